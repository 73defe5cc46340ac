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
#include "common/row_norm.cuh"
#include "rows/adapter_parts.cuh"

namespace tridecode {
namespace {

constexpr int kMostBlocks = 8;  // of a row with a norm
constexpr int kWholeItems = 2;  // vectors of 8 columns per thread of a row without an adapter
constexpr int kNormItems = 4;   // the same of a row with a norm

template <typename X, bool GATED>
__global__ void __launch_bounds__(kThreads, 2)
    spread_adapters(const __grid_constant__ Task task, int columns, int share) {
  __shared__ float all[kMostRanks], handed[kThreads][8];
  constexpr int kHalves = GATED ? 2 : 1;
  const int vectors = columns / 8;
  const Part part(task, share);
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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// add_up of row_statistics for a row shared by a cluster. The cluster arrives once more after the
// last call, and waits before it exits.
struct ClusterSums {
  float (*shared)[32];
  float* totals;
  __device__ __forceinline__ void operator()(float (&sums)[1], int which) const {
    sums[0] = block_sum(sums[0], shared[which]);
    if (threadIdx.x == 0) totals[which] = sums[0];
    cluster_sync_memory();
    const int lane = threadIdx.x % 32;
    sums[0] = warp_sum(lane < gridDim.x ? load_from(totals + which, lane) : 0.0f);
  }
};
#endif

template <typename X>
__global__ void __launch_bounds__(kThreads, 2)
    spread_adapters_norm(const __grid_constant__ Task task, int columns, int share) {
  __shared__ float all[kMostRanks], handed[kThreads][8];
  __shared__ float own[kRanks], joined[kRanks], norm_sums[2][32], totals[2];
  const int vectors = columns / 8;
  const Part part(task, share);
  if (!part.split && blockIdx.x) return;
  const int vector = part.split ? blockIdx.x * part.share + part.at : threadIdx.x;
  NextSums<X> next(part, columns, vector);
  float delta[1][8] = {};
  if (part.split) {
    const int rank = int(part.pair.rank);
    if (rank > 0 && task.sums) {
      expand_given<X>(task, part, vector, vectors, all, delta);
    } else if (rank > 0) {
      const Sums sums = {own, joined};
      for (int first = 0; first < rank; first += kRanks) {
        const int count = min(kRanks, rank - first);
        Expansion<X, 1> expansion(part, task.outputs, vector, vectors, first, count);
        shrink<X, 4>(static_cast<const X*>(task.x) + part.row * task.x_stride,
                     static_cast<const X*>(part.pair.a) + int64_t(first) * task.inputs, task.inputs,
                     count, own);
        expansion.load(0);
        expansion.add(sums.join(count), delta);
        sums.leave();
      }
    }
    if (rank > 0) join_groups(part, handed, delta);
    next.load(part.group);
  }
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kNormItems; ++i) {
      const int v = vector + i * kThreads;
      if (v < vectors && (!part.split || (i == 0 && part.group == 0))) body(i, 8 * v);
    }
  };
  const X* const bias = static_cast<const X*>(task.norm_bias);
  Vector<X> weights[kNormItems];
  each_item(
      [&](int i, int c) { weights[i].load(static_cast<const X*>(task.norm_weight) + c, true); });
  let_successor_start();
  wait_for_predecessor_alone();

  X* const out = static_cast<X*>(task.out) + part.row * task.out_stride;
  const X* const product = static_cast<const X*>(task.product) + part.row * task.product_stride;
  const X* const residual =
      task.residual ? static_cast<const X*>(task.residual) + part.row * task.residual_stride
                    : nullptr;
  float v[kNormItems][8] = {};
  {
    Vector<X> sums[kNormItems];
    each_item([&](int i, int c) { sums[i].load_shared(product + c); });
    each_item([&](int i, int c) {
      float r[8] = {};
      sums[i].get(v[i]);
      if (residual) load8_shared(residual + c, r);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        v[i][j] = activate_plain(v[i][j] + (i == 0 ? delta[0][j] : 0.0f), task.activation) + r[j];
      round_all<X>(v[i]);
    });
  }
  const bool changed = part.pair.rank > 0 || residual || out != product;
  each_item([&](int i, int c) {
    if (changed) store8(out + c, v[i]);
  });
  RowNorm norm = {};
  bool clustered = false;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (part.split && gridDim.x > 1) {
    clustered = true;
    float sum[1] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[0] += v[0][j];
    RowNorm norms[1];
    row_statistics(
        norms, sum, bias != nullptr, columns, task.norm_eps,
        [&](auto body) {
          each_item([&](int i, int) {
#pragma unroll
            for (int j = 0; j < 8; ++j) body(0, v[i][j]);
          });
        },
        ClusterSums{norm_sums, totals});
    norm = norms[0];
    cluster_arrive();
  }
#endif
  if (!clustered)
    norm = block_row_norm(v, each_item, bias != nullptr, columns, task.norm_eps, norm_sums);
  X* const normed = static_cast<X*>(task.normed) + part.row * task.normed_stride;
  each_item([&](int i, int c) {
    float w[8], b[8] = {};
    weights[i].get(w);
    if (bias) load8(bias + c, b);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[i][j] = norm(v[i][j], w[j], b[j]);
    store8(normed + c, v[i]);
  });
  if (next.rank > 0) {
    round_all<X>(v[0]);
    if (part.group == 0) store8(handed[part.at], v[0]);
    next.store(task, part, handed);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (clustered) cluster_wait();
#endif
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
  if (task.normed &&
      (joins_halves(task.activation) || blocks > kMostBlocks || vectors > kThreads * kNormItems))
    return fail("spread_adapters: a norm behind activation %d, of %d columns in %d blocks",
                task.activation, columns, blocks);
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
  const dim3 grid(task.blocks, task.tokens);
  return for_dtype(task.dtype, "spread_adapters", [&](auto zero) {
    using X = decltype(zero);
    if (task.normed)
      return launch_in_clusters("spread_adapters_norm", spread_adapters_norm<X>,
                                task.blocks > 1 ? task.blocks : 0, grid, kThreads, 0, stream, task,
                                columns, task.share);
    return launch("spread_adapters", gated ? spread_adapters<X, true> : spread_adapters<X, false>,
                  grid, kThreads, 0, stream, task, columns, task.share);
  });
}
