// The tail of the query, key and value projection: rotates q and k in place and writes k and v to
// the cache. One block a token.
// Bytes moved: 2 * (q + k) read and written where rotated, and k + v written, times sizeof(X).
// Bench: python -m tridecode.kernels.bench step
#include "common.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;

struct Rotary {
  const float* cos;
  const float* sin;
  const int* positions;
  int size;
  bool interleaved;
};

// (a, b) turned by the angle whose cosine and sine are given.
__device__ __forceinline__ void turn(float& a, float& b, float cosine, float sine) {
  const float first = a * cosine - b * sine;
  b = b * cosine + a * sine;
  a = first;
}

// WIDTH 8 needs head_size % 8 == 0 and, rotated by halves, rotary.size % 16 == 0; interleaved pairs
// need WIDTH 8.
template <typename X, int WIDTH>
__global__ void rotate_and_cache(X* qkv, Rotary rotary, const int* kv_slots, X* cache, int heads,
                                 int kv_heads, int head_size, int block_tokens, int64_t stride) {
  wait_for_predecessor();
  const int64_t token = blockIdx.x;
  X* row = qkv + token * stride;
  const int slot = kv_slots[token];
  const int64_t angle_row = rotary.size ? int64_t(rotary.positions[token]) * (rotary.size / 2) : 0;
  const float* cos = rotary.cos + angle_row;
  const float* sin = rotary.sin + angle_row;
  const int groups = head_size / WIDTH, half = rotary.size / 2;

  auto keep = [&](int head, int d, const float (&values)[WIDTH]) {
    store_some<WIDTH>(row + head * head_size + d, values);
    if (head < heads || slot < 0) return;
    const int is_value = head >= heads + kv_heads;
    const int kv_head = head - heads - is_value * kv_heads;
    const int64_t block = slot / block_tokens, offset = slot % block_tokens;
    X* to = cache +
            (((block * 2 + is_value) * kv_heads + kv_head) * block_tokens + offset) * head_size + d;
    store_some<WIDTH>(to, values);
  };

  const int first_head = rotary.size ? 0 : heads;  // unrotated queries stay as they are
  for (int i = first_head * groups + threadIdx.x; i < (heads + 2 * kv_heads) * groups;
       i += kThreads) {
    const int head = i / groups, d = i % groups * WIDTH;
    float a[WIDTH];
    load_some<WIDTH>(row + head * head_size + d, a);
    if (head >= heads + kv_heads || d >= rotary.size) {
      keep(head, d, a);
    } else if (rotary.interleaved) {
      if constexpr (WIDTH > 1) {
#pragma unroll
        for (int j = 0; j < WIDTH; j += 2)
          if (d + j < rotary.size) turn(a[j], a[j + 1], cos[(d + j) / 2], sin[(d + j) / 2]);
        keep(head, d, a);
      } else if (d % 2 == 0) {
        float b[WIDTH];
        load_some<WIDTH>(row + head * head_size + d + 1, b);
        turn(a[0], b[0], cos[d / 2], sin[d / 2]);
        keep(head, d, a);
        keep(head, d + 1, b);
      }
    } else if (d < half) {  // the thread that holds the first half turns both
      float b[WIDTH];
      load_some<WIDTH>(row + head * head_size + d + half, b);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) turn(a[j], b[j], cos[d + j], sin[d + j]);
      keep(head, d, a);
      keep(head, d + half, b);
    }
  }
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_rotate_and_cache(void* qkv, const float* cos, const float* sin, const int* positions,
                               const int* kv_slots, void* cache, int num_tokens, int heads,
                               int kv_heads, int head_size, int rotary_size, int interleaved,
                               int block_tokens, int64_t qkv_stride, int dtype, void* stream) {
  return for_dtype(dtype, "rotate_and_cache", [&](auto zero) {
    using X = decltype(zero);
    const bool wide = head_size % 8 == 0 && (interleaved || rotary_size % 16 == 0) &&
                      qkv_stride % 8 == 0 && aligned16(qkv) && aligned16(cache);
    return launch("rotate_and_cache", wide ? rotate_and_cache<X, 8> : rotate_and_cache<X, 1>,
                  num_tokens, kThreads, 0, stream, (X*)qkv,
                  Rotary{cos, sin, positions, rotary_size, interleaved != 0}, kv_slots, (X*)cache,
                  heads, kv_heads, head_size, block_tokens, qkv_stride);
  });
}
