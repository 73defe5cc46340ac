// Causal attention of few queries per row after a long prefix, ragged, with or without ALiBi, over
// a cache of 16 or 8 bits; LIMITED: with a window or a soft cap. Fresh prompts read keys and values
// from the output of the projection if the cache has 16 bits.
//
// A warp computes 16 columns (split_work.cuh) of a kv head, so that queries of all heads of a group
// share the loads of its keys and values. The tiles of a row are divided among blocks; a second
// launch combines the results of rows in several parts. Tiles of tokens from earlier steps are
// loaded while the predecessor still runs.
//
// Bytes moved: 2 * context * kv_heads * head_size * sizeof(C), once per 16 * kMostWarps columns.
// FLOP: 2 * 2 * head_size * heads * sum over queries of visible keys.
// Bench: python -m tridecode.kernels.bench prefix_attention
#pragma once
#include <algorithm>

#include "api/attention.h"
#include "attention/prefill/prefill_attention.cuh"
#include "attention/prefill/split_tiles.cuh"
#include "attention/soft_cap.cuh"

namespace tridecode {
namespace {

constexpr int kMostWarps = 8;      // per block
constexpr int kCombineWarps = 8;   // per block of the second launch
constexpr int kCombineBlocks = 2;  // per multiprocessor, in the second launch

// The two columns of a lane, which are 8 apart.
struct LaneColumns {
  int query[2], head[2];
  bool present[2];

  static __device__ __forceinline__ LaneColumns of(const SplitTask& task, const SplitItem& item,
                                                   int kv_head) {
    LaneColumns found;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
      found.present[i] = column < item.count;
      const int place = item.first + min(column, item.count - 1);
      found.query[i] = place / task.group;
      found.head[i] = kv_head * task.group + place % task.group;
    }
    return found;
  }
};

// Grid: task.blocks. A block has one warp per 16 columns.
template <typename X, typename C, int D, bool LIMITED>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    prefill_attention_split(const __grid_constant__ SplitTask task) {
  using Tiles = SplitTilesOf<X, C, D>;
  constexpr int kKeys = Tiles::kKeys;
  extern __shared__ __align__(128) char shared[];
  const Division division = divide(task, reinterpret_cast<int2*>(shared + Tiles::kBytes));
  const Tiles tiles(shared);
  const int t = threadIdx.x % 4;
  const float scale = task.scale * kLog2e;
  const SoftCap soft_cap = SoftCap::of(task.softcap);
  bool waited = false;

  for (int chunk = blockIdx.x; chunk < division.chunks(); chunk += gridDim.x) {
    const int r = division.row_of(chunk), row = task.first_row + r;
    const SplitRow found = SplitRow::of(task, row, division.length);
    const int within = chunk - division.before[r].x, part = within % found.parts;
    const int kv_head = within / found.parts % task.kv_heads;
    const SplitItem item = SplitItem::of(task, found, within / found.parts / task.kv_heads);
    if (part >= item.parts) continue;
    const int begin = item.first_tile + item.tiles * part / item.parts;
    const int end = item.first_tile + item.tiles * (part + 1) / item.parts;
    const auto source = SplitSource<X, C>::of(task, row, found, kv_head, item.visible);
    auto load = [&](int tile) {
      if (tile < end) tiles.load(task, source, tile, (tile - begin) % kStages);
      commit_copies();
    };
#pragma unroll
    for (int ahead = 0; ahead < kStages - 1; ++ahead) {
      // tokens of this step are written by the predecessor
      if (!waited && (begin + ahead + 1) * kKeys > found.before) {
        wait_for_predecessor();
        waited = true;
      }
      load(begin + ahead);
    }
    if (!waited) wait_for_predecessor();
    waited = true;

    const bool active = int(threadIdx.x) / 32 * 16 < item.count;  // the warp has columns
    const LaneColumns columns = LaneColumns::of(task, item, kv_head);
    uint32_t q[D / 16][4];
    float slope[2] = {};
    int position[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const X* const from = static_cast<const X*>(task.qkv) +
                            (found.start + columns.query[i]) * task.qkv_stride +
                            columns.head[i] * D + 2 * t;
      position[i] = found.before + columns.query[i];
      if (task.slopes) slope[i] = task.slopes[columns.head[i]] * kLog2e;
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        q[k][i] = *reinterpret_cast<const uint32_t*>(from + k * 16);
        q[k][i + 2] = *reinterpret_cast<const uint32_t*>(from + k * 16 + 8);
      }
    }
    using Sums = TileSums<X, D, kKeys>;
    Sums sums;
    for (int tile = begin; tile < end; ++tile) {
      wait_copies<kStages - 2>();
      __syncthreads();
      load(tile + kStages - 1);
      const X* const keys = tiles.take(tile, item.visible, (tile - begin) % kStages);
      if (!active) continue;
      float scores[kKeys / 8][4] = {};
      Sums::score(scores, keys, [&](int k) -> const uint32_t (&)[4] { return q[k]; });
      // masking, biases or a soft cap may apply
      const bool masked =
          task.slopes || scale <= 0.0f || (tile + 1) * kKeys > found.before + item.first_query + 1;
      if constexpr (LIMITED) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int behind = tile * kKeys + n * 8 + 2 * t + i % 2 - position[i / 2];
            scores[n][i] *= scale;
            if (task.softcap > 0.0f) scores[n][i] = soft_cap(scores[n][i]);
            scores[n][i] += slope[i / 2] * float(behind);
            if (behind > 0 || (task.window && behind <= -task.window)) scores[n][i] = -CUDART_INF_F;
          }
        }
      } else if (masked) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int behind = tile * kKeys + n * 8 + 2 * t + i % 2 - position[i / 2];
            scores[n][i] = scores[n][i] * scale + slope[i / 2] * float(behind);
            if (behind > 0) scores[n][i] = -CUDART_INF_F;
          }
        }
      }
      sums.weigh(scores, LIMITED || masked ? 1.0f : scale);
      sums.add_values(scores, keys + Tiles::kTile);
    }
    __syncthreads();  // the next chunk's tiles overwrite these
    if (!active) continue;
    sums.finish();
    const int slot = division.before[r].y + within;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!columns.present[i]) continue;
      if (item.parts == 1) {
        sums.write(i, static_cast<X*>(task.out) +
                          (found.start + columns.query[i]) * task.out_stride + columns.head[i] * D);
        continue;
      }
      const int column = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
      sums.write_part(i, part_output<D>(task, slot, column));
      if (t == 0)
        __stcg(part_totals<D>(task, slot, column), make_float2(sums.most[i], sums.sum[i]));
    }
  }
  if (!waited) wait_for_predecessor();
}

// Combines the parts of items; each warp processes one column.
template <typename X, int D>
__global__ void __launch_bounds__(32 * kCombineWarps, kCombineBlocks)
    combine_prefill_parts(const __grid_constant__ SplitTask task) {
  extern __shared__ int2 before[];
  const Division division = divide(task, before);
  wait_for_predecessor();
  if (division.parts() == 0) return;
  constexpr int kChunks = (D + 127) / 128;  // chunks of 128 dims, four per lane
  const int lane = threadIdx.x % 32;
  const int* const starts = task.query_starts + task.first_row;
  const int origin = task.query_starts[task.origin_row];
  const int tokens = starts[division.rows] - origin;  // without padding
  for (int i = blockIdx.x * kCombineWarps + threadIdx.x / 32; i < tokens * task.heads;
       i += gridDim.x * kCombineWarps) {
    const int token = i / task.heads, head = i % task.heads, kv_head = head / task.group;
    int r = 0, high = division.rows;  // starts[r] <= token < starts[high]
    while (high - r > 1) {
      const int middle = (r + high) / 2;
      (starts[middle] - origin <= token ? r : high) = middle;
    }
    const SplitRow row = SplitRow::of(task, task.first_row + r, division.length);
    const int place = (token - row.start) * task.group + head % task.group;
    const int number = place / task.columns, column = place % task.columns;
    const SplitItem item = SplitItem::of(task, row, number);
    if (item.parts <= 1) continue;  // the first launch has written it
    const int slot = division.before[r].y + (number * task.kv_heads + kv_head) * row.parts;
    float peak = -CUDART_INF_F;
    for (int part = lane; part < item.parts; part += 32)
      peak = fmaxf(peak, __ldcg(part_totals<D>(task, slot + part, column)).x);
    peak = warp_max(peak);
    float all = 0.0f;
    float4 together[kChunks] = {};
    for (int first = 0; first < item.parts; first += 32) {
      const int count = min(32, item.parts - first);
      float weight = 0.0f;
      if (lane < count) {
        const float2 totals = __ldcg(part_totals<D>(task, slot + first + lane, column));
        weight = exp2f(totals.x - peak);
        all += weight * totals.y;
      }
#pragma unroll 8
      for (int part = 0; part < count; ++part) {
        const float share = __shfl_sync(kAll, weight, part);
        const float* const from = part_output<D>(task, slot + first + part, column) + 4 * lane;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (D % 128 != 0 && 4 * lane >= D) continue;
          const float4 four = __ldcg(reinterpret_cast<const float4*>(from + 128 * c));
          together[c].x += share * four.x, together[c].y += share * four.y;
          together[c].z += share * four.z, together[c].w += share * four.w;
        }
      }
    }
    const float inverse = 1.0f / warp_sum(all);
    if (D % 128 != 0 && 4 * lane >= D) continue;
    X* const out = static_cast<X*>(task.out) + token * task.out_stride + head * D + 4 * lane;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float4 four = together[c];
      *reinterpret_cast<uint2*>(out + 128 * c) = make_uint2(
          pack<X>(four.x * inverse, four.y * inverse), pack<X>(four.z * inverse, four.w * inverse));
    }
  }
}

template <typename X, typename C, int D, bool LIMITED>
int run_split_size(const PrefillTask& given, void* stream) {
  const int group = given.heads / given.kv_heads, multiprocessors = device().multiprocessors;
  const int warps = std::min(kMostWarps, ceil_div(int64_t(given.max_query) * group, 16));
  // small blocks: several per multiprocessor
  const SplitTask task = {given, group, 16 * warps, (warps <= 4 ? 2 : 1) * multiprocessors,
                          keys_of(D)};
  const int64_t floats = parts_of(task.blocks) * task.columns * (D + 2);
  if (floats * int64_t(sizeof(float)) > tridecode_decode_attention_scratch(256))
    return fail("prefill_attention: %d multiprocessors have no scratch memory for %d columns",
                multiprocessors, task.columns);
  const int status =
      launch("prefill_attention", prefill_attention_split<X, C, D, LIMITED>, task.blocks,
             32 * warps, SplitTilesOf<X, C, D>::kBytes + division_bytes(task), stream, task);
  if (status) return status;
  return launch("prefill_attention", combine_prefill_parts<X, D>, kCombineBlocks * multiprocessors,
                32 * kCombineWarps, division_bytes(task), stream, task);
}

// Return whether there is a kernel for the head size. No published model with windows or soft caps
// has head size 80 or 112.
inline bool takes_split_size(int head_size, bool is_limited) {
  return head_size == 64 || head_size == 96 || head_size == 128 || head_size == 256 ||
         (!is_limited && (head_size == 80 || head_size == 112));
}

template <bool LIMITED, typename X, typename C>
int run_split_of(const PrefillTask& task, void* stream) {
  if (task.head_size == 64) return run_split_size<X, C, 64, LIMITED>(task, stream);
  if (task.head_size == 96) return run_split_size<X, C, 96, LIMITED>(task, stream);
  if (task.head_size == 128) return run_split_size<X, C, 128, LIMITED>(task, stream);
  if (task.head_size == 256) return run_split_size<X, C, 256, LIMITED>(task, stream);
  if constexpr (!LIMITED) {
    if (task.head_size == 80) return run_split_size<X, C, 80, LIMITED>(task, stream);
    if (task.head_size == 112) return run_split_size<X, C, 112, LIMITED>(task, stream);
  }
  return fail("prefill_attention: no kernel that splits keys for head size %d", task.head_size);
}

// Over a cache of the activations' dtype.
template <bool LIMITED>
int run_split_exact(const PrefillTask& task, void* stream) {
  return for_16_bit_dtype(task.dtype, "prefill_attention", [&](auto zero) {
    using X = decltype(zero);
    return run_split_of<LIMITED, X, X>(task, stream);
  });
}
template <bool LIMITED>
int run_split_rounded(const PrefillTask& task, void* stream) {
  return for_16_bit_dtype(task.dtype, "prefill_attention", [&](auto zero) {
    return for_cache_format(task.cache_format, "prefill_attention", [&](auto number) {
      return run_split_of<LIMITED, decltype(zero), decltype(number)>(task, stream);
    });
  });
}

}  // namespace
}  // namespace tridecode
