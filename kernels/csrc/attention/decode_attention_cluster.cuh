// Decode attention of few rows and heads, which is bound by latency: a cluster of blocks processes
// a row and KV head with its query heads, or one pass over the queries of a row with several, and
// each of its warps a run of tiles. The warps send
// their maxima, sums and outputs to the shared memory of the blocks that combine them, each for a
// share of the dims: no fence, counter or read of global memory lies between the last tile and the
// result.
//
// A long context is divided among several clusters. They store their combined results in scratch
// memory, and the last to arrive combines these.
//
// A warp's first tiles are loaded before the wait for the kernel that writes the queries and the
// newest token: one to registers or, with many bytes, two by bulk copies. decode_finish.cuh handles
// unfinished queries and tokens.
//
// Bytes moved and bench: see decode_attention.cuh.
#pragma once
#include <algorithm>

#include "attention/decode_finish.cuh"

namespace tridecode {
namespace {

constexpr int kClusterWarpTiles = 4;  // tiles of a warp beyond which a head gets one more cluster
constexpr int kPrefetchedTiles = 8;   // of a warp

// A piece is 8 dims. A block of the cluster combines every blocks-th piece.
__host__ __device__ constexpr int most_pieces(int head_size, int blocks) {
  return ceil_div(head_size / 8, blocks);
}
constexpr int kTotals = 4;  // floats that a warp sends every block: maximum, sum, two zeros

// Floats of shared memory: the pieces and totals of each warp of the cluster and query head.
__host__ __device__ constexpr int received_floats(int head_size, int blocks, int heads) {
  return blocks * kWarps * heads * (most_pieces(head_size, blocks) * 8 + kTotals);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Distributed shared memory of the exchange between the blocks of a cluster: a block's partial
// results and the buffers that it receives into.
template <int D>
struct Exchange {
  int blocks, rank, heads;
  float* received;
  uint64_t* barrier;

  __device__ __forceinline__ int warps() const { return blocks * kWarps; }
  __device__ __forceinline__ int own_pieces() const { return (D / 8 - rank + blocks - 1) / blocks; }
  __device__ __forceinline__ float* piece(int warp, int head, int place) const {
    return received + ((warp * heads + head) * most_pieces(D, blocks) + place) * 8;
  }
  __device__ __forceinline__ float* totals(int warp, int head) const {
    return received + warps() * heads * most_pieces(D, blocks) * 8 +
           (warp * heads + head) * kTotals;
  }

  // Called by one thread.
  __device__ __forceinline__ void initialize() const {
    barrier_init(barrier, 1);
    fence_barriers();
    barrier_expect(barrier, warps() * heads * (own_pieces() * 8 + kTotals) * int(sizeof(float)));
  }

  // Sends this warp's partial results to the blocks that combine them. Lane (g, t) holds heads 2 t
  // and 2 t + 1.
  template <typename S>
  __device__ __forceinline__ void send_sums(const S& sums) const {
    const int g = threadIdx.x % 32 / 4, warp = rank * kWarps + threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = threadIdx.x % 4 * 2 + i;
      if (head >= heads) break;
      if (g < blocks)
        send(address_in(totals(warp, head), g), sums.most[i], sums.sum[i], 0.0f, 0.0f,
             address_in(barrier, g));
#pragma unroll
      for (int c = 0; c < S::VC; ++c) {
        const int index = c * 8 + g, to = index % blocks;
        if (D % 64 != 0 && index >= D / 8) continue;
        const uint32_t there = address_in(piece(warp, head, index / blocks), to);
        const uint32_t arrival = address_in(barrier, to);
        const auto& eight = sums.output[c];
        send(there, eight[0][i], eight[0][2 + i], eight[1][i], eight[1][2 + i], arrival);
        send(there + 16, eight[2][i], eight[2][2 + i], eight[3][i], eight[3][2 + i], arrival);
      }
    }
  }

  // Combine the piece of a head at `place` over all warps, within one warp: the maximum, the sum,
  // and in lane l the output of dim l % 8.
  __device__ __forceinline__ void combine(int head, int place, float& peak, float& all,
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
      output += __shfl_sync(kAll, weight, warp) * piece(warp, head, place)[lane % 8];
    }
    output += __shfl_xor_sync(kAll, output, 8);
    output += __shfl_xor_sync(kAll, output, 16);
  }
};

#endif

// MODE: kOneQuery; kSeveral; or kLimited with rows of one query that are finished.
template <typename X, typename C, int D, typename Source, Mode MODE = kOneQuery>
__global__ void __launch_bounds__(32 * kWarps, D <= 128 ? 3 : 2)
    decode_attention_cluster(const __grid_constant__ Task task, int clusters) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using S = Sums<X, C, D, MODE>;
  extern __shared__ __align__(128) char shared[];  // the warps' tiles, then the received results
  char* const own_shared = shared + threadIdx.x / 32 * Source::kBytes;
  float* const received = reinterpret_cast<float*>(shared + kWarps * Source::kBytes);
  __shared__ uint64_t all_received;
  __shared__ bool last;

  constexpr bool SEVERAL = MODE == kSeveral;
  const int blocks = cluster_size(), rank = cluster_rank(), warp = threadIdx.x / 32;
  const int passes = task.kv_heads * task.groups;  // of a row
  const int lane = threadIdx.x % 32, items = task.num_rows * passes;
  const int item = blockIdx.x / blocks % items, part = blockIdx.x / blocks / items;
  const int row = item / passes, pass = item % passes, kv_head = pass / task.groups;
  const int hidden = hidden_tiles<MODE>(task, row, 1);
  const int context = task.context_lens[row] - hidden * kTile;
  Columns columns;
  if constexpr (SEVERAL) columns = Columns::of<false>(task, row, pass, hidden);
  const int heads = SEVERAL ? columns.count : task.group;  // or columns
  auto out_of = [&](int head) {
    if constexpr (SEVERAL) return columns.out<X>(task, head, D);
    return static_cast<X*>(task.out) + row * task.out_stride + (kv_head * heads + head) * D;
  };

  const int tiles = (context + kTile - 1) / kTile, warps = blocks * kWarps;
  const int parts = min(clusters, ceil_div(tiles, kClusterWarpTiles * warps));
  if (part >= parts || context <= 0 || heads == 0) {
    wait_for_predecessor();
    if (part == 0)  // padding
      for (int i = rank * blockDim.x + threadIdx.x; i < heads * D; i += blocks * blockDim.x)
        out_of(i / D)[i % D] = from_float<X>(0.0f);
    return;
  }
  const Exchange<D> exchange{blocks, rank, heads, received, &all_received};
  if (threadIdx.x == 0) exchange.initialize();
  if (threadIdx.x % 32 == 0) Source::initialize(own_shared);
  __syncwarp();
  cluster_arrive();

  // The first warps have one tile more: the last warp waits for the newest tokens.
  const int runs = parts * warps, mine = (part * blocks + rank) * kWarps + warp;
  const int begin = ceil_div(int64_t(tiles) * mine, runs),
            end = ceil_div(int64_t(tiles) * (mine + 1), runs);
  Source source(own_shared, false);
  Pages<X, C, D, Source> pages(task, source);
  pages.row = row, pages.kv_head = kv_head;
  pages.load_ids(hidden + min(begin, tiles - 1), hidden + tiles);
  static_assert(Source::kSpan == 1);
  auto request = [&](int which, int tile) {
    if (tile < end) pages.request(which, hidden + tile, hidden + tile + 1, hidden + tiles);
  };
  // tiles from here on have tokens that the predecessor writes
  const int first_new = SEVERAL ? max(context - columns.queries, 0) / kTile : tiles - 1;
  auto request_first = [&](bool newest) {
#pragma unroll
    for (int ahead = 0; ahead < Source::kKeysAhead; ++ahead) {
      if ((begin + ahead >= first_new) != newest) continue;
      request(0, begin + ahead);
      if (ahead < Source::kValuesAhead) request(1, begin + ahead);
    }
  };
  request_first(false);
  for (int tile = begin + Source::kValuesAhead; tile < min(end, begin + kPrefetchedTiles); ++tile)
    pages.prefetch(hidden + tile, hidden + tiles);
  const Newest newest(task, row);
  wait_for_predecessor();
  constexpr bool kFinishes = (D == 64 || D == 128) && MODE == kOneQuery;
  if constexpr (kFinishes) {
    if (task.unfinished && begin < end && end == tiles) {
      write_newest<X, C, D>(task, newest, row, kv_head);
      if (Source::kRing) fence_global_copies();
    }
  }
  request_first(true);

  S sums = [&] {
    if constexpr (MODE == kLimited)
      return S(task, row, kv_head * heads, heads, Columns::of<true>(task, row, kv_head, hidden));
    else if constexpr (SEVERAL)
      return S(task, row, 0, heads, columns);
    else
      return S(task, row, kv_head * heads, heads, [&](auto& q) {
        if constexpr (kFinishes && rotates_queries<X, C, D>()) {
          if (task.unfinished && task.rotary_size)
            rotate_queries<X, C, D>(task, newest.position, q);
        }
      });
  }();
  for (int tile = begin; tile < end; ++tile) {
    // alternately keys and values
    constexpr int kAhead = Source::kKeysAhead + Source::kValuesAhead;
    sums.add(
        source, tile, tile + 1, context, [&] { request(kAhead % 2, tile + kAhead / 2); },
        [&] { request(1 - kAhead % 2, tile + (kAhead + 1) / 2); });
  }
  sums.finish();
  cluster_wait();  // all blocks have initialised their barriers
  exchange.send_sums(sums);
  barrier_wait_for_cluster(&all_received, 0);

  auto slot_of = [&](int which, int head) {  // of a part: dims, maximum, sum
    const int each = SEVERAL ? kGroup : heads;
    return static_cast<float*>(task.scratch) +
           int64_t((item * clusters + which) * each + head) * (D + 2);
  };
  const int own = exchange.own_pieces();  // of each head
  for (int i = warp; i < heads * own; i += kWarps) {
    const int head = i / own, place = i % own, d = (place * blocks + rank) * 8 + lane;
    float peak, all, output;
    exchange.combine(head, place, peak, all, output);
    if (lane >= 8) continue;
    if (parts == 1) {
      out_of(head)[d] = from_float<X>(output / all);
    } else {
      __stcg(slot_of(part, head) + d, output);
      // all blocks of the cluster store the same numbers here
      if (lane == 0)
        __stcg(reinterpret_cast<float2*>(slot_of(part, head) + D), make_float2(peak, all));
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
  for (int i = warp; i < heads * own; i += kWarps) {
    const int head = i / own, place = i % own, d = (place * blocks + rank) * 8 + lane;
    if (lane >= 8) continue;
    float peak = -CUDART_INF_F, all = 0.0f, output = 0.0f;
    for (int which = 0; which < parts; ++which)
      peak = fmaxf(peak, __ldcg(slot_of(which, head) + D));
    for (int which = 0; which < parts; ++which) {
      const float2 totals = __ldcg(reinterpret_cast<const float2*>(slot_of(which, head) + D));
      const float share = exp2f(totals.x - peak);
      all += share * totals.y, output += share * __ldcg(slot_of(which, head) + d);
    }
    out_of(head)[d] = from_float<X>(output / all);
  }
#endif
}

// Launch shape per (row, KV head): clusters of `blocks` blocks; 0 blocks: too many rows and heads
// for clusters. Measured on an H200, ms of a step of BLOOM-7B1 in int8 (32 heads), with teams in
// brackets: one row 2.44 (2.57), with 1,900 tokens 2.72 (2.83), two rows 2.57 (2.62). Groups of
// query heads leave fewer kv heads, which teams spread over more multiprocessors: us of
// LLaMA-3-8B's attention over an fp8 cache, teams in brackets: one row of 544 tokens 5.5 (7.6), in
// a step 7.1 (11.0), two rows 6.5 (7.9), four 8.5 (8.8), eight 10.8 (9.6). A row and head get no
// more clusters than the block tables' width has tiles: idle blocks would keep others from
// starting.
constexpr int kRowsOfGroups = 2;
struct Clusters {
  int blocks, each;
};

Clusters clusters_of(const Task& task) {
  const int items = task.num_rows * task.kv_heads * task.groups;
  if (device().capability < 90 || (task.max_query <= 1 && task.groups > 1)) return {};
  if (task.group > 1 && task.num_rows > kRowsOfGroups) return {};
  int64_t most_tiles = (task.table_stride * task.block_tokens + kTile - 1) / kTile;
  if (task.window) most_tiles = std::min<int64_t>(most_tiles, ceil_div(task.window, kTile) + 1);
  for (int blocks = 8; blocks >= 4; blocks /= 2) {
    const int room = 2 * device().multiprocessors / blocks;
    if (items > room) continue;
    const int useful = ceil_div(most_tiles, kClusterWarpTiles * kWarps * blocks);
    return {blocks, room / items < useful ? room / items : useful};
  }
  return {};
}

// Upper bound of the bytes of keys and values: the block tables' width bounds the context lengths,
// which are unknown when a launch is captured in a CUDA graph.
template <typename C, int D>
int64_t most_bytes(const Task& task) {
  return task.num_rows * task.table_stride * task.block_tokens * task.kv_heads * D * 2 *
         int64_t(sizeof(C));
}

template <typename X, typename C, int D, typename Source, Mode MODE = kOneQuery>
int launch_clusters(const Task& task, const Clusters& clusters, void* stream) {
  const int blocks = task.num_rows * task.kv_heads * task.groups * clusters.blocks;
  const int heads = MODE == kSeveral ? kGroup : task.group;
  if (blocks > task.num_counters)
    return fail("decode_attention: %d blocks need more than %d counters", blocks,
                task.num_counters);
  return launch_in_clusters(
      "decode_attention", decode_attention_cluster<X, C, D, Source, MODE>, clusters.blocks,
      blocks * clusters.each, 32 * kWarps,
      kWarps * Source::kBytes + received_floats(D, clusters.blocks, heads) * sizeof(float), stream,
      task, clusters.each);
}

// Bulk copies if there may be many bytes: next to the next GEMM's ring, the L1 cache is too small
// for loads. A ring in this kernel delays the start of that GEMM. H200, us of a step of BLOOM-7B1,
// loads and copies, by rows x context: 1 x 544 3,856 and 3,863, 2 x 544 3,946 and 3,975, 1 x 2,048
// 4,121 and 4,125, 2 x 2,048 4,560 and 4,459, 2 x 4,096 5,318 and 5,014. Rings of heads of 256
// leave no room for a second block; 8 bits were not measured.
constexpr int64_t kCopiedBytes = 64 << 20;

template <typename X, typename C, int D>
int run_clusters(const Task& task, const Clusters& clusters, void* stream) {
  if constexpr (!std::is_same<C, X>::value) {
    return launch_clusters<X, C, D, Loads8<C, D>>(task, clusters, stream);
  } else {
    if constexpr (D <= 128)
      if (most_bytes<C, D>(task) >= kCopiedBytes)
        return launch_clusters<X, C, D, Copies<X, C, D, 4>>(task, clusters, stream);
    return launch_clusters<X, C, D, Loads<X, D>>(task, clusters, stream);
  }
}

}  // namespace
}  // namespace tridecode
