// The epilogue of a GEMM: bias, activation, residual.
#pragma once
#include "common/common.cuh"

namespace tridecode {

enum Activation {
  kNone = 0,
  kGeluTanh = 1,
  kGelu = 2,
  kRelu = 3,
  kSwiglu = 4,
  kGegluTanh = 5  // gated: gelu_tanh(gate) * value
};

__host__ __device__ constexpr bool is_gated(int activation) {
  return activation == kSwiglu || activation == kGegluTanh;
}

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

__device__ __forceinline__ float activate_gate(float gate, int activation) {
  return activation == kGegluTanh ? activate(gate, kGeluTanh) : silu(gate);
}

__device__ __forceinline__ float finish_gated(float gate, float gate_bias, float up, float up_bias,
                                              int activation, float residual) {
  return activate_gate(gate + gate_bias, activation) * (up + up_bias) + residual;
}

// Replaces numbers 4 i and 4 i + 1 of the gate by their activation times the values at 4 i + 2 and
// 4 i + 3. The branch is outside of the loops.
template <int COUNT>
__device__ __forceinline__ void gate_all(float (&c)[COUNT], int activation) {
  auto by = [&](auto gate) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      c[i] = gate(c[i]) * c[i + 2];
      c[i + 1] = gate(c[i + 1]) * c[i + 3];
    }
  };
  if (activation == kGegluTanh)
    by([](float x) { return activate(x, kGeluTanh); });
  else
    by([](float x) { return silu(x); });
}

}  // namespace tridecode
