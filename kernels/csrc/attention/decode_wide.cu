// Decode attention of many query heads per KV head (multi-query models): a block multiplies all
// query heads of a row and KV head with a tile of keys at once, 16 heads a warp, where
// decode_attention.cuh would read the tiles once for each 8 heads. Rows have one query, caches are
// of the activations' dtype.
//
// A row's tiles are divided among the blocks of a cluster. They send their results to each other's
// shared memory, where every block combines those of its share of the heads. A long row is divided
// among several clusters; these store their combined results in scratch memory, and the last to
// arrive combines them. Before Hopper, a cluster is one block.
//
// Scores and output stay in registers; two tiles are in shared memory, one in use and one in
// flight. Online softmax in base 2 and float32.
//
// Bytes moved: 2 * tokens * kv_heads * head_size * sizeof(X).
// Bench: python -m tridecode.kernels.bench decode_attention
#include "api/attention.h"
#include "attention/decode_attention.cuh"
#include "attention/tile_products.cuh"

namespace tridecode {
namespace {

constexpr int kWideWarps = 8;   // at most, of a block
constexpr int kMostParts = 16;  // clusters of a row
constexpr int kMostClusterBlocks = 8;
constexpr int kBlockTiles = 4;  // tiles of a block beyond which a row gets one more cluster
constexpr int kKeys = 64;       // of a tile
constexpr int kStages = 2;

template <int D>
struct WideLayout {
  static constexpr int kPitch = row_pitch(D);
  static constexpr int kTileNumbers = kKeys * kPitch;
  static constexpr int kBytes = kStages * 2 * kTileNumbers * 2;
};

// Floats of the result of a head: the output before the division by the sum, maximum and sum.
__host__ __device__ constexpr int result_floats(int head_size) { return head_size + 2; }

// A row with more tiles gets more clusters. A cluster of one block stores its result in any case.
__host__ __device__ constexpr int tiles_of_cluster(int blocks) {
  return blocks > 1 ? blocks * kBlockTiles : 1;
}

// Heads r, r + blocks, .. belong to block r of a cluster.
__host__ __device__ constexpr int most_own_heads(int heads, int blocks) {
  return ceil_div(heads, blocks);
}

// Combine `count` results of a head for dims d and d + 1: their maximum, the sum of their weighted
// sums, and the weighted outputs. two(which, i): floats i and i + 1 of a result.
struct Combined {
  float most, sum;
  float2 output;
};
template <int D, typename Two>
__device__ __forceinline__ Combined combine(int count, int d, Two two) {
  Combined all = {-CUDART_INF_F, 0.0f, make_float2(0.0f, 0.0f)};
#pragma unroll 4
  for (int which = 0; which < count; ++which) all.most = fmaxf(all.most, two(which, D).x);
#pragma unroll 4
  for (int which = 0; which < count; ++which) {
    const float2 totals = two(which, D), dims = two(which, d);
    const float weight = exp2f(totals.x - all.most);
    all.sum += weight * totals.y;
    all.output.x += weight * dims.x, all.output.y += weight * dims.y;
  }
  return all;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Stores 8 bytes to another block's shared memory and counts them at an mbarrier of that block.
__device__ __forceinline__ void send_two(uint32_t to, float a, float b, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(a), "f"(b), "r"(barrier)
      : "memory");
}

#endif

// Grid: (blocks of a cluster * items, clusters of an item). A block has a warp for each 16 heads.
template <typename X, int D>
__global__ void __launch_bounds__(32 * kWideWarps)
    decode_attention_wide(const __grid_constant__ Task task) {
  using L = WideLayout<D>;
  constexpr int kSteps = D / 16, kPieces = D / 8, kResult = result_floats(D);
  // the tiles, then the results that the cluster's blocks send; as declared in decode_attention.cuh
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t all_received;
  __shared__ bool is_last;
  X* const tiles = reinterpret_cast<X*>(shared);
  float* const received = reinterpret_cast<float*>(shared + L::kBytes);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const int blocks = cluster_size(), rank = cluster_rank();
#else
  constexpr int blocks = 1, rank = 0;
#endif
  const int item = blockIdx.x / blocks, row = item / task.kv_heads, kv_head = item % task.kv_heads;
  const int context = task.context_lens[row], group = task.group;
  const int num_tiles = (max(context, 0) + kKeys - 1) / kKeys, cluster = blockIdx.y;
  const int each = tiles_of_cluster(blocks);
  const int clusters = min(int(gridDim.y), (num_tiles + each - 1) / each);
  X* const out = static_cast<X*>(task.out) + row * task.out_stride + kv_head * group * D;
  if (cluster >= clusters) {
    wait_for_predecessor();
    if (cluster == 0)  // padding
      for (int i = rank * blockDim.x + threadIdx.x; i < group * D; i += blocks * blockDim.x)
        out[i] = from_float<X>(0.0f);
    return;
  }
  const int first_tile = num_tiles * cluster / clusters;
  const int tiles_here = num_tiles * (cluster + 1) / clusters - first_tile;
  const int senders = min(blocks, tiles_here);  // blocks with tiles
  const int own_heads = (group - rank + blocks - 1) / blocks;
  const int most_heads = most_own_heads(group, blocks);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    if (threadIdx.x == 0) {
      barrier_init(&all_received, 1);
      fence_barriers();
      barrier_expect(&all_received, senders * own_heads * kResult * int(sizeof(float)));
    }
    __syncwarp();
    cluster_arrive();
  }
#endif
  // The first blocks have one tile more: the last one waits for the newest token.
  const bool has_tiles = rank < senders;
  auto tiles_before = [&](int block) { return (tiles_here * block + senders - 1) / senders; };
  const int begin = first_tile + (has_tiles ? tiles_before(rank) : 0);
  const int end = has_tiles ? first_tile + tiles_before(rank + 1) : begin;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int* const table = task.block_tables + row * task.table_stride;
  const int64_t to_value = value_offset(task.kv_heads, task.block_tokens, D);
  auto load_tile = [&](int tile) {
    X* const keys = tiles + tile % kStages * 2 * L::kTileNumbers;
    X* const values = keys + L::kTileNumbers;
    for (int i = threadIdx.x; i < kKeys * kPieces; i += blockDim.x) {
      const int place = i / kPieces, d = i % kPieces * 8, token = tile * kKeys + place;
      const bool valid = token < context;
      const int seen = valid ? token : 0;
      const int64_t at = cache_row(table[seen / task.block_tokens], 0, kv_head,
                                   seen % task.block_tokens, task.kv_heads, task.block_tokens);
      const X* const from = static_cast<const X*>(task.cache) + at * D + d;
      copy16_async(keys + place * L::kPitch + d, from, valid);
      copy16_async(values + place * L::kPitch + d, from + to_value, valid);
    }
    commit_copies();
  };
  // The predecessor writes the newest token, which is in the last tile.
  const bool early = begin + 1 < num_tiles;
  if (has_tiles && early) load_tile(begin);
  wait_for_predecessor();
  if (has_tiles && !early) load_tile(begin);

  const int first_head = warp * 16;
  uint32_t q[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = first_head + g + i % 2 * 8, d = k * 16 + 2 * t + i / 2 * 8;
      const X* const from = static_cast<const X*>(task.qkv) + row * task.qkv_stride +
                            int64_t(kv_head * group + head) * D + d;
      q[k][i] = head < group ? *reinterpret_cast<const uint32_t*>(from) : 0u;
    }
  }
  float slope[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (task.slopes && first_head + g + 8 * i < group)
      slope[i] = task.slopes[kv_head * group + first_head + g + 8 * i] * kLog2e;
  const float scale = task.scale * kLog2e;
  using Sums = TileSums<X, D, kKeys>;
  Sums sums;

  for (int tile = begin; tile < end; ++tile) {
    if (tile + 1 < end) {
      load_tile(tile + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const X* const keys = tiles + tile % kStages * 2 * L::kTileNumbers;
    const X* const values = keys + L::kTileNumbers;
    float scores[kKeys / 8][4] = {};
    Sums::score(scores, keys, [&](int k) -> const uint32_t (&)[4] { return q[k]; });
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int behind = tile * kKeys + n * 8 + 2 * t + i % 2 - (context - 1);
        scores[n][i] = scores[n][i] * scale + slope[i / 2] * float(behind);
        if (behind > 0) scores[n][i] = -CUDART_INF_F;
      }
    }
    sums.weigh(scores);
    sums.add_values(scores, values);
    __syncthreads();  // the next tile is loaded to the place of this one
  }

  sums.finish();
  auto for_each_head = [&](auto use) {  // of this lane
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (first_head + g + 8 * i < group) use(i, first_head + g + 8 * i);
  };
  if (blocks == 1 && clusters == 1)
    return for_each_head([&](int i, int head) { sums.write(i, out + head * D); });

  auto result_of = [&](int which, int head) {  // of a cluster
    const int64_t index = (int64_t(item) * gridDim.y + which) * group + head;
    return static_cast<float*>(task.scratch) + index * kResult;
  };
  if (blocks == 1) {
    for_each_head([&](int i, int head) {
      sums.write_part(i, result_of(cluster, head));
      if (t == 0)
        __stcg(reinterpret_cast<float2*>(result_of(cluster, head) + D),
               make_float2(sums.most[i], sums.sum[i]));
    });
  }
  // One thread combines two dims of a head of this block.
  auto for_own_pairs = [&](auto use) {
    for (int i = threadIdx.x; i < own_heads * (D / 2); i += blockDim.x)
      use(i / (D / 2), i / (D / 2) * blocks + rank, i % (D / 2) * 2);
  };
  auto write_pair = [&](int head, int d, const Combined& all) {
    const float inverse = 1.0f / all.sum;
    *reinterpret_cast<uint32_t*>(out + head * D + d) =
        pack<X>(all.output.x * inverse, all.output.y * inverse);
  };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    cluster_wait();  // all blocks have initialised their barriers
    if (has_tiles) {
      for_each_head([&](int i, int head) {
        const int to = head % blocks;
        const uint32_t arrival = address_in(&all_received, to);
        const uint32_t there =
            address_in(received + (rank * most_heads + head / blocks) * kResult, to);
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
          send_two(there + (n * 8 + 2 * t) * 4, sums.output[n][2 * i], sums.output[n][2 * i + 1],
                   arrival);
        if (t == 0) send_two(there + D * 4, sums.most[i], sums.sum[i], arrival);
      });
    }
    barrier_wait_for_cluster(&all_received, 0);
    for_own_pairs([&](int place, int head, int d) {
      const Combined all = combine<D>(senders, d, [&](int which, int i) {
        return *reinterpret_cast<const float2*>(received + (which * most_heads + place) * kResult +
                                                i);
      });
      if (clusters == 1) return write_pair(head, d, all);
      float* const to = result_of(cluster, head);
      __stcg(reinterpret_cast<float2*>(to + d), all.output);
      if (d == 0) __stcg(reinterpret_cast<float2*>(to + D), make_float2(all.most, all.sum));
    });
    if (clusters == 1) return;
  }
#endif

  device_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned int* const counter = task.counters + item * blocks + rank;
    is_last = atomicAdd(counter, 1u) == unsigned(clusters - 1);
    if (is_last) *counter = 0;  // for the next launch
    device_fence();
  }
  __syncthreads();
  if (!is_last) return;
  for_own_pairs([&](int, int head, int d) {
    write_pair(head, d, combine<D>(clusters, d, [&](int which, int i) {
                 return __ldcg(reinterpret_cast<const float2*>(result_of(which, head) + i));
               }));
  });
}

template <typename X, int D>
int run_size_wide(const Task& task, void* stream) {
  const int items = task.num_rows * task.kv_heads, room = 2 * device().multiprocessors;
  auto shared_of = [&](int blocks) {
    const int received = blocks * most_own_heads(task.group, blocks) * result_floats(D);
    return WideLayout<D>::kBytes + (blocks > 1 ? received * int(sizeof(float)) : 0);
  };
  int blocks = device().capability >= 90 ? kMostClusterBlocks : 1;
  while (blocks > 1 && (items * blocks > room || shared_of(blocks) > device().shared_bytes))
    blocks /= 2;
  if (items * blocks > task.num_counters)
    return fail("decode_attention: %d rows of %d kv heads need more than %d counters",
                task.num_rows, task.kv_heads, task.num_counters);
  const int64_t most_tiles = (task.table_stride * task.block_tokens + kKeys - 1) / kKeys;
  const int wanted = std::max(1, room / (items * blocks));
  const int useful = std::max(1, ceil_div(most_tiles, tiles_of_cluster(blocks)));
  return launch_in_clusters("decode_attention", decode_attention_wide<X, D>,
                            blocks > 1 ? blocks : 0,
                            dim3(blocks * items, std::min({wanted, kMostParts, useful})),
                            32 * ceil_div(task.group, 16), shared_of(blocks), stream, task);
}

}  // namespace

bool takes_wide(const tridecode_attention_task& task) {
  const int group = task.heads / task.kv_heads;
  return task.dtype != kFloat32 && group > 2 * kGroup && group <= 16 * kWideWarps &&
         (task.head_size == 64 || task.head_size == 128) && device().capability >= 80 &&
         task.scratch && aligned16(task.out) && aligned16(task.qkv) && aligned16(task.cache) &&
         task.qkv_stride % 8 == 0 && task.out_stride % 8 == 0;
}

int run_wide(const tridecode_attention_task& given, void* stream) {
  const Task task = {given, given.heads / given.kv_heads, 1};
  if (task.unfinished)
    if (int status = finish_rows(task, stream)) return status;
  return for_16_bit_dtype(task.dtype, "decode_attention", [&](auto zero) {
    using X = decltype(zero);
    return task.head_size == 64 ? run_size_wide<X, 64>(task, stream)
                                : run_size_wide<X, 128>(task, stream);
  });
}

}  // namespace tridecode
