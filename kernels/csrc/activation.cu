// out = activation(product + bias) + residual: what follows a product that the library computed.
// Bytes moved: (columns read + columns written) * T * sizeof(X), twice the reads for SwiGLU.
// Bench: python -m tridecode.kernels.bench step
#include "epilogue.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;

template <typename X, typename Product, typename Out, int WIDTH>
__global__ void finish_linear(Out* out, const Product* product, const X* bias, const X* residual,
                              int num_tokens, int columns, int64_t out_stride,
                              int64_t product_stride, int64_t residual_stride, int activation) {
  wait_for_predecessor();
  const int c = (blockIdx.x * kThreads + threadIdx.x) * WIDTH;
  if (c >= columns) return;
  float b[WIDTH] = {}, up_bias[WIDTH] = {};
  if (bias) load_some<WIDTH>(bias + c, b);
  if (bias && activation == kSwiglu) load_some<WIDTH>(bias + columns + c, up_bias);
  for (int64_t t = blockIdx.y; t < num_tokens; t += gridDim.y) {
    float values[WIDTH];
    load_some<WIDTH>(product + t * product_stride + c, values);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] += b[i];
    if (activation == kSwiglu) {
      float up[WIDTH];
      load_some<WIDTH>(product + t * product_stride + columns + c, up);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[i] = silu(values[i]) * (up[i] + up_bias[i]);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[i] = activate(values[i], activation);
    }
    if (residual) {
      float more[WIDTH];
      load_some<WIDTH>(residual + t * residual_stride + c, more);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[i] += more[i];
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
  return launch("finish_linear",
                wide ? finish_linear<X, Product, Out, 8> : finish_linear<X, Product, Out, 1>, grid,
                kThreads, 0, stream, (Out*)out, (const Product*)product, (const X*)bias,
                (const X*)residual, num_tokens, columns, out_stride, product_stride,
                residual_stride, activation);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_finish_linear(void* out, const void* product, const void* bias, const void* residual,
                            int num_tokens, int columns, int64_t out_stride, int64_t product_stride,
                            int64_t residual_stride, int activation, int product_float32,
                            int out_float32, int dtype, void* stream) {
  return for_dtype(dtype, "finish_linear", [&](auto zero) {
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
