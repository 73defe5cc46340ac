// The tail of the query, key and value projection of models that change heads before the rotation:
// clamps q, k and v, normalises each head of q and k, rotates them in place, and writes k and v to
// the cache. A cache of 8 bits is quantised as by rotary_8bit.cu.
//
// LANES lanes of a warp hold a head; they exchange the numbers of rotated pairs through shared
// memory. Everything is computed in float32 and rounded once.
// Bytes moved: q + k + v read and written, and k + v written, times sizeof(X).
// Bench: python -m tridecode.kernels.bench finish_heads
#include "api/attention.h"
#include "cache/kv_cache_8bit.cuh"
#include "cache/rotary.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHead = 256;

using Task = tridecode_heads_task;

template <int LANES>
__device__ __forceinline__ float sum_over(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

// The norm of the heads of q or of k.
template <typename X>
struct HeadNorm {
  const X *weight, *bias;  // of this head; no weight: no norm; no bias: RMSNorm
  float eps;

  __device__ __forceinline__ HeadNorm(const Task& task, int head) {
    const bool is_query = head < task.heads;
    const int of_kind = is_query ? head : head - task.heads;
    const int64_t first = task.norm_per_head ? int64_t(of_kind) * task.head_size : 0;
    auto at = [&](const void* all) { return all ? static_cast<const X*>(all) + first : nullptr; };
    weight = at(is_query ? task.query_weight : task.key_weight);
    bias = at(is_query ? task.query_bias : task.key_bias);
    eps = is_query ? task.query_eps : task.key_eps;
  }
};

// Rotates dims d to d + WIDTH - 1 of a head. head: all dims, before the rotation.
template <int WIDTH>
__device__ __forceinline__ void rotate_piece(const Task& task, int position, int d,
                                             const float* head, float (&values)[WIDTH]) {
  const int rotary = task.rotary_size, half = rotary / 2;
  float others[WIDTH], cosine[WIDTH], sine[WIDTH];
  if (task.interleaved) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      if (d + j >= rotary) continue;
      const int64_t angle = angle_index(position, rotary, d + j, true);
      others[j] = head[(d + j) ^ 1], cosine[j] = task.cos[angle], sine[j] = task.sin[angle];
    }
  } else {
    const int64_t angle = angle_index(position, rotary, d < half ? d : d - half, false);
    load_some<WIDTH>(head + (d < half ? d + half : d - half), others);
    load_some<WIDTH>(task.cos + angle, cosine);
    load_some<WIDTH>(task.sin + angle, sine);
  }
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    if (d + j >= rotary) continue;
    const bool is_first = task.interleaved ? (d + j) % 2 == 0 : d + j < half;
    float a = is_first ? values[j] : others[j], b = is_first ? others[j] : values[j];
    rotate(a, b, cosine[j], sine[j]);
    values[j] = is_first ? a : b;
  }
}

// A lane holds PIECES pieces of WIDTH numbers, each LANES * WIDTH behind the one before. WIDTH 8
// needs head_size % 8 == 0 and, rotated by halves, rotary_size % 16 == 0.
template <typename X, typename C, int LANES, int WIDTH, int PIECES>
__global__ void __launch_bounds__(kThreads) finish_heads(const __grid_constant__ Task task) {
  constexpr bool kExact = std::is_same<C, X>::value;
  constexpr int kHeads = kThreads / LANES;  // of a block
  __shared__ __align__(16) float shared[kHeads][LANES * WIDTH * PIECES];
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES, size = task.head_size;
  const int rotary = task.rotary_size;
  const int rotated_heads = task.heads + task.kv_heads, all_heads = rotated_heads + task.kv_heads;
  const int head = blockIdx.y * kHeads + own;
  const bool exists = head < all_heads;  // the lanes of a warp stay together
  const bool is_query = head < task.heads, rotates = exists && head < rotated_heads;
  auto each_piece = [&](auto body) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const int d = (lane + LANES * piece) * WIDTH;
      if (d < size) body(piece, d);
    }
  };

  // Constants are loaded before the wait.
  const HeadNorm<X> norm(task, head);
  const bool normalises = rotates && norm.weight;
  float weights[PIECES][WIDTH], biases[PIECES][WIDTH] = {};
  if (normalises)
    each_piece([&](int piece, int d) {
      load_some<WIDTH>(norm.weight + d, weights[piece]);
      if (norm.bias) load_some<WIDTH>(norm.bias + d, biases[piece]);
    });
  wait_for_predecessor();
  const int64_t token = blockIdx.x;
  X* const x = static_cast<X*>(task.qkv) + token * task.qkv_stride + head * size;
  float values[PIECES][WIDTH] = {};
  if (exists) each_piece([&](int piece, int d) { load_some<WIDTH>(x + d, values[piece]); });
  if (task.limit > 0.0f) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        float& value = values[piece][j];
        // NaN stays
        value = value > task.limit ? task.limit : value < -task.limit ? -task.limit : value;
      }
    }
  }

  // Numbers beyond the head are 0 and do not count.
  float mean = 0.0f, scale = 1.0f;
  auto sum_of = [&](auto term) {
    float sum = 0.0f;
    each_piece([&](int piece, int) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) sum += term(values[piece][j]);
    });
    return sum_over<LANES>(sum);
  };
  const float total = sum_of([](float value) { return value; });
  if (normalises && norm.bias) mean = total / size;
  const float squares = sum_of([&](float value) { return (value - mean) * (value - mean); });
  if (normalises) {
    scale = rsqrtf(squares / size + norm.eps);
    each_piece([&](int piece, int) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j)
        values[piece][j] = (values[piece][j] - mean) * scale * weights[piece][j] + biases[piece][j];
    });
  }

  if (rotary) {
    each_piece([&](int piece, int d) { store_some<WIDTH>(&shared[own][d], values[piece]); });
    __syncwarp();
    const int position = task.positions[token];
    if (rotates)
      each_piece([&](int piece, int d) {
        if (d < rotary) rotate_piece(task, position, d, shared[own], values[piece]);
      });
  }

  const int slot = task.kv_slots[token];
  if constexpr (kExact) {
    if (exists)
      each_piece([&](int piece, int d) {
        store_some<WIDTH>(x + d, values[piece]);
        write_cache<X>(task, slot, head, d, values[piece]);
      });
  } else {
    uint32_t most = 0;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        values[piece][j] = to_float(from_float<X>(values[piece][j]));
        most = max(most, magnitude(values[piece][j]));
      }
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
      most = max(most, __shfl_xor_sync(kAll, most, offset));
    if (!exists) return;
    const CacheRounding<C> rounding(most);
    each_piece([&](int piece, int d) {
      if (!is_query) {
        alignas(8) C stored[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
          stored[j] = rounding.store(values[piece][j]);
          values[piece][j] = rounding.read(stored[j]);
        }
        write_rounded(task, slot, head, d, stored, rounding.scale);
      }
      store_some<WIDTH>(x + d, values[piece]);
    });
  }
}

template <typename X, typename C, int LANES, int WIDTH, int PIECES>
int run(const Task& task, void* stream) {
  const int heads = task.heads + 2 * task.kv_heads;
  return launch("finish_heads", finish_heads<X, C, LANES, WIDTH, PIECES>,
                dim3(task.tokens, ceil_div(heads, kThreads / LANES)), kThreads, 0, stream, task);
}

template <typename X, typename C>
int run_cache(const Task& task, void* stream) {
  const bool turns_wide = task.interleaved || (task.rotary_size % 16 == 0 && aligned16(task.cos) &&
                                               aligned16(task.sin));
  const bool wide = task.head_size % 8 == 0 && turns_wide && task.qkv_stride % 8 == 0 &&
                    aligned16(task.qkv) && aligned16(task.cache) && aligned16(task.query_weight) &&
                    aligned16(task.query_bias) && aligned16(task.key_weight) &&
                    aligned16(task.key_bias);
  if (!wide) return run<X, C, 32, 1, kMaxHead / 32>(task, stream);
  if (task.head_size <= 128) return run<X, C, 16, 8, 1>(task, stream);
  return run<X, C, 32, 8, 1>(task, stream);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_finish_heads(const tridecode_heads_task* given, void* stream) {
  const Task& task = *given;
  if (task.head_size > kMaxHead)
    return fail("finish_heads: head size %d; at most %d", task.head_size, kMaxHead);
  return for_dtype(task.dtype, "finish_heads", [&](auto zero) {
    using X = decltype(zero);
    if (task.cache_format == kCacheOfDtype) return run_cache<X, X>(task, stream);
    return for_cache_format(task.cache_format, "finish_heads", [&](auto number) {
      return run_cache<X, decltype(number)>(task, stream);
    });
  });
}
