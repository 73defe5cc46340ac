// The epilogue of gemm_sm90_stream_k.cu and gemm_sm90_split_k.cu: from the sums in a warp group's
// registers to memory.
#pragma once
#include "gemm_sm90.cuh"
#include "kv_cache.cuh"
#include "rotary.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Of E4M3 in blocks: where the scales of a run of stages begin.
struct StageScales {
  const GemmTask& task;
  int first = 0, second = 0;  // in block_scales, for the columns of c[4 j] and c[4 j + 2]
  int x = 0;                  // in x_scales, for the lane's first token
};

// The epilogue of a warp group's part of a tile. A column is an output.
//
// Results are staged in shared memory for TMA stores: 128 bytes per token, 64 columns; or 64 bytes
// per token, 32 columns, followed, with a rotation, by all tokens' columns of the other half of the
// head.
//
// SCALED: the sums are of 8-bit operands and are multiplied by weight_scales and x_scales first.
template <typename X, int N, Mode MODE, bool SCALED = false>
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
  float biases[2] = {};   // of the columns of c[4 j] and c[4 j + 2]
  float scales[2] = {};   // SCALED: of these columns
  // SCALED: the scales of the tile's tokens in shared memory, or null: they are read where needed
  float* x_scales = nullptr;

  // The first column of this warp group in the block whose rows begin at `row`.
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
    return buffers + use % kBuffers * S::kBufferBytes;
  }

  // In the first thread of the group: loads the residual of part `i` of a tile into the buffer that
  // the part is stored from. use: the number of the part.
  __device__ __forceinline__ void load_residual(int column, int token, int i, unsigned int use) {
    uint64_t* const barrier = arrived + use % kBuffers;
    barrier_expect(barrier, S::kPart * kBoxColumns * 2);
    copy_box(buffer(use), residual_map, column, token + i * S::kPart, barrier, evict_last());
  }

  __device__ __forceinline__ void load_first_residuals(int column, int token) {
    wait_stores_read<0>();
    for (int i = 0; i < kBuffers && i < kParts; ++i) load_residual(column, token, i, used + i);
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
      barrier_wait(arrived + used % kBuffers, used / kBuffers % 2);
    } else {
      if (leads) wait_stores_read<kBuffers - 1>();
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
    if (leads) {
      store_box(out_map, to, column, token + i * S::kPart);
      if (MODE == kQkvRotary)
        store_box(out_map, to + kSecondHalf, column + task.head_size / 2, token + i * S::kPart);
      commit_stores();
      if (MODE == kPlain && task.residual && i > 0 && i + 1 < kParts) {
        wait_stores_read<kBuffers - 1>();  // the first two were loaded at the start
        load_residual(column, token, i + 1, used + 1);
      }
    }
    if (MODE == kQkv || MODE == kQkvRotary) cache_part(to, column, token + i * S::kPart);
    ++used;
  }

  // Writes the keys and values of a part from shared memory to the cache, 16 bytes per thread. A
  // thread has the same columns of every 16th token.
  __device__ __forceinline__ void cache_part(const char* from, int column, int first_token) {
    const int size = task.head_size, piece = threadIdx.x % 8;
    const int c =
        MODE == kQkv ? column + piece * 8 : column + piece % 4 * 8 + piece / 4 * (size / 2);
    const int head = c / size;
    if (head < task.heads || c >= task.outputs) return;
    int slots[S::kPart / 16];  // loaded together
#pragma unroll
    for (int i = 0; i < S::kPart / 16; ++i) {
      const int token = first_token + threadIdx.x % 128 / 8 + 16 * i;
      slots[i] = token < task.tokens ? task.kv_slots[token] : -1;
    }
#pragma unroll
    for (int i = 0; i < S::kPart / 16; ++i) {
      const int at = threadIdx.x % 128 / 8 + 16 * i;
      const int place =
          MODE == kQkv ? place64(at, piece) : piece / 4 * kSecondHalf + place32(at, piece % 4);
      write_cache<X>(task, slots[i], head, c % size, *reinterpret_cast<const uint4*>(from + place));
    }
  }

  // Prefetches into the L2 cache what rotate_all and cache_part read: thread `index` of `count`.
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
  static constexpr int kBatch = N < 32 ? N / 4 : N <= 64 ? 8 : 4;
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

  // SCALED: the products' sums from those of the 8-bit numbers.
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

  // Bias and activation; SwiGLU's product takes the place of the gate.
  __device__ __forceinline__ void activate_all(float (&c)[N / 2]) {
    if (task.bias) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        c[4 * i] += biases[0], c[4 * i + 1] += biases[0];
        c[4 * i + 2] += biases[1], c[4 * i + 3] += biases[1];
      }
    }
    if (MODE == kGated) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        c[4 * i] = silu(c[4 * i]) * c[4 * i + 2];
        c[4 * i + 1] = silu(c[4 * i + 1]) * c[4 * i + 3];
      }
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
