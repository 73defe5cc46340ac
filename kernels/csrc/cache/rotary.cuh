// Rotary position embedding (Su et al. 2021): the pairs of a head, and the angle of each.
#pragma once
#include "api/gemm.h"
#include "common/common.cuh"

namespace tridecode {

// The index in the cos and sin tables, (positions, rotary_size / 2), of the pair that starts with
// dim `d` of a head: dims d and d + 1 if interleaved, else d and d + rotary_size / 2.
__device__ __forceinline__ int64_t angle_index(int position, int rotary_size, int d,
                                               bool interleaved) {
  return int64_t(position) * (rotary_size / 2) + (interleaved ? d / 2 : d);
}

// Rotates the pair (a, b) by an angle.
__device__ __forceinline__ void rotate(float& a, float& b, float cosine, float sine) {
  const float first = a * cosine - b * sine;
  b = b * cosine + a * sine;
  a = first;
}

template <typename X>
__device__ __forceinline__ void unpack_eight(const uint4& words, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack<X>(get(words, i));
    values[2 * i] = two.x, values[2 * i + 1] = two.y;
  }
}

// Rotates dims d to d + 7 of a head of D 16-bit numbers by halves if it `rotates`. D / 8
// consecutive lanes hold a head; all lanes of the warp must call it. cosine, sine: from dim d % (D
// / 2) on.
template <typename X, int D>
__device__ __forceinline__ void rotate_eight(const uint4& words, int d, bool rotates,
                                             const float (&cosine)[8], const float (&sine)[8],
                                             float (&values)[8]) {
  const bool is_first = d < D / 2;
  uint4 others;
#pragma unroll
  for (int i = 0; i < 4; ++i) put(others, i, __shfl_xor_sync(kAll, get(words, i), D / 16));
  unpack_eight<X>(words, values);
  if (!rotates) return;
  float other[8];
  unpack_eight<X>(others, other);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float a = is_first ? values[j] : other[j], b = is_first ? other[j] : values[j];
    rotate(a, b, cosine[j], sine[j]);
    values[j] = is_first ? a : b;
  }
}

// The number of blocks of a launch with D / 8 threads per head, `threads` per block, and one block
// per token or, with few tokens, per some of its heads.
inline dim3 blocks_of_heads(int tokens, int heads, int head_size, int threads) {
  constexpr int kManyTokens = 512;  // enough blocks to fill the device
  return dim3(tokens, tokens < kManyTokens ? ceil_div(heads, threads / (head_size / 8)) : 1);
}

// Return whether whole heads are rotated by halves, with angles that can be loaded four at a time.
inline bool rotates_whole(const tridecode_gemm_task& task) {
  return task.rotary_size == task.head_size && !task.interleaved && aligned16(task.cos) &&
         aligned16(task.sin);
}

// rotate_and_cache with an 8-bit cache: rotary_8bit.cu. wide: eight numbers can be read at once.
int run_rotate_and_round(const tridecode_gemm_task& task, bool wide, void* stream);

}  // namespace tridecode
