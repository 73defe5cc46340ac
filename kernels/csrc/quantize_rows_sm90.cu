// values[t, :] = x[t, :] / scales[t] rounded to int8 or E4M3, scales[t] = max|x[t, :]| / 127 or /
// 448; with a norm weight, of norm(x[t, :]) rounded to X.  One block per row, which stays in
// registers.
//
// The numbers are those of kernels/quantized.py, bit for bit: the division is exact, halves are
// rounded to even. As a norm it is short: the product behind it starts beside the kernel before it.
//
// Bytes moved: T * C * (sizeof(X) + 1) + 4 * T.   Bench: python -m tridecode.kernels.bench w8a8
#include "row_norm.cuh"

namespace tridecode {
namespace {

constexpr int kItems = 2;  // vectors of 8 per thread, as in norm.cu

// A row's values: int8 or E4M3, 8 of them in two words.
template <bool E4M3>
struct Rounding {
  static constexpr float kLimit = E4M3 ? 448.0f : 127.0f;

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

  // The quotient within the limits; NaN becomes 0.
  static __device__ __forceinline__ float scaled(float x, float scale) {
    const float quotient = __fdiv_rn(x, scale);
    return quotient == quotient ? fminf(fmaxf(quotient, -kLimit), kLimit) : 0.0f;
  }

  static __device__ __forceinline__ uint2 eight(const float (&x)[8], float scale) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = pair(scaled(x[2 * i], scale), scaled(x[2 * i + 1], scale));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }

  // Of a row whose largest magnitude has these bits.
  static __device__ __forceinline__ float scale_of(unsigned int largest) {
    return largest ? __fdiv_rn(__uint_as_float(largest), kLimit) : 1.0f;
  }
};

// The bits of |x|: as unsigned numbers NaN is above infinity, which is above
// all others.
__device__ __forceinline__ unsigned int magnitude(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
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

template <typename X>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<X>(x));
}

template <typename X, bool E4M3>
__global__ void quantize_row(uint8_t* values, float* scales, const X* x, const X* weight,
                             const X* bias, float eps, int columns, int64_t x_stride) {
  using R = Rounding<E4M3>;
  __shared__ float sums_shared[2][32];
  __shared__ unsigned int shared[32];
  const int first = threadIdx.x * 8, step = blockDim.x * 8;
  float w[kItems][8], b[kItems][8] = {}, v[kItems][8] = {};
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (first + i * step < columns) body(i, first + i * step);
  };
  if (weight) {  // constants, before the wait
    each_item([&](int i, int c) {
      load8(weight + c, w[i]);
      if (bias) load8(bias + c, b[i]);
    });
  }
  let_successor_start();
  wait_for_predecessor_alone();
  each_item([&](int i, int c) { load8(x + blockIdx.x * x_stride + c, v[i]); });
  if (weight) {
    float sums[1] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[0] += v[i][j];
    }
    RowNorm norm[1];
    row_statistics(
        norm, sums, bias != nullptr, columns, eps,
        [&](auto body) {
          each_item([&](int i, int) {
#pragma unroll
            for (int j = 0; j < 8; ++j) body(0, v[i][j]);
          });
        },
        BlockSums{sums_shared});
    each_item([&](int i, int) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = rounded<X>(norm[0](v[i][j], w[i][j], b[i][j]));
    });
  }
  unsigned int largest = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = max(largest, magnitude(v[i][j]));
  }
  const float scale = R::scale_of(block_max(largest, shared));
  each_item([&](int i, int c) {
    *reinterpret_cast<uint2*>(values + int64_t(blockIdx.x) * columns + c) = R::eight(v[i], scale);
  });
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// Any number of columns at any address: the row is read again for each pass.
template <typename X, bool E4M3>
__global__ void quantize_row_any(uint8_t* values, float* scales, const X* x, const X* weight,
                                 const X* bias, float eps, int columns, int64_t x_stride) {
  using R = Rounding<E4M3>;
  __shared__ float sums_shared[2][32];
  __shared__ unsigned int shared[32];
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
  auto number = [&](int c) {
    const float value = to_float(row[c]);
    if (!weight) return value;
    return rounded<X>(norm[0](value, to_float(weight[c]), bias ? to_float(bias[c]) : 0.0f));
  };
  unsigned int largest = 0;
  for (int c = threadIdx.x; c < columns; c += blockDim.x)
    largest = max(largest, magnitude(number(c)));
  const float scale = R::scale_of(block_max(largest, shared));
  for (int c = threadIdx.x; c < columns; c += blockDim.x)
    values[int64_t(blockIdx.x) * columns + c] = uint8_t(R::pair(R::scaled(number(c), scale), 0.0f));
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_quantize_rows_sm90(void* values, float* scales, const void* x,
                                 const void* norm_weight, const void* norm_bias, float eps,
                                 int num_tokens, int columns, int64_t x_stride, int operand,
                                 int dtype, void* stream) {
  if (operand != 1 && operand != 2)
    return fail("quantize_rows_sm90: operand code %d; wanted 1 or 2", operand);
  return for_16_bit_dtype(dtype, "quantize_rows_sm90", [&](auto zero) {
    using X = decltype(zero);
    const bool wide = columns % 8 == 0 && columns <= 1024 * 8 * kItems && x_stride % 8 == 0 &&
                      aligned16(values) && aligned16(x) && aligned16(norm_weight) &&
                      aligned16(norm_bias);
    const int threads = wide ? ceil_div(columns, 8 * kItems * 32) * 32 : 256;
    auto run = [&](auto kernel) {
      return launch("quantize_rows_sm90", kernel, num_tokens, threads, 0, stream, (uint8_t*)values,
                    scales, (const X*)x, (const X*)norm_weight, (const X*)norm_bias, eps, columns,
                    x_stride);
    };
    if (operand == 2) return run(wide ? quantize_row<X, true> : quantize_row_any<X, true>);
    return run(wide ? quantize_row<X, false> : quantize_row_any<X, false>);
  });
}
