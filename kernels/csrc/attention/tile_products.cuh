// Attention of a warp over a tile of keys and values in shared memory, for 16 columns; a column is
// a query of one head. Scores and output stay in registers; online softmax in base 2 and float32.
#pragma once
#include "attention/matrices.cuh"

namespace tridecode {
namespace {

// Row pitch of keys or values in shared memory; the padding spreads 8 rows over all banks.
__host__ __device__ constexpr int row_pitch(int head_size) { return head_size + 8; }

// Lane (g, t) holds elements of columns g and g + 8 in the fragment layout of multiply_add: scores
// of keys 8 n + 2 t and 8 n + 2 t + 1, output of dims 8 d + 2 t and 8 d + 2 t + 1.
template <typename X, int D, int KEYS>
struct TileSums {
  static constexpr int kPitch = row_pitch(D);
  float output[D / 8][4] = {}, most[2], sum[2] = {};

  __device__ __forceinline__ TileSums() { most[0] = most[1] = -CUDART_INF_F; }

  // scores += queries * keys. queries(k): the operand a of multiply_add for dims 16 k .. 16 k + 15.
  template <typename Queries>
  static __device__ __forceinline__ void score(float (&scores)[KEYS / 8][4], const X* keys,
                                               Queries queries) {
    const int lane = threadIdx.x % 32;
    const X* const own = keys + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const uint32_t (&a)[4] = queries(k);
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, own + n * 16 * kPitch + k * 16);
        multiply_add<X>(scores[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
        multiply_add<X>(scores[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }

  // Replaces scores by probabilities relative to the running maximum, and rescales the sums.
  // scale: factor of the scores, above 0.
  __device__ __forceinline__ void weigh(float (&scores)[KEYS / 8][4], float scale = 1.0f) {
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float high = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
        high = fmaxf(high, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
      high = fmaxf(high, __shfl_xor_sync(kAll, high, 1));
      high = fmaxf(high, __shfl_xor_sync(kAll, high, 2));
      const float now = fmaxf(most[i], high * scale);
      const float base = now == -CUDART_INF_F ? 0.0f : now;  // no visible key so far
      shrink[i] = power_of_2(most[i] - base);
      most[i] = now;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int j = 2 * i; j < 2 * i + 2; ++j)
          added += scores[n][j] = power_of_2(scores[n][j] * scale - base);
      }
      sum[i] = sum[i] * shrink[i] + added;
    }
    // the maximum seldom rises after the first tiles
    if (!__any_sync(kAll, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[d][i] *= shrink[i / 2];
    }
  }

  // output += probabilities * values.
  __device__ __forceinline__ void add_values(const float (&p)[KEYS / 8][4], const X* values) {
    const int lane = threadIdx.x % 32;
    const X* const own = values + lane % 16 * kPitch + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = pack<X>(p[2 * n + i / 2][i % 2 * 2], p[2 * n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
        uint32_t b[4];
        load_transposed(b, own + n * 16 * kPitch + d * 16);
        multiply_add<X>(output[2 * d], a[0], a[1], a[2], a[3], b[0], b[1]);
        multiply_add<X>(output[2 * d + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }

  // Adds up the lanes' sums of a column, after the last tile.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAll, sum[i], 1);
      sum[i] += __shfl_xor_sync(kAll, sum[i], 2);
    }
  }

  // Stores the output of column g + 8 i. to: its first element.
  __device__ __forceinline__ void write(int i, X* to) const {
    const float inverse = 1.0f / sum[i];
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
      *reinterpret_cast<uint32_t*>(to + d * 8 + threadIdx.x % 4 * 2) =
          pack<X>(output[d][2 * i] * inverse, output[d][2 * i + 1] * inverse);
  }

  // Stores the output without dividing by the sum, for the combining launch. to: D floats.
  __device__ __forceinline__ void write_part(int i, float* to) const {
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
      __stcg(reinterpret_cast<float2*>(to + d * 8 + threadIdx.x % 4 * 2),
             make_float2(output[d][2 * i], output[d][2 * i + 1]));
  }
};

}  // namespace
}  // namespace tridecode
