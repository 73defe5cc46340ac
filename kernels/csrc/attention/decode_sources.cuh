// Loads the tiles of a warp of decode attention: each 16 tokens of one kv head.
#pragma once
#include "cache/kv_cache_8bit.cuh"
#include "common/hopper.cuh"

namespace tridecode {
namespace {

constexpr int kTile = 16;  // tokens

// Eight numbers of a cache.
template <typename C>
using EightOf = std::conditional_t<sizeof(C) == 1, uint2, uint4>;

// A source loads pieces: the keys, or the values, of up to kSpan tiles of a row. Pieces are
// consumed in the order in which they were issued, alternately keys and values; kKeysAhead and
// kValuesAhead are issued before the first is consumed. All lanes of the warp call every function
// together.
//
// In lane (g, t), key(s, c, i) is a 16-byte part of token g + 8 i of tile s of the span: from dim
// 32 c + 8 t on with 16 bits, 64 c + 16 t with 8. value(s, c, i) is 8 dims, 64 c + 8 g, of token 2
// t + i % 2 + i / 2 * 8. Both are zeros beyond D, values also beyond the context, where the cache
// is undefined. In 8 bits key_scale(s, i) and value_scale(s, i) belong to token g + 8 i; beyond the
// context they are undefined.

// Loads to registers, one tile ahead.
template <typename X, int D>
struct Loads {
  static constexpr bool kRing = false;                    // of shared memory
  static constexpr int kSpan = 1;                         // tiles of a piece
  static constexpr int kKeysAhead = 1, kValuesAhead = 1;  // pieces that are issued at first
  static constexpr int kResident = D <= 128 ? 3 : 2;      // blocks per multiprocessor
  static constexpr int kBytes = 0;                        // of shared memory
  uint4 keys[(D + 31) / 32][2], values[(D + 63) / 64][4];

  __device__ __forceinline__ Loads(char*, bool) {}
  static __device__ __forceinline__ void initialize(char*) {}
  static __device__ __forceinline__ void release() {}

  __device__ __forceinline__ void request_keys(const X* from, const float*) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < (D + 31) / 32; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int d = c * 32 + t * 8;
        keys[c][i] =
            D % 32 == 0 || d < D ? load_once(from + (g + 8 * i) * D + d) : make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ __forceinline__ void request_values(const X* from, const float*, int valid) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < (D + 63) / 64; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 2 * t + i % 2 + i / 2 * 8, d = c * 64 + g * 8;
        values[c][i] = token < valid && (D % 64 == 0 || d < D) ? load_once(from + token * D + d)
                                                               : make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ __forceinline__ void take_keys() {}
  __device__ __forceinline__ void take_values(int, int) {}
  __device__ __forceinline__ uint4 key(int, int c, int i) const { return keys[c][i]; }
  __device__ __forceinline__ uint4 value(int, int c, int i, int) const { return values[c][i]; }
};

// The same for an 8-bit cache of C.
template <typename C, int D>
struct Loads8 {
  static constexpr bool kRing = false;
  static constexpr int kSpan = 1;
  static constexpr int kKeysAhead = 1, kValuesAhead = 1;
  static constexpr int kResident = D <= 128 ? 3 : 2;
  static constexpr int kBytes = 0;
  uint4 keys[(D + 63) / 64][2];
  uint2 values[(D + 63) / 64][4];
  float key_scales[2], value_scales[2];

  __device__ __forceinline__ Loads8(char*, bool) {}
  static __device__ __forceinline__ void initialize(char*) {}
  static __device__ __forceinline__ void release() {}

  __device__ __forceinline__ void request_keys(const C* from, const float* scales) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      key_scales[i] = scales[g + 8 * i];
#pragma unroll
      for (int c = 0; c < (D + 63) / 64; ++c) {
        const int d = c * 64 + t * 16;
        keys[c][i] =
            D % 64 == 0 || d < D ? load_once(from + (g + 8 * i) * D + d) : make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ __forceinline__ void request_values(const C* from, const float* scales, int valid) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) value_scales[i] = scales[g + 8 * i];
#pragma unroll
    for (int c = 0; c < (D + 63) / 64; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 2 * t + i % 2 + i / 2 * 8, d = c * 64 + g * 8;
        values[c][i] = token < valid && (D % 64 == 0 || d < D)
                           ? *reinterpret_cast<const uint2*>(from + token * D + d)
                           : make_uint2(0, 0);
      }
    }
  }
  __device__ __forceinline__ void take_keys() {}
  __device__ __forceinline__ void take_values(int, int) {}
  __device__ __forceinline__ uint4 key(int, int c, int i) const { return keys[c][i]; }
  __device__ __forceinline__ uint2 value(int, int c, int i, int) const { return values[c][i]; }
  __device__ __forceinline__ float key_scale(int, int i) const { return key_scales[i]; }
  __device__ __forceinline__ float value_scale(int, int i) const { return value_scales[i]; }
};

// Bulk copies into a ring of PIECES in shared memory. A piece is the keys, or the values, of a span
// of tiles, then their scales; keys and values alternate. Pieces that are read once are evicted
// first from the L2 cache.
template <typename X, typename C, int D, int PIECES>
struct Copies {
  static constexpr bool kExact = std::is_same<C, X>::value;
  static constexpr bool kRing = true;
  static constexpr int kSpan = kExact ? 1 : 2;
  static constexpr int kKeysAhead = (PIECES + 1) / 2, kValuesAhead = PIECES / 2;
  static constexpr int kResident = D > 160 ? 5 - PIECES : D > 128 ? 2 : 7 - PIECES;
  static constexpr int kTileBytes = kTile * D * int(sizeof(C));
  static constexpr int kTileScales = kExact ? 0 : kTile * int(sizeof(float));  // bytes
  static constexpr int kScales = kSpan * kTileBytes;  // offset of the scales in a piece
  static constexpr int kPiece = kScales + kSpan * kTileScales;
  static constexpr int kBarriers = PIECES * kPiece;  // offset of the ring in a warp's part
  static constexpr int kBytes = (kBarriers + PIECES * 8 + 127) / 128 * 128;

  char* const ring;
  const bool once;  // whether the pieces are read once
  // The places in the ring of the pieces that were requested and taken last; a parity.
  int requested = PIECES - 1, taken = PIECES - 1, parity = 1;

  __device__ __forceinline__ Copies(char* mine, bool once) : ring(mine), once(once) {}
  static __device__ __forceinline__ int after(int place) {
    return place + 1 == PIECES ? 0 : place + 1;
  }
  __device__ __forceinline__ char* piece(int place) const { return ring + place * kPiece; }
  __device__ __forceinline__ uint64_t* barrier(int place) const {
    return reinterpret_cast<uint64_t*>(ring + kBarriers) + place;
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Called by one thread, for one warp's part of shared memory.
  static __device__ __forceinline__ void initialize(char* mine) {
    for (int i = 0; i < PIECES; ++i)
      barrier_init(reinterpret_cast<uint64_t*>(mine + kBarriers) + i, 1);
    fence_barriers();
  }
  // Call after this thread's writes to shared memory that later copies overwrite; a barrier must
  // follow.
  static __device__ __forceinline__ void release() { fence_copies(); }
  // Tiles at .. at + count of a span.
  __device__ __forceinline__ void request(const C* from, const float* scales, int at, int count) {
    __syncwarp();  // every lane has read the piece that occupied the slot
    requested = after(requested);
    if (threadIdx.x % 32 != 0) return;
    const uint64_t policy = once ? evict_first() : evict_normally();
    uint64_t* const full = barrier(requested);
    char* const to = piece(requested);
    barrier_expect(full, count * (kTileBytes + kTileScales));
    copy_bulk(to + at * kTileBytes, from, count * kTileBytes, full, policy);
    if (!kExact)
      copy_bulk(to + kScales + at * kTileScales, scales, count * kTileScales, full, policy);
  }
  __device__ __forceinline__ void take_keys() {
    taken = after(taken);
    if (taken == 0) parity ^= 1;
    barrier_wait(barrier(taken), parity);
  }
  __device__ __forceinline__ void take_values(int valid, int present) {
    take_keys();
    if constexpr (!kExact) {
      if (valid >= present * kTile) return;
      for (int at = valid * D + threadIdx.x % 32 * 16; at < present * kTile * D; at += 32 * 16)
        *reinterpret_cast<uint4*>(piece(taken) + at) = make_uint4(0, 0, 0, 0);
      fence_copies();
      __syncwarp();
    }
  }
#else
  static __device__ __forceinline__ void initialize(char*) {}
  static __device__ __forceinline__ void release() {}
  __device__ __forceinline__ void request(const C*, const float*, int, int) {}
  __device__ __forceinline__ void take_keys() {}
  __device__ __forceinline__ void take_values(int, int) {}
#endif

  __device__ __forceinline__ uint4 key(int s, int c, int i) const {
    constexpr int kDims = 16 / int(sizeof(C));  // of a lane
    const int lane = threadIdx.x % 32, d = c * 4 * kDims + lane % 4 * kDims;
    if (D % (4 * kDims) != 0 && d >= D) return make_uint4(0, 0, 0, 0);
    const C* const from = reinterpret_cast<const C*>(piece(taken) + s * kTileBytes);
    return *reinterpret_cast<const uint4*>(from + (lane / 4 + 8 * i) * D + d);
  }
  __device__ __forceinline__ EightOf<C> value(int s, int c, int i, int valid) const {
    const int lane = threadIdx.x % 32, d = c * 64 + lane / 4 * 8;
    const int token = 2 * (lane % 4) + i % 2 + i / 2 * 8;
    if ((kExact && token >= valid) || (D % 64 != 0 && d >= D)) return EightOf<C>{};
    const C* const from = reinterpret_cast<const C*>(piece(taken) + s * kTileBytes);
    return *reinterpret_cast<const EightOf<C>*>(from + token * D + d);
  }
  __device__ __forceinline__ float key_scale(int s, int i) const {
    const float* const scales =
        reinterpret_cast<const float*>(piece(taken) + kScales + s * kTileScales);
    return scales[threadIdx.x % 32 / 4 + 8 * i];
  }
  __device__ __forceinline__ float value_scale(int s, int i) const { return key_scale(s, i); }
};

}  // namespace
}  // namespace tridecode
