// Quantises rows of x to 8 bit: int8, E4M3 or two int8 parts, bit for bit as
// kernels/formats/quantized.py.
#pragma once
#include "api/operands.h"
#include "common/common.cuh"

namespace tridecode {

using Values = tridecode_operand;  // how a row of x is quantised
constexpr int kGroup = 128;        // columns of a row that share a scale, in groups

template <Values VALUES>
constexpr bool kInTwoParts = VALUES == kOperandTwoParts || VALUES == kOperandTwoPartsInt4;

// Quantised values of a row.
template <Values VALUES>
struct Rounding {
  static constexpr bool E4M3 = VALUES == kOperandFp8 || VALUES == kOperandFp8Blocks;
  static constexpr float kLimit = E4M3 ? 448.0f : 127.0f;
  float scale, inverse;
  bool plain;  // plain: no relevant quotient is NaN or near the smallest normal number

  // Rounding of a row; `largest` holds the bits of its largest magnitude.
  __device__ __forceinline__ explicit Rounding(unsigned int largest) {
    scale = largest ? __fdiv_rn(__uint_as_float(largest), kLimit) : 1.0f;
    inverse = __frcp_rn(scale);
    plain = scale > kLeastDivisor && scale < kMostDivisor;
  }

  // Two numbers, the first in the low byte.
  static __device__ __forceinline__ uint32_t pair(float first, float second) {
    if constexpr (E4M3) {
      uint16_t both = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
#endif
      return both;
    } else {
      return (__float2int_rn(first) & 0xff) | (__float2int_rn(second) & 0xff) << 8;
    }
  }

  // No clamp: the largest quotient rounds to the limit.
  __device__ __forceinline__ float quotient(float x) const {
    return tridecode::quotient(x, scale, inverse);
  }

  // The quotient for any row; NaN becomes 0.
  __device__ __forceinline__ float any_quotient(float x) const {
    const float q = __fdiv_rn(x, scale);
    return q == q ? fminf(fmaxf(q, -kLimit), kLimit) : 0.0f;
  }

  // Remainder of a quotient after rounding to the nearest integer, in units of 1/254: -127 to 127.
  static __device__ __forceinline__ float rest(float quotient) {
    return (quotient - rintf(quotient)) * 254.0f;
  }

  // Quantises 8 numbers; with two parts, their high parts. PLAIN: the row is plain; one branch for
  // all numbers, which are then computed in parallel.
  template <typename X, bool PLAIN>
  __device__ __forceinline__ uint2 eight(const uint4& words, uint2* low) const {
    uint32_t pairs[4], lows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<X>(get(words, i));
      const float first = PLAIN ? quotient(x.x) : any_quotient(x.x);
      const float second = PLAIN ? quotient(x.y) : any_quotient(x.y);
      pairs[i] = pair(first, second);
      if constexpr (kInTwoParts<VALUES>) lows[i] = pair(rest(first), rest(second));
    }
    if constexpr (kInTwoParts<VALUES>)
      *low = make_uint2(lows[0] | lows[1] << 16, lows[2] | lows[3] << 16);
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
};

// Interleaves the bytes of 8 inputs into the order of a granule: bytes of one step of 16 inputs
// alternate with those of the next step, held by the thread after the next one. number: index of
// the thread or lane.
__device__ __forceinline__ uint2 in_granule_order(uint2 own, int number) {
  const bool second = number & 2;
  const uint32_t other = __shfl_xor_sync(kAll, second ? own.x : own.y, 2);
  const uint32_t even = second ? other : own.x, odd = second ? own.y : other;
  return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// The bits of |x| as float32, from its 16 bits.
template <typename X>
__device__ __forceinline__ unsigned int magnitude(unsigned int bits) {
  const float2 both = unpack<X>(bits & 0x7fffu);
  return __float_as_uint(both.x);
}

}  // namespace tridecode
