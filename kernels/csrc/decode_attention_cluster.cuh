// Decode attention of few rows and heads, which is bound by latency: a cluster of blocks takes a
// pass over a row and kv head, each warp of it a run of the tiles. The warps send their maxima,
// sums and outputs to the shared memory of the blocks that combine them, each for a share of the
// dims: no fence, counter or read of global memory lies between the last tile and the result.
//
// A long context is divided among several clusters. These leave what they have combined in scratch
// memory, and the last to arrive combines that.
//
// The tiles that a warp takes first are loaded before the wait for the kernel that writes the
// queries and the newest token.
//
// Bytes moved and bench: see decode_attention.cuh.
#pragma once
#include "decode_tiles.cuh"

namespace tridecode {
namespace {

constexpr int kManyWarps = 8;         // of a block, where passes are fewest
constexpr int kClusterWarpTiles = 2;  // of a warp, beyond which a pass takes one more cluster

// Of a pass: 8 dims of a head, in the order of heads and dims. A block of the cluster combines
// every blocks-th piece.
__host__ __device__ constexpr int pieces_of(int heads, int head_size) {
  return heads * head_size / 8;
}
// Floats that a warp sends of each pair of heads: their maxima and sums.
constexpr int kPairFloats = 4, kWarpPairs = kGroup / 2;

// Floats of shared memory: of each warp of the cluster, the pieces that a block combines, and the
// maxima and sums of all heads.
__host__ __device__ constexpr int received_floats(int heads, int head_size, int warps, int blocks) {
  return blocks * warps *
         (ceil_div(pieces_of(heads, head_size), blocks) * 8 + kWarpPairs * kPairFloats);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What the blocks of a cluster send each other, and where each keeps what it receives.
template <int D, int WARPS>
struct Exchange {
  int blocks, rank, heads;
  float* received;
  uint64_t* barrier;

  __device__ __forceinline__ int warps() const { return blocks * WARPS; }
  __device__ __forceinline__ int most_pieces() const {
    return ceil_div(pieces_of(heads, D), blocks);
  }
  __device__ __forceinline__ int own_pieces() const {
    return (pieces_of(heads, D) - rank + blocks - 1) / blocks;
  }
  __device__ __forceinline__ float* piece(int warp, int place) const {
    return received + (warp * most_pieces() + place) * 8;
  }
  // (maximum, sum) of a head.
  __device__ __forceinline__ float* totals(int warp, int head) const {
    return received + warps() * most_pieces() * 8 + (warp * kGroup + head) * 2;
  }

  // In one thread.
  __device__ __forceinline__ void initialize() const {
    barrier_init(barrier, 1);
    fence_barriers();
    barrier_expect(barrier, warps() * (own_pieces() * 8 + (heads + 1) / 2 * kPairFloats) * 4);
  }

  // What this warp has summed, to the blocks that combine it.
  template <typename S>
  __device__ __forceinline__ void send_sums(const S& sums) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = rank * WARPS + threadIdx.x / 32;
    if (g < blocks && 2 * t < heads)
      send(address_in(totals(warp, 2 * t), g), sums.most[0], sums.sum[0], sums.most[1], sums.sum[1],
           address_in(barrier, g));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * t + i >= heads) continue;
#pragma unroll
      for (int c = 0; c < S::VC; ++c) {
        const int d = c * 64 + g * 8;
        if (D % 64 != 0 && d >= D) continue;
        const int index = (2 * t + i) * (D / 8) + d / 8, to = index % blocks;
        const uint32_t there = address_in(piece(warp, index / blocks), to);
        const uint32_t arrival = address_in(barrier, to);
        const auto& eight = sums.output[c];
        send(there, eight[0][i], eight[0][2 + i], eight[1][i], eight[1][2 + i], arrival);
        send(there + 16, eight[2][i], eight[2][2 + i], eight[3][i], eight[3][2 + i], arrival);
      }
    }
  }

  // Of the own piece at `place`, of head `head`, over all warps, in a warp: the maximum, the sum,
  // and in lane l the output of dim l % 8.
  __device__ __forceinline__ void combine(int place, int head, float& peak, float& all,
                                          float& output) const {
    const int lane = threadIdx.x % 32;
    float2 own = make_float2(-CUDART_INF_F, 0.0f);
    if (lane < warps()) own = *reinterpret_cast<const float2*>(totals(lane, head));
    peak = warp_max(own.x);
    const float weight = lane < warps() ? exp2f(own.x - peak) : 0.0f;
    all = warp_sum(weight * own.y);
    output = 0.0f;
    for (int first = 0; first < warps(); first += 4) {
      const int warp = first + lane / 8;
      output += __shfl_sync(kAll, weight, warp) * piece(warp, place)[lane % 8];
    }
    output += __shfl_xor_sync(kAll, output, 8);
    output += __shfl_xor_sync(kAll, output, 16);
  }
};

#endif

// WARPS: of a block.
template <typename X, typename C, int D, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, WARPS > kWarps ? 1
                                              : D <= 128     ? 3
                                                             : 2)
    decode_attention_cluster(const __grid_constant__ Task task, int clusters) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using S = Sums<X, C, D>;
  using Source = std::conditional_t<S::kExact, Loads<X, D>, Loads8<C, D>>;
  extern __shared__ __align__(16) float received[];
  __shared__ uint64_t all_received;
  __shared__ bool last;

  const int blocks = cluster_size(), rank = cluster_rank(), warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32, per_row = task.kv_heads * task.groups;
  const int items = task.num_rows * per_row, item = blockIdx.x / blocks % items,
            part = blockIdx.x / blocks / items;
  const int row = item / per_row, pass = item % per_row, context = task.context_lens[row];
  const int kv_head = pass / task.groups, first_head = pass % task.groups * kGroup;
  const int heads = min(kGroup, task.group - first_head);  // of this pass
  const int head = kv_head * task.group + first_head;      // the first of them
  X* const out = static_cast<X*>(task.out) + row * task.out_stride + head * D;

  const int tiles = (context + kTile - 1) / kTile, warps = blocks * WARPS;
  const int parts = min(clusters, ceil_div(tiles, kClusterWarpTiles * warps));
  if (part >= parts || context <= 0) {
    wait_for_predecessor();
    if (part == 0)  // padding
      for (int i = rank * blockDim.x + threadIdx.x; i < heads * D; i += blocks * blockDim.x)
        out[i] = from_float<X>(0.0f);
    return;
  }
  const Exchange<D, WARPS> exchange{blocks, rank, heads, received, &all_received};
  if (threadIdx.x == 0) exchange.initialize();
  __syncwarp();
  cluster_arrive();

  // The first warps have one more: the last one waits for the newest token.
  const int runs = parts * warps, mine = (part * blocks + rank) * WARPS + warp;
  const int begin = ceil_div(int64_t(tiles) * mine, runs),
            end = ceil_div(int64_t(tiles) * (mine + 1), runs);
  Source source(nullptr, false);
  Pages<X, C, D, Source> pages(task, source);
  pages.row = row, pages.kv_head = kv_head;
  pages.load_ids(min(begin, tiles - 1), tiles);
  const bool newest = begin == tiles - 1;
  if (!newest && begin < end) {
    pages.request_keys(begin, tiles);
    pages.request_values(begin, tiles);
  }
  for (int tile = begin + !newest; tile < min(end, begin + kPrefetchedTiles); ++tile)
    pages.prefetch(tile, tiles);
  wait_for_predecessor();
  if (newest && begin < end) {
    pages.request_keys(begin, tiles);
    pages.request_values(begin, tiles);
  }

  S sums(task, row, head, heads);
  for (int tile = begin; tile < end; ++tile) {
    sums.add_tile(
        source, tile, context,
        [&] {
          if (tile + 1 < end) pages.request_keys(tile + 1, tiles);
        },
        [&] {
          if (tile + 1 < end) pages.request_values(tile + 1, tiles);
        });
  }
  sums.finish();
  cluster_wait();  // all blocks have initialised their barriers
  exchange.send_sums(sums);
  barrier_wait_for_cluster(&all_received, 0);

  auto slot_of = [&](int which, int h) {  // of a part and a head: dims, maximum, sum
    return static_cast<float*>(task.scratch) + int64_t(item * clusters + which) * slot_floats(D) +
           h * (D + 2);
  };
  for (int place = warp; place < exchange.own_pieces(); place += WARPS) {
    const int index = place * blocks + rank, h = index / (D / 8), d = index % (D / 8) * 8 + lane;
    float peak, all, output;
    exchange.combine(place, h, peak, all, output);
    if (lane >= 8) continue;
    if (parts == 1) {
      out[h * D + d] = from_float<X>(output / all);
    } else {
      __stcg(slot_of(part, h) + d, output);
      // the blocks of the cluster store the same numbers here
      if (lane == 0)
        __stcg(reinterpret_cast<float2*>(slot_of(part, h) + D), make_float2(peak, all));
    }
  }
  if (parts == 1) return;

  device_fence();
  __syncthreads();
  unsigned int* const counter = task.counters + item * blocks + rank;
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == unsigned(parts - 1);
    if (last) *counter = 0;  // for the next launch
    device_fence();
  }
  __syncthreads();
  if (!last) return;
  for (int place = warp; place < exchange.own_pieces(); place += WARPS) {
    const int index = place * blocks + rank, h = index / (D / 8), d = index % (D / 8) * 8 + lane;
    if (lane >= 8) continue;
    float peak = -CUDART_INF_F, all = 0.0f, output = 0.0f;
    for (int which = 0; which < parts; ++which) peak = fmaxf(peak, __ldcg(slot_of(which, h) + D));
    for (int which = 0; which < parts; ++which) {
      const float2 totals = __ldcg(reinterpret_cast<const float2*>(slot_of(which, h) + D));
      const float share = exp2f(totals.x - peak);
      all += share * totals.y, output += share * __ldcg(slot_of(which, h) + d);
    }
    out[h * D + d] = from_float<X>(output / all);
  }
#endif
}

// What is launched for a pass: clusters of `blocks` blocks of `warps` warps; 0 blocks: too many
// rows and heads. One token, us of an H200 less than with teams (decode_attention.cuh) in a step:
// BLOOM-7B1 118 (32 passes), two rows 50; LLaMA-3-8B 20 to 60 (8 passes of 4 heads); with 4 rows of
// it they take more.
struct Clusters {
  int blocks, warps, each;
};

Clusters clusters_of(const Task& task) {
  const int items = task.num_rows * task.kv_heads * task.groups;
  if (device().capability < 90) return {};
  if (task.group > 1) {  // few, so that the next kernel finds multiprocessors free
    const int blocks = 4, room = device().multiprocessors / blocks;
    return items <= 16 ? Clusters{blocks, kManyWarps, room / items} : Clusters{};
  }
  for (int blocks = 8; blocks >= 4; blocks /= 2) {
    const int room = 2 * device().multiprocessors / blocks;
    if (items <= room) return {blocks, kWarps, room / items};
  }
  return {};
}

template <typename X, typename C, int D, int WARPS>
int run_clusters(const Task& task, const Clusters& clusters, void* stream) {
  const int blocks = task.num_rows * task.kv_heads * task.groups * clusters.blocks;
  if (blocks > task.num_counters)
    return fail("decode_attention: %d blocks need more than %d counters", blocks,
                task.num_counters);
  const int heads = task.group < kGroup ? task.group : kGroup;
  return launch_in_clusters("decode_attention", decode_attention_cluster<X, C, D, WARPS>,
                            clusters.blocks, blocks * clusters.each, 32 * WARPS,
                            received_floats(heads, D, WARPS, clusters.blocks) * sizeof(float),
                            stream, task, clusters.each);
}

}  // namespace
}  // namespace tridecode
