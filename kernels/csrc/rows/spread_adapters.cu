// The operation of add_adapters.cu for decode steps: a row with an adapter is spread over many
// blocks, and a launch also multiplies its result by the `a` of the GEMM that reads it next.
//
// These kernels are rarely resident beside the GEMM that they follow, so most of their work is on
// the critical path, and latency bounds it. The products x * a^T are therefore complete before the
// GEMM of x starts: the launch that writes x stores their parts, one per block. A block has a share
// of the columns and loads its parts of b, and the first ranks of the next a, all at once.
//
// A row without an adapter takes few blocks, as in a norm or an activation. The others exit before
// the wait, so that they keep no other block from becoming resident; the row's first block waits.
//
// Bytes moved: as in add_adapters.cu, and the parts of the sums.
// Bench: python -m tridecode.tools.bench.studies.adapters
#include "rows/adapter_parts.cuh"

namespace tridecode {
namespace {

constexpr int kWholeItems = 2;    // vectors of 8 columns per thread of a row without an adapter
constexpr int kMostAdapted = 40;  // rows with an adapter that have blocks of their own

struct Shared {
  float all[kMostRanks], handed[kThreads][8];
};

template <typename X, bool GATED>
__device__ __forceinline__ void spread_row(const Task& task, const Part& part, Shared& shared,
                                           int columns) {
  auto& all = shared.all;
  auto& handed = shared.handed;
  constexpr int kHalves = GATED ? 2 : 1;
  const int vectors = columns / 8;
  const int vector = part.split ? blockIdx.x * part.share + part.at
                                : blockIdx.x * kThreads * kWholeItems + threadIdx.x;
  const bool changes =
      GATED || part.split || task.activation != kNone || task.residual || task.out != task.product;
  if (!part.split && blockIdx.x && (!changes || vector - int(threadIdx.x) >= vectors)) return;
  NextSums<X> next(part, columns, vector);
  float delta[kHalves][8] = {};
  if (part.split) {
    next.prefetch();
    if (part.pair.rank > 0) {
      expand_given<X>(task, part, vector, vectors, all, delta);
      join_groups(part, handed, delta);
    }
    next.load(part.group);
  }
  wait_for_predecessor();
  if (!changes) return;

  X* const out = static_cast<X*>(task.out) + part.row * task.out_stride;
  const X* const product = static_cast<const X*>(task.product) + part.row * task.product_stride;
  const X* const residual =
      task.residual ? static_cast<const X*>(task.residual) + part.row * task.residual_stride
                    : nullptr;
  // The loads of all items come before the first store, which might change what they read.
  Vector<X> sums[kWholeItems][kHalves], added[kWholeItems];
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kWholeItems; ++i) {
      const int v = vector + i * kThreads;
      if (v < vectors && (!part.split || (i == 0 && part.group == 0))) body(i, v);
    }
  };
  each_item([&](int i, int v) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      sums[i][half].load_shared(product + half * columns + 8 * v);
    if (residual) added[i].load_shared(residual + 8 * v);
  });
  float last[8] = {};
  each_item([&](int i, int v) {
    float values[8], second[8], r[8] = {};
    sums[i][0].get(values);
    if (residual) added[i].get(r);
    if (GATED) sums[i][kHalves - 1].get(second);
    if (i == 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[j] += delta[0][j];
        if (GATED) second[j] += delta[kHalves - 1][j];
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
      values[j] = (GATED ? gate(values[j], task.activation) * second[j]
                         : activate_plain(values[j], task.activation)) +
                  r[j];
    store8(out + 8 * v, values);
    if (i == 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) last[j] = values[j];
    }
  });
  if (next.rank > 0) {
    round_all<X>(last);
    if (part.group == 0) store8(handed[part.at], last);
    next.store(task, part, handed);
  }
}

template <typename X, bool GATED>
__global__ void __launch_bounds__(kThreads, 2)
    spread_adapters(const __grid_constant__ Task task, int columns, int share) {
  __shared__ Shared shared;
  spread_row<X, GATED>(task, Part(task, blockIdx.y, share, nullptr), shared, columns);
}

// Computes only the rows with an adapter.
template <typename X, bool GATED>
__global__ void __launch_bounds__(kThreads, 2)
    spread_adapted_rows(const __grid_constant__ Task task, int columns, int share) {
  __shared__ Shared shared;
  const int adapted = *task.num_adapted;
  if (int(blockIdx.y) >= adapted) return wait_for_predecessor();
#pragma unroll 1
  for (int number = blockIdx.y; number < adapted; number += gridDim.y) {
    const Part part(task, number, share, nullptr);
    if (part.split) spread_row<X, GATED>(task, part, shared, columns);
    __syncthreads();  // the sums in shared memory have been read
  }
}

int check_task(const Task& task, int columns) {
  const int vectors = columns / 8, share = task.share, blocks = task.blocks;
  if (device().capability < 90) return fail("spread_adapters: needs compute capability 9.0");
  if (task.inputs % 8 || columns % 8 || task.x_stride % 8 || task.out_stride % 8 ||
      task.product_stride % 8 || task.residual_stride % 8 || task.normed_stride % 8)
    return fail("spread_adapters: %d inputs, %d columns or a stride; wanted multiples of 8",
                task.inputs, columns);
  for (const void* each : {(const void*)task.out, task.product, task.x, task.residual,
                           (const void*)task.normed, task.norm_weight, task.norm_bias})
    if (!aligned16(each)) return fail("spread_adapters: an array is not aligned to 16 bytes");
  if (share < 32 || share > kThreads || (share & (share - 1)) || int64_t(share) * blocks < vectors)
    return fail("spread_adapters: %d blocks of %d vectors for %d", blocks, share, vectors);
  if (task.sum_ranks > kMostRanks || task.next_ranks > kMostRanks)
    return fail("spread_adapters: sums of %d and %d ranks; wanted at most %d", task.sum_ranks,
                task.next_ranks, kMostRanks);
  if (!task.normed && !task.sums) return fail("spread_adapters: no sums and no norm");
  return 0;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_spread_adapters(const tridecode_adapters_task* given, void* stream) {
  const Task& task = *given;
  const bool gated = joins_halves(task.activation);
  const int columns = gated ? task.outputs / 2 : task.outputs;
  if (int status = check_task(task, columns)) return status;
  if (task.normed) return run_spread_norm(task, columns, stream);
  if (task.complete && !(task.rows && task.num_adapted))
    return fail("spread_adapters: rows with adapters not first");
  const dim3 grid(task.blocks, task.complete ? min(task.tokens, kMostAdapted) : task.tokens);
  return for_dtype(task.dtype, "spread_adapters", [&](auto zero) {
    using X = decltype(zero);
    const auto kernel = task.complete
                            ? (gated ? spread_adapted_rows<X, true> : spread_adapted_rows<X, false>)
                            : (gated ? spread_adapters<X, true> : spread_adapters<X, false>);
    return launch("spread_adapters", kernel, grid, kThreads, 0, stream, task, columns, task.share);
  });
}
