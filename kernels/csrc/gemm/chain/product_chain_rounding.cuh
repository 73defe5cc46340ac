// Quantisation of a row's numbers for product_chain_sm90a.cu, as kernels/formats/quantized.py
// defines it.
#pragma once
#include "api/operands.h"
#include "gemm/chain/product_chain.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The quantisation of a row. A row with NaN or infinity has the scale NaN and arbitrary values.
template <Values VALUES>
struct Scaling {
  static constexpr bool kTwo = Format<VALUES>::kTwo;
  float scale, inverse;
  // inverse scale of an exact division; 0 if it would leave float32's range
  float by, correction;
  __device__ __forceinline__ explicit Scaling(unsigned int largest) {
    constexpr float kLimit = VALUES == kOperandFp8 ? 448.0f : 127.0f;
    const float most = __uint_as_float(largest);
    if constexpr (kTwo) {  // numbers below 2^-115 become 0
      const float plain = fmaxf(most, 0x1p-100f);
      scale = largest >= 0x7f800000u ? CUDART_NAN_F : plain * (1.0f / 127);
      inverse = near_reciprocal(plain * 0x1p-7f) * (127.0f / 128);
      return;
    }
    scale = largest == 0 ? 1.0f : largest >= 0x7f800000u ? CUDART_NAN_F : __fdiv_rn(most, kLimit);
    inverse = __frcp_rn(scale);
    const bool plain = scale > kLeastDivisor && scale < kMostDivisor;
    by = plain ? scale : 0.0f, correction = plain ? inverse : 0.0f;
  }
  // Same result as tridecode::quotient.
  __device__ __forceinline__ float quotient(float x) const {
    float q = x * inverse;
    q = fmaf(fmaf(-q, by, x), correction, q);
    return fmaf(fmaf(-q, by, x), correction, q);
  }
};

__device__ __forceinline__ uint32_t four_bytes(const uint32_t* of) {  // the lowest ones
  return __byte_perm(__byte_perm(of[0], of[1], 0x0040), __byte_perm(of[2], of[3], 0x0040), 0x5410);
}

// Quantise 8 numbers, or split them into high and low parts. The low parts are remainders of
// multiplications by the inverse, not of exact quotients.
template <typename X, Values VALUES>
__device__ __forceinline__ void round_eight(const uint4& words, const Scaling<VALUES>& scaling,
                                            uint2& high, uint2& low) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: a sum's last byte is the nearest integer
  uint32_t h[8], l[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = unpack<X>(get(words, i));
    if constexpr (VALUES == kOperandFp8)
      h[i] = Rounding<kOperandFp8>::pair(scaling.quotient(both.x), scaling.quotient(both.y));
#pragma unroll
    for (int j = 0; j < 2 && VALUES != kOperandFp8; ++j) {
      const float x = j ? both.y : both.x;
      if constexpr (Format<VALUES>::kTwo) {
        const float shifted = fmaf(x, scaling.inverse, kShift);
        const float rest = fmaf(x, scaling.inverse, kShift - shifted);
        h[2 * i + j] = __float_as_uint(shifted);
        l[2 * i + j] = __float_as_uint(fmaf(rest, 254.0f, kShift));
      } else {
        h[2 * i + j] = __float_as_uint(scaling.quotient(x) + kShift);
      }
    }
  }
  if constexpr (VALUES == kOperandFp8) {
    high = make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
  } else {
    high = make_uint2(four_bytes(h), four_bytes(h + 4));
    if (Format<VALUES>::kTwo) low = make_uint2(four_bytes(l), four_bytes(l + 4));
  }
}

#endif

}  // namespace
}  // namespace tridecode
