// gemm_sm90_stream_k.cu if some rows have an adapter, with more tokens than the epilogues of
// gemm_sm90_adapters.cuh: it also stores the products of these rows. spread_adapters.cu adds
// their adapters and computes their activation again, so that the other rows need no further pass.
// Bench: python -m tridecode.tools.bench.studies.adapters --rows 256
#include "api/kept_gemm.h"
#include "gemm/sm90/gemm_sm90_stream_k.cuh"

namespace tridecode {
namespace {

constexpr int kKeptTokens = 256;

struct KeptTask : GemmTask {
  tridecode_kept_gemm_task kept;
};

template <>
constexpr bool kAdapted<KeptTask> = false;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Idle warps of the producer find the kept rows during the mainloop.
template <typename X, int N>
struct BlockAdapters<X, N, kGated, KeptTask> : BlockAdapters<X, N, kGated, GemmTask> {
  static constexpr int kFillers = 96;

  uint32_t kept[kKeptTokens / 32];  // a bit for each token
  alignas(8) uint64_t found;

  __device__ __forceinline__ void initialize() { barrier_init(&found, kFillers); }

  __device__ __forceinline__ void find(const KeptTask& task, int index) {
    const int lane = index % 32;
    for (int i = index / 32; i < kKeptTokens / 32; i += kFillers / 32) {
      const int token = 32 * i + lane;
      const bool mine = token < task.tokens && __ldg(task.kept.slots + token) >= 0;
      const uint32_t bits = __ballot_sync(kAll, mine);
      if (lane == 0) kept[i] = bits;
    }
    barrier_arrive(&found);
  }

  // Stores the sums of the kept rows; c[4 j] and c[4 j + 2] are a gate and its pair.
  __device__ __forceinline__ void add(float (&c)[N / 2], const KeptTask& task, int&, int column,
                                      int token) {
    const int lane = threadIdx.x % 32, half = task.outputs / 2;
    const int output = column + threadIdx.x / 32 % 4 * 8 + lane / 4;
    barrier_wait(&found, 0);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const int first = token + 8 * j;
      const uint32_t eight = first < kKeptTokens ? kept[first / 32] >> first % 32 & 0xff : 0;
      if (!eight) continue;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int mine = lane % 4 * 2 + k;
        if (!(eight >> mine & 1) || output >= half) continue;
        X* const to = static_cast<X*>(task.kept.product) +
                      int64_t(first + mine) * task.kept.product_stride + output;
        to[0] = from_float<X>(c[4 * j + k]), to[half] = from_float<X>(c[4 * j + 2 + k]);
      }
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// (tokens of a tile, epilogue)
// clang-format off
#define TRIDECODE_INSTANCES(_) \
  _(96, kGated) _(128, kGated) _(160, kGated) _(192, kGated) _(224, kGated) _(256, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_stream_k_kept(const tridecode_kept_gemm_task* given, void* stream) {
  KeptTask task;
  static_cast<GemmTask&>(task) = *static_cast<const GemmTask*>(given->gemm);
  task.kept = *given;
  const char* const name = "gemm_sm90_stream_k";
  if (task.tokens > kKeptTokens || task.bias || task.block_scales)
    return fail("%s: keeps rows of %d tokens, or with a bias; wanted up to %d, and none", name,
                task.tokens, kKeptTokens);
  return divided(name, task, [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_)               \
  if (task.tile_tokens == tokens_ && mode == mode_) \
    return run<X, X, tokens_, mode_>(task, division, stream);
      TRIDECODE_INSTANCES(TRIDECODE_RUN)
      return fail("%s: no instance that keeps rows for a tile of %d tokens, epilogue %d", name,
                  task.tile_tokens, int(mode));
    });
  });
}
