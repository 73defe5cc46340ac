// rotate_and_cache with an 8-bit cache: rotates q and k in place, quantises k and v, writes them to
// the cache with their scales, and replaces k and v by their dequantised values.
// Bytes moved: q + k + v read and written, times sizeof(X), and k + v and scales written.
// Bench: python -m tridecode.kernels.bench step
#include "api/gemm.h"
#include "cache/kv_cache_8bit.cuh"
#include "cache/rotary.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxHead = 256;  // largest head of an 8-bit cache

using Task = tridecode_gemm_task;

// 16-bit X, heads of D dims that are rotated entirely by halves, or not at all. D / 8 lanes hold a
// head; the angles of a token are read once for all its heads. A block processes a token or, with
// few tokens, some of its heads.
template <typename X, typename C, int D, bool ROTATES>
__global__ void __launch_bounds__(kThreads)
    rotate_and_round_whole(const __grid_constant__ Task task) {
  constexpr int kLanes = D / 8, kHeads = kThreads / kLanes;  // lanes of a head; heads at once
  wait_for_predecessor();
  const int64_t token = blockIdx.x;
  X* const row = static_cast<X*>(task.out) + token * task.out_stride;
  const int d = threadIdx.x % kLanes * 8;
  const int rotated_heads = task.heads + task.kv_heads, all_heads = rotated_heads + task.kv_heads;
  const int slot = task.kv_slots[token];
  float cosine[8] = {}, sine[8] = {};
  if constexpr (ROTATES) {
    const int64_t angle = angle_index(task.positions[token], D, d % (D / 2), false);
    load8(task.cos + angle, cosine);
    load8(task.sin + angle, sine);
  }
  // the lanes of a warp stay together: they exchange numbers
  for (int base = (ROTATES ? 0 : task.heads) + blockIdx.y * kHeads; base < all_heads;
       base += gridDim.y * kHeads) {
    const int head = base + threadIdx.x / kLanes;
    X* const x = row + head * D + d;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (head < all_heads) words = *reinterpret_cast<const uint4*>(x);
    float values[8];
    if constexpr (ROTATES)
      rotate_eight<X, D>(words, d, head < rotated_heads, cosine, sine, values);
    else
      unpack_eight<X>(words, values);
    const CacheRounding<C> rounding = rounding_of<X, C, kLanes>(values);
    if (head >= all_heads) continue;
    if (head >= task.heads) {
      alignas(8) C stored[8];
      rounding.store(values, stored);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = rounding.read(stored[j]);
      write_rounded(task, slot, head, d, stored, rounding.scale);
    }
    store8(x, values);
  }
}

// Any head, rotation and X: a warp rotates, quantises and writes one head. WIDTH: as in rotary.cu.
template <typename X, typename C, int WIDTH>
__global__ void rotate_and_round(const __grid_constant__ Task task) {
  constexpr int kPieces = WIDTH == 8 ? 1 : kMaxHead / 32;  // of a lane
  wait_for_predecessor();
  const int lane = threadIdx.x % 32, size = task.head_size, rotary = task.rotary_size;
  const int half = rotary / 2, rotated_heads = task.heads + task.kv_heads;
  const int first_head = rotary ? 0 : task.heads;  // unrotated queries stay unchanged
  const int head = first_head + blockIdx.y * kWarps + threadIdx.x / 32;
  if (head >= rotated_heads + task.kv_heads) return;
  const int64_t token = blockIdx.x;
  X* const x = static_cast<X*>(task.out) + token * task.out_stride + head * size;
  const bool rotates = rotary && head < rotated_heads;
  const int position = rotates ? task.positions[token] : 0;

  float values[kPieces][WIDTH] = {};
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int d = (lane + 32 * piece) * WIDTH;
    float (&a)[WIDTH] = values[piece];
    if (d >= size) continue;
    load_some<WIDTH>(x + d, a);
    if (!rotates || d >= rotary) continue;
    auto rotate_pair = [&](float& first, float& second, int at) {
      const int64_t angle = angle_index(position, rotary, at, task.interleaved);
      rotate(first, second, task.cos[angle], task.sin[angle]);
    };
    if (WIDTH > 1 && task.interleaved) {
#pragma unroll
      for (int j = 0; j + 1 < WIDTH; j += 2)
        if (d + j < rotary) rotate_pair(a[j], a[j + 1], d + j);
      continue;
    }
    // another lane rotates the other numbers of the pairs
    const bool is_first = task.interleaved ? d % 2 == 0 : d < half;
    const int distance = task.interleaved ? 1 : half;
    float b[WIDTH];
    load_some<WIDTH>(x + (is_first ? d + distance : d - distance), b);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      if (is_first)
        rotate_pair(a[j], b[j], d + j);
      else
        rotate_pair(b[j], a[j], d - distance + j);
    }
  }
  __syncwarp();  // all lanes have read the numbers that others overwrite
  if (head < task.heads) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int d = (lane + 32 * piece) * WIDTH;
      if (d < size) store_some<WIDTH>(x + d, values[piece]);
    }
    return;
  }

  uint32_t most = 0;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      float& value = values[piece][j];
      value = to_float(from_float<X>(value));
      most = max(most, magnitude(value));
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    most = max(most, __shfl_xor_sync(kAll, most, offset));
  const CacheRounding<C> rounding(most);
  const int slot = task.kv_slots[token];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int d = (lane + 32 * piece) * WIDTH;
    if (d >= size) continue;
    alignas(8) C stored[WIDTH];
    float back[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      stored[j] = rounding.store(values[piece][j]);
      back[j] = rounding.read(stored[j]);
    }
    store_some<WIDTH>(x + d, back);
    write_rounded(task, slot, head, d, stored, rounding.scale);
  }
}

template <typename X, typename C, int D>
int run_whole(const Task& task, void* stream) {
  const int heads = (task.rotary_size ? task.heads : 0) + 2 * task.kv_heads;
  return launch("rotate_and_cache",
                task.rotary_size ? rotate_and_round_whole<X, C, D, true>
                                 : rotate_and_round_whole<X, C, D, false>,
                blocks_of_heads(task.tokens, heads, D, kThreads), kThreads, 0, stream, task);
}

template <typename X, typename C>
int run_rounded(const Task& task, bool wide, void* stream) {
  if (task.head_size > kMaxHead)
    return fail("rotate_and_cache: head size %d; an 8-bit cache takes at most %d", task.head_size,
                kMaxHead);
  if constexpr (sizeof(X) == 2) {
    if (wide && (!task.rotary_size || rotates_whole(task))) {
      if (task.head_size == 64) return run_whole<X, C, 64>(task, stream);
      if (task.head_size == 128) return run_whole<X, C, 128>(task, stream);
    }
  }
  const int heads = (task.rotary_size ? task.heads : 0) + 2 * task.kv_heads;
  return launch("rotate_and_cache", wide ? rotate_and_round<X, C, 8> : rotate_and_round<X, C, 1>,
                dim3(task.tokens, ceil_div(heads, kWarps)), kThreads, 0, stream, task);
}

}  // namespace
}  // namespace tridecode

int tridecode::run_rotate_and_round(const tridecode_gemm_task& task, bool wide, void* stream) {
  return for_dtype(task.dtype, "rotate_and_cache", [&](auto zero) {
    return for_cache_format(task.cache_format, "rotate_and_cache", [&](auto number) {
      return run_rounded<decltype(zero), decltype(number)>(task, wide, stream);
    });
  });
}
