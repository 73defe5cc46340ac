// What a warp of decode attention does with a tile: 16 tokens of one kv head.
//
// The matrix instruction multiplies keys (16 tokens x dims) with queries (dims x 8 heads), then
// values (dims x 16 tokens) with probabilities (16 tokens x 8 heads). The next keys are loaded once
// the scores are computed, the next values once these are summed. Tiles arrive by bulk copies in a
// ring of shared memory per warp, or by loads to registers. Queries beyond the size of the group
// are zeros: the kernels are memory-bound. Softmax in base 2 and float32.
//
// C is what the cache holds: X, int8_t or e4m3. Tiles of 8 bits become halves in registers, and so
// do queries in bfloat16, times a power of two of their head's. The scale of a key multiplies its
// score, the scale of a value its probability. Both products are in float32; the latter is divided
// by a power of two that is not below any value's scale so far, so that a half represents it as
// exactly as a probability.
#pragma once
#include "hopper.cuh"
#include "kv_cache_8bit.cuh"

namespace tridecode {
namespace {

constexpr int kTile = 16;  // tokens
constexpr int kGroup = 8;  // query heads that share a pass over the keys and values
constexpr int kWarps = 4;  // of a block

struct Task : tridecode_attention_task {
  int group, groups;  // query heads of a kv head; passes of kGroup heads over it
};

__host__ __device__ constexpr int slot_floats(int head_size) { return kGroup * (head_size + 2); }

// ---------------------------------------------------------------- how a warp loads its tiles

// Of a tile, in lane (g, t): key(c, i) is dims 32 c + 8 t of token g + 8 i; value(c, i) is dims 64
// c
// + 8 g of token 2 t + i % 2 + i / 2 * 8, zeros beyond the context, where the cache is
// undefined. Both are zeros beyond D. Tiles are taken in the order in which they were requested, at
// most kDepth ahead. The whole warp calls every function together.

// Loads to registers, one tile ahead.
template <typename X, int D>
struct Loads {
  static constexpr int kDepth = 1;
  static constexpr int kResident = 3;       // blocks on a multiprocessor, of heads of at most 128
  static constexpr bool kTogether = false;  // whether keys are requested with values, behind them
  static constexpr int kBytes = 0;          // of shared memory
  uint4 keys[(D + 31) / 32][2], values[(D + 63) / 64][4];

  __device__ __forceinline__ Loads(char*, bool) {}
  static __device__ __forceinline__ void initialize(char*) {}
  static __device__ __forceinline__ void release() {}

  __device__ __forceinline__ void request_keys(const X* from) {
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
  __device__ __forceinline__ void request_values(const X* from, int valid) {
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
  __device__ __forceinline__ void take_values(int) {}
  __device__ __forceinline__ uint4 key(int c, int i) const { return keys[c][i]; }
  __device__ __forceinline__ uint4 value(int c, int i, int) const { return values[c][i]; }
};

// Bulk copies into a ring in shared memory, two tiles ahead. Tiles that are read once are evicted
// first from the L2 cache.
template <typename X, int D>
struct Copies {
  static constexpr int kDepth = 2;
  static constexpr int kResident = 3;
  static constexpr bool kTogether = false;
  static constexpr int kHalf = kTile * D * sizeof(X);         // keys, or values, of a tile
  static constexpr int kRing = 2 * kDepth * kHalf;            // of a warp; its barriers follow it
  static constexpr int kBytes = kRing + 2 * kDepth * 8 + 96;  // a multiple of 128

  char* const ring;
  uint64_t policy = 0;                            // how long the L2 cache keeps tiles
  unsigned int requested[2] = {}, taken[2] = {};  // keys, values
  const X* keys = nullptr;
  const X* values = nullptr;

  __device__ __forceinline__ Copies(char* mine, bool once) : ring(mine) { set_policy(once); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void set_policy(bool once) {
    policy = once ? evict_first() : evict_normally();
  }
  // In one thread, for one warp's part of shared memory.
  static __device__ __forceinline__ void initialize(char* mine) {
    for (int i = 0; i < 2 * kDepth; ++i)
      barrier_init(reinterpret_cast<uint64_t*>(mine + kRing) + i, 1);
    fence_barriers();
  }
  // After writes of this thread to shared memory that later copies overwrite; a barrier follows.
  static __device__ __forceinline__ void release() { fence_copies(); }
  __device__ __forceinline__ char* place(int which, unsigned int use) const {
    return ring + (use % kDepth * 2 + which) * kHalf;
  }
  __device__ __forceinline__ uint64_t* barrier(int which, unsigned int use) const {
    return reinterpret_cast<uint64_t*>(ring + kRing) + use % kDepth * 2 + which;
  }
  __device__ __forceinline__ void request(int which, const X* from) {
    __syncwarp();  // every lane has read the previous tile
    if (threadIdx.x % 32 == 0) {
      barrier_expect(barrier(which, requested[which]), kHalf);
      copy_bulk(place(which, requested[which]), from, kHalf, barrier(which, requested[which]),
                policy);
    }
    ++requested[which];
  }
  __device__ __forceinline__ const X* take(int which) {
    const unsigned int use = taken[which]++;
    barrier_wait(barrier(which, use), use / kDepth % 2);
    return reinterpret_cast<const X*>(place(which, use));
  }
#else
  __device__ __forceinline__ void set_policy(bool) {}
  static __device__ __forceinline__ void initialize(char*) {}
  static __device__ __forceinline__ void release() {}
  __device__ __forceinline__ void request(int, const X*) {}
  __device__ __forceinline__ const X* take(int) { return nullptr; }
#endif
  __device__ __forceinline__ void request_keys(const X* from) { request(0, from); }
  __device__ __forceinline__ void request_values(const X* from, int) { request(1, from); }
  __device__ __forceinline__ void take_keys() { keys = take(0); }
  __device__ __forceinline__ void take_values(int) { values = take(1); }

  __device__ __forceinline__ uint4 key(int c, int i) const {
    const int lane = threadIdx.x % 32, d = c * 32 + lane % 4 * 8;
    if (D % 32 != 0 && d >= D) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(keys + (lane / 4 + 8 * i) * D + d);
  }
  __device__ __forceinline__ uint4 value(int c, int i, int valid) const {
    const int lane = threadIdx.x % 32, d = c * 64 + lane / 4 * 8;
    const int token = 2 * (lane % 4) + i % 2 + i / 2 * 8;
    if (token >= valid || (D % 64 != 0 && d >= D)) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(values + token * D + d);
  }
};

// The same for a cache of C, 8 bits a number. In lane (g, t), key(c, i) is 16 dims, from 64 c + 16
// t on, of token g + 8 i, and value(c, i) 8 dims, 64 c + 8 g, of token 2 t + i % 2 + i / 2 * 8.
// key_scale(i) and value_scale(i) belong to token g + 8 i; beyond the context they are undefined.
template <typename C, int D>
struct Loads8 {
  static constexpr int kDepth = 1;
  static constexpr int kResident = 3;       // blocks on a multiprocessor, of heads of at most 128
  static constexpr bool kTogether = false;  // whether keys are requested with values, behind them
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
  __device__ __forceinline__ void take_values(int) {}
  __device__ __forceinline__ uint4 key(int c, int i) const { return keys[c][i]; }
  __device__ __forceinline__ uint2 value(int c, int i, int) const { return values[c][i]; }
  __device__ __forceinline__ float key_scale(int i) const { return key_scales[i]; }
  __device__ __forceinline__ float value_scale(int i) const { return value_scales[i]; }
};

// Keys, values and scales of a tile arrive together, three tiles ahead. LLaMA-3-8B on an H200, us
// of 64 / 128 / 256 rows of 544 tokens: 27.0 / 48.3 / 91.0, with three blocks and four tiles 29.3 /
// 55.3 / 91.3. Of the 91, 2 are arithmetic, 3 the copies of the scales.
template <typename C, int D>
struct Copies8 {
  static constexpr int kDepth = 3;
  static constexpr int kResident = 4;
  static constexpr bool kTogether = true;
  static constexpr int kScales = kTile * D;  // keys, or values, of a tile, then their scales
  static constexpr int kHalf = kScales + kTile * int(sizeof(float));
  static constexpr int kRing = 2 * kDepth * kHalf;
  static constexpr int kBytes = (kRing + kDepth * 8 + 127) / 128 * 128;

  char* const ring;
  uint64_t policy = 0;
  unsigned int requested = 0, taken = 0;
  char* tile = nullptr;  // keys, then values

  __device__ __forceinline__ Copies8(char* mine, bool once) : ring(mine) { set_policy(once); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void set_policy(bool once) {
    policy = once ? evict_first() : evict_normally();
  }
  static __device__ __forceinline__ void initialize(char* mine) {
    for (int i = 0; i < kDepth; ++i) barrier_init(reinterpret_cast<uint64_t*>(mine + kRing) + i, 1);
    fence_barriers();
  }
  static __device__ __forceinline__ void release() { fence_copies(); }
  __device__ __forceinline__ uint64_t* barrier(unsigned int use) const {
    return reinterpret_cast<uint64_t*>(ring + kRing) + use % kDepth;
  }
  // values: how far the values of a tile are from its keys, in numbers; and in scales.
  __device__ __forceinline__ void request(const C* from, const float* scales, int64_t values,
                                          int64_t value_scales) {
    __syncwarp();  // every lane has read the previous tile
    if (threadIdx.x % 32 == 0) {
      uint64_t* const full = barrier(requested);
      char* const to = ring + requested % kDepth * 2 * kHalf;
      barrier_expect(full, 2 * kHalf);
      copy_bulk(to, from, kScales, full, policy);
      copy_bulk(to + kHalf, from + values, kScales, full, policy);
      copy_bulk(to + kScales, scales, kHalf - kScales, full, policy);
      copy_bulk(to + kHalf + kScales, scales + value_scales, kHalf - kScales, full, policy);
    }
    ++requested;
  }
  __device__ __forceinline__ void take_keys() {
    const unsigned int use = taken++;
    barrier_wait(barrier(use), use / kDepth % 2);
    tile = ring + use % kDepth * 2 * kHalf;
  }
  // Beyond the context the cache is undefined.
  __device__ __forceinline__ void take_values(int valid) {
    if (valid >= kTile) return;
    for (int at = valid * D + threadIdx.x % 32 * 16; at < kTile * D; at += 32 * 16)
      *reinterpret_cast<uint4*>(tile + kHalf + at) = make_uint4(0, 0, 0, 0);
    fence_copies();
    __syncwarp();
  }
#else
  __device__ __forceinline__ void set_policy(bool) {}
  static __device__ __forceinline__ void initialize(char*) {}
  static __device__ __forceinline__ void release() {}
  __device__ __forceinline__ void request(const C*, const float*, int64_t, int64_t) {}
  __device__ __forceinline__ void take_keys() {}
  __device__ __forceinline__ void take_values(int) {}
#endif

  __device__ __forceinline__ uint4 key(int c, int i) const {
    const int lane = threadIdx.x % 32, d = c * 64 + lane % 4 * 16;
    if (D % 64 != 0 && d >= D) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(tile + (lane / 4 + 8 * i) * D + d);
  }
  __device__ __forceinline__ uint2 value(int c, int i, int) const {
    const int lane = threadIdx.x % 32, d = c * 64 + lane / 4 * 8;
    const int token = 2 * (lane % 4) + i % 2 + i / 2 * 8;
    if (D % 64 != 0 && d >= D) return make_uint2(0, 0);
    return *reinterpret_cast<const uint2*>(tile + kHalf + token * D + d);
  }
  __device__ __forceinline__ float key_scale(int i) const {
    return reinterpret_cast<const float*>(tile + kScales)[threadIdx.x % 32 / 4 + 8 * i];
  }
  __device__ __forceinline__ float value_scale(int i) const {
    return reinterpret_cast<const float*>(tile + kHalf + kScales)[threadIdx.x % 32 / 4 + 8 * i];
  }
};

// The largest exponent of eight numbers of bfloat16, in place.
__device__ __forceinline__ uint32_t largest_bits(const uint4& words) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = __vmaxu2(most, get(words, i) & 0x7f807f80u);
  return max(most & 0xffffu, most >> 16);
}

// Eight numbers of bfloat16 times `by` as halves.
__device__ __forceinline__ void as_halves(uint4& words, float by) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = get(words, i);
    put(words, i,
        pack<half>(__uint_as_float(word << 16) * by, __uint_as_float(word & 0xffff0000u) * by));
  }
}

// The sums of a warp over tiles of a row, for the heads of a pass.
template <typename X, typename C, int D>
struct Sums {
  static constexpr bool kExact = std::is_same<C, X>::value;
  static constexpr int KC =
      kExact ? (D + 31) / 32 : (D + 63) / 64 * 2;  // chunks of 32 dims of a key
  static constexpr int VC = (D + 63) / 64;         // chunks of 64 dims of a value
  using Y = std::conditional_t<kExact, X, half>;   // of the products
  // Of a cache in 8 bits, halves hold the probabilities of values times this.
  static constexpr float kLift = 0x1p14f;

  uint4 q[KC];
  float slope[2] = {}, scale[2];
  float output[VC][4][4] = {};  // [chunk][two dims][dim, head]
  float most[2], sum[2] = {};
  // in 8 bits: a power of two above the values' scales, and its inverse; output is divided by it
  float unit_scale = 0x1p-126f, inverse = 0x1p126f;

  // Of `heads` heads from `head` on.
  __device__ __forceinline__ Sums(const Task& task, int row, int head, int heads) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    scale[0] = scale[1] = task.scale * kLog2e;
    most[0] = most[1] = -CUDART_INF_F;
#pragma unroll
    for (int c = 0; c < KC; ++c) {
      const int d = kExact ? c * 32 + t * 8 : c / 2 * 64 + t * 16 + c % 2 * 8;
      const X* from = static_cast<const X*>(task.qkv) + row * task.qkv_stride + (head + g) * D + d;
      q[c] = g < heads && (D % (kExact ? 32 : 64) == 0 || d < D)
                 ? *reinterpret_cast<const uint4*>(from)
                 : make_uint4(0, 0, 0, 0);
    }
    if constexpr (!std::is_same<X, Y>::value) queries_as_halves();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (task.slopes && 2 * t + i < heads) slope[i] = task.slopes[head + 2 * t + i] * kLog2e;
  }

  // Each head's times the power of two that brings the largest to 2^14 and above: what is 2^28
  // times smaller stays as exact as it was. Scores are divided by it.
  __device__ __forceinline__ void queries_as_halves() {
    uint32_t bits = 30 << 7;  // so that powers of two and their inverses are floats
#pragma unroll
    for (int c = 0; c < KC; ++c) bits = max(bits, largest_bits(q[c]));
    bits = max(bits, __shfl_xor_sync(kAll, bits, 1));
    bits = max(bits, __shfl_xor_sync(kAll, bits, 2));
    const uint32_t exponent = bits >> 7;
    const float by = __uint_as_float((268 - exponent) << 23);
#pragma unroll
    for (int c = 0; c < KC; ++c) as_halves(q[c], by);
    const float lower = __uint_as_float((exponent - 14) << 23);  // of head g
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] *= __shfl_sync(kAll, lower, threadIdx.x % 4 * 8 + 4 * i);
  }

  // Called by the whole warp. next_keys, next_values: request what the registers then have room
  // for.
  template <typename Source, typename Keys, typename Values>
  __device__ __forceinline__ void add_tile(Source& source, int tile, int context, Keys next_keys,
                                           Values next_values) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    float scores[2][4] = {};
    source.take_keys();
    float key_scales[2];
    if constexpr (kExact) {
#pragma unroll
      for (int c = 0; c < KC; ++c) {
        const uint4 low = source.key(c, 0), high = source.key(c, 1);
        multiply_add<Y>(scores[0], low.x, high.x, low.y, high.y, q[c].x, q[c].y);
        multiply_add<Y>(scores[1], low.z, high.z, low.w, high.w, q[c].z, q[c].w);
      }
    } else {
      key_scales[0] = source.key_scale(0), key_scales[1] = source.key_scale(1);
#pragma unroll
      for (int c = 0; c < KC / 2; ++c) {
        const uint4 low = source.key(c, 0), high = source.key(c, 1);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          uint32_t a[4];
          widen<C>(get(low, w), a[0], a[2]);
          widen<C>(get(high, w), a[1], a[3]);
          const uint4& dims = q[2 * c + w / 2];
          multiply_add<Y>(scores[w % 2], a[0], a[1], a[2], a[3], get(dims, w % 2 * 2),
                          get(dims, w % 2 * 2 + 1));
        }
      }
    }
    next_keys();
    float p[4];  // tokens g and g + 8, heads 2t and 2t + 1
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = tile * kTile + g + i / 2 * 8;
      const float key_scale = kExact ? scale[i % 2] : scale[i % 2] * key_scales[i / 2];
      const float score =
          (scores[0][i] + scores[1][i]) * key_scale + slope[i % 2] * float(token - (context - 1));
      p[i] = token < context ? score : -CUDART_INF_F;
    }
    float high[2] = {fmaxf(p[0], p[2]), fmaxf(p[1], p[3])};
    if (__any_sync(kAll, high[0] > most[0] || high[1] > most[1])) {
      float shrink[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        high[i] = fmaxf(high[i], __shfl_xor_sync(kAll, high[i], 4));
        high[i] = fmaxf(high[i], __shfl_xor_sync(kAll, high[i], 8));
        high[i] = fmaxf(high[i], __shfl_xor_sync(kAll, high[i], 16));
        const float now = fmaxf(most[i], high[i]);
        shrink[i] = exp2f(most[i] - now);
        most[i] = now;
        sum[i] *= shrink[i];
      }
#pragma unroll
      for (int c = 0; c < VC; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) output[c][j][i] *= shrink[i % 2];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = exp2f(p[i] - most[i % 2]);
      sum[i % 2] += p[i];
    }
    if constexpr (!kExact) {
      source.take_values(context - tile * kTile);
      float scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        scales[i] = tile * kTile + g + 8 * i < context ? source.value_scale(i) : 0.0f;
      if (__any_sync(kAll, fmaxf(scales[0], scales[1]) > unit_scale)) {
        const float largest = warp_max(fmaxf(scales[0], scales[1]));
        const float shrink = unit_scale;
        unit_scale = __uint_as_float((__float_as_uint(largest) & 0x7f800000u) + 0x00800000u);
        inverse = 1.0f / unit_scale;
#pragma unroll
        for (int c = 0; c < VC; ++c) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) output[c][j][i] *= shrink * inverse;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] *= scales[i / 2] * inverse * kLift;
    }
    const uint32_t p0 = transpose8x8(pack<Y>(p[0], p[1])), p1 = transpose8x8(pack<Y>(p[2], p[3]));
    if constexpr (kExact) source.take_values(context - tile * kTile);
#pragma unroll
    for (int c = 0; c < VC; ++c) {
      if constexpr (!kExact) {
        uint2 bytes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes[i] = source.value(c, i, context - tile * kTile);
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // 4 dims of the lane
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = j == 0 ? bytes[i].x : bytes[i].y;
#pragma unroll
          for (int k = 0; k < 2; ++k) {  // 2 of them
            uint32_t a[4];
            widen_pairs<C>(words[0], words[1], k, a[0], a[1]);
            widen_pairs<C>(words[2], words[3], k, a[2], a[3]);
            multiply_add<Y>(output[c][2 * j + k], a[0], a[1], a[2], a[3], p0, p1);
          }
        }
      } else {
        uint4 values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = source.value(c, i, context - tile * kTile);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = get(values[i], j);
          multiply_add<Y>(output[c][j], __byte_perm(words[0], words[1], 0x5410),
                          __byte_perm(words[0], words[1], 0x7632),
                          __byte_perm(words[2], words[3], 0x5410),
                          __byte_perm(words[2], words[3], 0x7632), p0, p1);
        }
      }
    }
    next_values();
  }

  // After the last tile: the sums of all lanes.
  __device__ __forceinline__ void finish() {
    if constexpr (!kExact) {
#pragma unroll
      for (int c = 0; c < VC; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) output[c][j][i] *= unit_scale * (1.0f / kLift);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAll, sum[i], 4);
      sum[i] += __shfl_xor_sync(kAll, sum[i], 8);
      sum[i] += __shfl_xor_sync(kAll, sum[i], 16);
    }
  }
};

// Requests the tiles of a row and kv head that a warp's Source loads. Of a Source with kDepth, at
// most that many are on their way.
template <typename X, typename C, int D, typename Source>
struct Pages {
  static constexpr bool kExact = std::is_same<C, X>::value;
  const Task& task;
  Source& source;
  int row = 0, kv_head = 0;
  int ids = 0, ids_base = 0;      // 32 entries of the block table, one a lane
  const int each;                 // tiles of a block
  const unsigned int reciprocal;  // 2^32 / each, rounded up, unless that is 2^32

  __device__ __forceinline__ Pages(const Task& task, Source& source)
      : task(task),
        source(source),
        each(task.block_tokens / kTile),
        reciprocal(0xffffffffu / each + 1) {}

  // From the entry of `tile` on, of a row of `tiles` tiles.
  __device__ __forceinline__ void load_ids(int tile, int tiles) {
    ids_base = entry_of(tile);
    const int entries = entry_of(tiles - 1) + 1;
    const int entry = min(ids_base + int(threadIdx.x % 32), entries - 1);
    ids = task.block_tables[row * task.table_stride + entry];
  }
  // Of the block table; exact, since tiles * each is below 2^32.
  __device__ __forceinline__ int entry_of(int tile) const {
    return each == 1 ? tile : __umulhi(tile, reciprocal);
  }
  __device__ __forceinline__ int64_t tile_row(int tile, int tiles) {  // of the tile's first key
    const int entry = entry_of(tile);
    if (entry - ids_base >= 32) load_ids(tile, tiles);
    const int id = __shfl_sync(kAll, ids, entry - ids_base);
    return cache_row(id, 0, kv_head, (tile - entry * each) * kTile, task.kv_heads,
                     task.block_tokens);
  }
  __device__ __forceinline__ void request_keys(int tile, int tiles) {
    if constexpr (!Source::kTogether) {
      const int64_t at = tile_row(tile, tiles);
      const C* const cache = static_cast<const C*>(task.cache);
      if constexpr (kExact)
        source.request_keys(cache + at * D);
      else
        source.request_keys(cache + at * D, task.cache_scales + at);
    }
  }
  __device__ __forceinline__ void request_values(int tile, int tiles) {
    const int64_t at = tile_row(tile, tiles);
    const C* const from = static_cast<const C*>(task.cache) + at * D;
    const int64_t values = value_offset(task.kv_heads, task.block_tokens, D);
    const int valid = task.context_lens[row] - tile * kTile;
    if constexpr (kExact) {
      source.request_values(from + values, valid);
    } else {
      const int64_t value_scales = value_offset(task.kv_heads, task.block_tokens, 1);
      const float* const scales = task.cache_scales + at;
      if constexpr (Source::kTogether)
        source.request(from, scales, values, value_scales);
      else
        source.request_values(from + values, scales + value_scales, valid);
    }
  }
  // To the L2 cache, before the next kernel floods the memory with requests for its weights.
  __device__ __forceinline__ void prefetch(int tile, int tiles) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const int64_t at = tile_row(tile, tiles);
    const int lane = threadIdx.x % 32, half = lane % 2;  // keys, values
    if (lane < 2)
      prefetch_bulk(static_cast<const C*>(task.cache) + at * D +
                        half * value_offset(task.kv_heads, task.block_tokens, D),
                    kTile * D * sizeof(C));
    else if (!kExact && lane < 4)
      prefetch_bulk(
          task.cache_scales + at + half * value_offset(task.kv_heads, task.block_tokens, 1),
          kTile * sizeof(float));
#endif
  }
};

}  // namespace
}  // namespace tridecode
