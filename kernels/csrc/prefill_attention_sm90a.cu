// prefill_attention.cu's operation with Hopper's instructions, for head sizes 64 and 128: causal
// attention of many query tokens per row, ragged, with or without ALiBi.
//
// A block computes 128 queries of one head, 64 per consumer warp group, and iterates over tiles of
// 128 of the keys that they see. Scores are wgmma products of shared memory; the output is a
// product of probabilities in registers and values in shared memory. Online softmax in base 2 and
// float32. It overlaps with products twice, as in FlashAttention-3 (Shah et al. 2024): a warp group
// issues the scores of a tile before the values' product of the tile before it, and computes the
// softmax while the latter runs; and the two warp groups take turns to issue their products.
//
// Blocks are persistent and take one item after the other, the longest first. A producer thread
// copies tiles, and runs ahead to the next item.
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
  // queries of two items, an output, keys and values of kStages tiles; 1 KiB to begin at a multiple
  // of it
  static constexpr int kSharedBytes = 1024 + (3 + 2 * kStages) * kTileBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// 128 queries of a head: what a block computes at a time.
struct Item {
  int row, head;  // row -1: there are no more items
  int first_query, queries;
  int start;    // of the row's tokens
  int before;   // tokens from earlier steps
  int visible;  // keys that any of the queries sees
  int tiles;
  float slope;  // of ALiBi, in base 2

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
    slope = task.slopes ? task.slopes[head] * kLog2e : 0.0f;
    return true;
  }
};

// The producer writes an item before it arrives at `queries`.
struct Shared {
  uint64_t queries[2], no_queries[2], keys[kStages], no_keys[kStages], values[kStages],
      no_values[kStages];
  Item items[2];
};

// The place of a tile, or of the queries of an item, in its ring of two, and the parity of its
// round.
__device__ __forceinline__ int place(int count) { return count & 1; }
__device__ __forceinline__ int parity(int count) { return count >> 1 & 1; }

template <int D>
struct Tiles {
  using L = Layout<D>;
  char* base;
  __device__ char* queries(int count) const { return base + place(count) * L::kTileBytes; }
  __device__ char* output() const { return base + 2 * L::kTileBytes; }
  __device__ char* keys(int count) const { return base + (3 + 2 * place(count)) * L::kTileBytes; }
  __device__ char* values(int count) const { return base + (4 + 2 * place(count)) * L::kTileBytes; }
};

// The producer thread: copies the tiles of all items of the block, in the order of their use.
template <int D>
struct Producer {
  using L = Layout<D>;
  const PrefillTask& task;
  const CUtensorMap *qkv_map, *cache_map;
  const Tiles<D>& tiles;
  Shared& shared;
  uint64_t policy;

  // keys (which 0) or values (which 1) of a tile
  __device__ __forceinline__ void copy_tile(const Item& item, int tile, int which, char* to,
                                            uint64_t* barrier) const {
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
  }

  __device__ __forceinline__ void copy_keys(const Item& item, int tile, int count) const {
    barrier_wait(shared.no_keys + place(count), parity(count) ^ 1);
    copy_tile(item, tile, 0, tiles.keys(count), shared.keys + place(count));
  }
  __device__ __forceinline__ void copy_values(const Item& item, int tile, int count) const {
    barrier_wait(shared.no_values + place(count), parity(count) ^ 1);
    copy_tile(item, tile, 1, tiles.values(count), shared.values + place(count));
  }

  __device__ __forceinline__ void copy_items(int items) const {
    int item_count = 0, tile_count = 0;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      Item item;
      if (!item.find(task, index)) continue;
      uint64_t* const arrival = shared.queries + place(item_count);
      barrier_wait(shared.no_queries + place(item_count), parity(item_count) ^ 1);
      shared.items[place(item_count)] = item;
      barrier_expect(arrival, L::kTileBytes);
      for (int part = 0; part < L::kParts; ++part)
        copy_box(tiles.queries(item_count) + part * L::kPartBytes, qkv_map,
                 item.head * D + part * 64, item.start + item.first_query, arrival, policy);
      ++item_count;
      // values are read one tile later than keys
      copy_keys(item, 0, tile_count);
      for (int tile = 1; tile < item.tiles; ++tile, ++tile_count) {
        copy_keys(item, tile, tile_count + 1);
        copy_values(item, tile - 1, tile_count);
      }
      copy_values(item, item.tiles - 1, tile_count++);
    }
    barrier_wait(shared.no_queries + place(item_count), parity(item_count) ^ 1);
    shared.items[place(item_count)].row = -1;
    barrier_arrive(shared.queries + place(item_count));
  }
};

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

// The descriptor of a matrix `bytes` after that of another.
__device__ __forceinline__ uint64_t later(uint64_t descriptor, int bytes) {
  return (descriptor & ~uint64_t(0xffffffff)) | (uint32_t(descriptor) + uint32_t(bytes >> 4));
}

// 2^x; results below 2^-126 are 0.
__device__ __forceinline__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// The two warp groups take turns to issue products. Group 0 has the first turn.
__device__ __forceinline__ void wait_for_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(kGroups + 1 + group) : "memory");
}
__device__ __forceinline__ void pass_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(kGroups + 1 + (group ^ 1)) : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers, as multiply_add's c packs them, to rows of 16 bytes in
// shared memory. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// One warp group's 64 queries of an item.
template <typename X, int D, bool ALIBI>
struct Attention {
  using L = Layout<D>;
  const PrefillTask& task;
  const Item& item;
  int group;
  float scale;  // in base 2
  float output[D / 2] = {};
  // of scores that are not scaled, with ALiBi of scaled ones
  float most[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {};
  uint32_t weights[kKeys / 16][4];

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  // Of a row of the warp group in the row's context.
  __device__ __forceinline__ int position(int row) const {
    return item.before + item.first_query + group * 64 + row;
  }
  // Of the lane's first row in the warp group.
  __device__ __forceinline__ int own_row() const { return threadIdx.x / 32 % 4 * 16 + lane() / 4; }
  // The last key that any of these queries sees.
  __device__ __forceinline__ int last_key() const { return min(position(63), item.visible - 1); }
  // The first tile with keys that some of these queries do not see.
  __device__ __forceinline__ int first_edge() const {
    return min(position(0) + 1, item.visible) / kKeys;
  }

  // Issues the scores of a tile's first KEYS keys.
  template <int KEYS>
  __device__ __forceinline__ void score(float (&scores)[KEYS / 2], uint64_t queries,
                                        uint64_t keys) const {
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        group_multiply_add<X, KEYS>(scores, later(queries, part * L::kPartBytes + 32 * k),
                                    later(keys, part * L::kPartBytes + 32 * k), part > 0 || k > 0);
    }
    commit_group();
  }

  // Issues the product of the probabilities and a tile's values.
  template <int KEYS>
  __device__ __forceinline__ void add_values(uint64_t values) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)  // 16 keys: two groups of 8 rows
      group_multiply_add_rows<X, D>(output, weights[k], later(values, k * 2048));
    commit_group();
  }

  template <int KEYS>
  __device__ __forceinline__ void add_bias(float (&scores)[KEYS / 2], int first_key) const {
    const float bias = item.slope * float(first_key + lane() % 4 * 2 - position(0));
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float own = fmaf(item.slope, float(8 * j + k), bias);
        scores[4 * j + k] = fmaf(scores[4 * j + k], scale, own);
        scores[4 * j + 2 + k] = fmaf(scores[4 * j + 2 + k], scale, own);
      }
    }
  }

  template <int KEYS>
  __device__ __forceinline__ void mask(float (&scores)[KEYS / 2], int first_key) const {
    const int seen = position(own_row()) - first_key - lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (8 * j + i % 2 > seen + i / 2 * 8) scores[4 * j + i] = -CUDART_INF_F;
    }
  }

  // Scores to probabilities; the output so far is to shrink with them.
  template <int KEYS>
  __device__ __forceinline__ void weigh(float (&scores)[KEYS / 2], int first_key, bool edge,
                                        float (&shrink)[2]) {
    if (ALIBI) add_bias<KEYS>(scores, first_key);
    if (edge) mask<KEYS>(scores, first_key);
    float high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = most[i];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j)
        high[i] = fmaxf(high[i], fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
      high[i] = fmaxf(high[i], __shfl_xor_sync(kAll, high[i], 1));
      high[i] = fmaxf(high[i], __shfl_xor_sync(kAll, high[i], 2));
    }
    const float factor = ALIBI ? 1.0f : scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // -inf: a query that has seen no key yet
      const float base = high[i] == -CUDART_INF_F ? 0.0f : high[i] * factor;
      shrink[i] = power_of_2(fmaf(most[i], factor, -base));
      most[i] = high[i];
      float part = 0.0f;
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int k = 2 * i; k < 2 * i + 2; ++k)
          part += scores[4 * j + k] = power_of_2(fmaf(scores[4 * j + k], factor, -base));
      }
      sum[i] = fmaf(sum[i], shrink[i], part);
    }
  }

  template <int KEYS>
  __device__ __forceinline__ void keep_weights(const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[k][i] = pack<X>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
        asm volatile("" : "+r"(weights[k][i])::"memory");  // before the fence of its product
      }
    }
  }

  __device__ __forceinline__ void shrink_output(const float (&shrink)[2]) {
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[4 * d + i] *= shrink[i / 2];
    }
  }

  // Through shared memory where all 64 queries exist. A partial store is left to the lanes.
  __device__ __forceinline__ void store(const CUtensorMap* out_map, char* staged) {
    float scale_out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAll, sum[i], 1);
      sum[i] += __shfl_xor_sync(kAll, sum[i], 2);
      scale_out[i] = 1.0f / sum[i];
    }
    const int first = item.first_query + group * 64;
    if (first + 64 > item.queries) return store_some_rows(first, scale_out);
    const bool stores = threadIdx.x % 128 == 0;
    if (stores) wait_stores_read<0>();  // of the item before
    group_sync(group);
    staged += group * 64 * kColumn;
    const int row = threadIdx.x / 32 % 4 * 16 + lane() % 16;
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack<X>(output[4 * d + 2 * i] * scale_out[i % 2],
                           output[4 * d + 2 * i + 1] * scale_out[i % 2]);
      store_matrices(
          staged + d / 8 * L::kPartBytes + row * kColumn + ((d % 8 + lane() / 16) ^ (row % 8)) * 16,
          words);
    }
    fence_copies();
    group_sync(group);
    if (!stores) return;
    for (int part = 0; part < L::kParts; ++part)
      store_box(out_map, staged + part * L::kPartBytes, item.head * D + part * 64,
                item.start + first);
    commit_stores();
  }

  __device__ __forceinline__ void store_some_rows(int first, const float (&scale_out)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = first + own_row() + 8 * i;
      if (query >= item.queries) continue;
      X* const out = static_cast<X*>(task.out) + (item.start + query) * task.out_stride +
                     item.head * D + lane() % 4 * 2;
#pragma unroll
      for (int d = 0; d < D / 8; ++d)
        *reinterpret_cast<uint32_t*>(out + d * 8) =
            pack<X>(output[4 * d + 2 * i] * scale_out[i], output[4 * d + 2 * i + 1] * scale_out[i]);
    }
  }
};

// A consumer warp group: its queries of all items of the block.
template <typename X, int D, bool ALIBI>
struct Consumer {
  const PrefillTask& task;
  const CUtensorMap* out_map;
  const Tiles<D>& tiles;
  Shared& shared;
  int group;
  int item_count = 0, tile_count = 0;

  __device__ __forceinline__ void arrive(uint64_t* barrier) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ uint64_t queries() const {
    return later(descriptor(tiles.queries(0) + group * 64 * kColumn, 1024),
                 place(item_count) * Layout<D>::kTileBytes);
  }
  __device__ __forceinline__ uint64_t keys(int count) const {
    return later(descriptor(tiles.keys(0), 1024), place(count) * 2 * Layout<D>::kTileBytes);
  }
  __device__ __forceinline__ uint64_t values(int count) const {
    return later(columns_descriptor(tiles.values(0), Layout<D>::kPartBytes, 1024),
                 place(count) * 2 * Layout<D>::kTileBytes);
  }

  // The probabilities of the first tile.
  template <int KEYS>
  __device__ __forceinline__ void begin(Attention<X, D, ALIBI>& attention, bool edge) const {
    const int count = tile_count;
    float scores[KEYS / 2], shrink[2];
    barrier_wait(shared.keys + place(count), parity(count));
    wait_for_turn(group);
    group_fence();
    attention.template score<KEYS>(scores, queries(), keys(count));
    pass_turn(group);
    wait_for_sums<0>(scores);
    arrive(shared.no_keys + place(count));
    attention.template weigh<KEYS>(scores, 0, edge, shrink);
    attention.template keep_weights<KEYS>(scores);
  }

  // The probabilities of a tile while the values of the one before it are added.
  template <int KEYS>
  __device__ __forceinline__ void advance(Attention<X, D, ALIBI>& attention, int tile,
                                          bool edge) const {
    const int count = tile_count + tile;
    float scores[KEYS / 2], shrink[2];
    barrier_wait(shared.keys + place(count), parity(count));
    wait_for_turn(group);
    group_fence();
    attention.template score<KEYS>(scores, queries(), keys(count));
    barrier_wait(shared.values + place(count - 1), parity(count - 1));
    group_fence();
    attention.template add_values<kKeys>(values(count - 1));
    pass_turn(group);
    wait_for_sums<1>(scores);
    arrive(shared.no_keys + place(count));
    attention.template weigh<KEYS>(scores, tile * kKeys, edge, shrink);
    wait_for_sums<0>(attention.output);
    arrive(shared.no_values + place(count - 1));
    attention.shrink_output(shrink);
    attention.template keep_weights<KEYS>(scores);
  }

  // The values of the last tile.
  template <int KEYS>
  __device__ __forceinline__ void finish(Attention<X, D, ALIBI>& attention, int tile) const {
    const int count = tile_count + tile, valid = attention.item.visible - tile * kKeys;
    barrier_wait(shared.values + place(count), parity(count));
    if (valid < KEYS) clear_values<D>(tiles.values(count), valid, group);
    group_fence();
    attention.template add_values<KEYS>(values(count));
    wait_for_sums<0>(attention.output);
    arrive(shared.no_values + place(count));
  }

  __device__ __forceinline__ void attend(const Item& item) {
    Attention<X, D, ALIBI> attention{task, item, group, task.scale * kLog2e};
    const bool exists = item.first_query + group * 64 < item.queries;  // any of these queries
    const int seen = exists ? attention.last_key() / kKeys + 1 : 0, edge = attention.first_edge();
    if (exists && attention.last_key() < kKeys / 2) {
      begin<kKeys / 2>(attention, true);
      finish<kKeys / 2>(attention, 0);
    } else if (seen > 0) {
      // the keys of the last tile that these queries see may lie in its first half
      const bool half = seen > 1 && attention.last_key() % kKeys < kKeys / 2;
      begin<kKeys>(attention, edge == 0);
      for (int tile = 1; tile < seen - half; ++tile) advance<kKeys>(attention, tile, tile >= edge);
      if (half) {
        advance<kKeys / 2>(attention, seen - 1, true);
        finish<kKeys / 2>(attention, seen - 1);
      } else {
        finish<kKeys>(attention, seen - 1);
      }
    }
    arrive(shared.no_queries + place(item_count++));
    for (int tile = seen; tile < item.tiles; ++tile) skip_tile(tile_count + tile);
    tile_count += item.tiles;
    if (seen > 0) attention.store(out_map, tiles.output());
  }

  // Of a tile that only the other group sees.
  __device__ __forceinline__ void skip_tile(int count) const {
    barrier_wait(shared.keys + place(count), parity(count));
    wait_for_turn(group);
    pass_turn(group);
    arrive(shared.no_keys + place(count));
    barrier_wait(shared.values + place(count), parity(count));
    arrive(shared.no_values + place(count));
  }

  __device__ __forceinline__ void attend_all() {
    if (group == 1) pass_turn(group);
    while (true) {
      barrier_wait(shared.queries + place(item_count), parity(item_count));
      const Item item = shared.items[place(item_count)];
      if (item.row < 0) break;
      attend(item);
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();  // of this block's shared memory
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename X, int D, bool ALIBI>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_attention_sm90a(const __grid_constant__ CUtensorMap qkv_map,
                            const __grid_constant__ CUtensorMap cache_map,
                            const __grid_constant__ CUtensorMap out_map,
                            const __grid_constant__ PrefillTask task, int items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  const Tiles<D> tiles{raw + (1024 - shared_address(raw) % 1024) % 1024};
  __shared__ Shared shared;
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.queries + i, 1);
      barrier_init(shared.no_queries + i, 4 * kGroups);  // warps
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared.keys + i, 1);
      barrier_init(shared.values + i, 1);
      barrier_init(shared.no_keys + i, 4 * kGroups);
      barrier_init(shared.no_values + i, 4 * kGroups);
    }
    fence_barriers();
  }
  __syncthreads();
  wait_for_predecessor();
  if (group == kGroups) {
    give_registers<24>();
    if (threadIdx.x == kGroups * 128) {
      prefetch_map(&qkv_map);
      prefetch_map(&cache_map);
      prefetch_map(&out_map);
      Producer<D>{task, &qkv_map, &cache_map, tiles, shared, evict_normally()}.copy_items(items);
    }
  } else {
    take_registers<240>();
    Consumer<X, D, ALIBI>{task, &out_map, tiles, shared, group}.attend_all();
  }
#endif
}

template <typename X, int D, bool ALIBI>
int run(const PrefillTask& task, void* stream) {
  CUtensorMap qkv_map, cache_map, out_map;
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
  const cuuint64_t out_sizes[] = {cuuint64_t(task.heads) * D, cuuint64_t(task.tokens)},
                   out_strides[] = {cuuint64_t(task.out_stride) * 2};
  const cuuint32_t group_box[] = {64, 64};
  if (!status)
    status = encode_map(&out_map, task.out, 2, out_sizes, out_strides, group_box, task.dtype);
  if (status) return status;
  const int items =
      ceil_div(task.max_query, kQueries) * task.heads * (task.num_rows - task.first_row);
  const int blocks = device().multiprocessors;
  return launch("prefill_attention", prefill_attention_sm90a<X, D, ALIBI>,
                items < blocks ? items : blocks, kThreads, Layout<D>::kSharedBytes, stream, qkv_map,
                cache_map, out_map, task, items);
}

}  // namespace

bool takes_prefill_sm90a(const PrefillTask& task) {
  return device().capability == 90 && (task.head_size == 64 || task.head_size == 128) &&
         task.block_tokens % kPage == 0 && task.scale > 0.0f;
}

int run_prefill_sm90a(const PrefillTask& task, void* stream) {
  return for_16_bit_dtype(task.dtype, "prefill_attention", [&](auto zero) {
    using X = decltype(zero);
    if (task.head_size == 64)
      return task.slopes ? run<X, 64, true>(task, stream) : run<X, 64, false>(task, stream);
    return task.slopes ? run<X, 128, true>(task, stream) : run<X, 128, false>(task, stream);
  });
}

}  // namespace tridecode
