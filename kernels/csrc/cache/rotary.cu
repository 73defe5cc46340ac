// The tail of the query, key and value projection: rotates q and k in place and writes k and v to
// the cache. One block per token; rotary_8bit.cu handles an 8-bit cache.
// Bytes moved: q + k read and written if rotated, v read, and k + v written, times sizeof(X).
// Bench: python -m tridecode.kernels.bench step
#include "api/attention.h"
#include "api/gemm.h"
#include "cache/kv_cache_8bit.cuh"
#include "cache/rotary_whole.cuh"

namespace tridecode {
namespace {

using Task = tridecode_gemm_task;

// WIDTH 8 needs head_size % 8 == 0 and, rotated by halves, rotary_size % 16 == 0; interleaved pairs
// are rotated within a thread's numbers, or by the thread of the even dim.
template <typename X, int WIDTH>
__global__ void rotate_and_cache(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const int64_t token = blockIdx.x;
  X* const row = static_cast<X*>(task.out) + token * task.out_stride;
  const int slot = task.kv_slots[token], size = task.head_size, rotary = task.rotary_size;
  const int position = rotary ? task.positions[token] : 0;
  const int groups = size / WIDTH, half = rotary / 2, rotated_heads = task.heads + task.kv_heads;

  auto rotate_pair = [&](float& a, float& b, int d) {
    const int64_t angle = angle_index(position, rotary, d, task.interleaved);
    rotate(a, b, task.cos[angle], task.sin[angle]);
  };
  auto keep = [&](int head, int d, const float (&values)[WIDTH]) {
    store_some<WIDTH>(row + head * size + d, values);
    write_cache<X>(task, slot, head, d, values);
  };

  const int first_head = rotary ? 0 : task.heads;  // unrotated queries stay unchanged
  for (int i = first_head * groups + threadIdx.x; i < (rotated_heads + task.kv_heads) * groups;
       i += kThreads) {
    const int head = i / groups, d = i % groups * WIDTH;
    float a[WIDTH];
    load_some<WIDTH>(row + head * size + d, a);
    if (head >= rotated_heads || d >= rotary) {
      write_cache<X>(task, slot, head, d, a);
    } else if (task.interleaved) {
      if constexpr (WIDTH > 1) {
#pragma unroll
        for (int j = 0; j < WIDTH; j += 2)
          if (d + j < rotary) rotate_pair(a[j], a[j + 1], d + j);
        keep(head, d, a);
      } else if (d % 2 == 0) {
        float b[WIDTH];
        load_some<WIDTH>(row + head * size + d + 1, b);
        rotate_pair(a[0], b[0], d);
        keep(head, d, a);
        keep(head, d + 1, b);
      }
    } else if (d < half) {  // the thread of the first half rotates both
      float b[WIDTH];
      load_some<WIDTH>(row + head * size + d + half, b);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) rotate_pair(a[j], b[j], d + j);
      keep(head, d, a);
      keep(head, d + half, b);
    }
  }
}

// 16-bit X, heads of D dims that are rotated by halves and whole. The angles of a token, and the
// addresses of its heads in the cache, are read before the wait.
template <typename X, int D, int PIECES>
__global__ void __launch_bounds__(kThreads, resident_blocks_of(PIECES))
    rotate_and_cache_whole(const __grid_constant__ Task task) {
  const int64_t token = blockIdx.x;
  const int d = threadIdx.x % (D / 8) * 8;
  const int rotated_heads = task.heads + task.kv_heads, all_heads = rotated_heads + task.kv_heads;
  const OwnHeads<D, PIECES> heads(0);
  const Turn<D, true> turn(task, token, d);
  const int slot = task.kv_slots[token];
  X* to[PIECES];  // null: not written
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    to[i] = heads(i) < all_heads ? cache_place<X>(task, slot, heads(i)) : nullptr;
  wait_for_predecessor();
  X* const row = static_cast<X*>(task.out) + token * task.out_stride + d;
  uint4 words[PIECES];
  heads.load(words, row, all_heads);
  // the lanes of a warp stay together: they exchange numbers
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    if (heads.first_of_block(i) >= all_heads) break;
    const int head = heads(i);
    float values[8];
    turn.template apply<X>(words[i], head < rotated_heads, values);
    store8(reinterpret_cast<X*>(&words[i]), values);
    if (head < rotated_heads) *reinterpret_cast<uint4*>(row + head * D) = words[i];
    if (to[i]) *reinterpret_cast<uint4*>(to[i] + d) = words[i];
  }
}

template <typename X, int D>
int run_whole(const Task& task, void* stream) {
  return divide_heads<D>(task.tokens, task.heads + 2 * task.kv_heads, [&](auto pieces, dim3 grid) {
    return launch("rotate_and_cache", rotate_and_cache_whole<X, D, pieces>, grid, kThreads, 0,
                  stream, task);
  });
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_rotate_and_cache(const tridecode_gemm_task* given, void* stream) {
  const Task& task = *given;
  return for_dtype(task.dtype, "rotate_and_cache", [&](auto zero) {
    using X = decltype(zero);
    const bool wide = task.head_size % 8 == 0 && (task.interleaved || task.rotary_size % 16 == 0) &&
                      task.out_stride % 8 == 0 && aligned16(task.out) && aligned16(task.cache);
    if (task.cache_format != kCacheOfDtype) return run_rotate_and_round(task, wide, stream);
    if constexpr (sizeof(X) == 2) {
      if (wide && rotates_whole(task)) {
        if (task.head_size == 64) return run_whole<X, 64>(task, stream);
        if (task.head_size == 128) return run_whole<X, 128>(task, stream);
      }
    }
    return launch("rotate_and_cache", wide ? rotate_and_cache<X, 8> : rotate_and_cache<X, 1>,
                  task.tokens, kThreads, 0, stream, task);
  });
}
