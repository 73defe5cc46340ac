// Decode attention: one query token per row over its paged cache; multi-head, grouped-query and
// multi-query, with or without ALiBi. decode_tiles.cuh: what a warp does with a tile.
//
// Of few rows and heads without groups a cluster of blocks takes each:
// decode_attention_cluster.cuh. Else all tiles of the batch, ordered by row and head, are assigned
// to teams in contiguous runs of equal length. The device computes the runs from context_lens, so
// that the grid does not depend on them. Each row and head counts as a few tiles more than it has
// (begin_tiles), behind its last: a team with many short ones would else take much longer than one
// that streams the same bytes of a long one. A team is a warp or, if rows are few, a block. If a
// row and head is shared by several teams, each stores its running maximum, sum and output in
// scratch memory, and the last team to arrive combines them.
//
// Bytes moved: 2 * tokens * kv_heads * head_size * sizeof(C), and in 8 bits 8 * tokens * kv_heads.
// Bench: python -m tridecode.kernels.bench decode_attention
#pragma once
#include "decode_attention_cluster.cuh"

namespace tridecode {
namespace {

constexpr int kMaxBlocks = 1024;  // of the grid
constexpr int kLeastTiles = 2;    // of a warp, if the batch has few

// What another row and head costs a team, in tiles: its search, its block table, its first tiles.
__host__ __device__ constexpr int begin_tiles(int team_warps) { return team_warps == 1 ? 2 : 8; }

// prefix[row]: the number of tiles of all rows before it, each row rounded up to a multiple of
// `unit`, and `more` for each row with a context; prefix[num_rows]: the total.
__device__ __forceinline__ void scan_rows(const Task& task, int unit, int more, int* prefix,
                                          int* warp_totals) {
  __syncthreads();
  const int threads = blockDim.x, each = (task.num_rows + threads - 1) / threads;
  const int first = threadIdx.x * each, last = min(first + each, task.num_rows);
  int sum = 0;
  for (int row = first; row < last; ++row) {
    prefix[row] = sum;
    const int context = task.context_lens[row];
    if (context > 0) sum += (context + kTile * unit - 1) / (kTile * unit) * unit + more;
  }
  int inclusive = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAll, inclusive, offset);
    if (threadIdx.x % 32 >= offset) inclusive += other;
  }
  if (threadIdx.x % 32 == 31) warp_totals[threadIdx.x / 32] = inclusive;
  __syncthreads();
  int before = inclusive - sum;
  for (int warp = 0; warp < int(threadIdx.x) / 32; ++warp) before += warp_totals[warp];
  for (int row = first; row < last; ++row) prefix[row] += before;
  if (threadIdx.x == threads - 1) prefix[task.num_rows] = before + sum;
  __syncthreads();
}

// Of shared memory.
template <int D, int TEAM, typename Source>
__host__ __device__ constexpr int warp_bytes() {
  const int sums = TEAM == 1 ? 0 : (slot_floats(D) * 4 + 127) / 128 * 128;
  return Source::kBytes > sums ? Source::kBytes : sums;
}

template <typename X, typename C, int D, int TEAM, typename Source>
__global__ void __launch_bounds__(32 * kWarps, D <= 128              ? Source::kResident
                                               : Source::kDepth == 1 ? 2
                                                                     : 1)
    decode_attention(const __grid_constant__ Task task) {
  using S = Sums<X, C, D>;
  constexpr int VC = S::VC;
  extern __shared__ __align__(128) char shared[];
  char* const own_shared = shared + threadIdx.x / 32 * warp_bytes<D, TEAM, Source>();
  int* const prefix = reinterpret_cast<int*>(shared + kWarps * warp_bytes<D, TEAM, Source>());
  // the sums of the warps of a team, in place of their tiles
  auto sums_of = [&](int warp) {
    return reinterpret_cast<float*>(shared + warp * warp_bytes<D, TEAM, Source>());
  };
  __shared__ int warp_totals[kWarps];
  __shared__ unsigned arrivals[kWarps];

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int per_row = task.kv_heads * task.groups;  // passes of a row
  const int available = gridDim.x * (kWarps / TEAM);
  // If tiles are few, every team takes kLeast tiles of one row and head: the kernel is then bound
  // by latency, which every further part, and a second row in the same run, increases.
  constexpr int kLeast = kLeastTiles * TEAM;
  if (threadIdx.x % 32 == 0) Source::initialize(own_shared);  // scan_rows begins with a barrier
  int unit = TEAM == 1 ? 1 : kLeast;
  scan_rows(task, unit, TEAM == 1 ? begin_tiles(1) : 0, prefix, warp_totals);
  if (unit > 1 && prefix[task.num_rows] / unit * per_row > available) {
    unit = 1;
    scan_rows(task, unit, begin_tiles(TEAM), prefix, warp_totals);
  }
  const int total = prefix[task.num_rows] * per_row;
  const int useful = (total + kLeast - 1) / kLeast;
  const int teams = max(1, min(available, useful));
  const int member = TEAM == 1 ? 0 : threadIdx.x / 32;
  const int team = TEAM == 1 ? blockIdx.x * kWarps + threadIdx.x / 32 : blockIdx.x;
  const int quota = total / teams, extra = total % teams;
  auto start_of = [&](int w) { return w * quota + min(w, extra); };
  auto owner_of = [&](int tile) {
    return tile < extra * (quota + 1) ? tile / (quota + 1)
                                      : extra + (tile - extra * (quota + 1)) / quota;
  };
  const int begin = team < teams ? start_of(team) : 0, end = team < teams ? start_of(team + 1) : 0;

  Source source(own_shared, task.groups == 1);  // groups 1: a tile is read once
  Pages<X, C, D, Source> pages(task, source);

  struct Part {  // tiles first_tile .. last_tile of a pass over a row
    int row, pass, tiles, rounded, first_tile, last_tile;
    int item_begin;  // of (row, pass), in the order of all tiles
  };
  auto find = [&](int at) {  // the part that begins with tile `at`
    Part part;
    const int target = at / per_row;
    int low = 0, high = task.num_rows;  // prefix[low] <= target < prefix[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (prefix[middle] <= target)
        low = middle;
      else
        high = middle;
    }
    part.row = low;
    part.tiles = (task.context_lens[low] + kTile - 1) / kTile;
    part.rounded = prefix[low + 1] - prefix[low];
    const int within = at - prefix[low] * per_row;
    part.pass = within / part.rounded;
    part.first_tile = within - part.pass * part.rounded;
    part.last_tile = min(part.tiles, part.first_tile + (end - at));
    part.item_begin = at - part.first_tile;
    return part;
  };
  bool waited = false;
  auto begin_part = [&](int& at) {
    Part part = find(at);
    if (part.first_tile >= part.tiles) {  // a run may begin behind a part's last tile
      at = part.item_begin + part.rounded;
      if (at >= end) return part;
      part = find(at);
    }
    const int my_tile = part.first_tile + member;  // this warp takes every TEAM-th
    pages.row = part.row, pages.kv_head = part.pass / task.groups;
    pages.load_ids(min(my_tile, part.tiles - 1), part.tiles);
#pragma unroll
    for (int ahead = 0; ahead < Source::kDepth; ++ahead) {
      const int tile = my_tile + ahead * TEAM;
      // The predecessor writes the newest token; the tiles before it may be loaded before the wait.
      if (!waited && tile >= part.tiles - 1) {
        wait_for_predecessor();
        waited = true;
      }
      if (tile < part.last_tile) {
        pages.request_keys(tile, part.tiles);
        pages.request_values(tile, part.tiles);
      }
    }
    if (!waited) {
      wait_for_predecessor();
      waited = true;
    }
    return part;
  };
  // Tiles of the next part are requested before the results of this one are stored, unless both
  // use the same shared memory or registers.
  constexpr bool kEarly = TEAM == 1 && Source::kDepth > 1;

  int at = begin;
  Part part = {};
  if (at < end) part = begin_part(at);
  while (at < end) {
    const int row = part.row, pass = part.pass, tiles = part.tiles, first_tile = part.first_tile,
              last_tile = part.last_tile, item_begin = part.item_begin;
    const int my_tile = first_tile + member, context = task.context_lens[row];
    const int kv_head = pass / task.groups, first_head = pass % task.groups * kGroup;
    const int heads = min(kGroup, task.group - first_head);  // of this pass
    const int head = kv_head * task.group + first_head;      // the first of them
    S sums(task, row, head, heads);
    for (int tile = my_tile; tile < last_tile; tile += TEAM) {
      const int later = tile + Source::kDepth * TEAM;
      sums.add_tile(
          source, tile, context,
          [&] {
            if (later < last_tile) pages.request_keys(later, tiles);
          },
          [&] {
            if (later < last_tile) pages.request_values(later, tiles);
          });
    }
    at = last_tile == tiles ? item_begin + part.rounded : at + last_tile - first_tile;
    if (kEarly && at < end) part = begin_part(at);
    sums.finish();

    X* const out = static_cast<X*>(task.out) + row * task.out_stride + head * D;
    const bool whole = first_tile == 0 && last_tile == tiles;
    // a team stores at most two parts: of the row and head of its first tile, and of its last
    auto slot_of = [&](int w) {
      return static_cast<float*>(task.scratch) +
             int64_t(2 * w + (start_of(w) >= item_begin ? 0 : 1)) * slot_floats(D);
    };
    float* const slot = TEAM == 1 ? slot_of(team) : sums_of(member);
    if (TEAM == 1 && whole) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (2 * t + i >= heads) continue;
        const float scale_out = 1.0f / sums.sum[i];
#pragma unroll
        for (int c = 0; c < VC; ++c) {
          const int d = c * 64 + g * 8;
          if (D % 64 != 0 && d >= D) continue;
          float eight[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) eight[j] = sums.output[c][j / 2][j % 2 * 2 + i] * scale_out;
          store8(out + (2 * t + i) * D + d, eight);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (2 * t + i >= heads) continue;
        float* const mine = slot + (2 * t + i) * (D + 2);
        if (g == 0) *reinterpret_cast<float2*>(mine + D) = make_float2(sums.most[i], sums.sum[i]);
#pragma unroll
        for (int c = 0; c < VC; ++c) {
          const int d = c * 64 + g * 8;
          if (D % 64 != 0 && d >= D) continue;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            *reinterpret_cast<float2*>(mine + d + 2 * j) =
                make_float2(sums.output[c][j][i], sums.output[c][j][2 + i]);
        }
      }
      if (TEAM > 1) {  // combine the parts of the warps
        __syncthreads();
        float* const part = slot_of(team);
        for (int i = threadIdx.x; i < heads * D; i += 32 * TEAM) {
          const int h = i / D, d = i % D;
          float peak = -CUDART_INF_F, all = 0.0f, together = 0.0f;
#pragma unroll
          for (int w = 0; w < TEAM; ++w) peak = fmaxf(peak, sums_of(w)[h * (D + 2) + D]);
#pragma unroll
          for (int w = 0; w < TEAM; ++w) {
            const float* const theirs = sums_of(w) + h * (D + 2);
            const float share = exp2f(theirs[D] - peak);
            all += share * theirs[D + 1], together += share * theirs[d];
          }
          if (whole) {
            out[i] = from_float<X>(together / all);
          } else {
            __stcg(part + h * (D + 2) + d, together);
            if (d == 0)
              __stcg(reinterpret_cast<float2*>(part + h * (D + 2) + D), make_float2(peak, all));
          }
        }
        Source::release();
        __syncthreads();
      }
    }
    if (!whole) {
      device_fence();
      if (TEAM == 1)
        __syncwarp();
      else
        __syncthreads();
      const int item = row * per_row + pass;
      if (TEAM == 1 ? lane == 0 : threadIdx.x == 0)
        arrivals[TEAM == 1 ? threadIdx.x / 32 : 0] =
            atomicAdd(task.counters + item, unsigned(last_tile - first_tile)) +
            (last_tile - first_tile);
      if (TEAM == 1)
        __syncwarp();
      else
        __syncthreads();
      const unsigned arrived = arrivals[TEAM == 1 ? threadIdx.x / 32 : 0];
      if (arrived == unsigned(tiles)) {
        if (TEAM == 1 ? lane == 0 : threadIdx.x == 0)
          task.counters[item] = 0;  // for the next launch
        device_fence();
        const int from = owner_of(item_begin), to = owner_of(item_begin + tiles - 1);
        for (int h = member; h < heads; h += TEAM) {
          // lane w holds the maximum and the sum of part w; more than 32 parts take turns
          float peak = -CUDART_INF_F;
          for (int w = from + lane; w <= to; w += 32)
            peak = fmaxf(peak, __ldcg(slot_of(w) + h * (D + 2) + D));
          peak = warp_max(peak);
          float all = 0.0f;
          float together[VC][2] = {};
          for (int first = from; first <= to; first += 32) {
            const int count = min(32, to - first + 1);
            float weight = 0.0f;
            if (lane < count) {
              const float2 part =
                  __ldcg(reinterpret_cast<const float2*>(slot_of(first + lane) + h * (D + 2) + D));
              weight = exp2f(part.x - peak);
              all += weight * part.y;
            }
#pragma unroll 8
            for (int w = 0; w < count; ++w) {
              const float share = __shfl_sync(kAll, weight, w);
              const float* part = slot_of(first + w) + h * (D + 2);
#pragma unroll
              for (int c = 0; c < VC; ++c) {
                const int d = c * 64 + lane * 2;
                if (D % 64 != 0 && d >= D) continue;
                const float2 two = __ldcg(reinterpret_cast<const float2*>(part + d));
                together[c][0] += share * two.x, together[c][1] += share * two.y;
              }
            }
          }
          const float scale_out = 1.0f / warp_sum(all);
#pragma unroll
          for (int c = 0; c < VC; ++c) {
            const int d = c * 64 + lane * 2;
            if (D % 64 != 0 && d >= D) continue;
            *reinterpret_cast<uint32_t*>(out + h * D + d) =
                pack<X>(together[c][0] * scale_out, together[c][1] * scale_out);
          }
        }
      }
      if (TEAM > 1) __syncthreads();  // before `arrivals` is written again
    }
    if (!kEarly && at < end) part = begin_part(at);
  }
  if (!waited) wait_for_predecessor();

  for (int b = blockIdx.x; b < task.num_rows; b += gridDim.x) {  // padding
    if (prefix[b + 1] > prefix[b]) continue;
    X* const out = static_cast<X*>(task.out) + b * task.out_stride;
    for (int i = threadIdx.x; i < task.heads * D; i += blockDim.x) out[i] = from_float<X>(0.0f);
  }
}

// Any head size and dtype, not tuned: a warp computes one row and head, token by token.
template <typename X, typename C, int DIMS>  // dims per lane
__global__ void decode_attention_any(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const int lane = threadIdx.x % 32;
  const int index = blockIdx.x * kWarps + threadIdx.x / 32;
  const int row = index / task.heads, head = index % task.heads;
  if (row >= task.num_rows) return;
  const int context = task.context_lens[row], kv_head = head / task.group;
  const int head_size = task.head_size;
  const X* const q = static_cast<const X*>(task.qkv) + row * task.qkv_stride + head * head_size;
  X* const out = static_cast<X*>(task.out) + row * task.out_stride + head * head_size;
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
  for (int token = 0; token < context; ++token) {
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
    score = warp_sum(score) * (scale * key_scale) + slope * float(token - (context - 1));
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

template <typename X, typename C, int D, typename Source>
int run_source(const Task& task, int blocks, void* stream) {
  // Few rows and heads: the warps of a block share one, and store one part. Tiles of 8 bits cost
  // more instructions than bytes, so that the meetings of these warps pay less.
  constexpr int kMany = std::is_same<C, X>::value ? 8 : 2;
  const bool few = task.num_rows * task.kv_heads * task.groups < kMany * blocks;
  return launch(
      "decode_attention",
      few ? decode_attention<X, C, D, kWarps, Source> : decode_attention<X, C, D, 1, Source>,
      blocks < kMaxBlocks ? blocks : kMaxBlocks, 32 * kWarps,
      kWarps * (few ? warp_bytes<D, kWarps, Source>() : Source::kBytes) +
          (task.num_rows + 1) * sizeof(int),
      stream, task);
}

template <typename X, typename C, int D>
int run(const Task& task, void* stream) {
  constexpr bool kExact = std::is_same<C, X>::value;
  using ByLoads = std::conditional_t<kExact, Loads<X, D>, Loads8<C, D>>;
  using ByCopies = std::conditional_t<kExact, Copies<X, D>, Copies8<C, D>>;
  if (task.num_rows * task.kv_heads * task.groups > task.num_counters)
    return fail("decode_attention: %d rows of %d kv heads need more than %d counters",
                task.num_rows, task.kv_heads, task.num_counters);
  const int multiprocessors = device().multiprocessors;
  const Clusters clusters = clusters_of(task);
  if (clusters.blocks) return run_clusters<X, C, D>(task, clusters, stream);
  const int fit =
      (device().shared_bytes + 1024) / (kWarps * ByCopies::kBytes + (task.num_rows + 1) * 4 + 1280);
  const int wanted = D <= 128 ? ByCopies::kResident : 1;
  // For one or two rows no ring in shared memory: the next GEMM becomes resident earlier.
  if (device().capability >= 90 && fit >= wanted && task.num_rows > 2)
    return run_source<X, C, D, ByCopies>(task, wanted * multiprocessors, stream);
  return run_source<X, C, D, ByLoads>(task, (D <= 128 ? 3 : 2) * multiprocessors, stream);
}

template <typename X, typename C>
int run_any(const Task& task, void* stream) {
  const auto kernel = task.head_size <= 64    ? decode_attention_any<X, C, 2>
                      : task.head_size <= 128 ? decode_attention_any<X, C, 4>
                                              : decode_attention_any<X, C, 8>;
  return launch("decode_attention", kernel, ceil_div(int64_t(task.num_rows) * task.heads, kWarps),
                32 * kWarps, 0, stream, task);
}

template <typename X, typename C>
int run_cache_of(const tridecode_attention_task& given, void* stream) {
  const int head_size = given.head_size, group = given.heads / given.kv_heads;
  const Task task = {given, group, ceil_div(group, kGroup)};
  if (head_size > 256) return fail("decode_attention: head size %d; at most 256", head_size);
  if constexpr (sizeof(X) == 2) {
    const bool aligned = aligned16(task.out) && aligned16(task.qkv) && aligned16(task.cache) &&
                         aligned16(task.cache_scales) && task.qkv_stride % 8 == 0 &&
                         task.out_stride % 8 == 0 && task.block_tokens % kTile == 0;
    if (aligned && task.scratch) {
      if (head_size == 64) return run<X, C, 64>(task, stream);
      if (head_size == 80) return run<X, C, 80>(task, stream);
      if (head_size == 96) return run<X, C, 96>(task, stream);
      if (head_size == 112) return run<X, C, 112>(task, stream);
      if (head_size == 128) return run<X, C, 128>(task, stream);
      if (head_size == 256) return run<X, C, 256>(task, stream);
    }
  }
  return run_any<X, C>(task, stream);
}

}  // namespace

// A cache of 8 bits: decode_attention_8bit.cu.
int run_decode_8bit(const tridecode_attention_task& task, void* stream);

}  // namespace tridecode
