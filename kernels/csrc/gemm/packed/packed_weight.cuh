// Weights in 8 or 4 bit: the layout that kernels/formats/packed_weight.py produces, and the
// conversion of a lane's words to operands of the matrix instructions.
//
// A granule is 8 rows times 64 inputs in 8 bit, or 128 in 4 bit: 512 bytes. Granules of the same 8
// rows are consecutive. Lane 4 g + t of a warp takes 16 bytes of a granule, four words: its share
// of row g. A word of 8-bit values is a step of 16 inputs: bytes 0 and 2 are inputs 2 t and 2 t +
// 1, bytes 1 and 3 inputs 2 t + 8 and 2 t + 9. A word of 4-bit values is two steps: half byte i and
// half byte i + 4 are those pairs of the first step (i = 0, 1) and of the second (i = 2, 3).
#pragma once
#include "gemm/gemm.cuh"

namespace tridecode {

enum WeightFormat { kInt8 = 1, kFp8 = 2, kInt4 = 3 };

constexpr int kGranuleRows = 8, kGranuleBytes = 512;

__host__ __device__ constexpr int granule_inputs(WeightFormat format) {
  return format == kInt4 ? 128 : 64;
}

// ---------------------------------------------------------------- pairs of 16-bit numbers

template <typename X>
struct PairOf;
template <>
struct PairOf<half> {
  using Type = __half2;
};
template <>
struct PairOf<bfloat16> {
  using Type = __nv_bfloat162;
};

template <typename X>
__device__ __forceinline__ uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  using Pair = typename PairOf<X>::Type;
  const Pair difference = __hsub2(*reinterpret_cast<Pair*>(&a), *reinterpret_cast<Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}

template <typename X>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  using Pair = typename PairOf<X>::Type;
  const Pair product = __hmul2(*reinterpret_cast<Pair*>(&a), *reinterpret_cast<Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// (word & MASK) | BITS in one LOP3, which takes one immediate: with two, ptxas emits two LOP3.
template <uint32_t MASK, uint32_t BITS>
__device__ __forceinline__ uint32_t mask_and_set(uint32_t word) {
  uint32_t mask, result;
  asm("mov.b32 %0, %1;" : "=r"(mask) : "n"(MASK));
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "n"(BITS));
  return result;
}

// ---------------------------------------------------------------- 8 bit

// Converts bytes 0 and 2 of a word to numbers.
template <typename X, WeightFormat F>
__device__ __forceinline__ uint32_t even_bytes(uint32_t word) {
  if constexpr (F == kInt8 && std::is_same<X, half>::value) {
    // 0x6480 is 1152, and the last bit counts 1
    return subtract_pairs<X>((word & 0x00ff00ffu) ^ 0x64806480u, 0x64806480u);
  } else if constexpr (F == kInt8) {
    // a bfloat16 has 7 bits: 128 + the low 7 bits, minus 128, or minus 256 if the sign bit is set
    return subtract_pairs<X>(mask_and_set<0x007f007fu, 0x43004300u>(word),
                             mask_and_set<0x00800080u, 0x43004300u>(word));
  } else {
    const uint32_t high = word << 8;
    constexpr int kShift = std::is_same<X, half>::value ? 1 : 4;
    // the exponent's bias is smaller by 8, or by 120
    constexpr uint32_t kScale = std::is_same<X, half>::value ? 0x5c005c00u : 0x7b807b80u;
    return multiply_pairs<X>((high & 0x80008000u) | (high & 0x7f007f00u) >> kShift, kScale);
  }
}

// ---------------------------------------------------------------- 4 bit

// Offset added to a 4-bit value and to a group's zero point: 16 to 31 are exact in either dtype.
constexpr uint32_t kBias = 16;

// Extracts pair `i` of a step of 4-bit values, each plus kBias.
template <typename X>
__device__ __forceinline__ uint32_t biased_pair(const uint4& words, int step, int i) {
  // the value becomes the first 4 bits of the mantissa
  constexpr bool kIsHalf = std::is_same<X, half>::value;
  constexpr int kPlace = kIsHalf ? 6 : 3;
  constexpr uint32_t kMask = kIsHalf ? 0x03c003c0u : 0x00780078u;
  constexpr uint32_t kSixteen = kIsHalf ? 0x4c004c00u : 0x41804180u;
  const uint32_t word = get(words, step / 2);
  const int from = 4 * (step % 2 * 2 + i);
  const uint32_t placed = from > kPlace ? word >> (from - kPlace) : word << (kPlace - from);
  return mask_and_set<kMask, kSixteen>(placed);
}

// ---------------------------------------------------------------- operands

// Unpacks the scale and the zero of a row's group of 4-bit weights from the word that holds both.
// The zero is biased like the values.
struct Group {
  uint32_t scale, zero;  // twice each
  __device__ __forceinline__ explicit Group(uint32_t word) {
    asm("prmt.b32 %0, %1, %1, 0x1010;" : "=r"(scale) : "r"(word));
    asm("prmt.b32 %0, %1, %1, 0x3232;" : "=r"(zero) : "r"(word));
  }
};

// The lane's operands of step `step` of a granule: inputs 2 t and the next, 2 t + 8 and the next.
template <typename X, WeightFormat F>
__device__ __forceinline__ void expand_step(const uint4& words, int step, uint32_t group,
                                            uint32_t (&pairs)[2]) {
  if constexpr (F == kInt4) {
    const Group of(group);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pairs[i] =
          multiply_pairs<X>(subtract_pairs<X>(biased_pair<X>(words, step, i), of.zero), of.scale);
  } else {
    const uint32_t word = get(words, step);
    pairs[0] = even_bytes<X, F>(word);
    pairs[1] = even_bytes<X, F>(word >> 8);
  }
}

// ---------------------------------------------------------------- 4 bit as int8

// Unpacks the scale of a group and, in each byte, its zero, from the word that holds both.
template <typename X>
__device__ __forceinline__ float scale_of(uint32_t word) {
  return unpack<X>(word).x;
}
template <typename X>
__device__ __forceinline__ int zero_number(uint32_t word) {
  constexpr int kPlace = std::is_same<X, half>::value ? 22 : 19;  // from a number of 16 to 31
  return word >> kPlace & 15;
}
template <typename X>
__device__ __forceinline__ uint32_t zero_of(uint32_t word) {  // four times
  return zero_number<X>(word) * 0x01010101u;
}

// Converts 8 values of a row to two int8 operands. SYMMETRIC: 16 * (value - 8), else value - zero,
// where each byte of `above` is 128 - zero: no byte carries.
template <bool SYMMETRIC>
__device__ __forceinline__ void expand_word(uint32_t word, uint32_t above, uint32_t& first,
                                            uint32_t& second) {
  if constexpr (SYMMETRIC) {
    first = (word << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
    second = (word & 0xf0f0f0f0u) ^ 0x80808080u;
  } else {
    first = ((word & 0x0f0f0f0fu) + above) ^ 0x80808080u;
    second = ((word >> 4 & 0x0f0f0f0fu) + above) ^ 0x80808080u;
  }
}

// ---------------------------------------------------------------- host

// Calls body with the constant of the format.
template <typename Body>
int for_weight_format(int format, const char* what, Body body) {
  if (format == kInt8) return body(std::integral_constant<WeightFormat, kInt8>());
  if (format == kFp8) return body(std::integral_constant<WeightFormat, kFp8>());
  if (format == kInt4) return body(std::integral_constant<WeightFormat, kInt4>());
  return fail("%s: weight format %d; wanted 1, 2 or 3", what, format);
}

}  // namespace tridecode
