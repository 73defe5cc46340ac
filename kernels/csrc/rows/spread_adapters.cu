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
#include "rows/adapter_rows.cuh"

namespace tridecode {
namespace {

constexpr int kMostRanks = 256;  // whose sums are given
constexpr int kMostBlocks = 8;   // of a row with a norm
constexpr int kWholeItems = 2;   // vectors of 8 columns per thread of a row without an adapter
constexpr int kNormItems = 4;    // the same of a row with a norm
constexpr int kWarps = kThreads / 32;
constexpr int kPartsAtOnce = 8;

// Vectors of 8 that a thread loads at once.
template <typename X>
constexpr int kAhead = 16 / sizeof(X);

template <typename X>
struct Vector {
  uint4 words[sizeof(X) / 2];

  // Constants: weights and adapters.
  __device__ __forceinline__ void load(const X* from, bool valid) {
#pragma unroll
    for (int i = 0; i < int(sizeof(X) / 2); ++i)
      words[i] =
          valid ? load_stream(reinterpret_cast<const uint4*>(from) + i) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void load_shared(const X* from) {
#pragma unroll
    for (int i = 0; i < int(sizeof(X) / 2); ++i)
      words[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
  }
  __device__ __forceinline__ void get(float (&values)[8]) const {
    load8(reinterpret_cast<const X*>(words), values);
  }
};

// What a thread has of a row: the adapters of the row's slot, and a vector of the columns. The
// threads of a block are `groups` times `share` threads; the threads of a group have different
// vectors, the groups different ranks.
struct Part {
  int64_t row;
  Pair pair, next;    // rank 0: none
  bool split;         // whether the row is spread over all blocks
  int share, groups;  // group 0 alone computes the row
  int group, at;      // at: the thread's number in its group

  __device__ __forceinline__ Part(const Task& task, int vectors_per_block) {
    row = task.rows ? task.rows[blockIdx.y] : blockIdx.y;
    const int64_t slot = task.slots[row];
    pair.rank = next.rank = 0;
    if (slot >= 0) {
      pair = task.pairs[slot * task.pair_stride];
      if (task.next_pairs) next = task.next_pairs[slot * task.next_pair_stride];
    }
    split = pair.rank > 0 || next.rank > 0;
    share = split ? vectors_per_block : kThreads;
    groups = kThreads / share;
    group = threadIdx.x / share, at = threadIdx.x % share;
  }
};

// sums[r - first] * b[r] for the ranks r of this thread's group, of one vector in each half.
template <typename X, int HALVES>
struct Expansion {
  static constexpr int kSteps = kAhead<X>;
  const X* b[HALVES];
  int64_t stride;
  int first, step, begin[HALVES], end[HALVES], rounds;
  Vector<X> loaded[kSteps][HALVES];

  __device__ __forceinline__ Expansion(const Part& part, int64_t outputs, int vector, int vectors,
                                       int first, int count)
      : stride(outputs), first(first), step(part.groups), rounds(0) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int mine = vector + half * vectors;
      begin[half] = end[half] = 0;
      if (vector < vectors) {
        const uint32_t span = __ldg(part.pair.spans + mine * 8 / kSpan);
        begin[half] = max(int(span & 0xffff), first) + part.group;
        end[half] = min(int(span >> 16), first + count);
      }
      b[half] = static_cast<const X*>(part.pair.b) + 8 * mine;
      rounds = max(rounds, end[half] - begin[half]);
    }
  }
  __device__ __forceinline__ void load(int done) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const int r = begin[half] + (done + i) * step;
        loaded[i][half].load(b[half] + r * stride, r < end[half]);
      }
    }
  }
  // Adds all products to delta; the first ranks have been loaded.
  __device__ __forceinline__ void add(const float* sums, float (&delta)[HALVES][8]) {
    for (int done = 0;;) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int r = begin[half] + (done + i) * step;
          const float sum = r < end[half] ? sums[r - first] : 0.0f;
          float w[8];
          loaded[i][half].get(w);
#pragma unroll
          for (int j = 0; j < 8; ++j) delta[half][j] = fmaf(sum, w[j], delta[half][j]);
        }
      }
      done += kSteps;
      if (done * step >= rounds) return;
      load(done);
    }
  }
};

// delta += x * a^T * b, from the parts that an earlier launch stored. Every thread calls it.
template <typename X, int HALVES>
__device__ __forceinline__ void expand_given(const Task& task, const Part& part, int vector,
                                             int vectors, float* all, float (&delta)[HALVES][8]) {
  Expansion<X, HALVES> expansion(part, task.outputs, vector, vectors, 0, int(part.pair.rank));
  const bool mine = threadIdx.x < part.pair.rank;
  const float* const from = task.sums + part.row * task.sum_parts * task.sum_ranks + threadIdx.x;
  float parts[kPartsAtOnce] = {};
#pragma unroll
  for (int i = 0; i < kPartsAtOnce; ++i)
    if (mine && i < task.sum_parts) parts[i] = __ldcg(from + i * task.sum_ranks);
  expansion.load(0);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPartsAtOnce; ++i) sum += parts[i];
#pragma unroll 4
  for (int i = kPartsAtOnce; i < task.sum_parts; ++i)
    if (mine) sum += __ldcg(from + i * task.sum_ranks);
  if (mine) all[threadIdx.x] = sum;
  __syncthreads();
  expansion.add(all, delta);
}

// Adds the deltas of the groups, in group 0. Every thread calls it.
template <int HALVES>
__device__ __forceinline__ void join_groups(const Part& part, float (*handed)[8],
                                            float (&delta)[HALVES][8]) {
  if (part.groups == 1) return;
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    __syncthreads();
    if (part.group) store8(handed[threadIdx.x], delta[half]);
    __syncthreads();
    if (part.group == 0) {
      for (int group = 1; group < part.groups; ++group) {
#pragma unroll
        for (int j = 0; j < 8; ++j) delta[half][j] += handed[group * part.share + part.at][j];
      }
    }
  }
  __syncthreads();
}

// This block's part of the result's products with the next a.
template <typename X>
struct NextSums {
  const X* a;
  int64_t inputs;
  int rank, step, group;
  bool valid;
  Vector<X> loaded[kAhead<X>];

  __device__ __forceinline__ NextSums(const Part& part, int columns, int vector)
      : a(static_cast<const X*>(part.next.a) + 8 * int64_t(vector)),
        inputs(columns),
        rank(int(part.next.rank)),
        step(part.groups),
        group(part.group),
        valid(8 * vector < columns) {}
  __device__ __forceinline__ void load(int from) {
#pragma unroll
    for (int i = 0; i < kAhead<X>; ++i) {
      const int r = from + i * step;
      loaded[i].load(a + r * inputs, valid && r < rank);
    }
  }
  // Makes later loads hit the L2 cache.
  __device__ __forceinline__ void prefetch() const {
    if (valid)
      for (int r = group + kAhead<X> * step; r < rank; r += step) prefetch_l2(a + r * inputs);
  }
  // handed: the block's vectors of the result, or zeros; overwritten. Every thread calls it; the
  // first ranks have been loaded.
  __device__ __forceinline__ void store(const Task& task, const Part& part, float (*handed)[8]) {
    __syncthreads();
    float y[8];
    load8(handed[part.at], y);
    __syncthreads();
    static_assert(kWarps * kMostRanks <= kThreads * 8, "the partial sums replace the vectors");
    float (*const partial)[kMostRanks] = reinterpret_cast<float (*)[kMostRanks]>(handed);
    const int warps = part.share / 32, warp = part.at / 32;
    for (int from = group;;) {
      float sums[kAhead<X>] = {};
#pragma unroll
      for (int i = 0; i < kAhead<X>; ++i) {
        float w[8];
        loaded[i].get(w);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i] = fmaf(y[j], w[j], sums[i]);
      }
#pragma unroll
      for (int i = 0; i < kAhead<X>; ++i) sums[i] = warp_sum(sums[i]);
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < kAhead<X>; ++i)
          if (from + i * step < rank) partial[warp][from + i * step] = sums[i];
      }
      from += kAhead<X> * step;
      if (from >= rank) break;
      load(from);
    }
    __syncthreads();
    if (threadIdx.x < rank) {
      float sum = 0.0f;
      for (int i = 0; i < warps; ++i) sum += partial[i][threadIdx.x];
      task.next_sums[(part.row * gridDim.x + blockIdx.x) * task.next_ranks + threadIdx.x] = sum;
    }
  }
};

// Rounds to X.
template <typename X>
__device__ __forceinline__ void round_all(float (&values)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = to_float(from_float<X>(values[j]));
}

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
