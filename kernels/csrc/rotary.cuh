// Rotary position embedding (Su et al. 2021): the pairs of a head, and the angle of each.
#pragma once
#include "common.cuh"

namespace tridecode {

// The index in the cos and sin tables, (positions, rotary_size / 2), of the pair that dim `d` of a
// head begins: dims d and d + 1 where interleaved, else d and d + rotary_size / 2.
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

// rotate_and_cache with an 8-bit cache: rotary_8bit.cu. wide: eight numbers can be read at once.
int run_rotate_and_round(const tridecode_gemm_task& task, bool wide, void* stream);

}  // namespace tridecode
