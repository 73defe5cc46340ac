// Hooks of GEMM kernels for a task whose rows may have adapters (AdaptedTask of
// gemm_sm90_adapters.cuh). For a GemmTask they are empty.
#pragma once
#include <climits>

#include "gemm/sm90/gemm_sm90.cuh"

namespace tridecode {
namespace {

constexpr int kTableRanks = 48;   // ranks of a token whose sums are in shared memory
constexpr int kTileAdapters = 8;  // adapters whose b is in shared memory at a time
constexpr int kChunkRanks = 16;   // ranks of an instruction, and of b in shared memory
constexpr int kPieces = 16;       // of 8 outputs of a block

template <typename Task>
constexpr bool kAdapted = !std::is_same<Task, GemmTask>::value;

// kResident. Half of the registers do not suffice for the sums and the adapters.
template <typename Operand, int N, typename Task>
constexpr int kResidentOf = kAdapted<Task> ? 1 : kResident<Operand, N>;

// Buffers of results per warp group: adapters take the place of one.
template <typename Task>
constexpr int kBuffersOf = kAdapted<Task> ? 1 : kBuffers;

// Bytes of shared memory for the adapters of N tokens.
template <int N, typename Task>
constexpr int kAdapterBytes =
    kAdapted<Task>
        ? N * (kTableRanks * 2 + 8) + kTileAdapters * (kPieces * (kChunkRanks * 16 + 4) + 4) + 128
        : 0;

// Shape, with room for the adapters in shared memory and, for few tokens too, in registers.
template <int N, int PARTS, typename Task>
struct ShapeOf : Shape<N, PARTS, kBuffersOf<Task>> {
  using Base = Shape<N, PARTS, kBuffersOf<Task>>;
  static constexpr bool kSlim = Base::kSlim && !kAdapted<Task>;
  static constexpr int kRoom = Base::kRoom - kAdapterBytes<N, Task>;
  static constexpr int kStages = kRoom / Base::kStageBytes < 12 ? kRoom / Base::kStageBytes : 12;
  static constexpr int kSharedBytes = 1024 + kStages * Base::kStageBytes + Base::kStoreBytes;
};

// The adapters of a block in shared memory. N: tokens of a tile. Idle warps of the producer call
// the fill functions, a consumer warp calls `add`.
template <typename X, int N, Mode MODE, typename Task>
struct BlockAdapters {
  __device__ __forceinline__ void initialize() {}
  template <typename Columns>
  __device__ __forceinline__ void fill_tile(const Task&, int, int, int&, Columns) {}
  __device__ __forceinline__ void find(const Task&, int) {}
  __device__ __forceinline__ void fill_tokens(const Task&, int, int) {}
  __device__ __forceinline__ void add(float (&)[N / 2], const Task&, int&, int, int) {}
};

}  // namespace
}  // namespace tridecode
