// out[t, :] = LayerNorm(x[t, :]) or, without a bias, RMSNorm(x[t, :]).  One block per row, which
// stays in registers.
//
// A norm is short: the GEMM after it becomes resident together with the kernel before it, so that
// its weights are prefetched before x is ready.
//
// Bytes moved: 2 * T * C * sizeof(X) + 2 * C * sizeof(X).
// Bench: python -m tridecode.kernels.bench norm
#include "api/rows.h"
#include "common/row_norm.cuh"

namespace tridecode {
namespace {

constexpr int kItems = 2;  // vectors of 8 per thread

template <typename X>
__global__ void norm_row(X* out, const X* x, const X* weight, const X* bias, float eps, int columns,
                         int64_t x_stride, int64_t out_stride) {
  __shared__ float shared[2][32];
  const int first = threadIdx.x * 8, step = blockDim.x * 8;
  float w[kItems][8], b[kItems][8] = {}, v[kItems][8] = {};
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (first + i * step < columns) body(i, first + i * step);
  };
  // Constants are loaded before the wait: after it they would queue behind the weights that the
  // next kernel prefetches.
  each_item([&](int i, int c) {
    load8(weight + c, w[i]);
    if (bias) load8(bias + c, b[i]);
  });
  let_successor_start();
  wait_for_predecessor_alone();
  each_item([&](int i, int c) { load8(x + blockIdx.x * x_stride + c, v[i]); });
  const RowNorm norm = block_row_norm(v, each_item, bias != nullptr, columns, eps, shared);
  each_item([&](int i, int c) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[i][j] = norm(v[i][j], w[i][j], b[i][j]);
    store8(out + blockIdx.x * out_stride + c, v[i]);
  });
}

// Any number of columns and alignment: the row is read three times.
template <typename X>
__global__ void norm_row_any(X* out, const X* x, const X* weight, const X* bias, float eps,
                             int columns, int64_t x_stride, int64_t out_stride) {
  __shared__ float shared[2][32];
  let_successor_start();
  wait_for_predecessor_alone();
  const X* const row = x + blockIdx.x * x_stride;
  auto each = [&](auto body) {
    for (int c = threadIdx.x; c < columns; c += blockDim.x) body(0, to_float(row[c]));
  };
  float sums[1] = {};
  if (bias) each([&](int, float value) { sums[0] += value; });
  RowNorm norm[1];
  row_statistics(norm, sums, bias != nullptr, columns, eps, each, BlockSums{shared});
  for (int c = threadIdx.x; c < columns; c += blockDim.x)
    out[blockIdx.x * out_stride + c] = from_float<X>(
        norm[0](to_float(row[c]), to_float(weight[c]), bias ? to_float(bias[c]) : 0.0f));
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
