// A block's part of a row that is spread over many blocks: its products with the adapters of the
// row, and of the GEMM that reads the row next.
#pragma once
#include "rows/adapter_rows.cuh"

namespace tridecode {

constexpr int kMostRanks = 256;  // whose sums are given
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

// A thread's view of a row: the adapters of the row's slot, and a vector of the columns. The
// threads of a block are `groups` times `share` threads; the threads of a group have different
// vectors, the groups different ranks.
struct Part {
  int64_t row;
  Pair pair, next;    // rank 0: none
  bool split;         // whether the row is spread over all blocks
  bool spare;         // whether this block has no part of a row
  bool last;          // whether all rows have smaller numbers
  int share, groups;  // group 0 alone computes the row
  int group, at;      // at: the thread's number in its group

  // The part of the row or, behind the rows with an adapter, of the rows with this number.
  // num_adapted: if not null, the blocks of a cluster behind these rows have a row each.
  __device__ __forceinline__ Part(const Task& task, int number, int vectors_per_block,
                                  const int* num_adapted) {
    spare = blockIdx.x > 0;
    int64_t slot = -1;
    pair.rank = next.rank = 0;
    row = task.rows && number < task.tokens ? task.rows[number] : number;  // before the next load
    const int adapted = num_adapted ? *num_adapted : task.tokens;
    last = number >= task.tokens;
    if (number < adapted) {
      slot = task.slots[row];
    } else {
      number = adapted + (number - adapted) * gridDim.x;
      last = number >= task.tokens;
      number += blockIdx.x;
      spare = number >= task.tokens;
      row = spare ? 0 : task.rows[number];
    }
    if (slot >= 0) {
      pair = task.pairs[slot * task.pair_stride];
      if (task.next_pairs) next = task.next_pairs[slot * task.next_pair_stride];
    }
    split = pair.rank > 0 || next.rank > 0;
    spare &= !split;
    share = split ? vectors_per_block : kThreads;
    groups = kThreads / share;
    group = threadIdx.x / share, at = threadIdx.x % share;
  }
};

// sums[r] * b[r] for the ranks r of this thread's group, of one vector in each half.
template <typename X, int HALVES>
struct Expansion {
  static constexpr int kSteps = kAhead<X>;
  const X* b[HALVES];
  int64_t stride;
  int step, begin[HALVES], end[HALVES], rounds;
  Vector<X> loaded[kSteps][HALVES];

  __device__ __forceinline__ Expansion(const Part& part, int64_t outputs, int vector, int vectors)
      : stride(outputs), step(part.groups), rounds(0) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int mine = vector + half * vectors;
      begin[half] = end[half] = 0;
      if (vector < vectors) {
        const uint32_t span = __ldg(part.pair.spans + mine * 8 / kSpan);
        begin[half] = int(span & 0xffff) + part.group;
        end[half] = min(int(span >> 16), int(part.pair.rank));
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
          const float sum = r < end[half] ? sums[r] : 0.0f;
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
  Expansion<X, HALVES> expansion(part, task.outputs, vector, vectors);
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

// spread_adapters_norm.cu: launches the kernel for a task with a norm.
int run_spread_norm(const Task& task, int columns, void* stream);

}  // namespace tridecode
