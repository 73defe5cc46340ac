// Shared by rotary.cu and rotary_8bit.cu: heads of D 16-bit numbers that are rotated whole and by
// halves, or not at all. A lane holds eight numbers of a head, D / 8 consecutive lanes a head.
#pragma once
#include "cache/kv_cache.cuh"
#include "cache/rotary.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;

// A block that has all heads of a token gives each thread parts of up to this many, which share the
// token's angles and whose loads are in flight together.
constexpr int kManyPieces = 4;

// Blocks per multiprocessor, which bounds the registers. With one piece, the 768 blocks of 256
// tokens of LLaMA-3-8B are resident together.
constexpr int resident_blocks_of(int pieces) { return pieces == 1 ? 6 : 4; }

// The angles of dims d to d + 7 of a token's heads.
template <int D, bool ROTATES>
struct Turn {
  float cosine[8], sine[8];  // sine: negative in the first half of a head

  __device__ __forceinline__ Turn(const tridecode_gemm_task& task, int64_t token, int d) {
    if constexpr (ROTATES) {
      const int64_t angle = angle_index(task.positions[token], D, d % (D / 2), false);
      load8(task.cos + angle, cosine);
      load8(task.sin + angle, sine);
      const float sign = d < D / 2 ? -1.0f : 1.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sine[j] *= sign;
    }
  }

  // Rotates eight numbers of a head if it `rotates`. All lanes of the warp must call it.
  template <typename X>
  __device__ __forceinline__ void apply(const uint4& words, bool rotates,
                                        float (&values)[8]) const {
    unpack_eight<X>(words, values);
    if constexpr (ROTATES) {
      uint4 others;
#pragma unroll
      for (int i = 0; i < 4; ++i) put(others, i, __shfl_xor_sync(kAll, get(words, i), D / 16));
      if (!rotates) return;
      float other[8];
      unpack_eight<X>(others, other);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = fmaf(values[j], cosine[j], other[j] * sine[j]);
    }
  }
};

// The heads whose parts a thread holds: head(0), head(1), ...
template <int D, int PIECES>
struct OwnHeads {
  static constexpr int kHeads = kThreads / (D / 8);  // of a block at once
  int first;                                         // of the block's heads
  __device__ __forceinline__ explicit OwnHeads(int first_of_all)
      : first(first_of_all + blockIdx.y * PIECES * kHeads) {}
  __device__ __forceinline__ int first_of_block(int piece) const { return first + piece * kHeads; }
  __device__ __forceinline__ int operator()(int piece) const {
    return first_of_block(piece) + threadIdx.x / (D / 8);
  }

  // Loads the thread's parts; zeros for heads that do not exist. row: of the token, at the thread's
  // dims.
  template <typename X>
  __device__ __forceinline__ void load(uint4 (&words)[PIECES], const X* row, int all_heads) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int head = (*this)(i);
      words[i] = head < all_heads ? *reinterpret_cast<const uint4*>(row + head * D)
                                  : make_uint4(0, 0, 0, 0);
    }
  }
};

// Calls run(pieces, grid) with the pieces of a thread as a constant, for `heads` heads per token.
template <int D, typename Run>
int divide_heads(int tokens, int heads, Run run) {
  const dim3 grid = blocks_of_heads(tokens, heads, D, kThreads);
  if (grid.y > 1) return run(std::integral_constant<int, 1>(), grid);
  const int most = kManyPieces * OwnHeads<D, kManyPieces>::kHeads;
  return run(std::integral_constant<int, kManyPieces>(), dim3(tokens, ceil_div(heads, most)));
}

}  // namespace
}  // namespace tridecode
