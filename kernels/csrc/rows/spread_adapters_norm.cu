// spread_adapters.cu with a norm: out = product + x * a^T * b + residual, normed = norm(out), and
// the parts of the products of normed with the next a.
//
// A row with an adapter has a cluster, whose blocks share its columns. Behind these rows the blocks
// of a cluster have a row each. A warp has 8 vectors of 8 columns at a time, in four lanes each,
// which have different ranks: shuffles add up the products of ranks and of columns. So a block
// needs less than 512 bytes of shared memory and is resident beside the GEMM before it, whose ring
// leaves no more. Only the loads of the product, the norm and the next products follow the GEMM.
//
// Bytes moved: the row, and rank * (inputs + outputs) * sizeof(X) per row with an adapter.
// Bench: python -m tridecode.tools.bench.studies.adapters
#include "common/row_norm.cuh"
#include "rows/adapter_parts.cuh"

namespace tridecode {
namespace {

constexpr int kMostBlocks = 8;     // of a row
constexpr int kMostClusters = 56;  // for rows with an adapter; of more rows they take several each
constexpr int kWholeItems = 4;     // vectors of 8 columns per thread of a row without an adapter
constexpr int kAtOnce = 16;        // ranks whose sums are in shared memory at a time
constexpr int kLanes = 4;          // of a vector
constexpr int kNextRanks = 12;     // ranks of the next a whose products are added up at once
// Ranks of the next a that are loaded before the wait; the others are in the L2 cache by then.
template <typename X, int VECTORS, bool LOOPS>
constexpr int kNextAhead = kNextRanks * (sizeof(X) * VECTORS > 4            ? 1
                                         : sizeof(X) * VECTORS > 2 || LOOPS ? 2
                                                                            : 4);

// A row of a launch, and the operands behind the product.
template <typename X>
struct Row {
  const Task& task;
  X* out;
  const X* product;
  const X* residual;
  X* normed;

  __device__ __forceinline__ Row(const Task& task, int64_t row)
      : task(task),
        out(static_cast<X*>(task.out) + row * task.out_stride),
        product(static_cast<const X*>(task.product) + row * task.product_stride),
        residual(task.residual ? static_cast<const X*>(task.residual) + row * task.residual_stride
                               : nullptr),
        normed(static_cast<X*>(task.normed) + row * task.normed_stride) {}

  __device__ __forceinline__ void add(float (&v)[8], const Vector<X>& product, int column) const {
    float values[8], more[8] = {};
    product.get(values);
    if (residual) load8_shared(residual + column, more);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = values[j] + v[j] + more[j];
    round_all<X>(v);
  }
  __device__ __forceinline__ void normalise(float (&v)[8], const RowNorm& norm,
                                            const Vector<X>& weights, int column) const {
    const X* const bias = static_cast<const X*>(task.norm_bias);
    float w[8], b[8] = {};
    weights.get(w);
    if (bias) load8(bias + column, b);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = norm(v[j], w[j], b[j]);
  }
};

// A row without an adapter, in a block.
template <typename X>
__device__ __forceinline__ void norm_row(const Row<X>& row, int columns, float (*shared)[32]) {
  const Task& task = row.task;
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kWholeItems; ++i) {
      const int column = 8 * (threadIdx.x + i * kThreads);
      if (column < columns) body(i, column);
    }
  };
  Vector<X> weights[kWholeItems], products[kWholeItems];
  float v[kWholeItems][8] = {};
  each_item(
      [&](int i, int c) { weights[i].load(static_cast<const X*>(task.norm_weight) + c, true); });
  let_successor_start();
  wait_for_predecessor_alone();
  each_item([&](int i, int c) { products[i].load_shared(row.product + c); });
  each_item([&](int i, int c) { row.add(v[i], products[i], c); });
  if (row.residual || row.out != row.product)
    each_item([&](int i, int c) { store8(row.out + c, v[i]); });
  const RowNorm norm =
      block_row_norm(v, each_item, task.norm_bias != nullptr, columns, task.norm_eps, shared);
  each_item([&](int i, int c) {
    row.normalise(v[i], norm, weights[i], c);
    store8(row.normed + c, v[i]);
  });
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

struct Shared {
  union {
    struct {
      float own[kAtOnce], joined[kAtOnce], norm_sums[2][32];
    };
    float next[kWarps][kNextRanks];  // of the warps
  };
  float totals[2];
};

// This block's columns of a row with an adapter: VECTORS of 8 columns per lane.
template <typename X, int VECTORS>
struct Share {
  const Task& task;
  const Part& part;
  Shared& shared;
  int columns, lane_rank, vector[VECTORS];  // lane_rank: the first of the lane's ranks
  bool valid[VECTORS];

  __device__ __forceinline__ Share(const Task& task, const Part& part, Shared& shared, int columns,
                                   int share)
      : task(task), part(part), shared(shared), columns(columns) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    lane_rank = lane / 8;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int mine = (warp + i * kWarps) * 8 + lane % 8;
      vector[i] = blockIdx.x * share + mine;
      valid[i] = mine < share && 8 * vector[i] < columns;
    }
  }

  // The lane's four of kAtOnce ranks from `first` on.
  __device__ __forceinline__ void load_b(Vector<X> (&loaded)[VECTORS][kAtOnce / kLanes],
                                         int first) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
      for (int k = 0; k < kAtOnce / kLanes; ++k) {
        const int r = first + lane_rank + kLanes * k;
        loaded[i][k].load(
            static_cast<const X*>(part.pair.b) + int64_t(r) * task.outputs + 8 * vector[i],
            valid[i] && r < part.pair.rank);
      }
    }
  }

  // sums[r - first] = x * a[r]^T for up to kAtOnce ranks.
  __device__ __forceinline__ const float* sums_of(int first, int count) const {
    if (!task.sums) {
      shrink<X, 4>(static_cast<const X*>(task.x) + part.row * task.x_stride,
                   static_cast<const X*>(part.pair.a) + int64_t(first) * task.inputs, task.inputs,
                   count, shared.own);
      return Sums{shared.own, shared.joined}.join(count);
    }
    if (threadIdx.x < count) {
      const float* const from =
          task.sums + part.row * task.sum_parts * task.sum_ranks + first + threadIdx.x;
      float sum = 0.0f;
#pragma unroll 8
      for (int i = 0; i < task.sum_parts; ++i) sum += __ldcg(from + i * task.sum_ranks);
      shared.joined[threadIdx.x] = sum;
    }
    __syncthreads();
    return shared.joined;
  }

  // v = x * a^T * b, in all lanes of a vector.
  __device__ __forceinline__ void expand(float (&v)[VECTORS][8]) const {
    const int rank = int(part.pair.rank);
    for (int first = 0; first < rank; first += kAtOnce) {
      Vector<X> loaded[VECTORS][kAtOnce / kLanes];
      load_b(loaded, first);
      const int count = min(kAtOnce, rank - first);
      const float* const sums = sums_of(first, count);
#pragma unroll
      for (int k = 0; k < kAtOnce / kLanes; ++k) {
        const int r = lane_rank + kLanes * k;
        const float sum = r < count ? sums[r] : 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
          float w[8];
          loaded[i][k].get(w);
#pragma unroll
          for (int j = 0; j < 8; ++j) v[i][j] = fmaf(sum, w[j], v[i][j]);
        }
      }
      if (task.sums) {
        __syncthreads();
      } else {
        Sums{shared.own, shared.joined}.leave();
      }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[i][j] += __shfl_xor_sync(kAll, v[i][j], 8);
        v[i][j] += __shfl_xor_sync(kAll, v[i][j], 16);
      }
    }
  }

  // COUNT ranks of the next a from `first` on, in kLanes lanes.
  template <int COUNT>
  __device__ __forceinline__ void load_next(Vector<X> (&loaded)[COUNT / kLanes][VECTORS],
                                            int first) const {
#pragma unroll
    for (int k = 0; k < COUNT / kLanes; ++k) {
      const int r = first + lane_rank + kLanes * k;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i)
        loaded[k][i].load(static_cast<const X*>(part.next.a) + int64_t(r) * columns + 8 * vector[i],
                          valid[i] && r < part.next.rank);
    }
  }

  // Makes later loads of this block's share of a and of the next a hit the L2 cache.
  __device__ __forceinline__ void prefetch() const {
    if (!task.sums) {
      const int begin = int64_t(task.inputs / 8) * blockIdx.x / gridDim.x * 8;
      const int end = int64_t(task.inputs / 8) * (blockIdx.x + 1) / gridDim.x * 8;
      const X* const a = static_cast<const X*>(part.pair.a);
      constexpr int kLine = 128 / sizeof(X);
      const int lines = ceil_div(end - begin, kLine);
      for (int i = threadIdx.x; i < lines * int(part.pair.rank); i += kThreads)
        prefetch_l2(a + int64_t(i / lines) * task.inputs + begin + i % lines * kLine);
    }
    for (int r = lane_rank; r < part.next.rank; r += kLanes) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i)
        if (valid[i])
          prefetch_l2(static_cast<const X*>(part.next.a) + int64_t(r) * columns + 8 * vector[i]);
    }
  }

  // Stores this block's part of y * a^T for kNextRanks ranks. Called by every thread.
  template <int AT, int COUNT>
  __device__ __forceinline__ void store_some(const float (&y)[VECTORS][8],
                                             const Vector<X> (&loaded)[COUNT / kLanes][VECTORS],
                                             int first) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = int(part.next.rank);
    float sums[kNextRanks / kLanes] = {};
#pragma unroll
    for (int k = 0; k < kNextRanks / kLanes; ++k) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        float w[8];
        loaded[AT / kLanes + k][i].get(w);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[k] = fmaf(y[i][j], w[j], sums[k]);
      }
#pragma unroll
      for (int offset = 1; offset < 8; offset *= 2)
        sums[k] += __shfl_xor_sync(kAll, sums[k], offset);
    }
    __syncthreads();  // the last sums have been read
    if (lane % 8 == 0) {
#pragma unroll
      for (int k = 0; k < kNextRanks / kLanes; ++k)
        shared.next[warp][lane_rank + kLanes * k] = sums[k];
    }
    __syncthreads();
    if (threadIdx.x < kNextRanks && first + threadIdx.x < rank) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += shared.next[i][threadIdx.x];
      task.next_sums[(part.row * gridDim.x + blockIdx.x) * task.next_ranks + first + threadIdx.x] =
          sum;
    }
  }

  // Stores this block's part of y * a^T. loaded: the first ranks of a.
  template <int COUNT>
  __device__ __forceinline__ void store_next(
      const float (&y)[VECTORS][8], const Vector<X> (&loaded)[COUNT / kLanes][VECTORS]) const {
    const int rank = int(part.next.rank);
    if (rank > 0) store_some<0, COUNT>(y, loaded, 0);
    if constexpr (COUNT > kNextRanks) {
      if (rank > kNextRanks) store_some<kNextRanks, COUNT>(y, loaded, kNextRanks);
    }
    if constexpr (COUNT > 2 * kNextRanks) {
      if (rank > 2 * kNextRanks) store_some<2 * kNextRanks, COUNT>(y, loaded, 2 * kNextRanks);
      if (rank > 3 * kNextRanks) store_some<3 * kNextRanks, COUNT>(y, loaded, 3 * kNextRanks);
    }
    for (int first = COUNT; first < rank; first += kNextRanks) {
      Vector<X> more[kNextRanks / kLanes][VECTORS];
      load_next<kNextRanks>(more, first);
      store_some<0, kNextRanks>(y, more, first);
    }
  }
};

template <typename X, int VECTORS, bool LOOPS>
__device__ __forceinline__ void norm_share(const Row<X>& row, const Share<X, VECTORS>& share) {
  const Task& task = row.task;
  constexpr int kAhead = kNextAhead<X, VECTORS, LOOPS>;
  Vector<X> next[kAhead / kLanes][VECTORS], weights[VECTORS], products[VECTORS];
  float v[VECTORS][8] = {};
  share.prefetch();
  share.expand(v);
  share.template load_next<kAhead>(next, 0);
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (share.valid[i]) body(i, 8 * share.vector[i]);
  };
  const bool first = share.lane_rank == 0;
  each_item(
      [&](int i, int c) { weights[i].load(static_cast<const X*>(task.norm_weight) + c, true); });
  let_successor_start();
  wait_for_predecessor_alone();
  each_item([&](int i, int c) { products[i].load_shared(row.product + c); });
  each_item([&](int i, int c) { row.add(v[i], products[i], c); });
  __syncwarp();  // all lanes of a vector have loaded what `out` may replace
  each_item([&](int i, int c) {
    if (first) store8(row.out + c, v[i]);
  });
  float sum[1] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[0] += first && share.valid[i] ? v[i][j] : 0.0f;
  }
  RowNorm norms[1];
  row_statistics(
      norms, sum, task.norm_bias != nullptr, share.columns, task.norm_eps,
      [&](auto body) {
        each_item([&](int i, int) {
          if (!first) return;
#pragma unroll
          for (int j = 0; j < 8; ++j) body(0, v[i][j]);
        });
      },
      ClusterSums{share.shared.norm_sums, share.shared.totals});
  cluster_arrive();
  each_item([&](int i, int c) {
    row.normalise(v[i], norms[0], weights[i], c);
    if (first) store8(row.normed + c, v[i]);
    round_all<X>(v[i]);
  });
  share.template store_next<kAhead>(v, next);
  cluster_wait();
}

#endif

// LOOPS: more rows may have an adapter than there are clusters. Apart, because it takes registers.
template <typename X, int VECTORS, bool LOOPS = false>
__global__ void __launch_bounds__(kThreads, 2)
    spread_adapters_norm(const __grid_constant__ Task task, int columns, int share) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ Shared shared;
#pragma unroll 1
  for (int number = blockIdx.y;; number += gridDim.y) {
    const Part part(task, number, share, task.num_adapted);
    if (part.last) return;
    if (!part.spare) {
      const Row<X> row(task, part.row);
      if (part.split) {
        norm_share<X, VECTORS, LOOPS>(row, Share<X, VECTORS>(task, part, shared, columns, share));
      } else {
        norm_row(row, columns, shared.norm_sums);
      }
    }
    if (!LOOPS) return;
    __syncthreads();  // the sums in shared memory have been read
  }
#endif
}

}  // namespace

int run_spread_norm(const Task& task, int columns, void* stream) {
  if (task.activation != kNone || task.blocks > kMostBlocks ||
      columns > 8 * kThreads * kWholeItems || (task.share != 64 && task.share != 128))
    return fail("spread_adapters: a norm behind activation %d, of %d columns in %d blocks of %d",
                task.activation, columns, task.blocks, task.share);
  if (task.num_adapted && !task.rows) return fail("spread_adapters: rows with adapters not first");
  return for_dtype(task.dtype, "spread_adapters", [&](auto zero) {
    using X = decltype(zero);
    const int clusters = kMostClusters + ceil_div(task.tokens, task.blocks);
    const bool loops = sizeof(X) == 2 && task.share == 64 && clusters < task.tokens;
    auto kernel = task.share == 64 ? spread_adapters_norm<X, 1> : spread_adapters_norm<X, 2>;
    if constexpr (sizeof(X) == 2) kernel = loops ? spread_adapters_norm<X, 1, true> : kernel;
    return launch_in_clusters("spread_adapters_norm", kernel, task.blocks > 1 ? task.blocks : 0,
                              dim3(task.blocks, loops ? clusters : task.tokens), kThreads, 0,
                              stream, task, columns, task.share);
  });
}

}  // namespace tridecode
