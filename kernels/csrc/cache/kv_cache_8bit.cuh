// The cache in 8 bits: int8_t or e4m3, with float32 scales (blocks, 2, kv_heads, block_tokens). A
// number is stored * scale; kernels/formats/kv_rounding.py defines the rounding.
#pragma once
#include <cuda_fp8.h>

#include "cache/kv_cache.cuh"

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

// Rounds to nearest, halves to even. The number is finite and, up to rounding, at most
// largest_of<C>().
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

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The scaling of a stored key or value whose largest magnitude has the bits `most`.
template <typename C>
struct CacheRounding {
  bool is_finite;  // infinity and NaN are above all other magnitudes
  float scale;

  __device__ __forceinline__ explicit CacheRounding(uint32_t most) : is_finite(most < 0x7f800000u) {
    const float least = __uint_as_float(0x00800000u);  // the smallest normal number
    scale = is_finite ? fmaxf(__uint_as_float(most) / largest_of<C>(), least)
                      : __uint_as_float(0x7fc00000u);
  }
  __device__ __forceinline__ C store(float x) const {
    return round_to<C>(is_finite ? x / scale : 0.0f);
  }
  // Eight at once, without branches if the scale permits.
  __device__ __forceinline__ void store(const float (&x)[8], C (&stored)[8]) const {
    if (scale > kLeastDivisor && scale < kMostDivisor) {
      const float inverse = __frcp_rn(scale);
#pragma unroll
      for (int j = 0; j < 8; ++j) stored[j] = round_to<C>(quotient(x[j], scale, inverse));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) stored[j] = store(x[j]);
    }
  }
  __device__ __forceinline__ float read(C stored) const { return expand(stored) * scale; }
};

// Quantises a key or value held by LANES neighbouring lanes, eight numbers each. values:
// rounded to X in place. All lanes of the warp take part.
template <typename X, typename C, int LANES>
__device__ __forceinline__ CacheRounding<C> rounding_of(float (&values)[8]) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    values[j] = to_float(from_float<X>(values[j]));
    most = max(most, magnitude(values[j]));
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    most = max(most, __shfl_xor_sync(kAll, most, offset));
  return CacheRounding<C>(most);
}

// Converts bytes 0 and 1, and bytes 2 and 3, of a word to two words of halves, exactly. Halves
// because the E4M3 instruction returns them, and int8 needs fewer instructions than to bfloat16.
// Never NaN: the scale holds it.
template <typename C>
__device__ __forceinline__ void widen(uint32_t four, uint32_t& low, uint32_t& high) {
  if constexpr (std::is_same<C, int8_t>::value) {
    four ^= 0x80808080u;                           // x + 128
    low = __byte_perm(four, 0x64646464u, 0x4140);  // 1024 + 128 + x
    high = __byte_perm(four, 0x64646464u, 0x4342);
    const uint32_t bias = 0x64806480u;  // 1152
    const __half2 b = reinterpret_cast<const __half2&>(bias);
    reinterpret_cast<__half2&>(low) = __hsub2(reinterpret_cast<__half2&>(low), b);
    reinterpret_cast<__half2&>(high) = __hsub2(reinterpret_cast<__half2&>(high), b);
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n"
        " cvt.rn.f16x2.e4m3x2 %0, low;\n cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(low), "=r"(high)
        : "r"(four));
#else
    auto pair = [](uint32_t two) {  // the exponent is too small by 8
      const uint32_t bits = (two & 0x80008000u) | ((two >> 1) & 0x3f803f80u), eight = 0x5c005c00u;
      const __half2 both =
          __hmul2(reinterpret_cast<const __half2&>(bits), reinterpret_cast<const __half2&>(eight));
      return reinterpret_cast<const uint32_t&>(both);
    };
    low = pair(__byte_perm(four, 0, 0x1404)), high = pair(__byte_perm(four, 0, 0x3424));
#endif
  }
}

// Packs the even bytes of two words into a word of halves, and the odd bytes into another.
template <typename C>
__device__ __forceinline__ void widen_pairs(uint32_t first, uint32_t second, int k, uint32_t& even,
                                            uint32_t& odd) {
  widen<C>(__byte_perm(first, second, k == 0 ? 0x5140 : 0x7362), even, odd);
}

// Writes WIDTH quantised numbers from d on, of the key or value of a token with a slot. The lane
// with d = 0 also writes the scale.
template <typename Task>
__device__ __forceinline__ void write_rounded(const Task& task, int slot, int head, int d,
                                              uint2 eight, float scale) {
  if (slot < 0) return;
  const int64_t row = row_of_head(task, slot, head);
  *reinterpret_cast<uint2*>(static_cast<char*>(task.cache) + row * task.head_size + d) = eight;
  if (d == 0) task.cache_scales[row] = scale;
}
template <typename C, typename Task, int WIDTH>
__device__ __forceinline__ void write_rounded(const Task& task, int slot, int head, int d,
                                              const C (&stored)[WIDTH], float scale) {
  if constexpr (WIDTH == 8) {
    write_rounded(task, slot, head, d, *reinterpret_cast<const uint2*>(stored), scale);
  } else if (slot >= 0) {
    const int64_t row = row_of_head(task, slot, head);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j)
      static_cast<C*>(task.cache)[row * task.head_size + d + j] = stored[j];
    if (d == 0) task.cache_scales[row] = scale;
  }
}

}  // namespace tridecode
