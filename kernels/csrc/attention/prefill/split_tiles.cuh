// Loads key and value tiles for prefill_split.cuh into a ring of tiles in shared memory, with
// asynchronous copies. The ring holds 8-bit tiles as stored; they are dequantised to a tile of X
// when they are used, with the rounding of expand_cache.cu.
#pragma once
#include "attention/prefill/split_work.cuh"
#include "attention/tile_products.cuh"
#include "cache/kv_cache_8bit.cuh"

namespace tridecode {
namespace {

constexpr int kStages = 3;  // tiles in the ring

// Addresses of a row's keys and values.
template <typename X, typename C>
struct SplitSource {
  const X* fresh;  // first key in qkv of a prompt without cached tokens, else null
  const int* table;
  int64_t stride;  // of qkv
  int kv_head, visible;
  unsigned int reciprocal;  // 2^32 / block_tokens, rounded up

  static __device__ __forceinline__ SplitSource of(const SplitTask& task, int row,
                                                   const SplitRow& found, int kv_head,
                                                   int visible) {
    SplitSource source = {};
    if (std::is_same<C, X>::value && found.before == 0)
      source.fresh = static_cast<const X*>(task.qkv) + found.start * task.qkv_stride +
                     int64_t(task.heads + kv_head) * task.head_size;
    source.table = task.block_tables + row * task.table_stride;
    source.stride = task.qkv_stride;
    source.kv_head = kv_head, source.visible = visible;
    source.reciprocal = 0xffffffffu / task.block_tokens + 1;
    return source;
  }
  // Index of a token's key, in rows of head_size elements. Exact, because context * block_tokens is
  // below 2^32.
  __device__ __forceinline__ int64_t row_of(const SplitTask& task, int token) const {
    const int entry = __umulhi(unsigned(token), reciprocal);
    return cache_row(table[entry], 0, kv_head, token - entry * task.block_tokens, task.kv_heads,
                     task.block_tokens);
  }
};

// Tiles of a cache of X.
template <typename X, typename C, int D>
struct SplitTiles {
  static_assert(std::is_same<C, X>::value);
  static constexpr int kKeys = keys_of(D);
  static constexpr int kTile = kKeys * row_pitch(D);  // elements of a tile of keys or values
  static constexpr int kBytes = kStages * 2 * kTile * int(sizeof(X));
  X* const ring;

  __device__ __forceinline__ explicit SplitTiles(char* shared)
      : ring(reinterpret_cast<X*>(shared)) {}
  __device__ __forceinline__ void load(const SplitTask& task, const SplitSource<X, C>& source,
                                       int tile, int stage) const {
    constexpr int kPieces = D / 8;
    X* const keys = ring + stage * 2 * kTile;
    for (int i = threadIdx.x; i < kKeys * kPieces; i += blockDim.x) {
      const int place = i / kPieces, d = i % kPieces * 8, token = tile * kKeys + place;
      const bool valid = token < source.visible;
      const int seen = valid ? token : 0;
      const X* from;
      int64_t to_value;
      if (source.fresh) {
        from = source.fresh + seen * source.stride + d;
        to_value = int64_t(task.kv_heads) * D;
      } else {
        from = static_cast<const X*>(task.cache) + source.row_of(task, seen) * D + d;
        to_value = value_offset(task.kv_heads, task.block_tokens, D);
      }
      X* const to = keys + place * row_pitch(D) + d;
      copy16_async(to, from, valid);
      copy16_async(to + kTile, from + to_value, valid);
    }
  }
  // Return the keys of a loaded tile; its values follow at offset kTile.
  __device__ __forceinline__ const X* take(int, int, int stage) const {
    return ring + stage * 2 * kTile;
  }
};

// Dequantises sixteen elements to X.
template <typename X, typename C>
__device__ __forceinline__ void dequantise(const uint4& stored, float scale, uint4 (&numbers)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[2];
    widen<C>(get(stored, i), pairs[0], pairs[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 two = unpack<half>(pairs[j]);
      put(numbers[i / 2], i % 2 * 2 + j, pack<X>(two.x * scale, two.y * scale));
    }
  }
}

// Tiles of an 8-bit cache. A stage holds keys, values, and the scales of both.
template <typename X, typename C, int D>
struct SplitTiles8 {
  static constexpr int kKeys = keys_of(D);
  static constexpr int kTile = kKeys * row_pitch(D);
  static constexpr int kStored = kKeys * D;                   // bytes
  static constexpr int kScales = kKeys * int(sizeof(float));  // bytes
  static constexpr int kStage = 2 * (kStored + kScales);
  static constexpr int kBytes = 2 * kTile * int(sizeof(X)) + kStages * kStage;
  X* const numbers;
  char* const ring;

  __device__ __forceinline__ explicit SplitTiles8(char* shared)
      : numbers(reinterpret_cast<X*>(shared)), ring(shared + 2 * kTile * sizeof(X)) {}
  __device__ __forceinline__ void load(const SplitTask& task, const SplitSource<X, C>& source,
                                       int tile, int stage) const {
    constexpr int kPieces = D / 16;
    char* const keys = ring + stage * kStage;
    const int64_t to_value = value_offset(task.kv_heads, task.block_tokens, 1);
    for (int i = threadIdx.x; i < kKeys * kPieces; i += blockDim.x) {
      const int place = i / kPieces, d = i % kPieces * 16, token = tile * kKeys + place;
      const bool valid = token < source.visible;
      const int64_t row = source.row_of(task, valid ? token : 0);
      const C* const from = static_cast<const C*>(task.cache) + row * D + d;
      copy16_async(keys + place * D + d, from, valid);
      copy16_async(keys + kStored + place * D + d, from + to_value * D, valid);
      if (d == 0 && place % 4 == 0) {  // scales of four tokens of one block
        char* const scales = keys + 2 * kStored + place * sizeof(float);
        copy16_async(scales, task.cache_scales + row, valid);
        copy16_async(scales + kScales, task.cache_scales + row + to_value, valid);
      }
    }
  }
  // Called by all threads of the block. The tile is zero from token `visible` on.
  __device__ __forceinline__ const X* take(int tile, int visible, int stage) const {
    constexpr int kPieces = D / 16;
    const char* const stored = ring + stage * kStage;
    const float* const scales = reinterpret_cast<const float*>(stored + 2 * kStored);
    for (int i = threadIdx.x; i < 2 * kKeys * kPieces; i += blockDim.x) {
      const int row = i / kPieces, d = i % kPieces * 16, place = row % kKeys;  // keys, then values
      uint4 both[2] = {};
      if (tile * kKeys + place < visible)
        dequantise<X, C>(*reinterpret_cast<const uint4*>(stored + row * D + d), scales[row], both);
      X* const to = numbers + row * row_pitch(D) + d;
      reinterpret_cast<uint4*>(to)[0] = both[0];
      reinterpret_cast<uint4*>(to)[1] = both[1];
    }
    __syncthreads();
    return numbers;
  }
};

template <typename X, typename C, int D>
using SplitTilesOf =
    std::conditional_t<std::is_same<C, X>::value, SplitTiles<X, X, D>, SplitTiles8<X, C, D>>;

}  // namespace
}  // namespace tridecode
