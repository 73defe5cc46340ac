// Decode attention: the query tokens of each row over its paged cache; multi-head, grouped-query
// and multi-query, with or without ALiBi. decode_tiles.cuh: a warp's work on a tile.
//
// Small batches: one cluster per (row, KV head), see decode_attention_cluster.cuh. Otherwise
// decode_runs.cuh divides the tiles of the batch among teams; a team is a warp or, with few rows, a
// block. If several teams share a row and head, decode_parts.cuh adds their partial results.
//
// Bytes moved: 2 * tokens * kv_heads * head_size * sizeof(C), and in 8 bits 8 * tokens * kv_heads.
// Bench: python -m tridecode.kernels.bench decode_attention
#pragma once
#include <algorithm>

#include "api/attention.h"
#include "api/gemm.h"
#include "attention/decode_attention_cluster.cuh"
#include "attention/decode_parts.cuh"

namespace tridecode {
namespace {

constexpr int kMaxBlocks = 1024;  // blocks of the grid

// Bytes of shared memory per warp.
template <int D, int TEAM, typename Source>
__host__ __device__ constexpr int warp_bytes() {
  const int sums = TEAM == 1 ? 0 : (team_floats<D>() * 4 + 127) / 128 * 128;
  return Source::kBytes > sums ? Source::kBytes : sums;
}

template <typename X, typename C, int D, int TEAM, typename Source, Mode MODE = kOneQuery>
__global__ void __launch_bounds__(32 * kWarps, Source::kResident)
    decode_attention(const __grid_constant__ Task task) {
  using S = Sums<X, C, D, MODE>;
  constexpr bool SEVERAL = MODE != kOneQuery, LIMITED = MODE == kLimited;
  constexpr int kSpan = Source::kSpan, kStride = warp_bytes<D, TEAM, Source>();
  extern __shared__ __align__(128) char shared[];
  __shared__ unsigned int arrival;
  char* const own_shared = shared + threadIdx.x / 32 * kStride;
  int* const prefix = reinterpret_cast<int*>(shared + kWarps * kStride);

  const bool several = LIMITED ? task.max_query > 1 : SEVERAL;
  // New tokens may be in any tile; only rings load others before the wait.
  bool waited = several && (LIMITED || !Source::kRing);
  if (waited) wait_for_predecessor();
  if (threadIdx.x % 32 == 0) Source::initialize(own_shared);  // barriers follow
  constexpr bool kLongChunks = TEAM > 1 && !std::is_same<C, X>::value;
  const Runs runs =
      divide<TEAM, kLongChunks, MODE>(task, gridDim.x * (kWarps / TEAM), kSpan, prefix);
  const int member = TEAM == 1 ? 0 : threadIdx.x / 32;
  const int team = TEAM == 1 ? blockIdx.x * kWarps + threadIdx.x / 32 : blockIdx.x;
  const int end = runs.start_of(team + 1);

  Source source(own_shared, task.groups == 1);  // groups 1: a tile is read once
  Pages<X, C, D, Source> pages(task, source);
  auto request = [&](const Part& part, int which, int span) {  // whether it has tiles of the part
    const int first = max(span * kSpan, part.first_tile);
    const int last = min((span + 1) * kSpan, part.last_tile);
    if (first < last)
      pages.request(which, part.hidden + first, part.hidden + last, part.hidden + part.tiles);
  };
  auto begin_part = [&](int& at) {
    Part part = runs.find<MODE>(task, at, end);
    if (part.first_tile >= part.tiles) {
      at = part.item + runs.places_of(part.row);
      if (at >= end) return part;
      part = runs.find<MODE>(task, at, end);
    }
    const int own = part.first_tile / kSpan + member;  // this warp takes every TEAM-th span
    pages.row = part.row, pages.kv_head = part.pass / task.groups;
    pages.load_ids(part.hidden + min(own * kSpan, part.tiles - 1), part.hidden + part.tiles);
#pragma unroll
    for (int ahead = 0; ahead < Source::kKeysAhead; ++ahead) {
      const int span = own + ahead * TEAM;
      // The predecessor writes the newest token, or at most kTile of them, which may lie in two
      // tiles. The tiles before may be loaded before the wait.
      if (!waited && (span + 1) * kSpan >= part.tiles - (SEVERAL ? 1 : 0)) {
        wait_for_predecessor();
        waited = true;
      }
      request(part, 0, span);
      if (ahead < Source::kValuesAhead) request(part, 1, span);
    }
    if (!waited) {
      wait_for_predecessor();
      waited = true;
    }
    return part;
  };
  // Loads for the next part are issued before the results of this one are stored, unless both use
  // the same shared memory or registers.
  constexpr bool kEarly = TEAM == 1 && Source::kRing;

  int at = runs.start_of(team);
  Part next = {};
  if (at < end) next = begin_part(at);
  while (at < end) {
    const Part part = next;
    const int context = task.context_lens[part.row] - part.hidden * kTile;
    const Columns columns =
        SEVERAL ? Columns::of<LIMITED>(task, part.row, part.pass, part.hidden) : Columns();
    const int first_head = part.pass % task.groups * kGroup;
    const int heads =
        SEVERAL ? columns.count : min(kGroup, task.group - first_head);  // of this pass
    S sums(task, part.row, part.pass / task.groups * task.group + first_head, heads, columns);
    for (int span = part.first_tile / kSpan + member; span * kSpan < part.last_tile; span += TEAM) {
      // alternately keys and values
      constexpr int kAhead = Source::kKeysAhead + Source::kValuesAhead;
      sums.add(
          source, max(span * kSpan, part.first_tile), min((span + 1) * kSpan, part.last_tile),
          context, [&] { request(part, kAhead % 2, span + kAhead / 2 * TEAM); },
          [&] { request(part, 1 - kAhead % 2, span + (kAhead + 1) / 2 * TEAM); });
    }
    at = part.next;
    if (kEarly && at < end) next = begin_part(at);
    sums.finish();
    if constexpr (TEAM == 1) {
      WarpParts<X, D, S> parts{task, runs, sums, part, team, heads, &columns};
      if (parts.meet()) parts.write();
    } else {
      const TeamParts<X, D, TEAM, S> parts{task,     runs,   part,    team,    heads,
                                           &columns, shared, kStride, &arrival};
      parts.store(sums);
      __syncthreads();
      parts.combine_warps();
      Source::release();
      __syncthreads();
      if (!part.whole() && parts.is_last()) parts.combine_teams();
    }
    if (!kEarly && at < end) next = begin_part(at);
  }
  if (!waited) wait_for_predecessor();

  for (int b = blockIdx.x; b < task.num_rows; b += gridDim.x) {  // padding
    if (runs.places_of(b) > 0) continue;
    if (several) {
      zero_row<X>(task, b, D);
      continue;
    }
    X* const out = static_cast<X*>(task.out) + b * task.out_stride;
    for (int i = threadIdx.x; i < task.heads * D; i += blockDim.x) out[i] = from_float<X>(0.0f);
  }
}

// Any head size and dtype, untuned: a warp computes one query and head, token by token.
template <typename X, typename C, int DIMS, Mode MODE = kOneQuery>  // dims per lane
__global__ void decode_attention_any(const __grid_constant__ Task task) {
  constexpr bool LIMITED = MODE == kLimited;
  const bool several = LIMITED ? task.max_query > 1 : MODE == kSeveral;
  wait_for_predecessor();
  const int lane = threadIdx.x % 32;
  const int index = blockIdx.x * kWarps + threadIdx.x / 32;
  const int each = several ? task.heads * task.max_query : task.heads;  // of a row
  const int row = index / each, head = index % task.heads;
  if (row >= task.num_rows) return;
  int context = task.context_lens[row], token_row = row;
  if (several) {
    const int query = index % each / task.heads, first = task.query_starts[row];
    const int queries = task.query_starts[row + 1] - first;
    if (query >= queries) return;
    token_row = first + query;
    if (context > 0) context += query + 1 - queries;
  }
  const int kv_head = head / task.group;
  const int head_size = task.head_size;
  const X* const q =
      static_cast<const X*>(task.qkv) + token_row * task.qkv_stride + head * head_size;
  X* const out = static_cast<X*>(task.out) + token_row * task.out_stride + head * head_size;
  const float slope = task.slopes ? task.slopes[head] * kLog2e : 0.0f, scale = task.scale * kLog2e;
  float query[DIMS] = {}, output[DIMS] = {}, most = -CUDART_INF_F, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < DIMS; ++i)
    if (lane + 32 * i < head_size) query[i] = to_float(q[lane + 32 * i]);
  auto number = [](C x) {
    if constexpr (std::is_same<C, X>::value)
      return to_float(x);
    else
      return expand(x);
  };
  int first = 0;
  if constexpr (LIMITED)
    if (task.window) first = max(0, context - task.window);
  for (int token = first; token < context; ++token) {
    const int64_t id = task.block_tables[row * task.table_stride + token / task.block_tokens];
    const int64_t at =
        cache_row(id, 0, kv_head, token % task.block_tokens, task.kv_heads, task.block_tokens);
    const C* const key = static_cast<const C*>(task.cache) + at * head_size;
    const C* const value = key + value_offset(task.kv_heads, task.block_tokens, head_size);
    float key_scale = 1.0f, value_scale = 1.0f;
    if constexpr (!std::is_same<C, X>::value) {
      key_scale = task.cache_scales[at];
      value_scale = task.cache_scales[at + value_offset(task.kv_heads, task.block_tokens, 1)];
    }
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < DIMS; ++i)
      if (lane + 32 * i < head_size) score += query[i] * number(key[lane + 32 * i]);
    score = warp_sum(score) * (scale * key_scale);
    if constexpr (LIMITED) {
      if (task.softcap > 0.0f)
        score = tanhf(score / (task.softcap * kLog2e)) * (task.softcap * kLog2e);
      if (task.key_bias)
        score +=
            kLog2e *
            task.key_bias[head * int64_t(task.bias_columns) + min(token, task.bias_columns - 1)];
    }
    score += slope * float(token - (context - 1));
    const float now = fmaxf(most, score), shrink = exp2f(most - now), p = exp2f(score - now);
    most = now;
    sum = sum * shrink + p;
#pragma unroll
    for (int i = 0; i < DIMS; ++i)
      if (lane + 32 * i < head_size)
        output[i] = output[i] * shrink + p * value_scale * number(value[lane + 32 * i]);
  }
#pragma unroll
  for (int i = 0; i < DIMS; ++i)
    if (lane + 32 * i < head_size)
      out[lane + 32 * i] = from_float<X>(context ? output[i] / sum : 0.0f);
}

// The number of blocks of a launch, and whether each is one team.
struct Grid {
  int blocks, teams;
  bool few;
};

// Few items: the warps of a block share one and store one part. 8-bit tiles are bound by
// instructions rather than bytes, so sharing among warps gains less.
template <bool EXACT, typename Source>
Grid grid_of(int items) {
  const int blocks = std::min(Source::kResident * device().multiprocessors, kMaxBlocks);
  const bool few = items < (EXACT ? 8 : 2) * blocks;
  return {blocks, few ? blocks : kWarps * blocks, few};
}

// The share of the teams' time that items of equal length use if each runs on one team.
double busy(const Grid& grid, int items) {
  return double(items) / (double(grid.teams) * ceil_div(items, grid.teams));
}

// Return whether to launch four blocks per SM with 3-stage rings instead of three with 4-stage
// rings: more warps with fewer bytes in flight win if they divide items of equal length more
// evenly. A 16-bit cache has as many bytes in flight per SM either way; there, only if each item
// then has its own block. LLaMA-3-8B on an H200, us of rows of 544 tokens, three pieces and four:
//   16 / 64 / 128 / 192 / 256 rows over an fp8 cache 14.4 / 22.0 / 42.0 / 64.1 / 76.6 and
//   12.7 / 29.7 / 45.9 / 54.5 / 84.1; 64 / 128 / 256 rows in bf16 35.8 / 70.7 / 137.8 and
//   39.1 / 71.5 / 136.4; 254 rows of a load of chats 59.3 and 57.4 (fp8), 90.5 and 89.5 (bf16).
template <bool EXACT>
bool more_warps(const Grid& three_pieces, const Grid& four_pieces, int items) {
  if (items <= four_pieces.blocks) return false;
  if (EXACT) return items <= three_pieces.blocks;
  return busy(three_pieces, items) > 1.1 * busy(four_pieces, items);
}

// Pieces of the longest ring. Heads of 256 over an 8-bit cache have rings of three pieces, which
// leave room for a second block.
template <int D, bool EXACT>
constexpr int kMostPieces = D > 160 && !EXACT ? 3 : 4;

// Return whether to launch two blocks per SM with 3-stage rings for heads of 256, instead of one
// with 4-stage rings: a block waits while it adds up an item and starts the next one. One block
// wins if it divides an item among teams, or reads at the roof.
template <int D, bool EXACT>
bool two_blocks(const Grid& four_pieces, int items) {
  return D > 160 && EXACT && four_pieces.few && items > four_pieces.blocks;
}

int prefix_bytes(const Task& task) {
  return (std::max(task.num_rows, kRowsOfWarp) + 1) * int(sizeof(int));
}

template <typename X, typename C, int D, typename Source, Mode MODE = kOneQuery>
int run_source(const Task& task, const Grid& grid, void* stream) {
  return launch(
      "decode_attention",
      grid.few ? decode_attention<X, C, D, kWarps, Source, MODE>
               : decode_attention<X, C, D, 1, Source, MODE>,
      grid.blocks, 32 * kWarps,
      kWarps * (grid.few ? warp_bytes<D, kWarps, Source>() : Source::kBytes) + prefix_bytes(task),
      stream, task);
}

// The same for limited rows by loads, with blocks as teams alone: one warp's registers do not hold
// all of that.
template <typename X, typename C, int D, typename Source>
int run_limited_by_loads(const Task& task, int items, void* stream) {
  const Grid grid = grid_of<std::is_same<C, X>::value, Source>(items);
  return launch("decode_attention", decode_attention<X, C, D, kWarps, Source, kLimited>,
                grid.blocks, 32 * kWarps,
                kWarps * warp_bytes<D, kWarps, Source>() + prefix_bytes(task), stream, task);
}

// Return whether its blocks fit on a multiprocessor and each span of tiles lies in one cache block.
template <typename Source>
bool takes(const Task& task) {
  const int block = kWarps * Source::kBytes + prefix_bytes(task) + 1536;
  return device().capability >= 90 && task.block_tokens % (Source::kSpan * kTile) == 0 &&
         Source::kResident * block <= device().shared_bytes + 1024;
}

// Launches decode attention in a separate launch.
int finish_rows(const Task& task, void* stream) {
  tridecode_gemm_task rows = {};
  rows.out = const_cast<void*>(task.qkv), rows.out_stride = task.qkv_stride;
  rows.tokens = task.num_rows, rows.dtype = task.dtype;
  rows.heads = task.heads, rows.kv_heads = task.kv_heads, rows.head_size = task.head_size;
  rows.cache = task.cache, rows.cache_scales = task.cache_scales;
  rows.cache_format = task.cache_format, rows.block_tokens = task.block_tokens;
  rows.positions = task.positions, rows.kv_slots = task.kv_slots;
  rows.cos = task.cos, rows.sin = task.sin;
  rows.rotary_size = task.rotary_size, rows.interleaved = task.interleaved;
  return tridecode_rotate_and_cache(&rows, stream);
}

template <typename X, typename C, int D>
int run(const Task& task, void* stream) {
  constexpr bool kExact = std::is_same<C, X>::value;
  using ByLoads = std::conditional_t<kExact, Loads<X, D>, Loads8<C, D>>;
  using ThreePieces = Copies<X, C, D, 3>;
  using FourPieces = Copies<X, C, D, kMostPieces<D, kExact>>;
  const int items = task.num_rows * task.kv_heads * task.groups;
  if (items > task.num_counters)
    return fail("decode_attention: %d rows of %d kv heads need more than %d counters",
                task.num_rows, task.kv_heads, task.num_counters);
  const Clusters clusters = clusters_of(task);
  if (task.unfinished && !(clusters.blocks && finishes_rows<X, C, D>(task))) {
    if (int status = finish_rows(task, stream)) return status;
    Task finished = task;
    finished.unfinished = 0;
    return run<X, C, D>(finished, stream);
  }
  if (clusters.blocks) return run_clusters<X, C, D>(task, clusters, stream);
  // No ring in shared memory for one or two rows, so that the next GEMM becomes resident earlier.
  if (task.num_rows > 2) {
    const Grid three = grid_of<kExact, ThreePieces>(items),
               four = grid_of<kExact, FourPieces>(items);
    if constexpr (D <= 128)
      if (more_warps<kExact>(three, four, items) && takes<ThreePieces>(task))
        return run_source<X, C, D, ThreePieces>(task, three, stream);
    if constexpr (D > 160)
      if (two_blocks<D, kExact>(four, items) && takes<ThreePieces>(task))
        return run_source<X, C, D, ThreePieces>(task, three, stream);
    if (takes<FourPieces>(task)) return run_source<X, C, D, FourPieces>(task, four, stream);
  }
  return run_source<X, C, D, ByLoads>(task, grid_of<kExact, ByLoads>(items), stream);
}

// Rows of several queries, or limited ones; finished. The tuned rings are for rows that are read
// once; teams process rows of several queries with rings for the usual head sizes.
template <typename X, typename C, int D, Mode MODE>
int run_several(const Task& task, void* stream) {
  constexpr bool kExact = std::is_same<C, X>::value;
  using ByLoads = std::conditional_t<kExact, Loads<X, D>, Loads8<C, D>>;
  using Ring = Copies<X, C, D, kMostPieces<D, kExact>>;
  using ThreePieces = Copies<X, C, D, 3>;
  const int items = task.num_rows * task.kv_heads * task.groups;
  if (items > task.num_counters)
    return fail("decode_attention: %d rows of %d kv heads and %d passes need more than %d counters",
                task.num_rows, task.kv_heads, task.groups, task.num_counters);
  if constexpr (MODE == kLimited) {
    const Clusters clusters = task.max_query > 1 ? Clusters{} : clusters_of(task);
    if (clusters.blocks) return launch_clusters<X, C, D, ByLoads, kLimited>(task, clusters, stream);
  }
  if constexpr (MODE == kSeveral && (D == 64 || D == 128)) {
    const Clusters clusters = clusters_of(task);
    if (clusters.blocks) return launch_clusters<X, C, D, ByLoads, kSeveral>(task, clusters, stream);
  }
  if constexpr (D > 160 && MODE == kLimited)
    if (task.num_rows > 2 && two_blocks<D, kExact>(grid_of<kExact, Ring>(items), items) &&
        takes<ThreePieces>(task))
      return run_source<X, C, D, ThreePieces, MODE>(task, grid_of<kExact, ThreePieces>(items),
                                                    stream);
  if constexpr (D == 64 || D == 128 || MODE == kLimited)
    if (task.num_rows > 2 && takes<Ring>(task))
      return run_source<X, C, D, Ring, MODE>(task, grid_of<kExact, Ring>(items), stream);
  if constexpr (MODE == kLimited)
    return run_limited_by_loads<X, C, D, ByLoads>(task, items, stream);
  else
    return run_source<X, C, D, ByLoads, MODE>(task, grid_of<kExact, ByLoads>(items), stream);
}

template <typename X, typename C, Mode MODE>
int run_any(const Task& task, void* stream) {
  const auto kernel = task.head_size <= 64    ? decode_attention_any<X, C, 2, MODE>
                      : task.head_size <= 128 ? decode_attention_any<X, C, 4, MODE>
                                              : decode_attention_any<X, C, 8, MODE>;
  const int64_t queries = MODE == kOneQuery ? 1 : std::max(task.max_query, 1);
  return launch("decode_attention", kernel,
                ceil_div(int64_t(task.num_rows) * task.heads * queries, kWarps), 32 * kWarps, 0,
                stream, task);
}

template <typename X, typename C, int D, Mode MODE>
int run_size(const Task& task, void* stream) {
  if constexpr (MODE != kOneQuery)
    return run_several<X, C, D, MODE>(task, stream);
  else
    return run<X, C, D>(task, stream);
}

template <typename X, typename C, Mode MODE = kOneQuery>
int run_cache_of(const tridecode_attention_task& given, void* stream) {
  const int head_size = given.head_size, group = given.heads / given.kv_heads;
  const int columns = group * (MODE == kOneQuery ? 1 : std::max(given.max_query, 1));
  const Task task = {given, group, ceil_div(columns, kGroup)};
  if (MODE != kOneQuery && given.unfinished)
    return fail("decode_attention: unfinished rows of %d queries, window %d, soft cap %g",
                given.max_query, given.window, given.softcap);
  if (head_size > 256) return fail("decode_attention: head size %d; at most 256", head_size);
  if constexpr (sizeof(X) == 2) {
    const bool aligned = aligned16(task.out) && aligned16(task.qkv) && aligned16(task.cache) &&
                         aligned16(task.cache_scales) && task.qkv_stride % 8 == 0 &&
                         task.out_stride % 8 == 0 && task.block_tokens % kTile == 0;
    if (aligned && task.scratch && !task.key_bias) {
      if (head_size == 64) return run_size<X, C, 64, MODE>(task, stream);
      if (head_size == 96) return run_size<X, C, 96, MODE>(task, stream);
      if (head_size == 128) return run_size<X, C, 128, MODE>(task, stream);
      if constexpr (MODE != kLimited) {  // of no published model with windows or soft caps
        if (head_size == 80) return run_size<X, C, 80, MODE>(task, stream);
        if (head_size == 112) return run_size<X, C, 112, MODE>(task, stream);
        if (head_size == 160) return run_size<X, C, 160, MODE>(task, stream);
      }
      if (head_size == 256) return run_size<X, C, 256, MODE>(task, stream);
    }
  }
  if (task.unfinished) {
    if (int status = finish_rows(task, stream)) return status;
  }
  return run_any<X, C, MODE>(task, stream);
}

}  // namespace

// A cache of 8 bits: decode_attention_8bit.cu. Rows of several queries: decode_several.cu and
// decode_several_8bit.cu. A window, a soft cap or biases of keys: decode_limited.cu and
// decode_limited_8bit.cu.
int run_decode_8bit(const tridecode_attention_task& task, void* stream);
// Many query heads per KV head: decode_wide.cu.
bool takes_wide(const tridecode_attention_task& task);
int run_wide(const tridecode_attention_task& task, void* stream);
int run_limited(const tridecode_attention_task& task, void* stream);
int run_limited_8bit(const tridecode_attention_task& task, void* stream);
int run_several_queries(const tridecode_attention_task& task, void* stream);
int run_several_queries_8bit(const tridecode_attention_task& task, void* stream);

}  // namespace tridecode
