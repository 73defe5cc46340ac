// out = activation(product + bias) + residual: the epilogue of a cuBLAS GEMM. Sums of 8-bit
// operands, int32 or float32, are first multiplied by the scales of their column and row.
// Bytes moved: (columns read + columns written) * T * sizeof(X), twice the reads if gated.
// Bench: python -m tridecode.kernels.bench step
#include "api/library.h"
#include "common/epilogue.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;

template <int WIDTH, typename Product>
__device__ __forceinline__ void load_product(const Product* from, float (&values)[WIDTH]) {
  load_some<WIDTH>(from, values);
}
template <int WIDTH>
__device__ __forceinline__ void load_product(const int* from, float (&values)[WIDTH]) {
  load_some<WIDTH>(reinterpret_cast<const float*>(from), values);  // bits
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) values[i] = float(__float_as_int(values[i]));
}

// scales: one per column of product; row_scales: one per row; null: neither.
template <typename X, typename Product, typename Out, int WIDTH>
__global__ void gemm_library_epilogue(Out* out, const Product* product, const X* bias,
                                      const X* residual, const float* scales,
                                      const float* row_scales, int num_tokens, int columns,
                                      int64_t out_stride, int64_t product_stride,
                                      int64_t residual_stride, int activation) {
  wait_for_predecessor();
  const int c = (blockIdx.x * kThreads + threadIdx.x) * WIDTH;
  if (c >= columns) return;
  float b[WIDTH] = {}, up_bias[WIDTH] = {}, s[WIDTH], up_scales[WIDTH];
  if (scales) load_some<WIDTH>(scales + c, s);
  if (scales && is_gated(activation)) load_some<WIDTH>(scales + columns + c, up_scales);
  if (bias) load_some<WIDTH>(bias + c, b);
  if (bias && is_gated(activation)) load_some<WIDTH>(bias + columns + c, up_bias);
  for (int64_t t = blockIdx.y; t < num_tokens; t += gridDim.y) {
    float values[WIDTH], r[WIDTH] = {};
    load_product<WIDTH>(product + t * product_stride + c, values);
    const float row_scale = scales ? row_scales[t] : 1.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
      if (scales) values[i] = values[i] * s[i] * row_scale;
    if (residual) load_some<WIDTH>(residual + t * residual_stride + c, r);
    if (is_gated(activation)) {
      float up[WIDTH];
      load_product<WIDTH>(product + t * product_stride + columns + c, up);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i)
        if (scales) up[i] = up[i] * up_scales[i] * row_scale;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i)
        values[i] = finish_gated(values[i], b[i], up[i], up_bias[i], activation, r[i]);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[i] = finish_sum(values[i], b[i], activation, r[i]);
    }
    store_some<WIDTH>(out + t * out_stride + c, values);
  }
}

struct Given {
  void* out;
  const void *product, *bias, *residual;
  const float *scales, *row_scales;
  int num_tokens, columns;
  int64_t out_stride, product_stride, residual_stride;
  int activation;
};

template <typename X, typename Product, typename Out>
int run(const Given& given, void* stream) {
  const bool wide = given.columns % 8 == 0 && given.out_stride % 8 == 0 &&
                    given.product_stride % 8 == 0 && given.residual_stride % 8 == 0 &&
                    aligned16(given.out) && aligned16(given.product) && aligned16(given.bias) &&
                    aligned16(given.residual) && aligned16(given.scales);
  const dim3 grid(ceil_div(given.columns, kThreads * (wide ? 8 : 1)),
                  given.num_tokens < 32768 ? given.num_tokens : 32768);
  return launch(
      "gemm_library_epilogue",
      wide ? gemm_library_epilogue<X, Product, Out, 8> : gemm_library_epilogue<X, Product, Out, 1>,
      grid, kThreads, 0, stream, (Out*)given.out, (const Product*)given.product,
      (const X*)given.bias, (const X*)given.residual, given.scales, given.row_scales,
      given.num_tokens, given.columns, given.out_stride, given.product_stride,
      given.residual_stride, given.activation);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_library_epilogue(void* out, const void* product, const void* bias,
                                    const void* residual, const float* scales,
                                    const float* row_scales, int num_tokens, int columns,
                                    int64_t out_stride, int64_t product_stride,
                                    int64_t residual_stride, int activation, int product_format,
                                    int out_float32, int dtype, void* stream) {
  const Given given = {
      out,        product, bias,       residual,       scales,          row_scales,
      num_tokens, columns, out_stride, product_stride, residual_stride, activation};
  return for_dtype(dtype, "gemm_library_epilogue", [&](auto zero) {
    using X = decltype(zero);
    if (product_format == 2 && !scales)
      return fail("gemm_library_epilogue: an int32 product needs scales");
    if (product_format == 2 && out_float32) return run<X, int, float>(given, stream);
    if (product_format == 2) return run<X, int, X>(given, stream);
    if (product_format == 1 && out_float32) return run<X, float, float>(given, stream);
    if (product_format == 1) return run<X, float, X>(given, stream);
    if (out_float32) return run<X, X, float>(given, stream);
    return run<X, X, X>(given, stream);
  });
}
