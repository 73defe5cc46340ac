// residual[t, :] += norm(x[t, :]), rounded, then normed[t, :] = next_norm(residual[t, :]): the
// norms around the sum of a sandwich layer. One block per row, which stays in registers.
//
// The kernel lets the GEMM after it become resident before x is ready, like norm.cu.
//
// Bytes moved: 5 * T * C * sizeof(X).
// Bench: python -m tridecode.kernels.bench add_normed
#include "api/rows.h"
#include "common/row_norm.cuh"

namespace tridecode {
namespace {

constexpr int kItems = 2;  // vectors of 8 per thread
constexpr int kMostThreads = 512;

using Task = tridecode_add_normed_task;

template <typename X>
__device__ __forceinline__ X* row_of(const void* rows, int64_t stride) {
  return const_cast<X*>(static_cast<const X*>(rows)) + blockIdx.x * stride;
}

template <typename X>
__global__ void __launch_bounds__(kMostThreads) add_normed(const __grid_constant__ Task task) {
  __shared__ float shared[4][32];
  const int first = threadIdx.x * 8, step = blockDim.x * 8;
  float w[kItems][8] = {}, b[kItems][8] = {}, v[kItems][8] = {}, r[kItems][8] = {};
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (first + i * step < task.columns) body(i, first + i * step);
  };
  auto load_norm = [&](const void* weight, const void* bias) {
    each_item([&](int i, int c) {
      load8(static_cast<const X*>(weight) + c, w[i]);
      if (bias) load8(static_cast<const X*>(bias) + c, b[i]);
    });
  };
  if (task.weight) load_norm(task.weight, task.bias);
  let_successor_start();
  wait_for_predecessor_alone();
  X* const residual = row_of<X>(task.residual, task.residual_stride);
  each_item([&](int i, int c) {
    load8(row_of<X>(task.x, task.x_stride) + c, v[i]);
    load8(residual + c, r[i]);
  });
  RowNorm norm = {0.0f, 1.0f};
  if (task.weight)
    norm = block_row_norm(v, each_item, task.bias != nullptr, task.columns, task.eps, shared);
  each_item([&](int i, int c) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float value = task.weight ? norm(v[i][j], w[i][j], b[i][j]) : v[i][j];
      r[i][j] = to_float(from_float<X>(r[i][j] + value));
    }
    store8(residual + c, r[i]);
  });
  if (!task.next_weight) return;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) b[i][j] = 0.0f;
  }
  load_norm(task.next_weight, task.next_bias);
  norm = block_row_norm(r, each_item, task.next_bias != nullptr, task.columns, task.next_eps,
                        shared + 2);
  X* const normed = row_of<X>(task.normed, task.normed_stride);
  each_item([&](int i, int c) {
#pragma unroll
    for (int j = 0; j < 8; ++j) r[i][j] = norm(r[i][j], w[i][j], b[i][j]);
    store8(normed + c, r[i]);
  });
}

// Any number of columns and alignment: rows are read several times, each number by one thread.
template <typename X>
__global__ void add_normed_any(const __grid_constant__ Task task) {
  __shared__ float shared[4][32];
  let_successor_start();
  wait_for_predecessor_alone();
  const int columns = task.columns;
  auto statistics = [&](const X* row, bool centred, float eps, float (*memory)[32]) {
    auto each = [&](auto body) {
      for (int c = threadIdx.x; c < columns; c += blockDim.x) body(0, to_float(row[c]));
    };
    float sums[1] = {};
    if (centred) each([&](int, float value) { sums[0] += value; });
    RowNorm norm[1];
    row_statistics(norm, sums, centred, columns, eps, each, BlockSums{memory});
    return norm[0];
  };
  auto at = [](const void* vector, int c) {
    return vector ? to_float(static_cast<const X*>(vector)[c]) : 0.0f;
  };
  const X* const x = row_of<X>(task.x, task.x_stride);
  X* const residual = row_of<X>(task.residual, task.residual_stride);
  RowNorm norm = {0.0f, 1.0f};
  if (task.weight) norm = statistics(x, task.bias != nullptr, task.eps, shared);
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    float value = to_float(x[c]);
    if (task.weight) value = norm(value, at(task.weight, c), at(task.bias, c));
    residual[c] = from_float<X>(to_float(residual[c]) + value);
  }
  if (!task.next_weight) return;
  norm = statistics(residual, task.next_bias != nullptr, task.next_eps, shared + 2);
  X* const normed = row_of<X>(task.normed, task.normed_stride);
  for (int c = threadIdx.x; c < columns; c += blockDim.x)
    normed[c] =
        from_float<X>(norm(to_float(residual[c]), at(task.next_weight, c), at(task.next_bias, c)));
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_add_normed(const tridecode_add_normed_task* given, void* stream) {
  const Task& task = *given;
  return for_dtype(task.dtype, "add_normed", [&](auto zero) {
    using X = decltype(zero);
    bool wide = task.columns % 8 == 0 && task.columns <= kMostThreads * 8 * kItems &&
                task.x_stride % 8 == 0 && task.residual_stride % 8 == 0 &&
                task.normed_stride % 8 == 0;
    for (const void* each : {(const void*)task.residual, task.x, (const void*)task.normed,
                             task.weight, task.bias, task.next_weight, task.next_bias})
      wide = wide && aligned16(each);
    const int threads = wide ? ceil_div(task.columns, 8 * kItems * 32) * 32 : 256;
    return launch("add_normed", wide ? add_normed<X> : add_normed_any<X>, task.tokens, threads, 0,
                  stream, task);
  });
}
