// prefill_attention.cu's operation with Hopper's instructions, for head sizes 64 and 128: causal
// attention of many query tokens per row, ragged, with or without ALiBi.
//
// A block computes 128 queries of one head, 64 per consumer warp group, and iterates over tiles of
// 128 visible keys. Scores are wgmmas on shared memory; the output accumulates wgmmas of
// probabilities in registers and values in shared memory. Online softmax in base 2 and float32. It
// overlaps with wgmmas in two ways, as in FlashAttention-3 (Shah et al. 2024): a warp group issues
// the score wgmmas of a tile before the value wgmmas of the previous tile, and computes the softmax
// while the latter run; and the two warp groups alternate in issuing wgmmas.
//
// Blocks are persistent and process items in order: by sections of heads whose keys and values fit
// in the L2 cache, longest items first within a section. A producer thread copies tiles and runs
// ahead to the next item.
//
// Fresh prompts read keys and values from the output of the projection, prompts with tokens in the
// cache from its blocks.
//
// FLOP: 2 * 2 * head_size * heads * sum over queries of visible keys.
// Bench: python -m tridecode.kernels.bench prefill_attention
#include "attention/prefill/prefill_softmax_sm90a.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

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

  // Release a tile that only the other warp group attends to.
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
                            const __grid_constant__ PrefillTask task, int items, int section) {
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
      Producer<D>{task, &qkv_map, &cache_map, tiles, shared, evict_normally()}.copy_items(items,
                                                                                          section);
    }
  } else {
    take_registers<240>();
    Consumer<X, D, ALIBI>{task, &out_map, tiles, shared, group}.attend_all();
  }
#endif
}

// The number of heads in a section. Their keys and values take a quarter of an H200's L2 cache, and
// items of a multiple of 12 heads spread evenly over its 132 multiprocessors. With few sections
// they would not, so all heads form one section.
int section_of(int all, int max_query, int head_size) {
  constexpr int64_t kBytes = 12 << 20;
  constexpr int kMultiple = 12, kLeastSections = 8;
  const int section = ceil_div(kBytes, int64_t(max_query) * head_size * 4 * kMultiple) * kMultiple;
  return section * kLeastSections > all ? all : section;
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
  const int all = task.heads * (task.num_rows - task.first_row);
  const int items = ceil_div(task.max_query, kQueries) * all;
  const int section = section_of(all, task.max_query, D);
  const int blocks = device().multiprocessors;
  return launch("prefill_attention", prefill_attention_sm90a<X, D, ALIBI>,
                items < blocks ? items : blocks, kThreads, Layout<D>::kSharedBytes, stream, qkv_map,
                cache_map, out_map, task, items, section);
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
