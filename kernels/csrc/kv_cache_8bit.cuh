// The cache in 8 bits: int8_t or e4m3, with float32 scales (blocks, 2, kv_heads, block_tokens). A
// number is stored * scale; kernels/kv_rounding.py defines the rounding.
#pragma once
#include <cuda_fp8.h>

#include "kv_cache.cuh"

namespace tridecode {

using e4m3 = __nv_fp8_e4m3;

enum CacheFormat { kCacheOfDtype = 0, kCacheInt8 = 1, kCacheFp8 = 2 };

// Calls body with a value of the type that an 8-bit cache holds.
template <typename Body>
int for_cache_format(int format, const char* what, Body body) {
  if (format == kCacheInt8) return body(int8_t());
  if (format == kCacheFp8) return body(e4m3());
  return fail("%s: cache format %d; wanted 1 or 2", what, format);
}

template <typename C>
__device__ __forceinline__ float largest_of() {
  return std::is_same<C, int8_t>::value ? 127.0f : 448.0f;
}

// A finite number, at most largest_of<C>() up to rounding, to nearest, halves to even.
template <typename C>
__device__ __forceinline__ C round_to(float x) {
  if constexpr (std::is_same<C, int8_t>::value) {
    return static_cast<int8_t>(__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f)));
  } else {
    return e4m3(x);  // saturates
  }
}

template <typename C>
__device__ __forceinline__ float expand(C x) {
  return static_cast<float>(x);
}

// Bytes 0 and 1, and bytes 2 and 3, of a word as two words of X, exactly. Never NaN: NaN is in the
// scale.
template <typename X, typename C>
__device__ __forceinline__ void widen(uint32_t four, uint32_t& low, uint32_t& high) {
  constexpr bool kIsHalf = std::is_same<X, half>::value;
  if constexpr (std::is_same<C, int8_t>::value && kIsHalf) {
    four ^= 0x80808080u;                           // x + 128
    low = __byte_perm(four, 0x64646464u, 0x4140);  // 1024 + 128 + x
    high = __byte_perm(four, 0x64646464u, 0x4342);
    const uint32_t bias = 0x64806480u;  // 1152
    const __half2 b = reinterpret_cast<const __half2&>(bias);
    reinterpret_cast<__half2&>(low) = __hsub2(reinterpret_cast<__half2&>(low), b);
    reinterpret_cast<__half2&>(high) = __hsub2(reinterpret_cast<__half2&>(high), b);
  } else if constexpr (std::is_same<C, int8_t>::value) {
    // 128 + the low seven bits, minus 128 or, of a negative number, 256
    auto pair = [](uint32_t two) {
      const uint32_t plus = (two & 0x007f007fu) | 0x43004300u;
      const uint32_t minus = (two & 0x00800080u) | 0x43004300u;
      const __nv_bfloat162 both = __hsub2(reinterpret_cast<const __nv_bfloat162&>(plus),
                                          reinterpret_cast<const __nv_bfloat162&>(minus));
      return reinterpret_cast<const uint32_t&>(both);
    };
    low = pair(__byte_perm(four, 0, 0x4140)), high = pair(__byte_perm(four, 0, 0x4342));
  } else if constexpr (kIsHalf) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n"
        " cvt.rn.f16x2.e4m3x2 %0, low;\n cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(low), "=r"(high)
        : "r"(four));
#else
    auto pair = [](uint32_t two) {  // an exponent that is 8 too small
      const uint32_t bits = (two & 0x80008000u) | ((two >> 1) & 0x3f803f80u), eight = 0x5c005c00u;
      const __half2 both =
          __hmul2(reinterpret_cast<const __half2&>(bits), reinterpret_cast<const __half2&>(eight));
      return reinterpret_cast<const uint32_t&>(both);
    };
    low = pair(__byte_perm(four, 0, 0x1404)), high = pair(__byte_perm(four, 0, 0x3424));
#endif
  } else {
    auto pair = [](uint32_t two) {  // an exponent that is 120 too small
      const uint32_t bits = (two & 0x80008000u) | ((two >> 4) & 0x07f007f0u), more = 0x7b807b80u;
      const __nv_bfloat162 both = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits),
                                          reinterpret_cast<const __nv_bfloat162&>(more));
      return reinterpret_cast<const uint32_t&>(both);
    };
    low = pair(__byte_perm(four, 0, 0x1404)), high = pair(__byte_perm(four, 0, 0x3424));
  }
}

// As bfloat16, e4m3 numbers that keep their bits have an exponent that is 120 too small. A
// product's other operand makes up for it: widen_small() and widen_small_pairs() give numbers *
// kSmall, and as `widen` does, for other types. The smallest are subnormal, which mma takes.
template <typename X, typename C>
constexpr bool kStaysSmall = std::is_same<C, e4m3>::value && std::is_same<X, __nv_bfloat16>::value;

template <typename X, typename C>
constexpr float kSmall = kStaysSmall<X, C> ? 0x1p-120f : 1.0f;

// The high bytes of the halves of a word.
__device__ __forceinline__ uint32_t small_pair(uint32_t two) {
  return (two & 0x80008000u) | ((two >> 4) & 0x07f007f0u);
}

template <typename X, typename C>
__device__ __forceinline__ void widen_small(uint32_t four, uint32_t& low, uint32_t& high) {
  if constexpr (kStaysSmall<X, C>) {
    low = small_pair(__byte_perm(four, 0, 0x1404)), high = small_pair(__byte_perm(four, 0, 0x3424));
  } else {
    widen<X, C>(four, low, high);
  }
}

// Bytes 2 k of two words as a word of X, and bytes 2 k + 1 as another.
template <typename X, typename C>
__device__ __forceinline__ void widen_small_pairs(uint32_t first, uint32_t second, int k,
                                                  uint32_t& even, uint32_t& odd) {
  if constexpr (kStaysSmall<X, C>) {
    even = small_pair(__byte_perm(first, second, k == 0 ? 0x4000 : 0x6020));
    odd = small_pair(__byte_perm(first, second, k == 0 ? 0x5010 : 0x7030));
  } else {
    widen<X, C>(__byte_perm(first, second, k == 0 ? 0x5140 : 0x7362), even, odd);
  }
}

// Writes WIDTH stored numbers from d on, of a key or value of a token that has a slot. The lane of
// d = 0 also writes the scale.
template <typename C, typename Task, int WIDTH>
__device__ __forceinline__ void write_rounded(const Task& task, int slot, int head, int d,
                                              const C (&stored)[WIDTH], float scale) {
  if (slot < 0) return;
  const int64_t row = row_of_head(task, slot, head);
  C* const to = static_cast<C*>(task.cache) + row * task.head_size + d;
  if constexpr (WIDTH == 8) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(stored);
  } else {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) to[j] = stored[j];
  }
  if (d == 0) task.cache_scales[row] = scale;
}

}  // namespace tridecode
