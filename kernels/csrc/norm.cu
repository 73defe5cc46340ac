// out[t, :] = LayerNorm(x[t, :]) or, without a bias, RMSNorm(x[t, :]).  One block a row, which
// stays in registers; the variance is that of the centred row.
//
// A norm is short: the product behind it starts beside the kernel before it, so that its weights
// are on their way when x is there.
//
// Bytes moved: 2 * T * C * sizeof(X) + 2 * C * sizeof(X).
// Bench: python -m tridecode.kernels.bench norm
#include "common.cuh"

namespace tridecode {
namespace {

constexpr int kItems = 2;  // vectors of 8 a thread

template <typename X>
__global__ void norm_row(X* out, const X* x, const X* weight, const X* bias, float eps, int columns,
                         int64_t x_stride, int64_t out_stride) {
  __shared__ float sums[2][32];
  const int first = threadIdx.x * 8, step = blockDim.x * 8;
  float w[kItems][8], b[kItems][8] = {}, v[kItems][8];
  // Constant: asked for before the wait. After it they would queue behind the weights that the next
  // kernel has on their way.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int c = first + i * step;
    if (c >= columns) continue;
    load8(weight + c, w[i]);
    if (bias) load8(bias + c, b[i]);
  }
  let_successor_start();
  wait_for_predecessor_alone();
  const X* row = x + blockIdx.x * x_stride;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i * step < columns) {
      load8(row + first + i * step, v[i]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[i][j];
  }
  const float mean = bias ? block_sum(sum, sums[0]) / columns : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i * step >= columns) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += (v[i][j] - mean) * (v[i][j] - mean);
  }
  const float scale = rsqrtf(block_sum(squares, sums[1]) / columns + eps);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int c = first + i * step;
    if (c >= columns) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[i][j] = (v[i][j] - mean) * scale * w[i][j] + b[i][j];
    store8(out + blockIdx.x * out_stride + c, v[i]);
  }
}

// Any number of columns at any address: the row is read three times.
template <typename X>
__global__ void norm_row_any(X* out, const X* x, const X* weight, const X* bias, float eps,
                             int columns, int64_t x_stride, int64_t out_stride) {
  __shared__ float sums[2][32];
  let_successor_start();
  wait_for_predecessor_alone();
  const X* row = x + blockIdx.x * x_stride;
  float mean = 0.0f, sum = 0.0f;
  if (bias) {
    for (int c = threadIdx.x; c < columns; c += blockDim.x) sum += to_float(row[c]);
    mean = block_sum(sum, sums[0]) / columns;
  }
  float squares = 0.0f;
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    float centred = to_float(row[c]) - mean;
    squares += centred * centred;
  }
  const float scale = rsqrtf(block_sum(squares, sums[1]) / columns + eps);
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    float value =
        (to_float(row[c]) - mean) * scale * to_float(weight[c]) + (bias ? to_float(bias[c]) : 0.0f);
    out[blockIdx.x * out_stride + c] = from_float<X>(value);
  }
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_norm(void* out, const void* x, const void* weight, const void* bias, float eps,
                   int num_tokens, int columns, int64_t x_stride, int64_t out_stride, int dtype,
                   void* stream) {
  return for_dtype(dtype, "norm", [&](auto zero) {
    using X = decltype(zero);
    const bool wide = columns % 8 == 0 && columns <= 1024 * 8 * kItems && x_stride % 8 == 0 &&
                      out_stride % 8 == 0 && aligned16(out) && aligned16(x) && aligned16(weight) &&
                      aligned16(bias);
    const int threads = wide ? ceil_div(columns, 8 * kItems * 32) * 32 : 256;
    return launch("norm", wide ? norm_row<X> : norm_row_any<X>, num_tokens, threads, 0, stream,
                  (X*)out, (const X*)x, (const X*)weight, (const X*)bias, eps, columns, x_stride,
                  out_stride);
  });
}
