// The results of linear_many_sm90a.cu and linear_split_sm90a.cu: from the sums in a warp group's
// registers to memory.
#pragma once
#include "epilogue.cuh"
#include "kv_cache.cuh"
#include "linear_many.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a warp group has of a tile, where it is to go and what is added to it.
//
// In shared memory a token has 128 bytes: 64 columns; or 64 bytes: 32 columns, behind which, where
// rotated, those of the other half of the head follow for all tokens.
template <typename X, int N, Mode MODE>
struct Finish {
  using S = Shape<N>;
  static constexpr bool kPairs = MODE == kGated || MODE == kRotated;  // rows c[4 j] and c[4 j + 2]
  static constexpr int kBoxColumns = kPairs ? 32 : 64;
  static constexpr int kParts = N / S::kPart;
  static constexpr int kSecondHalf = S::kPart * 64;

  const ProductTask& task;
  const CUtensorMap* out_map;
  const CUtensorMap* residual_map;
  char* buffers;      // of this warp group
  uint64_t* arrived;  // a barrier for each of its buffers
  int group;
  unsigned int used = 0;  // parts stored so far
  float biases[2] = {};   // of the rows of c[4 j] and c[4 j + 2]

  // The first column of this warp group in the block whose rows begin at `row`.
  __device__ __forceinline__ int first_column(int row) const {
    if (MODE == kGated) return row / 2 + group * 32;
    if (MODE != kRotated) return row + group * 64;
    const int half = task.head_size / 2, pair = row / 2 + group * 32;
    return pair / half * task.head_size + pair % half;
  }

  __device__ __forceinline__ char* buffer(unsigned int use) const {
    return buffers + use % kBuffers * S::kBufferBytes;
  }

  // In the first thread of the group: the residual of part `i` of a tile into the buffer that it
  // will be stored from. `use`: the part's number.
  __device__ __forceinline__ void ask_residual(int column, int token, int i, unsigned int use) {
    uint64_t* const barrier = arrived + use % kBuffers;
    barrier_expect(barrier, S::kPart * kBoxColumns * 2);
    copy_box(buffer(use), residual_map, column, token + i * S::kPart, barrier, evict_last());
  }

  __device__ __forceinline__ void ask_first_residuals(int column, int token) {
    wait_stores_read<0>();
    for (int i = 0; i < kBuffers && i < kParts; ++i) ask_residual(column, token, i, used + i);
  }

  static __device__ __forceinline__ int place64(int token, int piece) {
    return token * 128 + ((piece ^ (token % 8)) * 16);
  }
  static __device__ __forceinline__ int place32(int token, int piece) {
    return token * 64 + ((piece ^ (token / 2 % 4)) * 16);
  }

  // Of the lane's row of 16 bytes for store_transposed: 8 columns of four times 8 tokens (gated),
  // of twice 8 tokens in both halves (rotated), or 16 columns of twice 8 tokens.
  static __device__ __forceinline__ int place(int warp, int lane, int eight) {
    if (MODE == kGated) return place32(8 * eight + lane, warp);
    if (MODE == kRotated) return lane / 16 * kSecondHalf + place32(8 * eight + lane % 16, warp);
    return place64(8 * (eight + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2);
  }

  // Where, for matrix k of store_transposed, the first of two tokens' sums is in c.
  static constexpr __device__ __forceinline__ int sums_of(int k) {
    if (MODE == kGated) return 4 * k;
    if (MODE == kRotated) return k % 2 * 4 + k / 2 * 2;
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
    constexpr int kStep = MODE == kGated ? 4 : 2;  // eights of tokens stored at once
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
      if (MODE == kRotated)
        store_box(out_map, to + kSecondHalf, column + task.head_size / 2, token + i * S::kPart);
      commit_stores();
      if (MODE == kPlain && task.residual && i > 0 && i + 1 < kParts) {
        wait_stores_read<kBuffers - 1>();  // the first two were asked for at the start
        ask_residual(column, token, i + 1, used + 1);
      }
    }
    if (MODE == kCached || MODE == kRotated) keep(to, column, token + i * S::kPart);
    ++used;
  }

  // Keys and values of a part, from shared memory to the cache, 16 bytes a thread.
  __device__ __forceinline__ void keep(const char* from, int column, int first_token) {
    const int size = task.head_size;
    if (column + (MODE == kCached ? 64 : 32) <= task.heads * size) return;
    for (int item = threadIdx.x % 128; item < S::kPart * 8; item += 128) {
      const int at = item / 8, piece = item % 8, token = first_token + at;
      const int c =
          MODE == kCached ? column + piece * 8 : column + piece % 4 * 8 + piece / 4 * (size / 2);
      const int head = c / size;
      if (token >= task.tokens || head < task.heads || c >= task.outputs) continue;
      const int slot = task.kv_slots[token];
      if (slot < 0) continue;
      const int is_value = head >= task.heads + task.kv_heads;
      const int kv_head = head - task.heads - is_value * task.kv_heads;
      const int64_t block = slot / task.block_tokens, offset = slot % task.block_tokens;
      const int64_t to =
          (((block * 2 + is_value) * task.kv_heads + kv_head) * task.block_tokens + offset) * size +
          c % size;
      const int place =
          MODE == kCached ? place64(at, piece) : piece / 4 * kSecondHalf + place32(at, piece % 4);
      *reinterpret_cast<uint4*>(static_cast<X*>(task.cache) + to) =
          *reinterpret_cast<const uint4*>(from + place);
    }
  }

  // Into the L2 cache, what rotate_all and keep will read: `index` of `count` threads.
  static __device__ __forceinline__ void prefetch_tables(const ProductTask& task, int index,
                                                         int count) {
    if (MODE != kCached && MODE != kRotated) return;
    for (int token = index; token < task.tokens; token += count) {
      if (token % 32 == 0) prefetch_l2(task.kv_slots + token);
      if (MODE == kCached) continue;
      const int64_t angle = int64_t(task.positions[token]) * (task.head_size / 2);
      for (int i = 0; i < task.head_size / 2; i += 32) {  // 128 bytes
        prefetch_l2(task.cos + angle + i);
        prefetch_l2(task.sin + angle + i);
      }
    }
  }

  // Of some of the lane's tokens, what their pairs of queries and keys are turned by.
  static constexpr int kBatch = N < 32 ? N / 4 : 8;
  struct Angles {
    float cosines[kBatch], sines[kBatch];
  };

  __device__ __forceinline__ bool rotates(int column) const {
    return MODE == kRotated && column / task.head_size < task.heads + task.kv_heads;
  }

  // Of the lane's tokens from the `first`th on.
  __device__ __forceinline__ void ask_angles(Angles& angles, int column, int token, int first) {
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

  __device__ __forceinline__ void turn(float (&c)[N / 2], const Angles& angles, int first) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      float& a = c[(first + k) / 2 * 4 + k % 2];
      float& b = c[(first + k) / 2 * 4 + 2 + k % 2];
      const float x = a, y = b;
      a = x * angles.cosines[k] - y * angles.sines[k];
      b = y * angles.cosines[k] + x * angles.sines[k];
    }
  }

  // Turns the pairs of queries and keys.
  __device__ __forceinline__ void rotate_all(float (&c)[N / 2], int column, int token) {
    if (!rotates(column)) return;
#pragma unroll
    for (int first = 0; first < N / 4; first += kBatch) {
      Angles angles;
      ask_angles(angles, column, token, first);
      turn(c, angles, first);
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

  // The biases of the lane's rows, constants: asked for before the products. After them they would
  // queue behind the weights that the next kernel has on their way.
  __device__ __forceinline__ void ask_biases(int column) {
    const X* const bias = static_cast<const X*>(task.bias);
    if (!bias) return;
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    const int row = column + (kPairs ? warp * 8 : warp * 16) + g;
    const int second = MODE == kGated     ? task.outputs / 2 + row
                       : MODE == kRotated ? row + task.head_size / 2
                                          : row + 8;
    const int limit = MODE == kGated ? task.outputs / 2 : task.outputs;
    biases[0] = row < limit ? to_float(bias[row]) : 0.0f;
    biases[1] = (kPairs ? row : second) < limit ? to_float(bias[second]) : 0.0f;
  }

  // bias, activation, and for gated pairs the product, which takes the place of the gate.
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
