// Causal attention of many query tokens per row, ragged, with or without ALiBi; LIMITED: with a
// window, a soft cap or biases of keys. Fresh prompts read keys and values from the output of the
// projection, prompts with tokens in the cache from its blocks.
//
// A block computes 128 queries of one head, 16 per warp, or 64 if shared memory is small (64 KiB
// on sm_75, 99 KiB on sm_86, sm_89 and sm_120). It iterates over tiles of visible keys; two tiles
// are in shared memory at a time, one in use and one in flight. Scores and output stay in
// registers. Online softmax in base 2 and float32. Fully masked tiles are not read.
//
// FLOP: 2 * 2 * head_size * heads * sum over queries of visible keys.
// Bench: python -m tridecode.kernels.bench prefill_attention
#pragma once
#include "attention/prefill/prefill_attention.cuh"
#include "attention/soft_cap.cuh"
#include "attention/tile_products.cuh"
#include "cache/kv_cache.cuh"

namespace tridecode {
namespace {

constexpr int kAnyWarps = 8;  // of a block of prefill_attention_any
constexpr int kNoTile = -1;

// The keys and values of a row.
template <typename X>
struct Source {
  const X* keys;   // fresh prompt: its first token
  const X* cache;  // otherwise
  const int* table;
  int64_t stride;
  int kv_heads, kv_head, block_tokens, head_size;
  bool fresh;

  __device__ __forceinline__ const X* key(int token) const {
    if (fresh) return keys + token * stride;
    const int64_t id = table[token / block_tokens];
    return cache +
           cache_row(id, 0, kv_head, token % block_tokens, kv_heads, block_tokens) * head_size;
  }
  __device__ __forceinline__ int64_t to_value() const {
    return fresh ? int64_t(kv_heads) * head_size : value_offset(kv_heads, block_tokens, head_size);
  }
};

template <typename X>
__device__ __forceinline__ Source<X> source_of(const PrefillTask& task, int row, int head,
                                               int start, bool fresh) {
  const int kv_head = head / (task.heads / task.kv_heads);
  return {static_cast<const X*>(task.qkv) + start * task.qkv_stride +
              int64_t(task.heads + kv_head) * task.head_size,
          static_cast<const X*>(task.cache),
          task.block_tables + row * task.table_stride,
          task.qkv_stride,
          task.kv_heads,
          kv_head,
          task.block_tokens,
          task.head_size,
          fresh};
}

// STAGES: tiles of keys and values in shared memory. With one, a tile is loaded after the previous
// one has been used.
template <int HEAD, int WARPS, int TILE_KEYS, int STAGES>
struct Layout {
  static constexpr int kHead = HEAD, kKeys = TILE_KEYS, kStages = STAGES;
  static constexpr int kThreads = 32 * WARPS;
  static constexpr int kQueries = 16 * WARPS;
  static constexpr int kPitch = row_pitch(HEAD);
  static constexpr int kTile = kKeys * kPitch;
  static constexpr int kBytes = (kQueries * kPitch + 2 * STAGES * kTile) * 2;
  static constexpr bool kKeepQueries = HEAD <= 128;  // in registers
};

template <typename X, typename L, bool LIMITED>
__global__ void __launch_bounds__(L::kThreads, 1)
    prefill_attention(const __grid_constant__ PrefillTask task) {
  constexpr int D = L::kHead, KEYS = L::kKeys, kSteps = D / 16;
  extern __shared__ uint4 shared[];
  X* const qs = reinterpret_cast<X*>(shared);
  X* const tiles = qs + L::kQueries * L::kPitch;  // keys and values of each stage

  wait_for_predecessor();
  const int row = task.first_row + blockIdx.z, head = blockIdx.y;
  const int first_token = task.query_starts[task.origin_row];
  const int start = task.query_starts[row] - first_token,
            queries = task.query_starts[row + 1] - first_token - start;
  const int first_query = (gridDim.x - 1 - blockIdx.x) * L::kQueries;  // longest first
  if (first_query >= queries) return;
  const int context = task.context_lens[row];
  const int before = context - queries;  // tokens from earlier steps
  const Source<X> source = source_of<X>(task, row, head, start, before == 0);
  const int64_t to_value = source.to_value();
  // keys visible to any of the queries
  const int visible = min(context, before + first_query + L::kQueries);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  auto load_tile = [&](int first_key, int stage) {
    X* const keys = tiles + stage * 2 * L::kTile;
    X* const values = keys + L::kTile;
    constexpr int kPieces = D / 8;
    for (int i = threadIdx.x; i < KEYS * kPieces; i += L::kThreads) {
      const int token = i / kPieces, d = i % kPieces * 8;
      const bool valid = first_key + token < visible;
      const X* const from = source.key(valid ? first_key + token : 0) + d;
      copy16_async(keys + token * L::kPitch + d, from, valid);
      copy16_async(values + token * L::kPitch + d, from + to_value, valid);
    }
    commit_copies();
  };
  {
    constexpr int kPieces = D / 8;
    const X* const q =
        static_cast<const X*>(task.qkv) + (start + first_query) * task.qkv_stride + head * D;
    for (int i = threadIdx.x; i < L::kQueries * kPieces; i += L::kThreads) {
      const int token = i / kPieces, d = i % kPieces * 8;
      const bool valid = first_query + token < queries;
      copy16_async(qs + token * L::kPitch + d, q + (valid ? token * task.qkv_stride + d : 0),
                   valid);
    }
  }
  // the tile of the first key that the first query sees
  int first_tile = 0;
  if constexpr (LIMITED)
    if (task.window) first_tile = max(0, before + first_query + 1 - task.window) / KEYS;
  load_tile(first_tile * KEYS, first_tile % L::kStages);

  const float scale = task.scale * kLog2e, slope = task.slopes ? task.slopes[head] * kLog2e : 0.0f;
  const SoftCap soft_cap = SoftCap::of(task.softcap);
  const int warp_query = first_query + warp * 16;
  const int position[2] = {before + warp_query + g, before + warp_query + g + 8};
  using Sums = TileSums<X, D, KEYS>;
  Sums sums;
  uint32_t q[L::kKeepQueries ? kSteps : 1][4];
  const X* const q_row = qs + (warp * 16 + lane % 16) * L::kPitch + lane / 16 * 8;

  const int num_tiles = (visible + KEYS - 1) / KEYS;
  for (int tile = first_tile; tile < num_tiles; ++tile) {
    const int first_key = tile * KEYS;
    if (L::kStages > 1 && tile + 1 < num_tiles) {
      load_tile(first_key + KEYS, (tile + 1) % L::kStages);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    if (L::kKeepQueries && tile == first_tile) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_matrices(q[L::kKeepQueries ? k : 0], q_row + k * 16);
    }
    // otherwise the tile is masked for all queries of this warp
    bool seen = first_key <= before + warp_query + 15;
    if constexpr (LIMITED)
      seen = seen && (!task.window || first_key + KEYS > before + warp_query + 1 - task.window);
    if (seen) {
      const X* const keys = tiles + tile % L::kStages * 2 * L::kTile;
      const X* const values = keys + L::kTile;
      float scores[KEYS / 8][4] = {};
      Sums::score(scores, keys, [&](int k) -> const uint32_t (&)[4] {
        if (!L::kKeepQueries) load_matrices(q[0], q_row + k * 16);
        return q[L::kKeepQueries ? k : 0];
      });
      const bool edge = first_key + KEYS - 1 > before + warp_query || first_key + KEYS > visible;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int behind = first_key + n * 8 + 2 * t + i % 2 - position[i / 2];
          if constexpr (LIMITED) {
            scores[n][i] *= scale;
            if (task.softcap > 0.0f) scores[n][i] = soft_cap(scores[n][i]);
            scores[n][i] += slope * float(behind);
            if (behind > 0 || (task.window && behind <= -task.window)) scores[n][i] = -CUDART_INF_F;
            continue;
          }
          scores[n][i] = scores[n][i] * scale + slope * float(behind);
          if (edge && behind > 0) scores[n][i] = -CUDART_INF_F;
        }
      }
      sums.weigh(scores);
      sums.add_values(scores, values);
    }
    __syncthreads();
    if (L::kStages == 1 && tile + 1 < num_tiles) load_tile(first_key + KEYS, 0);
  }
  sums.finish();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = warp_query + g + 8 * i;
    if (query >= queries) continue;
    sums.write(i, static_cast<X*>(task.out) + (start + query) * task.out_stride + head * D);
  }
}

// Any head size and dtype, untuned: a warp computes one query of one head, key by key.
template <typename X, int DIMS, bool LIMITED>  // dims per lane
__global__ void prefill_attention_any(const __grid_constant__ PrefillTask task) {
  wait_for_predecessor();
  const int lane = threadIdx.x % 32, head = blockIdx.y, row = task.first_row + blockIdx.z;
  const int first_token = task.query_starts[task.origin_row];
  const int start = task.query_starts[row] - first_token,
            queries = task.query_starts[row + 1] - first_token - start;
  const int query = blockIdx.x * kAnyWarps + threadIdx.x / 32;
  if (query >= queries) return;
  const int before = task.context_lens[row] - queries, size = task.head_size;
  const Source<X> source = source_of<X>(task, row, head, start, before == 0);
  const int64_t to_value = source.to_value();
  const X* const q =
      static_cast<const X*>(task.qkv) + (start + query) * task.qkv_stride + head * size;
  X* const out = static_cast<X*>(task.out) + (start + query) * task.out_stride + head * size;
  const float scale = task.scale * kLog2e, slope = task.slopes ? task.slopes[head] * kLog2e : 0.0f;
  float mine[DIMS] = {}, output[DIMS] = {}, most = -CUDART_INF_F, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < DIMS; ++i)
    if (lane + 32 * i < size) mine[i] = to_float(q[lane + 32 * i]);
  int first = 0;
  if constexpr (LIMITED)
    if (task.window) first = max(0, before + query + 1 - task.window);
  for (int token = first; token <= before + query; ++token) {
    const X* const key = source.key(token);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < DIMS; ++i)
      if (lane + 32 * i < size) score += mine[i] * to_float(key[lane + 32 * i]);
    score = warp_sum(score) * scale;
    if constexpr (LIMITED) {
      if (task.softcap > 0.0f)
        score = tanhf(score / (task.softcap * kLog2e)) * (task.softcap * kLog2e);
      if (task.key_bias)
        score +=
            kLog2e *
            task.key_bias[head * int64_t(task.bias_columns) + min(token, task.bias_columns - 1)];
    }
    score += slope * float(token - before - query);
    const float now = fmaxf(most, score), shrink = exp2f(most - now), p = exp2f(score - now);
    most = now;
    sum = sum * shrink + p;
#pragma unroll
    for (int i = 0; i < DIMS; ++i)
      if (lane + 32 * i < size)
        output[i] = output[i] * shrink + p * to_float(key[to_value + lane + 32 * i]);
  }
#pragma unroll
  for (int i = 0; i < DIMS; ++i)
    if (lane + 32 * i < size) out[lane + 32 * i] = from_float<X>(output[i] / sum);
}

// The tiles of a head size, fastest first; later ones need less shared memory.
template <int D, typename Body>
int for_tile(int shared_bytes, Body body) {
  if (Layout<D, 8, 64, 2>::kBytes <= shared_bytes) return body(Layout<D, 8, 64, 2>());
  if (Layout<D, 8, 32, 2>::kBytes <= shared_bytes) return body(Layout<D, 8, 32, 2>());
  if constexpr (D >= 128)
    if (Layout<D, 4, 32, 2>::kBytes <= shared_bytes) return body(Layout<D, 4, 32, 2>());
  if constexpr (D == 256)
    if (Layout<D, 4, 16, 1>::kBytes <= shared_bytes) return body(Layout<D, 4, 16, 1>());
  return kNoTile;
}

// Calls body with the Layout for the head size and shared memory limit; returns kNoTile if there is
// none.
template <typename Body>
int for_tile(int head_size, int shared_bytes, Body body) {
  if (head_size == 64) return for_tile<64>(shared_bytes, body);
  if (head_size == 80) return for_tile<80>(shared_bytes, body);
  if (head_size == 96) return for_tile<96>(shared_bytes, body);
  if (head_size == 112) return for_tile<112>(shared_bytes, body);
  if (head_size == 128) return for_tile<128>(shared_bytes, body);
  if (head_size == 160) return for_tile<160>(shared_bytes, body);
  if (head_size == 256) return for_tile<256>(shared_bytes, body);
  return kNoTile;
}

template <typename X, typename L, bool LIMITED>
int run(const PrefillTask& task, void* stream) {
  const dim3 grid(ceil_div(task.max_query, L::kQueries), task.heads,
                  task.num_rows - task.first_row);
  return launch("prefill_attention", prefill_attention<X, L, LIMITED>, grid, L::kThreads, L::kBytes,
                stream, task);
}

template <typename X, bool LIMITED>
int run_any(const PrefillTask& task, void* stream) {
  const auto kernel = task.head_size <= 64    ? prefill_attention_any<X, 2, LIMITED>
                      : task.head_size <= 128 ? prefill_attention_any<X, 4, LIMITED>
                                              : prefill_attention_any<X, 8, LIMITED>;
  const dim3 grid(ceil_div(task.max_query, kAnyWarps), task.heads, task.num_rows - task.first_row);
  return launch("prefill_attention", kernel, grid, 32 * kAnyWarps, 0, stream, task);
}

// Return whether the tensors permit copies of 16 bytes.
inline bool is_aligned(const PrefillTask& task) {
  return aligned16(task.out) && aligned16(task.qkv) && aligned16(task.cache) &&
         task.qkv_stride % 8 == 0 && task.out_stride % 8 == 0;
}

template <typename X, bool LIMITED>
int run_tiles(const PrefillTask& task, void* stream) {
  if constexpr (sizeof(X) == 2) {
    const int shared_bytes = task.shared_bytes ? task.shared_bytes : device().shared_bytes;
    if (is_aligned(task) && !task.key_bias) {
      const int status = for_tile(task.head_size, shared_bytes, [&](auto tile) {
        return run<X, decltype(tile), LIMITED>(task, stream);
      });
      if (status != kNoTile) return status;
    }
  }
  return run_any<X, LIMITED>(task, stream);
}

}  // namespace
}  // namespace tridecode
