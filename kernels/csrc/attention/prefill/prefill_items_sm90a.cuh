// Work items of prefill_attention_sm90a.cu, the shared-memory layout of their tiles, and the
// producer thread, which finds the items and issues the loads.
#pragma once
#include "attention/prefill/prefill_attention.cuh"
#include "cache/kv_cache.cuh"
#include "common/wgmma.cuh"

namespace tridecode {
namespace {

constexpr int kGroups = 2;                     // consumer warp groups
constexpr int kThreads = 128 * kGroups + 128;  // and the producer warp group
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
  // queries of two items, an output, keys and values of kStages tiles; 1 KiB for alignment
  static constexpr int kSharedBytes = 1024 + (3 + 2 * kStages) * kTileBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A work item of a block: 128 queries of a head.
struct Item {
  int row, head;  // row -1: no more items
  int first_query, queries;
  int start;    // of the row's tokens
  int before;   // tokens from earlier steps
  int visible;  // keys visible to any of the queries
  int tiles;
  float slope;  // ALiBi slope, in base 2

  // Returns false if the row has no such queries. The items of a section of heads are consecutive,
  // longest first.
  __device__ bool find(const PrefillTask& task, int index, int section) {
    const int all = task.heads * (task.num_rows - task.first_row);
    const int blocks = ceil_div(task.max_query, kQueries);
    const int first = index / (section * blocks) * section, each = min(section, all - first);
    const int within = index - first * blocks, one = first + within % each;
    first_query = (blocks - 1 - within / each) * kQueries;
    head = one % task.heads;
    row = task.first_row + one / task.heads;
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

// The slot of a tile, or of an item's queries, in its ring of two, and the mbarrier parity of its
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

// The producer thread: copies the tiles of all items of the block, in order of use.
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

  __device__ __forceinline__ void copy_items(int items, int section) const {
    int item_count = 0, tile_count = 0;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      Item item;
      if (!item.find(task, index, section)) continue;
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

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace
}  // namespace tridecode
