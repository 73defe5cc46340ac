// out = activation(product + bias) + residual: the epilogue of a cuBLAS product.
// Bytes moved: (columns read + columns written) * T * sizeof(X), twice the reads for SwiGLU.
// Bench: python -m tridecode.kernels.bench step
#include "epilogue.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;

template <typename X, typename Product, typename Out, int WIDTH>
__global__ void gemm_library_epilogue(Out* out, const Product* product, const X* bias,
                                      const X* residual, int num_tokens, int columns,
                                      int64_t out_stride, int64_t product_stride,
                                      int64_t residual_stride, int activation) {
  wait_for_predecessor();
  const int c = (blockIdx.x * kThreads + threadIdx.x) * WIDTH;
  if (c >= columns) return;
  float b[WIDTH] = {}, up_bias[WIDTH] = {};
  if (bias) load_some<WIDTH>(bias + c, b);
  if (bias && activation == kSwiglu) load_some<WIDTH>(bias + columns + c, up_bias);
  for (int64_t t = blockIdx.y; t < num_tokens; t += gridDim.y) {
    float values[WIDTH], r[WIDTH] = {};
    load_some<WIDTH>(product + t * product_stride + c, values);
    if (residual) load_some<WIDTH>(residual + t * residual_stride + c, r);
    if (activation == kSwiglu) {
      float up[WIDTH];
      load_some<WIDTH>(product + t * product_stride + columns + c, up);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i)
        values[i] = finish_gated(values[i], b[i], up[i], up_bias[i], r[i]);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[i] = finish_sum(values[i], b[i], activation, r[i]);
    }
    store_some<WIDTH>(out + t * out_stride + c, values);
  }
}

template <typename X, typename Product, typename Out>
int run(void* out, const void* product, const void* bias, const void* residual, int num_tokens,
        int columns, int64_t out_stride, int64_t product_stride, int64_t residual_stride,
        int activation, void* stream) {
  const bool wide = columns % 8 == 0 && out_stride % 8 == 0 && product_stride % 8 == 0 &&
                    residual_stride % 8 == 0 && aligned16(out) && aligned16(product) &&
                    aligned16(bias) && aligned16(residual);
  const dim3 grid(ceil_div(columns, kThreads * (wide ? 8 : 1)),
                  num_tokens < 32768 ? num_tokens : 32768);
  return launch(
      "gemm_library_epilogue",
      wide ? gemm_library_epilogue<X, Product, Out, 8> : gemm_library_epilogue<X, Product, Out, 1>,
      grid, kThreads, 0, stream, (Out*)out, (const Product*)product, (const X*)bias,
      (const X*)residual, num_tokens, columns, out_stride, product_stride, residual_stride,
      activation);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_library_epilogue(void* out, const void* product, const void* bias,
                                    const void* residual, int num_tokens, int columns,
                                    int64_t out_stride, int64_t product_stride,
                                    int64_t residual_stride, int activation, int product_float32,
                                    int out_float32, int dtype, void* stream) {
  return for_dtype(dtype, "gemm_library_epilogue", [&](auto zero) {
    using X = decltype(zero);
    auto run_as = [&](auto kernel) {
      return kernel(out, product, bias, residual, num_tokens, columns, out_stride, product_stride,
                    residual_stride, activation, stream);
    };
    if (product_float32 && out_float32) return run_as(run<X, float, float>);
    if (product_float32) return run_as(run<X, float, X>);
    if (out_float32) return run_as(run<X, X, float>);
    return run_as(run<X, X, X>);
  });
}
