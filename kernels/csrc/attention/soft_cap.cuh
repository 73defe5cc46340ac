// The soft cap of attention scores (Gemma 2).
#pragma once
#include "common/common.cuh"

namespace tridecode {

// The soft cap of scores in base 2: cap * tanh(score / cap), within 3e-7 * cap.
struct SoftCap {
  float cap, rate;  // rate: exp2(score * rate) = exp(2 * score / cap)

  // softcap: of natural scores; 0: none.
  static __device__ __forceinline__ SoftCap of(float softcap) {
    return {softcap * kLog2e, 2.0f / softcap};
  }
  __device__ __forceinline__ float operator()(float score) const {
    return cap - __fdividef(2.0f * cap, exp2f(score * rate) + 1.0f);
  }
};

}  // namespace tridecode
