// Parts of a row of decode_wide.cu. The blocks of a cluster divide the row's tiles, and send their
// results to each other's shared memory; each block combines those of its share of the heads. A
// long row is divided among several clusters; these store their combined results in scratch memory,
// and the last to arrive combines them.
#pragma once
#include "attention/decode_columns.cuh"
#include "common/hopper.cuh"

namespace tridecode {
namespace {

constexpr int kMostClusterBlocks = 8;
constexpr int kMostClusters = 16;  // of a row
constexpr int kBlockTiles = 4;     // of a block beyond which a row gets one more cluster

// A row with more tiles gets more clusters. A cluster of one block stores its result in any case.
__host__ __device__ constexpr int tiles_of_cluster(int blocks) {
  return blocks > 1 ? blocks * kBlockTiles : 1;
}

__device__ __forceinline__ int blocks_of_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cluster_size();
#else
  return 1;
#endif
}

// The tiles begin .. end - 1 of this block. The `senders` blocks of its cluster have tiles.
struct Share {
  int blocks, rank;  // of the cluster
  int cluster = blockIdx.y, clusters;
  int senders, begin = 0, end = 0;

  __device__ __forceinline__ explicit Share(int tiles) {
    blocks = blocks_of_cluster(), rank = blockIdx.x % blocks;
    const int each = tiles_of_cluster(blocks);
    clusters = min(int(gridDim.y), (tiles + each - 1) / each);
    if (cluster >= clusters) return;
    const int first = tiles * cluster / clusters, held = tiles * (cluster + 1) / clusters - first;
    senders = min(blocks, held);
    if (rank >= senders) return;
    // The first blocks have one tile more: the last one waits for the newest token.
    begin = first + (held * rank + senders - 1) / senders;
    end = first + (held * (rank + 1) + senders - 1) / senders;
  }
  __device__ __forceinline__ bool alone() const { return blocks == 1 && clusters == 1; }
};

// The result of a head: its output before the division by the sum, its maximum and its sum.
template <int D>
constexpr int kResultFloats = D + 2;

// Block r of a cluster combines the results of heads r, r + blocks, ..
__host__ __device__ constexpr int most_own_heads(int heads, int blocks) {
  return ceil_div(heads, blocks);
}

// Results in scratch memory, one for each cluster of an item and head.
template <int D>
__device__ __forceinline__ float* stored_result(const Task& task, int item, int cluster, int head) {
  const int64_t index = (int64_t(item) * gridDim.y + cluster) * task.group + head;
  return static_cast<float*>(task.scratch) + index * kResultFloats<D>;
}

// Dims d and d + 1 of several results of a head, added up.
template <int D>
struct Combined {
  float most, sum;
  float2 output;

  // two(which, i): floats i and i + 1 of a result.
  template <typename Two>
  __device__ __forceinline__ Combined(int count, int d, Two two) {
    most = -CUDART_INF_F, sum = 0.0f, output = make_float2(0.0f, 0.0f);
#pragma unroll 4
    for (int which = 0; which < count; ++which) most = fmaxf(most, two(which, D).x);
    const float base = most == -CUDART_INF_F ? 0.0f : most;  // all scores are minus infinity
#pragma unroll 4
    for (int which = 0; which < count; ++which) {
      const float2 totals = two(which, D), dims = two(which, d);
      const float weight = exp2f(totals.x - base);
      sum += weight * totals.y;
      output.x += weight * dims.x, output.y += weight * dims.y;
    }
  }
  template <typename X>
  __device__ __forceinline__ void write(X* to) const {
    const float inverse = 1.0f / sum;
    *reinterpret_cast<uint32_t*>(to) = pack<X>(output.x * inverse, output.y * inverse);
  }
};

// Calls use(n, head, d) for dims d and d + 1 of each head that this block combines, its n-th.
template <int D, typename Use>
__device__ __forceinline__ void for_own_pairs(const Share& share, int heads, Use use) {
  const int own = (heads - share.rank + share.blocks - 1) / share.blocks;
  for (int i = threadIdx.x; i < own * (D / 2); i += blockDim.x) {
    const int n = i / (D / 2);
    use(n, n * share.blocks + share.rank, i % (D / 2) * 2);
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The exchange between the blocks of a cluster: `received` holds the results that they send to this
// one, most_own_heads each; `arrived` counts the bytes.
template <int D>
struct WideExchange {
  static constexpr int kResult = kResultFloats<D>;
  const Share& share;
  const int heads;
  float* const received;
  uint64_t* const arrived;

  // Called by one thread.
  __device__ __forceinline__ void initialize() const {
    const int own = (heads - share.rank + share.blocks - 1) / share.blocks;
    barrier_init(arrived, 1);
    fence_barriers();
    barrier_expect(arrived, share.senders * own * kResult * int(sizeof(float)));
  }
  __device__ __forceinline__ float* result(int sender, int n) const {
    return received + (sender * most_own_heads(heads, share.blocks) + n) * kResult;
  }
  // Sends column i of this lane, which is a head.
  template <typename Sums>
  __device__ __forceinline__ void send(const Sums& sums, int i, int head) const {
    const int t = threadIdx.x % 4, to = head % share.blocks;
    const uint32_t there = address_in(result(share.rank, head / share.blocks), to);
    const uint32_t arrival = address_in(arrived, to);
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      send_two(there + (n * 8 + 2 * t) * 4, sums.output[n][2 * i], sums.output[n][2 * i + 1],
               arrival);
    if (t == 0) send_two(there + D * 4, sums.most[i], sums.sum[i], arrival);
  }
  // Stores 8 bytes to another block's shared memory and counts them at an mbarrier of that block.
  static __device__ __forceinline__ void send_two(uint32_t to, float a, float b, uint32_t arrival) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
            to),
        "f"(a), "f"(b), "r"(arrival)
        : "memory");
  }
};

#endif

// Return whether this block is the last one of an item's blocks of its rank.
__device__ __forceinline__ bool is_last(const Task& task, int item, const Share& share) {
  __shared__ bool last;
  device_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned int* const counter = task.counters + item * share.blocks + share.rank;
    last = atomicAdd(counter, 1u) == unsigned(share.clusters - 1);
    if (last) *counter = 0;  // for the next launch
    device_fence();
  }
  __syncthreads();
  return last;
}

}  // namespace
}  // namespace tridecode
