// Consumer warp group of prefill_attention_sm90a.cu: scores, softmax and output of one tile.
#pragma once
#include "attention/prefill/prefill_items_sm90a.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Zeroes the values of masked keys: they are undefined, and 0 * NaN is NaN. Each warp group does
// it, since both read the whole tile.
template <int D>
__device__ __forceinline__ void clear_values(char* values, int valid, int group) {
  using L = Layout<D>;
  for (int i = threadIdx.x % 128; i < (kKeys - valid) * 8 * L::kParts; i += 128) {
    const int token = valid + i / (8 * L::kParts), piece = i % (8 * L::kParts);
    *reinterpret_cast<uint4*>(values + piece / 8 * L::kPartBytes + token * kColumn +
                              piece % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  fence_copies();
  group_sync(group);
}

// The two warp groups alternate in issuing wgmmas, beginning with group 0.
__device__ __forceinline__ void wait_for_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(kGroups + 1 + group) : "memory");
}
__device__ __forceinline__ void pass_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(kGroups + 1 + (group ^ 1)) : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers, as multiply_add's c packs them, to rows of 16 bytes in
// shared memory. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// One warp group's 64 queries of an item.
template <typename X, int D, bool ALIBI>
struct Attention {
  using L = Layout<D>;
  const PrefillTask& task;
  const Item& item;
  int group;
  float scale;  // in base 2
  float output[D / 2] = {};
  // maximum of unscaled scores; with ALiBi, of scaled ones
  float most[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {};
  uint32_t weights[kKeys / 16][4];

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  // Position in its context of the warp group's row `row`.
  __device__ __forceinline__ int position(int row) const {
    return item.before + item.first_query + group * 64 + row;
  }
  // Index of the lane's first row in the warp group.
  __device__ __forceinline__ int own_row() const { return threadIdx.x / 32 % 4 * 16 + lane() / 4; }
  // The last key visible to any of these queries.
  __device__ __forceinline__ int last_key() const { return min(position(63), item.visible - 1); }
  // The first tile that is masked for some of these queries.
  __device__ __forceinline__ int first_edge() const {
    return min(position(0) + 1, item.visible) / kKeys;
  }

  // Issues the scores of a tile's first KEYS keys.
  template <int KEYS>
  __device__ __forceinline__ void score(float (&scores)[KEYS / 2], uint64_t queries,
                                        uint64_t keys) const {
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        group_multiply_add<X, KEYS>(scores, later(queries, part * L::kPartBytes + 32 * k),
                                    later(keys, part * L::kPartBytes + 32 * k), part > 0 || k > 0);
    }
    commit_group();
  }

  // Issues the wgmmas of the probabilities and a tile's values.
  template <int KEYS>
  __device__ __forceinline__ void add_values(uint64_t values) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)  // 16 keys: two groups of 8 rows
      group_multiply_add_rows<X, D>(output, weights[k], later(values, k * 2048));
    commit_group();
  }

  template <int KEYS>
  __device__ __forceinline__ void add_bias(float (&scores)[KEYS / 2], int first_key) const {
    const float bias = item.slope * float(first_key + lane() % 4 * 2 - position(0));
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float own = fmaf(item.slope, float(8 * j + k), bias);
        scores[4 * j + k] = fmaf(scores[4 * j + k], scale, own);
        scores[4 * j + 2 + k] = fmaf(scores[4 * j + 2 + k], scale, own);
      }
    }
  }

  template <int KEYS>
  __device__ __forceinline__ void mask(float (&scores)[KEYS / 2], int first_key) const {
    const int seen = position(own_row()) - first_key - lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (8 * j + i % 2 > seen + i / 2 * 8) scores[4 * j + i] = -CUDART_INF_F;
    }
  }

  // Turns scores into probabilities; returns the rescaling of the output so far.
  template <int KEYS>
  __device__ __forceinline__ void weigh(float (&scores)[KEYS / 2], int first_key, bool edge,
                                        float (&shrink)[2]) {
    if (ALIBI) add_bias<KEYS>(scores, first_key);
    if (edge) mask<KEYS>(scores, first_key);
    float high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = most[i];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j)
        high[i] = fmaxf(high[i], fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
      high[i] = fmaxf(high[i], __shfl_xor_sync(kAll, high[i], 1));
      high[i] = fmaxf(high[i], __shfl_xor_sync(kAll, high[i], 2));
    }
    const float factor = ALIBI ? 1.0f : scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // -inf: no visible key so far
      const float base = high[i] == -CUDART_INF_F ? 0.0f : high[i] * factor;
      shrink[i] = power_of_2(fmaf(most[i], factor, -base));
      most[i] = high[i];
      float part = 0.0f;
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int k = 2 * i; k < 2 * i + 2; ++k)
          part += scores[4 * j + k] = power_of_2(fmaf(scores[4 * j + k], factor, -base));
      }
      sum[i] = fmaf(sum[i], shrink[i], part);
    }
  }

  template <int KEYS>
  __device__ __forceinline__ void keep_weights(const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[k][i] = pack<X>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
        asm volatile("" : "+r"(weights[k][i])::"memory");  // before the fence of its wgmmas
      }
    }
  }

  __device__ __forceinline__ void shrink_output(const float (&shrink)[2]) {
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[4 * d + i] *= shrink[i / 2];
    }
  }

  // Stores through shared memory if all 64 queries exist; otherwise the lanes store directly.
  __device__ __forceinline__ void store(const CUtensorMap* out_map, char* staged) {
    float scale_out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAll, sum[i], 1);
      sum[i] += __shfl_xor_sync(kAll, sum[i], 2);
      scale_out[i] = 1.0f / sum[i];
    }
    const int first = item.first_query + group * 64;
    if (first + 64 > item.queries) return store_some_rows(first, scale_out);
    const bool stores = threadIdx.x % 128 == 0;
    if (stores) wait_stores_read<0>();  // of the previous item
    group_sync(group);
    staged += group * 64 * kColumn;
    const int row = threadIdx.x / 32 % 4 * 16 + lane() % 16;
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack<X>(output[4 * d + 2 * i] * scale_out[i % 2],
                           output[4 * d + 2 * i + 1] * scale_out[i % 2]);
      store_matrices(
          staged + d / 8 * L::kPartBytes + row * kColumn + ((d % 8 + lane() / 16) ^ (row % 8)) * 16,
          words);
    }
    fence_copies();
    group_sync(group);
    if (!stores) return;
    for (int part = 0; part < L::kParts; ++part)
      store_box(out_map, staged + part * L::kPartBytes, item.head * D + part * 64,
                item.start + first);
    commit_stores();
  }

  __device__ __forceinline__ void store_some_rows(int first, const float (&scale_out)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = first + own_row() + 8 * i;
      if (query >= item.queries) continue;
      X* const out = static_cast<X*>(task.out) + (item.start + query) * task.out_stride +
                     item.head * D + lane() % 4 * 2;
#pragma unroll
      for (int d = 0; d < D / 8; ++d)
        *reinterpret_cast<uint32_t*>(out + d * 8) =
            pack<X>(output[4 * d + 2 * i] * scale_out[i], output[4 * d + 2 * i + 1] * scale_out[i]);
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace
}  // namespace tridecode
