// out = activation(product + x * a^T * b) + residual, with the LoRA adapter of each row; then
// normed = norm(out).
//
// A block, or a cluster of blocks, computes one row. It multiplies x by the rows of a, and the sums
// by the columns of b, before it waits for the GEMM that writes the product. The GEMM needs
// most of a multiprocessor's shared memory and half of its registers. A block of this kernel uses
// 128 registers per thread and less than 1 KiB of shared memory, so that it is resident with the
// GEMM and reads the adapter while the product is computed. Rows with adapters come first, because
// later blocks may not become resident before the GEMM ends.
//
// Bytes moved: rank * (inputs + outputs) * sizeof(X) per row with an adapter, from the L2 cache
// if rows share an adapter, and the row of the product. Zero spans of b are not read.
// Bench: python -m tridecode.tools.bench.studies.adapters
#include "common/row_norm.cuh"
#include "rows/adapter_rows.cuh"

namespace tridecode {
namespace {

constexpr int kItems = 4;  // vectors of 8 columns per thread
constexpr int kMostBlocks = 8;

// kPlain: no or an elementwise activation. kGated: an activation that combines the output halves.
enum Form { kPlain, kGated, kNorm };

// delta += sums[r - first] * b[r] for one vector of outputs, over the ranks r of its span.
template <typename X>
__device__ __forceinline__ void expand(const Pair& pair, const float* sums, int first, int count,
                                       int64_t outputs, int vector, float (&delta)[8]) {
  const uint32_t span = __ldg(pair.spans + vector * 8 / kSpan);
  const int begin = max(int(span & 0xffff), first), end = min(int(span >> 16), first + count);
  const X* const b = static_cast<const X*>(pair.b) + 8 * vector;
#pragma unroll 8
  for (int r = begin; r < end; ++r) {
    float w[8];
    load8_once(b + r * outputs, w);
    const float sum = sums[r - first];
#pragma unroll
    for (int j = 0; j < 8; ++j) delta[j] = fmaf(sum, w[j], delta[j]);
  }
}

template <typename X, Form FORM>
__global__ void __launch_bounds__(kThreads, 2)
    add_adapters(const __grid_constant__ Task task, int columns) {
  __shared__ float own[kRanks], joined[kRanks], norm_sums[2][FORM == kNorm ? 32 : 1];
  constexpr int kHalves = FORM == kGated ? 2 : 1, kAhead = FORM == kGated ? 2 : 4;
  const int64_t row = task.rows ? task.rows[blockIdx.y] : blockIdx.y;
  const int slot = task.slots[row], vectors = columns / 8;
  const Pair* const pairs = task.pairs + int64_t(slot) * task.pair_stride;
  const int begin = int64_t(vectors) * blockIdx.x / gridDim.x;
  const int end = int64_t(vectors) * (blockIdx.x + 1) / gridDim.x;
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int vector = begin + threadIdx.x + i * kThreads;
      if (vector < end) body(i, vector);
    }
  };
  float delta[kItems][kHalves][8] = {};
  const int rank = slot < 0 ? 0 : int(pairs->rank);
  if (rank > 0) {
    const Pair pair = *pairs;
    const Sums sums = {own, joined};
    for (int first = 0; first < rank; first += kRanks) {
      const int count = min(kRanks, rank - first);
      shrink<X, kAhead>(static_cast<const X*>(task.x) + row * task.x_stride,
                        static_cast<const X*>(pair.a) + int64_t(first) * task.inputs, task.inputs,
                        count, own);
      const float* const all = sums.join(count);
      each_item([&](int i, int vector) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          expand<X>(pair, all, first, count, task.outputs, vector + half * vectors, delta[i][half]);
      });
      sums.leave();
    }
  }
  wait_for_predecessor();

  X* const out = static_cast<X*>(task.out) + row * task.out_stride;
  const X* const product = static_cast<const X*>(task.product) + row * task.product_stride;
  const X* const residual =
      task.residual ? static_cast<const X*>(task.residual) + row * task.residual_stride : nullptr;
  if constexpr (FORM == kPlain) {
    if (rank == 0 && task.activation == kNone && !residual && out == product) return;
  }
  each_item([&](int i, int vector) {
    float (&values)[8] = delta[i][0];
    float sum[8], r[8] = {};
    load8_shared(product + 8 * vector, sum);
    if (residual) load8_shared(residual + 8 * vector, r);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] += sum[j];
    if constexpr (FORM == kGated) {
      load8_shared(product + columns + 8 * vector, sum);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        values[j] = gate(values[j], task.activation) * (delta[i][1][j] + sum[j]) + r[j];
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = activate_plain(values[j], task.activation) + r[j];
    }
    if constexpr (FORM == kNorm) {
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = to_float(from_float<X>(values[j]));
    }
    if (FORM != kNorm || rank > 0 || residual || out != product) store8(out + 8 * vector, values);
  });
  if constexpr (FORM == kNorm) {
    const X* const weight = static_cast<const X*>(task.norm_weight);
    const X* const bias = static_cast<const X*>(task.norm_bias);
    float v[kItems][8] = {};
    each_item([&](int i, int) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = delta[i][0][j];
    });
    auto each_column = [&](auto body) {
      each_item([&](int i, int vector) { body(i, 8 * vector); });
    };
    const RowNorm norm =
        block_row_norm(v, each_column, bias != nullptr, columns, task.norm_eps, norm_sums);
    X* const normed = static_cast<X*>(task.normed) + row * task.normed_stride;
    each_column([&](int i, int c) {
      float w[8], b[8] = {};
      load8(weight + c, w);
      if (bias) load8(bias + c, b);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = norm(v[i][j], w[j], b[j]);
      store8(normed + c, v[i]);
    });
  }
}

// Returns 0 if vectors of 8 elements are aligned and a row fits into its threads, else an error
// status.
int check_task(const Task& task, int columns) {
  const int blocks = task.blocks;
  if (task.inputs % 8 || columns % 8 || task.x_stride % 8 || task.out_stride % 8 ||
      task.product_stride % 8 || task.residual_stride % 8 || task.normed_stride % 8)
    return fail("add_adapters: %d inputs, %d columns or a stride; wanted multiples of 8",
                task.inputs, columns);
  for (const void* each : {(const void*)task.out, task.product, task.x, task.residual,
                           (const void*)task.normed, task.norm_weight, task.norm_bias})
    if (!aligned16(each)) return fail("add_adapters: an array is not aligned to 16 bytes");
  if (blocks < 1 || blocks > kMostBlocks || (blocks & (blocks - 1)))
    return fail("add_adapters: %d blocks; wanted 1, 2, 4 or 8", blocks);
  if (blocks > 1 && (device().capability < 90 || task.normed))
    return fail("add_adapters: %d blocks; a row with a norm, and before 9.0, has one", blocks);
  if (ceil_div(columns / 8, blocks) > kThreads * kItems)
    return fail("add_adapters: %d blocks of %d columns; wanted at most %d", blocks,
                ceil_div(columns, blocks), 8 * kThreads * kItems);
  if (task.normed && joins_halves(task.activation))
    return fail("add_adapters: a norm behind activation %d", task.activation);
  return 0;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_add_adapters(const tridecode_adapters_task* given, void* stream) {
  const Task& task = *given;
  const bool gated = joins_halves(task.activation);
  const int columns = gated ? task.outputs / 2 : task.outputs;
  if (int status = check_task(task, columns)) return status;
  return for_dtype(task.dtype, "add_adapters", [&](auto zero) {
    using X = decltype(zero);
    const auto kernel = task.normed ? add_adapters<X, kNorm>
                        : gated     ? add_adapters<X, kGated>
                                    : add_adapters<X, kPlain>;
    return launch_in_clusters("add_adapters", kernel, task.blocks > 1 ? task.blocks : 0,
                              dim3(task.blocks, task.tokens), kThreads, 0, stream, task, columns);
  });
}
