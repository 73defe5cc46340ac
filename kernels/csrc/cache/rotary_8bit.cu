// rotate_and_cache with an 8-bit cache: rotates q and k in place, quantises k and v, writes them to
// the cache with their scales, and replaces k and v by their dequantised values.
// Bytes moved: q + k + v read and written, times sizeof(X), and k + v and scales written.
// Bench: python -m tridecode.kernels.bench step
#include "api/gemm.h"
#include "cache/kv_cache_8bit.cuh"
#include "cache/rotary_whole.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kMaxHead = 256;  // largest head of an 8-bit cache

using Task = tridecode_gemm_task;

// Eight numbers of a head, quantised: bit for bit as CacheRounding stores and reads them, without a
// branch for scales that quotient() does not take. Those are multiplied by a power of two first.
template <typename X, typename C>
__device__ __forceinline__ uint2 round_eight(uint4& words, const CacheRounding<C>& rounding) {
  const float factor = rounding.scale <= kLeastDivisor  ? 0x1p80f
                       : rounding.scale >= kMostDivisor ? 0x1p-80f
                                                        : 1.0f;
  const float by = rounding.scale * factor, inverse = __frcp_rn(by);
  float values[8];
  unpack_eight<X>(words, values);
  alignas(8) C stored[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = quotient(values[j] * factor, by, inverse);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    if constexpr (std::is_same<C, e4m3>::value) {
      reinterpret_cast<__nv_fp8x2_storage_t*>(stored)[j / 2] = __nv_cvt_float2_to_fp8x2(
          make_float2(values[j], values[j + 1]), __NV_SATFINITE, __NV_E4M3);
    } else {
      stored[j] = round_to<C>(values[j]), stored[j + 1] = round_to<C>(values[j + 1]);
    }
  }
  uint2 eight = *reinterpret_cast<const uint2*>(stored);
  if (!rounding.is_finite) eight = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t low, high;
    widen<C>(i == 0 ? eight.x : eight.y, low, high);
    const float2 a = unpack<half>(low), b = unpack<half>(high);
    put(words, 2 * i, pack<X>(a.x * rounding.scale, a.y * rounding.scale));
    put(words, 2 * i + 1, pack<X>(b.x * rounding.scale, b.y * rounding.scale));
  }
  return eight;
}

// The scaling of a head held by LANES neighbouring lanes. All lanes of the warp take part.
template <typename X, typename C, int LANES>
__device__ __forceinline__ CacheRounding<C> rounding_of_words(const uint4& words) {
  uint32_t most = 0;  // 16-bit numbers without their sign are ordered by magnitude
#pragma unroll
  for (int i = 0; i < 4; ++i) most = __vmaxu2(most, get(words, i) & 0x7fff7fffu);
  most = max(most & 0xffffu, most >> 16);
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    most = max(most, __shfl_xor_sync(kAll, most, offset));
  return CacheRounding<C>(__float_as_uint(unpack<X>(most).x));
}

// 16-bit X, heads of D dims that are rotated entirely by halves, or not at all. The angles of a
// token, and the places of its heads in the cache, are read before the wait.
template <typename X, typename C, int D, bool ROTATES, int PIECES>
__global__ void __launch_bounds__(kThreads, resident_blocks_of(PIECES))
    rotate_and_round_whole(const __grid_constant__ Task task) {
  const int64_t token = blockIdx.x;
  const int d = threadIdx.x % (D / 8) * 8;
  const int rotated_heads = task.heads + task.kv_heads, all_heads = rotated_heads + task.kv_heads;
  const OwnHeads<D, PIECES> heads(ROTATES ? 0 : task.heads);
  const Turn<D, ROTATES> turn(task, token, d);
  const int slot = task.kv_slots[token];
  unsigned rows[PIECES] = {};
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (slot >= 0) rows[i] = unsigned(row_of_head(task, slot, heads(i)));
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
    if (__any_sync(kAll, head >= task.heads)) {
      const CacheRounding<C> rounding = rounding_of_words<X, C, D / 8>(words[i]);
      if (head >= task.heads) {
        const uint2 eight = round_eight<X>(words[i], rounding);
        if (slot >= 0 && head < all_heads) {
          const int64_t at = rows[i];
          *reinterpret_cast<uint2*>(static_cast<char*>(task.cache) + at * D + d) = eight;
          if (d == 0) task.cache_scales[at] = rounding.scale;
        }
      }
    }
    if (head < all_heads) *reinterpret_cast<uint4*>(row + head * D) = words[i];
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
  return divide_heads<D>(task.tokens, heads, [&](auto pieces, dim3 grid) {
    return launch("rotate_and_cache",
                  task.rotary_size ? rotate_and_round_whole<X, C, D, true, pieces>
                                   : rotate_and_round_whole<X, C, D, false, pieces>,
                  grid, kThreads, 0, stream, task);
  });
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
