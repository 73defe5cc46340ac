// Activations of rows that no epilogue of a GEMM has: out = activation(product + bias) + residual,
// gated or not, and the soft cap of logits.
// Bytes moved: (columns read + columns written) * T * sizeof(X), twice the reads if gated.
// Bench: python -m tridecode.kernels.bench activate_rows
#include "api/rows.h"
#include "common/epilogue.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;

using Task = tridecode_activate_task;

__device__ __forceinline__ float activation_of(float x, int kind) {
  return kind == kRowsSilu ? silu(x) : activate(x, kGelu);
}

template <typename X, typename Out, int WIDTH>
__global__ void activate_rows(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const int c = (blockIdx.x * kThreads + threadIdx.x) * WIDTH, columns = task.columns;
  if (c >= columns) return;
  const bool gated = task.activation != kRowsSilu;
  const X* const bias = static_cast<const X*>(task.bias);
  float b[WIDTH] = {}, up_bias[WIDTH] = {};
  if (bias) load_some<WIDTH>(bias + c, b);
  if (bias && gated) load_some<WIDTH>(bias + columns + c, up_bias);
  for (int64_t t = blockIdx.y; t < task.tokens; t += gridDim.y) {
    const X* const product = static_cast<const X*>(task.product) + t * task.product_stride + c;
    float values[WIDTH], up[WIDTH], r[WIDTH] = {};
    load_some<WIDTH>(product, values);
    if (gated) load_some<WIDTH>(product + columns, up);
    if (task.residual)
      load_some<WIDTH>(static_cast<const X*>(task.residual) + t * task.residual_stride + c, r);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      values[i] = activation_of(values[i] + b[i], task.activation);
      if (gated) values[i] *= up[i] + up_bias[i];
      values[i] += r[i];
    }
    store_some<WIDTH>(static_cast<Out*>(task.out) + t * task.out_stride + c, values);
  }
}

__global__ void soft_cap(float* x, int64_t count, float cap) {
  wait_for_predecessor();
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4;
  const float inverse = 1.0f / cap;
  auto capped = [&](float value) { return cap * tanhf(value * inverse); };
  if (first + 4 <= count) {
    float4 four = *reinterpret_cast<float4*>(x + first);
    four = make_float4(capped(four.x), capped(four.y), capped(four.z), capped(four.w));
    *reinterpret_cast<float4*>(x + first) = four;
  } else {
    for (int64_t i = first; i < count; ++i) x[i] = capped(x[i]);
  }
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_activate_rows(const tridecode_activate_task* given, void* stream) {
  const Task& task = *given;
  if (task.activation < kRowsGeglu || task.activation > kRowsSilu)
    return fail("activate_rows: activation %d; wanted %d to %d", task.activation, kRowsGeglu,
                kRowsSilu);
  return for_dtype(task.dtype, "activate_rows", [&](auto zero) {
    using X = decltype(zero);
    const bool wide = task.columns % 8 == 0 && task.out_stride % 8 == 0 &&
                      task.product_stride % 8 == 0 && task.residual_stride % 8 == 0 &&
                      aligned16(task.out) && aligned16(task.product) && aligned16(task.bias) &&
                      aligned16(task.residual);
    const dim3 grid(ceil_div(task.columns, kThreads * (wide ? 8 : 1)),
                    task.tokens < 32768 ? task.tokens : 32768);
    auto run = [&](auto out) {
      using Out = decltype(out);
      return launch("activate_rows", wide ? activate_rows<X, Out, 8> : activate_rows<X, Out, 1>,
                    grid, kThreads, 0, stream, task);
    };
    return task.out_float32 ? run(float()) : run(X());
  });
}

int tridecode_soft_cap(float* x, int64_t count, float cap, void* stream) {
  if (!aligned16(x)) return fail("soft_cap: x is not aligned to 16 bytes");
  return launch("soft_cap", soft_cap, ceil_div(count, kThreads * 4), kThreads, 0, stream, x, count,
                cap);
}
