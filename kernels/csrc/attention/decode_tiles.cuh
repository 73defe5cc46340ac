// One warp's work on one tile of decode attention: 16 tokens of one KV head.
//
// The matrix instruction multiplies keys (16 tokens x dims) with queries (dims x 8 heads), then
// values (dims x 16 tokens) with probabilities (16 tokens x 8 heads). The next keys are loaded once
// the scores are computed, the next values once these are summed. Tiles arrive by bulk copies in a
// ring of shared memory per warp, or by loads to registers. Queries beyond the size of the group
// are zeros: the kernels are memory-bound. Softmax in base 2 and float32.
//
// C is the type of the cache: X, int8_t or e4m3. 8-bit tiles are converted to halves in registers,
// and so are bfloat16 queries, times a power of two chosen per head. The scale of a key multiplies
// its score, the scale of a value its probability. Both products are in float32; the latter is
// divided by a power of two that is at least every value's scale so far, so that a half represents
// it as precisely as a probability.
#pragma once
#include "attention/decode_columns.cuh"

namespace tridecode {
namespace {

// Floats of scratch memory for a part's output, maxima and sums.
__host__ __device__ constexpr int slot_floats(int head_size) {
  return kGroup * (ceil_div(head_size, 64) * 64 + 2);
}

// The largest exponent of eight bfloat16 numbers, as exponent bits in place.
__device__ __forceinline__ uint32_t largest_bits(const uint4& words) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = __vmaxu2(most, get(words, i) & 0x7f807f80u);
  return max(most & 0xffffu, most >> 16);
}

// Converts eight bfloat16 numbers, times `by`, to halves.
__device__ __forceinline__ void as_halves(uint4& words, float by) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = get(words, i);
    put(words, i,
        pack<half>(__uint_as_float(word << 16) * by, __uint_as_float(word & 0xffff0000u) * by));
  }
}

// The sums of a warp over tiles of a row, for the columns of a pass.
template <typename X, typename C, int D, Mode MODE = kOneQuery>
struct Sums {
  static constexpr bool SEVERAL = MODE != kOneQuery, LIMITED = MODE == kLimited;
  static constexpr bool kSeveral = SEVERAL;  // queries of a row
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
  // SEVERAL: the tokens visible to a column in 8 bits: a power of two above the values' scales, and
  // its inverse; output is divided by it
  int limit[2];
  // LIMITED: the first token visible to a column; the soft cap, with a cap of 0 if there is none
  int first_seen[2];
  SoftCap soft_cap = {};
  float unit_scale = 0x1p-126f, inverse = 0x1p126f;

  // Initialises for `heads` heads from `head` on. prepare(q): called with the lane's part of the
  // queries.
  __device__ __forceinline__ Sums(const Task& task, int row, int head, int heads)
      : Sums(task, row, head, heads, [](uint4 (&)[KC]) {}) {}
  template <typename Prepare>
  __device__ __forceinline__ Sums(const Task& task, int row, int head, int heads, Prepare prepare) {
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
    prepare(q);
    if constexpr (!std::is_same<X, Y>::value) queries_as_halves();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (task.slopes && 2 * t + i < heads) slope[i] = task.slopes[head + 2 * t + i] * kLog2e;
  }

  // Initialises for the columns or, if rows have one query, for `heads` heads.
  __device__ __forceinline__ Sums(const Task& task, int row, int head, int heads,
                                  const Columns& columns)
      : Sums(task, row, head, SEVERAL ? 0 : heads) {
    if constexpr (SEVERAL) take(task, columns);
  }
  __device__ __forceinline__ void take(const Task& task, const Columns& columns) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (LIMITED) soft_cap = SoftCap::of(task.softcap);
#pragma unroll
    for (int c = 0; c < KC; ++c) {
      const int d = kExact ? c * 32 + t * 8 : c / 2 * 64 + t * 16 + c % 2 * 8;
      q[c] = g < columns.count && (D % (kExact ? 32 : 64) == 0 || d < D)
                 ? *reinterpret_cast<const uint4*>(columns.query<X>(task, g, D) + d)
                 : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 2 * t + i;
      scale[i] = task.scale * kLog2e;
      // Finite, so that a column for which a tile is fully masked has probabilities of zero instead
      // of NaN.
      most[i] = -1e30f;
      limit[i] = columns.seen(task, column);
      if constexpr (LIMITED) first_seen[i] = task.window ? limit[i] - task.window : 0;
      if (task.slopes && column < columns.count)
        slope[i] = task.slopes[columns.head_of(task, column)] * kLog2e;
    }
    if constexpr (!std::is_same<X, Y>::value) queries_as_halves();
  }

  // Scale each head's query by a power of two so that its maximum lies in [2^14, 2^15): values down
  // to 2^-28 of it keep full fp16 precision. Scores are divided by it.
  __device__ __forceinline__ void queries_as_halves() {
    uint32_t bits = 30 << 7;  // so that powers of two and their inverses are representable
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

  // Adds tiles first .. last of a row, which belong to one span. Called by the whole warp.
  // keys_taken, values_taken: issue the loads for which the source then has room.
  template <typename Source, typename Keys, typename Values>
  __device__ __forceinline__ void add(Source& source, int first, int last, int context,
                                      Keys keys_taken, Values values_taken) {
    constexpr int kSpan = Source::kSpan;
    const int span = first / kSpan * kSpan;
    auto present = [&](int s) { return kSpan == 1 || (span + s >= first && span + s < last); };
    float p[kSpan][4];  // tokens g and g + 8, heads 2t and 2t + 1
    source.take_keys();
#pragma unroll
    for (int s = 0; s < kSpan; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[s][i] = -CUDART_INF_F;
      if (present(s)) add_scores(source, s, (span + s) * kTile, context, p[s]);
    }
    keys_taken();
    raise_maxima(p);
    source.take_values(context - span * kTile, last - span);
#pragma unroll
    for (int s = 0; s < kSpan; ++s)
      if (present(s)) add_values(source, s, context - (span + s) * kTile, p[s]);
    values_taken();
  }

  // Scores of tile s of the source's span, which begins with `token`, in base 2.
  template <typename Source>
  __device__ __forceinline__ void add_scores(const Source& source, int s, int token, int context,
                                             float (&p)[4]) const {
    float scores[2][4] = {}, key_scales[2];
    if constexpr (kExact) {
#pragma unroll
      for (int c = 0; c < KC; ++c) {
        const uint4 low = source.key(s, c, 0), high = source.key(s, c, 1);
        multiply_add<Y>(scores[0], low.x, high.x, low.y, high.y, q[c].x, q[c].y);
        multiply_add<Y>(scores[1], low.z, high.z, low.w, high.w, q[c].z, q[c].w);
      }
    } else {
      key_scales[0] = source.key_scale(s, 0), key_scales[1] = source.key_scale(s, 1);
#pragma unroll
      for (int c = 0; c < KC / 2; ++c) {
        const uint4 low = source.key(s, c, 0), high = source.key(s, c, 1);
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
    token += threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = token + i / 2 * 8;
      const float key_scale = kExact ? scale[i % 2] : scale[i % 2] * key_scales[i / 2];
      const int seen = SEVERAL ? limit[i % 2] : context;
      float score = (scores[0][i] + scores[1][i]) * key_scale;
      if constexpr (LIMITED)
        if (soft_cap.cap > 0.0f) score = soft_cap(score);
      score += slope[i % 2] * float(own - (seen - 1));
      bool visible = own < seen;
      if constexpr (LIMITED) visible = visible && own >= first_seen[i % 2];
      p[i] = visible ? score : -CUDART_INF_F;
    }
  }

  // Raise the running maxima, and rescale sums and outputs, if a score exceeds them.
  template <int TILES>
  __device__ __forceinline__ void raise_maxima(const float (&p)[TILES][4]) {
    float high[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) high[i % 2] = fmaxf(high[i % 2], p[s][i]);
    }
    if (!__any_sync(kAll, high[0] > most[0] || high[1] > most[1])) return;
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
    scale_output(shrink[0], shrink[1]);
  }

  // Raise the unit, and rescale the outputs, if a value's scale exceeds it.
  __device__ __forceinline__ void raise_unit(float largest) {
    if (!__any_sync(kAll, largest > unit_scale)) return;
    largest = warp_max(largest);
    const float before = unit_scale;
    unit_scale = __uint_as_float((__float_as_uint(largest) & 0x7f800000u) + 0x00800000u);
    inverse = 1.0f / unit_scale;
    scale_output(before * inverse, before * inverse);
  }

  __device__ __forceinline__ void scale_output(float even, float odd) {
#pragma unroll
    for (int c = 0; c < VC; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[c][j][i] *= i % 2 ? odd : even;
      }
    }
  }

  // Accumulate the values of tile s of the source's span; its first `valid` tokens are in the
  // context. p: scores.
  template <typename Source>
  __device__ __forceinline__ void add_values(const Source& source, int s, int valid,
                                             float (&p)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = exp2f(p[i] - most[i % 2]);
      sum[i % 2] += p[i];
    }
    if constexpr (!kExact) {
      const int g = threadIdx.x % 32 / 4;
      float scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[i] = g + 8 * i < valid ? source.value_scale(s, i) : 0.0f;
      raise_unit(fmaxf(scales[0], scales[1]));
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] *= scales[i / 2] * inverse * kLift;
    }
    const uint32_t p0 = transpose8x8(pack<Y>(p[0], p[1])), p1 = transpose8x8(pack<Y>(p[2], p[3]));
#pragma unroll
    for (int c = 0; c < VC; ++c) {
      EightOf<C> values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = source.value(s, c, i, valid);
      if constexpr (!kExact) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // 4 dims of the lane
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = j == 0 ? values[i].x : values[i].y;
#pragma unroll
          for (int k = 0; k < 2; ++k) {  // 2 of them
            uint32_t a[4];
            widen_pairs<C>(words[0], words[1], k, a[0], a[1]);
            widen_pairs<C>(words[2], words[3], k, a[2], a[3]);
            multiply_add<Y>(output[c][2 * j + k], a[0], a[1], a[2], a[3], p0, p1);
          }
        }
      } else {
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
  }

  // Adds up the sums of all lanes, after the last tile.
  __device__ __forceinline__ void finish() {
    if constexpr (!kExact) scale_output(unit_scale * (1.0f / kLift), unit_scale * (1.0f / kLift));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kAll, sum[i], 4);
      sum[i] += __shfl_xor_sync(kAll, sum[i], 8);
      sum[i] += __shfl_xor_sync(kAll, sum[i], 16);
    }
  }
};

// Issues the loads of the tiles of a row and KV head for a warp's Source.
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

  // Loads entries from that of `tile` on, of a row of `tiles` tiles.
  __device__ __forceinline__ void load_ids(int tile, int tiles) {
    ids_base = entry_of(tile);
    const int entries = entry_of(tiles - 1) + 1;
    const int entry = min(ids_base + int(threadIdx.x % 32), entries - 1);
    ids = task.block_tables[row * task.table_stride + entry];
  }
  // Index into the block table; exact, since tiles * each is below 2^32.
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
  // Loads keys (which = 0) or values (1) of tiles first .. last, of one span, of a row of `tiles`.
  __device__ __forceinline__ void request(int which, int first, int last, int tiles) {
    const int64_t at = place_of(which, first, tiles);
    if constexpr (Source::kRing)
      source.request(numbers(at), scales(at), first % Source::kSpan, last - first);
    else if (which == 0)
      source.request_keys(numbers(at), scales(at));
    else
      source.request_values(numbers(at), scales(at), task.context_lens[row] - first * kTile);
  }
  __device__ __forceinline__ int64_t place_of(int which, int tile, int tiles) {
    return tile_row(tile, tiles) + which * value_offset(task.kv_heads, task.block_tokens, 1);
  }
  __device__ __forceinline__ const C* numbers(int64_t at) const {
    return static_cast<const C*>(task.cache) + at * D;
  }
  __device__ __forceinline__ const float* scales(int64_t at) const {
    return kExact ? nullptr : task.cache_scales + at;
  }
  // Prefetch to L2 before the next kernel saturates memory with loads of its weights.
  __device__ __forceinline__ void prefetch(int tile, int tiles) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x % 32;
    const int64_t at = place_of(lane % 2, tile, tiles);
    if (lane < 2)
      prefetch_bulk(numbers(at), kTile * D * sizeof(C));
    else if (!kExact && lane < 4)
      prefetch_bulk(scales(at), kTile * sizeof(float));
#endif
  }
};

}  // namespace
}  // namespace tridecode
