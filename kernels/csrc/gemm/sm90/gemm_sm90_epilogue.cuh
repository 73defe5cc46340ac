// The epilogue of the wgmma kernels: from the sums in a warp group's registers to memory.
#pragma once
#include "cache/kv_cache_8bit.cuh"
#include "cache/rotary.cuh"
#include "gemm/sm90/gemm_sm90.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The epilogue of a warp group's part of a tile. A column is an output.
//
// Results are staged in shared memory for TMA stores: 128 bytes per token, 64 columns; or 64 bytes
// per token, 32 columns, followed, if rotated, by all tokens' columns of the other half of the
// head.
//
// SCALED: the sums are of 8-bit operands and are multiplied by weight_scales and x_scales first.
// ROUNDS: keys and values of up to 64 tokens are quantised for an 8-bit cache.
template <typename X, int N, Mode MODE, bool SCALED = false, bool ROUNDS = true,
          int BUFFERS = kBuffers>
struct Finish {
  using S = Shape<N>;
  static constexpr bool kPairs = MODE == kGated || MODE == kQkvRotary;  // in c[4 j] and c[4 j + 2]
  static constexpr int kBoxColumns = kPairs ? 32 : 64;
  static constexpr int kParts = N / S::kPart;
  static constexpr int kSecondHalf = S::kPart * 64;

  const GemmTask& task;
  const CUtensorMap* out_map;
  const CUtensorMap* residual_map;
  char* buffers;      // of this warp group
  uint64_t* arrived;  // an mbarrier for each of its buffers
  int group;
  unsigned int used = 0;  // parts stored so far
  unsigned int parts_rounded = 0;
  float biases[2] = {};  // of the columns of c[4 j] and c[4 j + 2]
  float scales[2] = {};  // SCALED: of these columns
  // SCALED: the scales of the tile's tokens in shared memory, or null: they are read where needed
  float* x_scales = nullptr;
  // KV slots of this thread's tokens: preloaded (load_slots) if registers allow, N <= 32; otherwise
  // read on demand.
  static constexpr bool kHeads = MODE == kQkv || MODE == kQkvRotary;
  static constexpr bool kRounds = kHeads && ROUNDS && N <= 64, kSlotsAhead = N <= 32;
  static_assert(!kRounds || kParts == 1);
  int slots[kHeads && kSlotsAhead ? N / 16 : 1];

  // The first column of this warp group in the block whose rows start at `row`.
  __device__ __forceinline__ int first_column(int row) const {
    if (MODE == kGated) return row / 2 + group * 32;
    if (MODE != kQkvRotary) return row + group * 64;
    const int half = task.head_size / 2, pair = row / 2 + group * 32;
    return pair / half * task.head_size + pair % half;
  }

  // The scales from stage `step` on of the columns of c[4 j] and c[4 j + 2], and of the tile's
  // tokens.
  __device__ __forceinline__ StageScales stage_scales(int column, int token, int step) const {
    if (!task.block_scales) return {task};
    const int half = MODE == kGated ? task.outputs / 2 : task.outputs;
    const int first = min(column, half - 1);
    const int second = MODE == kGated       ? half + first
                       : MODE == kQkvRotary ? min(column + task.head_size / 2, half - 1)
                                            : first;
    const int stages = (task.inputs + kStageInputs - 1) / kStageInputs;
    const int lane_token = token + threadIdx.x % 4 * 2;
    return {task, first / kScaleBlock * stages + step, second / kScaleBlock * stages + step,
            step * task.tokens + lane_token};
  }

  __device__ __forceinline__ char* buffer(unsigned int use) const {
    return buffers + use % BUFFERS * S::kBufferBytes;
  }

  // Called by the first thread of the group: loads the residual of part `i` of a tile into the
  // buffer that the part is stored from. use: the number of the part.
  __device__ __forceinline__ void load_residual(int column, int token, int i, unsigned int use) {
    uint64_t* const barrier = arrived + use % BUFFERS;
    barrier_expect(barrier, S::kPart * kBoxColumns * 2);
    copy_box(buffer(use), residual_map, column, token + i * S::kPart, barrier, evict_last());
  }

  __device__ __forceinline__ void load_first_residuals(int column, int token) {
    wait_stores_read<0>();
    for (int i = 0; i < BUFFERS && i < kParts; ++i) load_residual(column, token, i, used + i);
  }

  static __device__ __forceinline__ int place64(int token, int piece) {
    return token * 128 + ((piece ^ (token % 8)) * 16);
  }
  static __device__ __forceinline__ int place32(int token, int piece) {
    return token * 64 + ((piece ^ (token / 2 % 4)) * 16);
  }

  // The offset of the lane's row of 16 bytes for store_transposed: 8 columns of 32 tokens (gated),
  // of 16 tokens in both halves (rotated), or 16 columns of 16 tokens.
  static __device__ __forceinline__ int place(int warp, int lane, int eight) {
    if (MODE == kGated) return place32(8 * eight + lane, warp);
    if (MODE == kQkvRotary) return lane / 16 * kSecondHalf + place32(8 * eight + lane % 16, warp);
    return place64(8 * (eight + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2);
  }

  // The index in c of the first of two tokens' sums of matrix k of store_transposed.
  static constexpr __device__ __forceinline__ int sums_of(int k) {
    if (MODE == kGated) return 4 * k;
    if (MODE == kQkvRotary) return k % 2 * 4 + k / 2 * 2;
    return 2 * k;
  }

  __device__ __forceinline__ void store_part(const float (&c)[N / 2], int column, int token,
                                             int i) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool leads = threadIdx.x % 128 == 0;
    char* const to = buffer(used);
    if (MODE == kPlain && task.residual) {
      barrier_wait(arrived + used % BUFFERS, used / BUFFERS % 2);
    } else {
      if (leads) wait_stores_read<BUFFERS - 1>();
      group_sync(group);
    }
    constexpr int kStep = MODE == kGated ? 4 : 2;  // groups of 8 tokens of a store_transposed
#pragma unroll
    for (int eight = 0; eight < S::kPart / 8; eight += kStep) {
      char* const row = to + place(warp, lane, eight);
      uint32_t words[4];
      float values[4][2];
      const int first = 4 * (i * (S::kPart / 8) + eight);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        values[k][0] = c[first + sums_of(k)], values[k][1] = c[first + sums_of(k) + 1];
      if (MODE == kPlain && task.residual) {
        load_transposed(row, words);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 more = unpack<X>(words[k]);
          values[k][0] += more.x, values[k][1] += more.y;
        }
        __syncwarp();
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) words[k] = pack<X>(values[k][0], values[k][1]);
      store_transposed(row, words);
    }
    fence_copies();
    group_sync(group);
    Rounded rounded;
    bool rounds = false;
    if constexpr (kRounds) rounds = round_part(to, column, token, rounded);
    if (leads) {
      store_box(out_map, to, column, token + i * S::kPart);
      if (MODE == kQkvRotary)
        store_box(out_map, to + kSecondHalf, column + task.head_size / 2, token + i * S::kPart);
      commit_stores();
      if (MODE == kPlain && task.residual && i > 0 && i + 1 < kParts) {
        wait_stores_read<BUFFERS - 1>();  // the first two were loaded at the start
        load_residual(column, token, i + 1, used + 1);
      }
    }
    if (!rounds && kHeads) cache_part(to, column, token, i);
    if (rounds && N <= 32) cache_rounded(rounded, column, token, 0);
    ++used;
  }

  // Cache writes: a thread handles the same 8 columns of every 16th token of a part: the first
  // column, the first token, and their address in shared memory.
  static constexpr int kCachedTokens = S::kPart / 16;
  __device__ __forceinline__ int cached_column(int column) const {
    const int piece = threadIdx.x % 8;
    return MODE == kQkv ? column + piece * 8
                        : column + piece % 4 * 8 + piece / 4 * (task.head_size / 2);
  }
  static __device__ __forceinline__ int cached_token() { return threadIdx.x % 128 / 8; }
  static __device__ __forceinline__ int cached_place(int i) {
    const int at = cached_token() + 16 * i, piece = threadIdx.x % 8;
    return MODE == kQkv ? place64(at, piece) : piece / 4 * kSecondHalf + place32(at, piece % 4);
  }
  __device__ __forceinline__ int load_slot(int token, int at) const {
    token += cached_token() + 16 * at;
    return token < task.tokens ? task.kv_slots[token] : -1;
  }
  // The cache slot of the thread's token 16 * at of a tile.
  __device__ __forceinline__ int slot_of(int token, int at) const {
    return kSlotsAhead ? slots[at] : load_slot(token, at);
  }
  // Loads the slots before the mainloop: after it they would queue behind the next kernel's loads.
  __device__ __forceinline__ void load_slots(int column, int token) {
    if (!kHeads || !kSlotsAhead || cached_column(column) / task.head_size < task.heads) return;
#pragma unroll
    for (int at = 0; at < N / 16; ++at) slots[at] = load_slot(token, at);
  }

  // Writes the keys and values of a part from shared memory to the cache, 16 bytes per thread.
  __device__ __forceinline__ void cache_part(const char* from, int column, int token, int part) {
    const int c = cached_column(column), head = c / task.head_size;
    if (head < task.heads || c >= task.outputs) return;  // heads may be narrower than a group
    int places[kCachedTokens];                           // loaded together
#pragma unroll
    for (int i = 0; i < kCachedTokens; ++i) places[i] = slot_of(token, part * kCachedTokens + i);
#pragma unroll
    for (int i = 0; i < kCachedTokens; ++i)
      write_cache<X>(task, places[i], head, c % task.head_size,
                     *reinterpret_cast<const uint4*>(from + cached_place(i)));
  }

  // The thread's tokens of a part, quantised for an 8-bit cache. If registers suffice (not for 64
  // tokens), they are written after the store of the part.
  struct Rounded {
    static constexpr int kHeld = N <= 32 ? kCachedTokens : 1;
    uint2 eights[kHeld];
    float scales[kHeld];
  };

  // Return whether this warp group's columns are keys or values.
  __device__ __forceinline__ bool caches(int column) const {
    return column / task.head_size >= task.heads && column < task.outputs;
  }

  // Quantises the keys and values of a part in shared memory for an 8-bit cache, and replaces them
  // by their dequantised values. A head of 64 dims belongs to one warp group, a head of 128 to both
  // of the block.
  template <typename C>
  __device__ __forceinline__ void round_heads(char* part, uint32_t (&largest)[kGroups][S::kPart],
                                              int column, int token, Rounded& rounded) {
    constexpr int kTogether = N <= 32 ? kCachedTokens : SCALED ? 2 : 1;
    const bool wide = task.head_size == 128;
#pragma unroll(kTogether)
    for (int i = 0; i < kCachedTokens; ++i) {
      const uint4 words = *reinterpret_cast<const uint4*>(part + cached_place(i));
      uint32_t both = 0, most;  // 16-bit numbers without their sign are ordered by magnitude
#pragma unroll
      for (int j = 0; j < 4; ++j) both = __vmaxu2(both, get(words, j) & 0x7fff7fffu);
      most = __float_as_uint(unpack<X>(max(both & 0xffffu, both >> 16)).x);
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2)
        most = max(most, __shfl_xor_sync(kAll, most, offset));
      if (threadIdx.x % 8 == 0) largest[group][cached_token() + 16 * i] = most;
    }
    if (wide)
      groups_sync();
    else
      __syncwarp();
#pragma unroll(kTogether)
    for (int i = 0; i < kCachedTokens; ++i) {
      uint4& words = *reinterpret_cast<uint4*>(part + cached_place(i));
      const int at = cached_token() + 16 * i;
      const CacheRounding<C> rounding(max(largest[group][at], wide ? largest[1 - group][at] : 0u));
      float values[8];
      alignas(8) C stored[8];
      unpack_eight<X>(words, values);
      rounding.store(values, stored);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = rounding.read(stored[j]);
      store8(reinterpret_cast<X*>(&words), values);
      const int held = N <= 32 ? i : 0;
      rounded.eights[held] = *reinterpret_cast<const uint2*>(stored);
      rounded.scales[held] = rounding.scale;
      if (N > 32) cache_rounded(rounded, column, token, i);
    }
  }

  // Returns false if the part has no keys and values, or the cache has 16 bits. token: the part's
  // first.
  __device__ __forceinline__ bool round_part(char* part, int column, int token, Rounded& rounded) {
    __shared__ uint32_t largest[2][kGroups][S::kPart];  // magnitudes of a group's dims
    if (task.cache_format == kCacheOfDtype || !caches(column)) return false;
    auto& most = largest[parts_rounded++ % 2];
    if (task.cache_format == kCacheInt8)
      round_heads<int8_t>(part, most, column, token, rounded);
    else
      round_heads<e4m3>(part, most, column, token, rounded);
    fence_copies();
    group_sync(group);
    return true;
  }

  // Write the quantised keys or values of all tokens of the only part, or of token i alone.
  __device__ __forceinline__ void cache_rounded(const Rounded& rounded, int column, int token,
                                                int i) const {
    const int c = cached_column(column);
#pragma unroll
    for (int k = 0; k < Rounded::kHeld; ++k)
      write_rounded(task, slot_of(token, i + k), c / task.head_size, c % task.head_size,
                    rounded.eights[k], rounded.scales[k]);
  }

  // The barrier of both warp groups.
  static __device__ __forceinline__ void groups_sync() {
    static_assert(kGroups == 2);
    asm volatile("bar.sync %0, 256;" ::"n"(2 * kGroups + 1) : "memory");
  }

  // Prefetches the operands of rotate_all, cache_part and round_part into L2: thread `index` of
  // `count`.
  static __device__ __forceinline__ void prefetch_tables(const GemmTask& task, int index,
                                                         int count) {
    if (MODE != kQkv && MODE != kQkvRotary) return;
    for (int token = index; token < task.tokens; token += count) {
      if (token % 32 == 0) prefetch_l2(task.kv_slots + token);
      if (MODE == kQkv) continue;
      const int64_t angle = int64_t(task.positions[token]) * (task.head_size / 2);
      for (int i = 0; i < task.head_size / 2; i += 32) {  // 128 bytes
        prefetch_l2(task.cos + angle + i);
        prefetch_l2(task.sin + angle + i);
      }
    }
  }

  // The angles of kBatch of the lane's tokens.
  static constexpr int kBatch = N < 32 ? N / 4 : N <= 96 ? 8 : N <= 128 ? 16 : 4;
  struct Angles {
    float cosines[kBatch], sines[kBatch];
  };

  __device__ __forceinline__ bool rotates(int column) const {
    return MODE == kQkvRotary && column / task.head_size < task.heads + task.kv_heads;
  }

  // The angles of the lane's tokens from the `first`th on.
  __device__ __forceinline__ void load_angles(Angles& angles, int column, int token, int first) {
    const int half = task.head_size / 2, lane = threadIdx.x % 32;
    const int d = column % task.head_size + threadIdx.x / 32 % 4 * 8 + lane / 4;
    int at[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int mine = token + (first + k) / 2 * 8 + lane % 4 * 2 + k % 2;
      at[k] = task.positions[min(mine, task.tokens - 1)] * half + d;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      angles.cosines[k] = task.cos[at[k]], angles.sines[k] = task.sin[at[k]];
  }

  __device__ __forceinline__ void rotate_batch(float (&c)[N / 2], const Angles& angles, int first) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      float* const pair = c + (first + k) / 2 * 4 + k % 2;
      rotate(pair[0], pair[2], angles.cosines[k], angles.sines[k]);
    }
  }

  // Rotates the pairs of queries and keys.
  __device__ __forceinline__ void rotate_all(float (&c)[N / 2], int column, int token) {
    if (!rotates(column)) return;
#pragma unroll
    for (int first = 0; first < N / 4; first += kBatch) {
      Angles angles;
      load_angles(angles, column, token, first);
      rotate_batch(c, angles, first);
    }
  }

  __device__ __forceinline__ void store_float32(const float (&c)[N / 2], int column, int token) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* const out = static_cast<float*>(task.out);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = token + 8 * j + 2 * t + k % 2;
        const int row = column + warp * 16 + g + k / 2 * 8;
        if (at < task.tokens && row < task.outputs) out[at * task.out_stride + row] = c[4 * j + k];
      }
    }
  }

  // Stores finished sums.
  __device__ __forceinline__ void store_all(const float (&c)[N / 2], int column, int token) {
    if (MODE == kPlain && task.out_float32) {
      store_float32(c, column, token);
    } else {
#pragma unroll
      for (int i = 0; i < kParts; ++i) store_part(c, column, token, i);
    }
  }

  // Loads the biases of the lane's columns before the mainloop: after it they would queue behind
  // the weights that the next kernel prefetches.
  __device__ __forceinline__ void load_biases(int column) {
    const X* const bias = static_cast<const X*>(task.bias);
    if (!SCALED && !bias) return;
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    const int row = column + (kPairs ? warp * 8 : warp * 16) + g;
    const int second = MODE == kGated       ? task.outputs / 2 + row
                       : MODE == kQkvRotary ? row + task.head_size / 2
                                            : row + 8;
    const int limit = MODE == kGated ? task.outputs / 2 : task.outputs;
    const bool has[2] = {row < limit, (kPairs ? row : second) < limit};
    if (SCALED) {
      scales[0] = !has[0] ? 0.0f : task.block_scales ? 1.0f : task.weight_scales[row];
      scales[1] = !has[1] ? 0.0f : task.block_scales ? 1.0f : task.weight_scales[second];
      if (!bias) return;
    }
    biases[0] = has[0] ? to_float(bias[row]) : 0.0f;
    biases[1] = has[1] ? to_float(bias[second]) : 0.0f;
  }

  // SCALED: loads the scales of the tile's tokens before the mainloop, too.
  __device__ __forceinline__ void load_x_scales(int token) {
    if (!x_scales) return;
    group_sync(group);  // the last tile's have been read
    for (int i = threadIdx.x % 128; i < N; i += 128)
      x_scales[i] = token + i < task.tokens ? task.x_scales[token + i] : 0.0f;
  }

  // SCALED: multiplies the sums of 8-bit numbers by their scales.
  __device__ __forceinline__ void scale_all(float (&c)[N / 2], int token) {
    const int t = threadIdx.x % 4;
    if (x_scales) group_sync(group);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const int at = 8 * j + 2 * t, last = task.tokens - 1;
      const float first = x_scales ? x_scales[at] : task.x_scales[min(token + at, last)];
      const float next = x_scales ? x_scales[at + 1] : task.x_scales[min(token + at + 1, last)];
      c[4 * j] = c[4 * j] * scales[0] * first, c[4 * j + 1] = c[4 * j + 1] * scales[0] * next;
      c[4 * j + 2] = c[4 * j + 2] * scales[1] * first;
      c[4 * j + 3] = c[4 * j + 3] * scales[1] * next;
    }
  }

  // Applies bias and activation; a gated result replaces the gate.
  __device__ __forceinline__ void activate_all(float (&c)[N / 2]) {
    if (task.bias) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        c[4 * i] += biases[0], c[4 * i + 1] += biases[0];
        c[4 * i + 2] += biases[1], c[4 * i + 3] += biases[1];
      }
    }
    if (MODE == kGated) {
      gate_all(c, task.activation);
    } else if (task.activation == kGeluTanh) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) c[i] = activate(c[i], kGeluTanh);
    } else if (task.activation == kGelu) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) c[i] = activate(c[i], kGelu);
    } else if (task.activation == kRelu) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) c[i] = activate(c[i], kRelu);
    }
  }
};

#endif

}  // namespace
}  // namespace tridecode
