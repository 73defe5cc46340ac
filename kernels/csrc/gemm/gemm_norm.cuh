// The norm that gemv.cu and gemm_mma.cu fuse: x is normalised in shared memory.
#pragma once
#include "common/row_norm.cuh"
#include "gemm/gemm.cuh"

namespace tridecode {

// Normalises rows of x in place. piece_of(p, token): address of inputs 8 p to 8 p + 7 of a token.
// Each thread of the block processes every THREADS-th piece, which it copied itself; no thread may
// read another's pieces before the next barrier. tokens: at most TOKENS.
template <typename X, int TOKENS, int THREADS, typename PieceOf>
__device__ __forceinline__ void normalize_rows(const GemmTask& task, int tokens, PieceOf piece_of) {
  constexpr int kWarps = THREADS / 32;
  __shared__ float partial[2][TOKENS][kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = task.inputs / 8;
  const bool centred = task.norm_bias != nullptr;
  auto each = [&](auto body) {
    for (int p = threadIdx.x; p < pieces; p += THREADS) {
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        if (token >= tokens) continue;
        float values[8];
        load8(piece_of(p, token), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) body(token, values[i]);
      }
    }
  };
  auto add_up = [&](float (&sums)[TOKENS], int which) {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      const float sum = warp_sum(sums[token]);
      if (lane == 0) partial[which][token][warp] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      sums[token] = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sums[token] += partial[which][token][w];
    }
  };
  float sums[TOKENS] = {};
  if (centred) each([&](int token, float x) { sums[token] += x; });
  RowNorm rows[TOKENS];
  row_statistics(rows, sums, centred, task.inputs, task.norm_eps, each, add_up);
  for (int p = threadIdx.x; p < pieces; p += THREADS) {
    float w[8], b[8] = {};
    load8(static_cast<const X*>(task.norm_weight) + p * 8, w);
    if (centred) load8(static_cast<const X*>(task.norm_bias) + p * 8, b);
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      if (token >= tokens) continue;
      float values[8];
      load8(piece_of(p, token), values);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = rows[token](values[i], w[i], b[i]);
      store8(piece_of(p, token), values);
    }
  }
}

}  // namespace tridecode
