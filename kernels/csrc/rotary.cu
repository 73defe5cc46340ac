// The tail of the query, key and value projection: rotates q and k in place and writes k and v to
// the cache. One block per token; with an 8-bit cache one warp per token and head, which also
// rounds k and v.
// Bytes moved: 2 * (q + k) read and written where rotated, and k + v written, times sizeof(X).
// With an 8-bit cache: q + k + v read and written, times sizeof(X), and k + v and scales written.
// Bench: python -m tridecode.kernels.bench step
#include "kv_cache_8bit.cuh"
#include "rotary.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;

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

  const int first_head = rotary ? 0 : task.heads;  // unrotated queries stay as they are
  for (int i = first_head * groups + threadIdx.x; i < (rotated_heads + task.kv_heads) * groups;
       i += kThreads) {
    const int head = i / groups, d = i % groups * WIDTH;
    float a[WIDTH];
    load_some<WIDTH>(row + head * size + d, a);
    if (head >= rotated_heads || d >= rotary) {
      keep(head, d, a);
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

constexpr int kWarps = kThreads / 32;
constexpr int kMaxHead = 256;  // of an 8-bit cache

// The same for a cache of C, int8_t or e4m3: a warp rotates, rounds and writes one head. WIDTH: as
// above.
template <typename X, typename C, int WIDTH>
__global__ void rotate_and_round(const __grid_constant__ Task task) {
  constexpr int kPieces = WIDTH == 8 ? 1 : kMaxHead / 32;  // of a lane
  wait_for_predecessor();
  const int lane = threadIdx.x % 32, size = task.head_size, rotary = task.rotary_size;
  const int half = rotary / 2, rotated_heads = task.heads + task.kv_heads;
  const int first_head = rotary ? 0 : task.heads;  // unrotated queries stay as they are
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
    // the other numbers of the pairs are rotated by another lane
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
  __syncwarp();  // all lanes have read what others overwrite
  if (head < task.heads) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int d = (lane + 32 * piece) * WIDTH;
      if (d < size) store_some<WIDTH>(x + d, values[piece]);
    }
    return;
  }

  uint32_t most = 0;  // bits of the largest magnitude; infinity and NaN are above all others
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      float& value = values[piece][j];
      value = to_float(from_float<X>(value));
      most = max(most, __float_as_uint(value) & 0x7fffffffu);
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    most = max(most, __shfl_xor_sync(kAll, most, offset));
  const bool is_finite = most < 0x7f800000u;
  const float least = __uint_as_float(0x00800000u);  // the smallest normal number
  const float scale = is_finite ? fmaxf(__uint_as_float(most) / largest_of<C>(), least)
                                : __uint_as_float(0x7fc00000u);
  const int slot = task.kv_slots[token];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int d = (lane + 32 * piece) * WIDTH;
    if (d >= size) continue;
    alignas(8) C stored[WIDTH];
    float back[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      stored[j] = round_to<C>(is_finite ? values[piece][j] / scale : 0.0f);
      back[j] = expand(stored[j]) * scale;
    }
    store_some<WIDTH>(x + d, back);
    write_rounded(task, slot, head, d, stored, scale);
  }
}

template <typename X, typename C>
int run_rounded(const Task& task, bool wide, void* stream) {
  if (task.head_size > kMaxHead)
    return fail("rotate_and_cache: head size %d; an 8-bit cache takes at most %d", task.head_size,
                kMaxHead);
  const int heads = (task.rotary_size ? task.heads : 0) + 2 * task.kv_heads;
  return launch("rotate_and_cache", wide ? rotate_and_round<X, C, 8> : rotate_and_round<X, C, 1>,
                dim3(task.tokens, ceil_div(heads, kWarps)), kThreads, 0, stream, task);
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
    if (task.cache_format != kCacheOfDtype)
      return for_cache_format(task.cache_format, "rotate_and_cache", [&](auto number) {
        return run_rounded<X, decltype(number)>(task, wide, stream);
      });
    return launch("rotate_and_cache", wide ? rotate_and_cache<X, 8> : rotate_and_cache<X, 1>,
                  task.tokens, kThreads, 0, stream, task);
  });
}
