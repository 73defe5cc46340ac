// The epilogue of a GEMM: bias, activation, residual.
#pragma once
#include "common/common.cuh"

namespace tridecode {

enum Activation { kNone = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kSwiglu = 4 };

// SiLU; 0 where the exponential overflows to infinity.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float activate(float x, int activation) {
  if (activation == kGeluTanh) {
    // 0.5 x (1 + tanh(u)) = x * sigmoid(2 u)
    float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-2.0f * u));
  }
  if (activation == kGelu) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  if (activation == kRelu) return fmaxf(x, 0.0f);
  return x;
}

__device__ __forceinline__ float finish_sum(float sum, float bias, int activation, float residual) {
  return activate(sum + bias, activation) + residual;
}

// SwiGLU.
__device__ __forceinline__ float finish_gated(float gate, float gate_bias, float up, float up_bias,
                                              float residual) {
  return silu(gate + gate_bias) * (up + up_bias) + residual;
}

}  // namespace tridecode
