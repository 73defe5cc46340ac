// Decode attention of many query heads per KV head (multi-query models): a block multiplies all
// query heads of a row and KV head with a tile of keys at once, 16 heads a warp, where
// decode_attention.cuh would read the tiles once for each 8 heads. Rows have one query, caches are
// of the activations' dtype.
//
// decode_wide_parts.cuh divides a row's tiles among the blocks of a cluster, and a long row among
// several clusters. Before Hopper, a cluster is one block.
//
// Scores and output stay in registers; two tiles are in shared memory, one in use and one in
// flight. Online softmax in base 2 and float32.
//
// Bytes moved: 2 * tokens * kv_heads * head_size * sizeof(X).
// Bench: python -m tridecode.kernels.bench decode_attention
#include "api/attention.h"
#include "attention/decode_attention.cuh"
#include "attention/decode_wide_parts.cuh"
#include "attention/tile_products.cuh"

namespace tridecode {
namespace {

constexpr int kWideWarps = 8;  // at most, of a block
constexpr int kKeys = 64;      // of a tile
constexpr int kStages = 2;

template <int D>
struct WideLayout {
  static constexpr int kPitch = row_pitch(D);
  static constexpr int kTileNumbers = kKeys * kPitch;
  static constexpr int kBytes = kStages * 2 * kTileNumbers * 2;
};

// Grid: (blocks of a cluster * items, clusters of an item). A block has a warp for each 16 heads.
template <typename X, int D>
__global__ void __launch_bounds__(32 * kWideWarps)
    decode_attention_wide(const __grid_constant__ Task task) {
  using L = WideLayout<D>;
  constexpr int kSteps = D / 16, kPieces = D / 8;
  // the tiles, and later the received results; as declared in decode_attention.cuh
  extern __shared__ __align__(128) char shared[];
  X* const tiles = reinterpret_cast<X*>(shared);

  const int item = blockIdx.x / blocks_of_cluster();
  const int row = item / task.kv_heads, kv_head = item % task.kv_heads;
  const int context = task.context_lens[row], group = task.group;
  const int num_tiles = (max(context, 0) + kKeys - 1) / kKeys;
  const Share share(num_tiles);
  X* const out = static_cast<X*>(task.out) + row * task.out_stride + kv_head * group * D;
  if (share.cluster >= share.clusters) {
    wait_for_predecessor();
    if (share.cluster == 0)  // padding
      for (int i = share.rank * blockDim.x + threadIdx.x; i < group * D;
           i += share.blocks * blockDim.x)
        out[i] = from_float<X>(0.0f);
    return;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ uint64_t arrived;
  const WideExchange<D> exchange{share, group, reinterpret_cast<float*>(shared), &arrived};
  if (share.blocks > 1 && threadIdx.x == 0) exchange.initialize();
#endif
  const int begin = share.begin, end = share.end;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int* const table = task.block_tables + row * task.table_stride;
  const int places = blockDim.x / kPieces;  // of a tile that are loaded at once

  // x / block_tokens as a product; exact for x * block_tokens < 2^32
  const unsigned int inverse = 0xffffffffu / unsigned(task.block_tokens) + 1;
  auto load_tile = [&](int tile) {
    X* const keys = tiles + tile % kStages * 2 * L::kTileNumbers;
    const int d = threadIdx.x % kPieces * 8;
    // the ids of several blocks are loaded before the first copy that needs one
    constexpr int kAtOnce = 4;
    for (int first = threadIdx.x / kPieces; first < kKeys; first += kAtOnce * places) {
      unsigned rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = min(tile * kKeys + first + i * places, context - 1);
        const int block = int(__umulhi(unsigned(token), inverse));
        rows[i] = unsigned(cache_row(table[block], 0, kv_head, token - block * task.block_tokens,
                                     task.kv_heads, task.block_tokens));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int place = first + i * places;
        if (place >= kKeys) break;
        const int64_t at = rows[i];
        const X* const from = static_cast<const X*>(task.cache) + at * D + d;
        X* const to = keys + place * L::kPitch + d;
        const bool valid = tile * kKeys + place < context;
        copy16_async(to, from, valid);
        copy16_async(to + L::kTileNumbers, from + unsigned(task.kv_heads * task.block_tokens * D),
                     valid);
      }
    }
    commit_copies();
  };
  // The predecessor writes the newest token, which is in the last tile.
  const bool early = begin + 1 < num_tiles;
  if (begin < end && early) load_tile(begin);
  wait_for_predecessor();
  if (begin < end && !early) load_tile(begin);

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
  if (share.alone()) return for_each_head([&](int i, int head) { sums.write(i, out + head * D); });
  if (share.blocks == 1) {
    for_each_head([&](int i, int head) {
      float* const to = stored_result<D>(task, item, share.cluster, head);
      sums.write_part(i, to);
      if (t == 0) __stcg(reinterpret_cast<float2*>(to + D), make_float2(sums.most[i], sums.sum[i]));
    });
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (share.blocks > 1) {
    cluster_sync();  // all blocks have read their tiles and initialised their barriers
    if (begin < end) for_each_head([&](int i, int head) { exchange.send(sums, i, head); });
    barrier_wait_for_cluster(&arrived, 0);
    for_own_pairs<D>(share, group, [&](int n, int head, int d) {
      const Combined<D> all(share.senders, d, [&](int sender, int i) {
        return *reinterpret_cast<const float2*>(exchange.result(sender, n) + i);
      });
      if (share.clusters == 1) return all.write(out + head * D + d);
      float* const to = stored_result<D>(task, item, share.cluster, head);
      __stcg(reinterpret_cast<float2*>(to + d), all.output);
      if (d == 0) __stcg(reinterpret_cast<float2*>(to + D), make_float2(all.most, all.sum));
    });
    if (share.clusters == 1) return;
  }
#endif
  if (!is_last(task, item, share)) return;
  for_own_pairs<D>(share, group, [&](int, int head, int d) {
    const Combined<D> all(share.clusters, d, [&](int cluster, int i) {
      const float* const from = stored_result<D>(task, item, cluster, head);
      return __ldcg(reinterpret_cast<const float2*>(from + i));
    });
    all.write(out + head * D + d);
  });
}

template <typename X, int D>
int run_size_wide(const Task& task, void* stream) {
  static_assert(16 * kWideWarps * kResultFloats<D> * sizeof(float) <= WideLayout<D>::kBytes);
  const int items = task.num_rows * task.kv_heads;
  // Blocks that are resident at once. Three with heads of 64 fit on a multiprocessor, two with
  // heads of 128; clusters do not fill these: an H200 holds 30 of eight blocks, or 62 of four.
  const int room = (D == 64 ? 16 : 15) * device().multiprocessors / 8;
  int blocks = device().capability >= 90 ? kMostClusterBlocks : 1;
  while (blocks > 1 && items * blocks > room) blocks /= 2;
  if (items * blocks > task.num_counters)
    return fail("decode_attention: %d rows of %d kv heads need more than %d counters",
                task.num_rows, task.kv_heads, task.num_counters);
  const int64_t most_tiles = (task.table_stride * task.block_tokens + kKeys - 1) / kKeys;
  const int wanted = std::max(1, room / (items * blocks));
  const int useful = std::max(1, ceil_div(most_tiles, tiles_of_cluster(blocks)));
  return launch_in_clusters("decode_attention", decode_attention_wide<X, D>,
                            blocks > 1 ? blocks : 0,
                            dim3(blocks * items, std::min({wanted, kMostClusters, useful})),
                            32 * ceil_div(task.group, 16), WideLayout<D>::kBytes, stream, task);
}

}  // namespace

bool takes_wide(const tridecode_attention_task& task) {
  const int group = task.heads / task.kv_heads;
  return task.dtype != kFloat32 && group > 2 * kGroup && group <= 16 * kWideWarps &&
         (task.head_size == 64 || task.head_size == 128) && device().capability >= 80 &&
         task.scratch && aligned16(task.out) && aligned16(task.qkv) && aligned16(task.cache) &&
         task.block_tokens % kTile == 0 && task.qkv_stride % 8 == 0 && task.out_stride % 8 == 0;
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
