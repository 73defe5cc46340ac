// values[t, :] = x[t, :] / scales[t] rounded to int8 or E4M3, scales[t] = max|x[t, :]| / 127 or /
// 448; with a norm weight, of norm(x[t, :]) rounded to X.  One block per row, which stays in
// registers.
//
// In two parts, x[t, c] = scales[t] * (high + low / 254) with int8 high and low: values has 8 rows
// of high parts of 8 tokens, then 8 rows of their low parts, so that a wgmma thread holds both sums
// of a token; for 4-bit weights the inputs are in the order of a granule. Blocks beyond the last
// token fill its group of 8 with zeros.
//
// In groups (E4M3): each 128 columns of a row have a scale, scales[c / 128, t].
//
// The numbers match kernels/formats/quantized.py bit for bit: the division is exact, halves are
// rounded to even. Like a norm it is short: the GEMM after it becomes resident together with the
// kernel before it.
//
// Bytes moved: T * C * (sizeof(X) + parts) + 4 * T.   Bench: python -m tridecode.kernels.bench w8a8
#include "api/operands.h"
#include "api/rows.h"
#include "common/rounding.cuh"
#include "common/row_norm.cuh"

namespace tridecode {
namespace {

constexpr int kItems = 2;  // vectors of 8 per thread, as in norm.cu

// The first row of a token's values; the low parts are in the 8th row after it.
template <Values VALUES>
__device__ __forceinline__ int64_t row_of(int token) {
  return kInTwoParts<VALUES> ? token / 8 * 16 + token % 8 : token;
}

// Position of input c in this order.
__device__ __forceinline__ int granule_place(int c) {
  return (c & ~31) + (c >> 3 & 1) * 16 + (c >> 1 & 3) * 4 + (c & 1) * 2 + (c >> 4 & 1);
}

// Loads numbers c to c + 7 of a row, or numbers order[c] to order[c + 7].
template <typename X>
__device__ __forceinline__ void load_ordered(const X* row, const int* order, int c,
                                             float (&values)[8]) {
  if (!order) return load8(row + c, values);
  const int4 from[2] = {reinterpret_cast<const int4*>(order + c)[0],
                        reinterpret_cast<const int4*>(order + c)[1]};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[4 * i] = to_float(row[from[i].x]), values[4 * i + 1] = to_float(row[from[i].y]);
    values[4 * i + 2] = to_float(row[from[i].z]), values[4 * i + 3] = to_float(row[from[i].w]);
  }
}

// Writes zeros for a token beyond the last one.
__device__ __forceinline__ void no_token(uint8_t* values, int columns) {
  let_successor_start();
  wait_for_predecessor_alone();
  uint8_t* const high = values + row_of<kOperandTwoParts>(blockIdx.x) * columns;
  for (int c = threadIdx.x; c < columns; c += blockDim.x)
    high[c] = high[int64_t(8) * columns + c] = 0;
}

// The maximum over the block, in every thread. shared: one number per warp.
__device__ __forceinline__ unsigned int block_max(unsigned int x, unsigned int* shared) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const int warps = (blockDim.x + 31) / 32, lane = threadIdx.x % 32;
  x = __reduce_max_sync(kAll, x);
  if (lane == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = __reduce_max_sync(kAll, lane < warps ? shared[lane] : 0u);
#endif
  return x;
}

template <typename X, Values VALUES, bool NORM>
__global__ void quantize_row(uint8_t* values, float* scales, const X* x, const int* order,
                             const X* weight, const X* bias, float eps, int num_tokens, int columns,
                             int64_t x_stride) {
  __shared__ unsigned int shared[32];
  if (kInTwoParts<VALUES> && blockIdx.x >= num_tokens) return no_token(values, columns);
  const int first = threadIdx.x * 8, step = blockDim.x * 8;
  uint4 words[kItems] = {};
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (first + i * step < columns) body(i, first + i * step);
  };
  const X* const row = x + blockIdx.x * x_stride;
  if constexpr (NORM) {  // as norm_row of norm.cu, to the bit
    __shared__ float sums_shared[2][32];
    float w[kItems][8], b[kItems][8] = {}, v[kItems][8] = {};
    each_item([&](int i, int c) {  // constants, before the wait
      load_ordered(weight, order, c, w[i]);
      if (bias) load_ordered(bias, order, c, b[i]);
    });
    let_successor_start();
    wait_for_predecessor_alone();
    each_item([&](int i, int c) { load_ordered(row, order, c, v[i]); });
    const RowNorm norm = block_row_norm(v, each_item, bias != nullptr, columns, eps, sums_shared);
    each_item([&](int i, int) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        put(words[i], j,
            pack<X>(norm(v[i][2 * j], w[i][2 * j], b[i][2 * j]),
                    norm(v[i][2 * j + 1], w[i][2 * j + 1], b[i][2 * j + 1])));
    });
  } else {
    let_successor_start();
    wait_for_predecessor_alone();
    each_item([&](int i, int c) {
      if (!order) {
        words[i] = *reinterpret_cast<const uint4*>(row + c);
        return;
      }
      float v[8];
      load_ordered(row, order, c, v);
      store8(reinterpret_cast<X*>(words + i), v);
    });
  }
  // The bits of magnitudes are ordered like the numbers, with infinity above them and NaN above
  // infinity.
  if constexpr (VALUES == kOperandFp8Blocks) {  // 16 lanes have one
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      unsigned int largest = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) largest = __vmaxu2(largest, get(words[i], j) & 0x7fff7fffu);
      largest = max(largest & 0xffffu, largest >> 16);
#pragma unroll
      for (int offset = kGroup / 16; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(kAll, largest, offset));
      const Rounding<VALUES> rounding(magnitude<X>(largest));
      const int c = first + i * step;
      if (c >= columns) continue;
      uint8_t* const to = values + int64_t(blockIdx.x) * columns + c;
      *reinterpret_cast<uint2*>(to) = rounding.plain
                                          ? rounding.template eight<X, true>(words[i], nullptr)
                                          : rounding.template eight<X, false>(words[i], nullptr);
      if (c % kGroup == 0) scales[int64_t(c / kGroup) * num_tokens + blockIdx.x] = rounding.scale;
    }
    return;
  }
  unsigned int largest = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = __vmaxu2(largest, get(words[i], j) & 0x7fff7fffu);
  }
  largest = max(largest & 0xffffu, largest >> 16);
  const Rounding<VALUES> rounding(magnitude<X>(block_max(largest, shared)));
  uint8_t* const to = values + row_of<VALUES>(blockIdx.x) * columns;
  const auto store = [&](auto is_plain) {
    constexpr bool PLAIN = decltype(is_plain)::value;
    if constexpr (VALUES == kOperandTwoPartsInt4) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {  // in all lanes
        uint2 low, high = rounding.template eight<X, PLAIN>(words[i], &low);
        high = in_granule_order(high, threadIdx.x), low = in_granule_order(low, threadIdx.x);
        const int c = first + i * step, place = (c & ~31) + (c >> 3 & 1) * 16 + (c >> 4 & 1) * 8;
        if (c >= columns) continue;
        *reinterpret_cast<uint2*>(to + place) = high;
        *reinterpret_cast<uint2*>(to + int64_t(8) * columns + place) = low;
      }
    } else {
      each_item([&](int i, int c) {
        uint2 low;
        *reinterpret_cast<uint2*>(to + c) = rounding.template eight<X, PLAIN>(words[i], &low);
        if (VALUES == kOperandTwoParts)
          *reinterpret_cast<uint2*>(to + int64_t(8) * columns + c) = low;
      });
    }
  };
  if (rounding.plain) {
    store(std::true_type());
  } else {
    store(std::false_type());
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = rounding.scale;
}

// Any number of columns and alignment: the row is read again for each pass.
template <typename X, Values VALUES>
__global__ void quantize_row_any(uint8_t* values, float* scales, const X* x, const int* order,
                                 const X* weight, const X* bias, float eps, int num_tokens,
                                 int columns, int64_t x_stride) {
  __shared__ float sums_shared[2][32];
  __shared__ unsigned int shared[32];
  if (kInTwoParts<VALUES> && blockIdx.x >= num_tokens) return no_token(values, columns);
  let_successor_start();
  wait_for_predecessor_alone();
  const X* const row = x + blockIdx.x * x_stride;
  auto each = [&](auto body) {
    for (int c = threadIdx.x; c < columns; c += blockDim.x) body(0, to_float(row[c]));
  };
  RowNorm norm[1];
  if (weight) {
    float sums[1] = {};
    if (bias) each([&](int, float value) { sums[0] += value; });
    row_statistics(norm, sums, bias != nullptr, columns, eps, each, BlockSums{sums_shared});
  }
  auto number = [&](int place) {
    const int c = order ? order[place] : place;
    const float value = to_float(row[c]);
    if (!weight) return value;
    return to_float(
        from_float<X>(norm[0](value, to_float(weight[c]), bias ? to_float(bias[c]) : 0.0f)));
  };
  if (VALUES == kOperandFp8Blocks) {  // a warp takes one
    const int lane = threadIdx.x % 32;
    uint8_t* const to = values + int64_t(blockIdx.x) * columns;
    for (int begin = threadIdx.x / 32 * kGroup; begin < columns; begin += blockDim.x * 4) {
      const int end = min(begin + kGroup, columns);
      unsigned int most = 0;
      for (int c = begin + lane; c < end; c += 32)
        most = max(most, __float_as_uint(number(c)) & 0x7fffffffu);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        most = max(most, __shfl_xor_sync(kAll, most, offset));
      const Rounding<VALUES> rounding(most);
      for (int c = begin + lane; c < end; c += 32)
        to[c] = uint8_t(rounding.pair(rounding.any_quotient(number(c)), 0.0f));
      if (lane == 0) scales[int64_t(begin / kGroup) * num_tokens + blockIdx.x] = rounding.scale;
    }
    return;
  }
  unsigned int largest = 0;
  for (int c = threadIdx.x; c < columns; c += blockDim.x)
    largest = max(largest, __float_as_uint(number(c)) & 0x7fffffffu);
  const Rounding<VALUES> rounding(block_max(largest, shared));
  uint8_t* const to = values + row_of<VALUES>(blockIdx.x) * columns;
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    const float quotient = rounding.any_quotient(number(c));
    const int place = VALUES == kOperandTwoPartsInt4 ? granule_place(c) : c;
    to[place] = uint8_t(rounding.pair(quotient, 0.0f));
    if (kInTwoParts<VALUES>)
      to[int64_t(8) * columns + place] = uint8_t(rounding.pair(rounding.rest(quotient), 0.0f));
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = rounding.scale;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_quantize_rows(void* values, float* scales, const void* x, const int* order,
                            const void* norm_weight, const void* norm_bias, float eps,
                            int num_tokens, int columns, int64_t x_stride, int operand, int dtype,
                            void* stream) {
  if (operand < kOperandInt8 || operand > kOperandFp8Blocks)
    return fail("quantize_rows: operand code %d; wanted 1 to 5", operand);
  if (operand == kOperandTwoPartsInt4 && columns % 32)
    return fail("quantize_rows: %d columns; wanted a multiple of 32", columns);
  return for_16_bit_dtype(dtype, "quantize_rows", [&](auto zero) {
    using X = decltype(zero);
    const bool wide = columns % 8 == 0 && columns <= 1024 * 8 * kItems && x_stride % 8 == 0 &&
                      aligned16(values) && aligned16(x) && aligned16(order) &&
                      aligned16(norm_weight) && aligned16(norm_bias);
    const int threads = wide ? ceil_div(columns, 8 * kItems * 32) * 32 : 256;
    const bool in_two = operand == kOperandTwoParts || operand == kOperandTwoPartsInt4;
    const int rows = in_two ? ceil_div(num_tokens, 8) * 8 : num_tokens;
    auto run = [&](auto kernel) {
      return launch("quantize_rows", kernel, rows, threads, 0, stream, (uint8_t*)values, scales,
                    (const X*)x, order, (const X*)norm_weight, (const X*)norm_bias, eps, num_tokens,
                    columns, x_stride);
    };
    auto run_as = [&](auto chosen) {
      constexpr Values kValues = decltype(chosen)::value;
      if (!wide) return run(quantize_row_any<X, kValues>);
      return run(norm_weight ? quantize_row<X, kValues, true> : quantize_row<X, kValues, false>);
    };
    if (operand == kOperandTwoParts)
      return run_as(std::integral_constant<Values, kOperandTwoParts>());
    if (operand == kOperandTwoPartsInt4)
      return run_as(std::integral_constant<Values, kOperandTwoPartsInt4>());
    if (operand == kOperandFp8) return run_as(std::integral_constant<Values, kOperandFp8>());
    if (operand == kOperandFp8Blocks)
      return run_as(std::integral_constant<Values, kOperandFp8Blocks>());
    return run_as(std::integral_constant<Values, kOperandInt8>());
  });
}
