// prefill_attention.cu's operation with Hopper's instructions, for head sizes 64 and 128: causal
// attention of many query tokens per row, ragged, with or without ALiBi.
//
// A block computes 128 queries of one head, 64 per consumer warp group, and iterates over tiles of
// 128 of the keys that they see. Scores are wgmma products of shared memory; the output is a
// product of probabilities in registers and values in shared memory. Online softmax in base 2 and
// float32: one warp group computes it while the other multiplies. Blocks are persistent and take
// one item after the other, the longest first. A producer thread copies tiles, and runs ahead to
// the next item.
//
// Fresh prompts read keys and values from the output of the projection, prompts with tokens in the
// cache from its blocks.
//
// FLOP: 2 * 2 * head_size * heads * sum over queries of visible keys.
// Bench: python -m tridecode.kernels.bench prefill_attention
#include "kv_cache.cuh"
#include "prefill_attention.cuh"
#include "wgmma.cuh"

namespace tridecode {
namespace {

constexpr int kGroups = 2;                     // consumer warp groups
constexpr int kThreads = 128 * kGroups + 128;  // and the producer's
constexpr int kQueries = 64 * kGroups;
constexpr int kKeys = 128;    // of a tile
constexpr int kPage = 16;     // tokens of one copy from the cache
constexpr int kStages = 2;    // tiles in shared memory
constexpr int kColumn = 128;  // bytes of a row of a part of 64 numbers: the width of the swizzle

template <int D>
struct Layout {
  static constexpr int kParts = D / 64;
  static constexpr int kPartBytes = 128 * kColumn;  // of 128 queries or keys
  static constexpr int kTileBytes = kParts * kPartBytes;
  // queries of two items, keys and values of kStages tiles; 1 KiB to begin at a multiple of it
  static constexpr int kSharedBytes = 1024 + (2 + 2 * kStages) * kTileBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// 128 queries of a head: what a block computes at a time.
struct Item {
  int row, head, first_query, queries;
  int start;    // of the row's tokens
  int before;   // tokens from earlier steps
  int visible;  // keys that any of the queries sees
  int tiles;

  // False: the row has no such queries.
  __device__ bool find(const PrefillTask& task, int index) {
    const int each = task.heads * (task.num_rows - task.first_row);
    const int blocks = ceil_div(task.max_query, kQueries);
    first_query = (blocks - 1 - index / each) * kQueries;  // the longest first
    const int rest = index % each;
    head = rest % task.heads;
    row = task.first_row + rest / task.heads;
    start = task.query_starts[row] - task.query_starts[task.origin_row];
    queries = task.query_starts[row + 1] - task.query_starts[row];
    if (first_query >= queries) return false;
    before = task.context_lens[row] - queries;
    visible = min(task.context_lens[row], before + first_query + kQueries);
    tiles = (visible + kKeys - 1) / kKeys;
    return true;
  }
};

struct Barriers {
  uint64_t queries[2], no_queries[2], keys[kStages], no_keys[kStages], values[kStages],
      no_values[kStages];
};

// A place in a ring of two, and the parity of its round.
struct Turn {
  int place = 0, parity = 0;
  __device__ void next() {
    place ^= 1;
    if (place == 0) parity ^= 1;
  }
};

template <int D>
struct Tiles {
  using L = Layout<D>;
  char* base;
  __device__ char* queries(int place) const { return base + place * L::kTileBytes; }
  __device__ char* keys(int place) const { return base + (2 + 2 * place) * L::kTileBytes; }
  __device__ char* values(int place) const { return base + (3 + 2 * place) * L::kTileBytes; }
};

// The producer thread: copies the tiles of all items of the block, in order.
template <typename X, int D>
__device__ __forceinline__ void copy_items(const PrefillTask& task, const CUtensorMap* qkv_map,
                                           const CUtensorMap* cache_map, const Tiles<D>& tiles,
                                           Barriers& barriers, int items) {
  using L = Layout<D>;
  const uint64_t policy = evict_normally();
  Turn query_turn, turn;
  // keys (which 0) or values (which 1) of a tile
  auto copy_tile = [&](const Item& item, int tile, int which, char* to, uint64_t* barrier) {
    const int kv_head = item.head / (task.heads / task.kv_heads), first = tile * kKeys;
    barrier_expect(barrier, L::kTileBytes);
    if (item.before == 0) {
      const int column = (task.heads + which * task.kv_heads + kv_head) * D;
      for (int part = 0; part < L::kParts; ++part)
        copy_box(to + part * L::kPartBytes, qkv_map, column + part * 64, item.start + first,
                 barrier, policy);
      return;
    }
    const int* const table = task.block_tables + item.row * task.table_stride;
    for (int token = 0; token < kKeys; token += kPage) {
      const int at = min(first + token, (item.visible - 1) / kPage * kPage);
      const int64_t id = table[at / task.block_tokens];
      const int row = int(
          cache_row(id, which, kv_head, at % task.block_tokens, task.kv_heads, task.block_tokens));
      for (int part = 0; part < L::kParts; ++part)
        copy_box(to + part * L::kPartBytes + token * kColumn, cache_map, part * 64, row, barrier,
                 policy);
    }
  };
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    Item item;
    if (!item.find(task, index)) continue;
    barrier_wait(barriers.no_queries + query_turn.place, query_turn.parity ^ 1);
    barrier_expect(barriers.queries + query_turn.place, L::kTileBytes);
    for (int part = 0; part < L::kParts; ++part)
      copy_box(tiles.queries(query_turn.place) + part * L::kPartBytes, qkv_map,
               item.head * D + part * 64, item.start + item.first_query,
               barriers.queries + query_turn.place, policy);
    query_turn.next();
    for (int tile = 0; tile < item.tiles; ++tile) {
      barrier_wait(barriers.no_keys + turn.place, turn.parity ^ 1);
      copy_tile(item, tile, 0, tiles.keys(turn.place), barriers.keys + turn.place);
      barrier_wait(barriers.no_values + turn.place, turn.parity ^ 1);
      copy_tile(item, tile, 1, tiles.values(turn.place), barriers.values + turn.place);
      turn.next();
    }
  }
}

// Sets values beyond the visible ones to zero: they are undefined, and 0 * NaN is NaN. Each warp
// group does it, since both read the whole tile.
template <int D>
__device__ __forceinline__ void clear_values(char* values, int valid, int group) {
  using L = Layout<D>;
  for (int i = threadIdx.x % 128; i < (kKeys - valid) * 8 * L::kParts; i += 128) {
    const int token = valid + i / (8 * L::kParts), piece = i % (8 * L::kParts);
    *reinterpret_cast<uint4*>(values + piece / 8 * L::kPartBytes + token * kColumn +
                              piece % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  fence_copies();
  group_sync(group);
}

// One warp group's 64 queries of an item.
template <typename X, int D>
struct Attention {
  using L = Layout<D>;
  const PrefillTask& task;
  const Item& item;
  int group;
  float scale, slope;
  float output[D / 2] = {};
  float most[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {};

  // Of the lane's first row in the row's context.
  __device__ __forceinline__ int position() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    return item.before + item.first_query + group * 64 + warp * 16 + lane / 4;
  }
  // Whether any of these queries sees the tile.
  __device__ __forceinline__ bool sees(int first_key) const {
    return first_key <= item.before + item.first_query + group * 64 + 63;
  }

  __device__ __forceinline__ void score(float (&scores)[kKeys / 2], const char* queries,
                                        const char* keys) const {
    group_fence();
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      const uint64_t a = descriptor(queries + part * L::kPartBytes + group * 64 * kColumn, 1024),
                     b = descriptor(keys + part * L::kPartBytes, 1024);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        group_multiply_add<X, kKeys>(scores, a + 2 * k, b + 2 * k, part > 0 || k > 0);
    }
    commit_group();
    wait_for_sums(scores);
  }

  // Scores to probabilities; the output so far shrinks with them.
  __device__ __forceinline__ void weigh(float (&scores)[kKeys / 2], int first_key) {
    const int lane = threadIdx.x % 32, t = lane % 4, at = position(), least = at - lane / 4;
    const bool edge = first_key + kKeys - 1 > least || first_key + kKeys > item.visible;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int behind = first_key + 8 * j + 2 * t + i % 2 - (at + i / 2 * 8);
        float& score = scores[4 * j + i];
        score = score * scale + slope * float(behind);
        if (edge && behind > 0) score = -CUDART_INF_F;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float high = most[i];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
        high = fmaxf(high, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
      high = fmaxf(high, __shfl_xor_sync(kAll, high, 1));
      high = fmaxf(high, __shfl_xor_sync(kAll, high, 2));
      const float base = high == -CUDART_INF_F ? 0.0f : high;  // a query that has seen no key yet
      const float shrink = exp2f(most[i] - base);
      most[i] = high;
      float part = 0.0f;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int k = 2 * i; k < 2 * i + 2; ++k)
          part += scores[4 * j + k] = exp2f(scores[4 * j + k] - base);
      }
      sum[i] = sum[i] * shrink + part;
#pragma unroll
      for (int d = 0; d < D / 8; ++d)
        output[4 * d + 2 * i] *= shrink, output[4 * d + 2 * i + 1] *= shrink;
    }
  }

  __device__ __forceinline__ void add_values(const float (&scores)[kKeys / 2], const char* values) {
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[k][i] = pack<X>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }
    group_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)  // 16 keys: two groups of 8 rows
      group_multiply_add_rows<X, D>(output, weights[k],
                                    columns_descriptor(values + k * 2048, L::kPartBytes, 1024));
    commit_group();
    wait_for_sums(output);
  }

  __device__ __forceinline__ void store() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAll, sum[i], 1);
      sum[i] += __shfl_xor_sync(kAll, sum[i], 2);
      const int query = item.first_query + group * 64 + warp * 16 + lane / 4 + 8 * i;
      if (query >= item.queries) continue;
      const float scale_out = 1.0f / sum[i];
      X* const out = static_cast<X*>(task.out) + (item.start + query) * task.out_stride +
                     item.head * D + 2 * t;
#pragma unroll
      for (int d = 0; d < D / 8; ++d)
        *reinterpret_cast<uint32_t*>(out + d * 8) =
            pack<X>(output[4 * d + 2 * i] * scale_out, output[4 * d + 2 * i + 1] * scale_out);
    }
  }
};

template <typename X, int D>
__device__ __forceinline__ void attend(const PrefillTask& task, const Tiles<D>& tiles,
                                       Barriers& barriers, int items, int group) {
  Turn query_turn, turn;
  const bool leads = threadIdx.x % 32 == 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    Item item;
    if (!item.find(task, index)) continue;
    Attention<X, D> attention{task, item, group, task.scale * kLog2e,
                              task.slopes ? task.slopes[item.head] * kLog2e : 0.0f};
    barrier_wait(barriers.queries + query_turn.place, query_turn.parity);
    for (int tile = 0; tile < item.tiles; ++tile) {
      const int first_key = tile * kKeys;
      const bool sees = attention.sees(first_key);
      float scores[kKeys / 2];
      barrier_wait(barriers.keys + turn.place, turn.parity);
      if (sees) attention.score(scores, tiles.queries(query_turn.place), tiles.keys(turn.place));
      if (leads) barrier_arrive(barriers.no_keys + turn.place);
      if (sees) attention.weigh(scores, first_key);
      barrier_wait(barriers.values + turn.place, turn.parity);
      if (sees) {
        char* const values = tiles.values(turn.place);
        if (first_key + kKeys > item.visible)
          clear_values<D>(values, item.visible - first_key, group);
        attention.add_values(scores, values);
      }
      if (leads) barrier_arrive(barriers.no_values + turn.place);
      turn.next();
    }
    if (leads) barrier_arrive(barriers.no_queries + query_turn.place);
    query_turn.next();
    attention.store();
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename X, int D>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_attention_sm90a(const __grid_constant__ CUtensorMap qkv_map,
                            const __grid_constant__ CUtensorMap cache_map,
                            const __grid_constant__ PrefillTask task, int items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  const Tiles<D> tiles{raw + (1024 - shared_address(raw) % 1024) % 1024};
  __shared__ Barriers barriers;
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(barriers.queries + i, 1);
      barrier_init(barriers.no_queries + i, 4 * kGroups);  // warps
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.keys + i, 1);
      barrier_init(barriers.values + i, 1);
      barrier_init(barriers.no_keys + i, 4 * kGroups);
      barrier_init(barriers.no_values + i, 4 * kGroups);
    }
    fence_barriers();
  }
  __syncthreads();
  wait_for_predecessor();
  if (group == kGroups) {
    give_registers<40>();
    if (threadIdx.x == kGroups * 128) {
      prefetch_map(&qkv_map);
      prefetch_map(&cache_map);
      copy_items<X, D>(task, &qkv_map, &cache_map, tiles, barriers, items);
    }
  } else {
    take_registers<232>();
    attend<X, D>(task, tiles, barriers, items, group);
  }
#endif
}

template <typename X, int D>
int run(const PrefillTask& task, void* stream) {
  CUtensorMap qkv_map, cache_map;
  const cuuint64_t columns = cuuint64_t(task.heads + 2 * task.kv_heads) * D;
  const cuuint64_t sizes[] = {columns, cuuint64_t(task.tokens)},
                   strides[] = {cuuint64_t(task.qkv_stride) * 2};
  const cuuint32_t box[] = {64, 128};
  int status = encode_map(&qkv_map, task.qkv, 2, sizes, strides, box, task.dtype);
  // the number of blocks is not known here: the map covers the largest possible cache
  const cuuint64_t cache_sizes[] = {D, cuuint64_t(1) << 31}, cache_strides[] = {D * 2};
  const cuuint32_t page[] = {64, kPage};
  if (!status)
    status = encode_map(&cache_map, task.cache, 2, cache_sizes, cache_strides, page, task.dtype);
  if (status) return status;
  const int items =
      ceil_div(task.max_query, kQueries) * task.heads * (task.num_rows - task.first_row);
  const int blocks = device().multiprocessors;
  return launch("prefill_attention", prefill_attention_sm90a<X, D>, items < blocks ? items : blocks,
                kThreads, Layout<D>::kSharedBytes, stream, qkv_map, cache_map, task, items);
}

}  // namespace

bool takes_prefill_sm90a(const PrefillTask& task) {
  return device().capability == 90 && (task.head_size == 64 || task.head_size == 128) &&
         task.block_tokens % kPage == 0;
}

int run_prefill_sm90a(const PrefillTask& task, void* stream) {
  return for_16_bit_dtype(task.dtype, "prefill_attention", [&](auto zero) {
    using X = decltype(zero);
    if (task.head_size == 64) return run<X, 64>(task, stream);
    return run<X, 128>(task, stream);
  });
}

}  // namespace tridecode
