// Prologue of decode attention over unfinished rows: rotary embedding and the cache write, bit for
// bit as in rotate_and_cache. Each warp rotates its queries in registers; the warp with a row's
// newest tile writes the token's key and value to the cache before it loads that tile.
#pragma once
#include "attention/decode_tiles.cuh"
#include "cache/rotary.cuh"

namespace tridecode {
namespace {

// Return whether a warp holds both halves of each rotated pair of its queries in its own registers.
template <typename X, typename C, int D>
__host__ __device__ constexpr bool rotates_queries() {
  return D == 128 || (D == 64 && std::is_same<C, X>::value);
}

template <typename X, typename C, int D>
bool finishes_rows(const Task& task) {
  if (D != 64 && D != 128) return false;
  if (!task.rotary_size) return true;
  return rotates_queries<X, C, D>() && task.rotary_size == D && !task.interleaved &&
         aligned16(task.cos) && aligned16(task.sin);
}

// A row's newest token: loaded before the wait for the kernel that writes the row.
struct Newest {
  int position = 0, slot = -1;
  __device__ __forceinline__ Newest(const Task& task, int row) {
    if (!task.unfinished) return;
    slot = task.kv_slots[row];
    if (task.rotary_size) position = task.positions[row];
  }
};

// Rotates the queries held in Sums, and rounds them to X.
template <typename X, typename C, int D, int KC>
__device__ __forceinline__ void rotate_queries(const Task& task, int position, uint4 (&q)[KC]) {
  constexpr bool kExact = std::is_same<C, X>::value;
  static_assert(KC % 2 == 0);
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < KC / 2; ++c) {
    const int64_t angle =
        angle_index(position, D, kExact ? c * 32 + t * 8 : t * 16 + c % 2 * 8, false);
    float cosine[8], sine[8], a[8], b[8];
    load8(task.cos + angle, cosine);
    load8(task.sin + angle, sine);
    unpack_eight<X>(q[c], a);
    unpack_eight<X>(q[c + KC / 2], b);
#pragma unroll
    for (int j = 0; j < 8; ++j) rotate(a[j], b[j], cosine[j], sine[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      put(q[c], i, pack<X>(a[2 * i], a[2 * i + 1]));
      put(q[c + KC / 2], i, pack<X>(b[2 * i], b[2 * i + 1]));
    }
  }
}

// Writes the key and value of a row's newest token for a KV head, by a warp: D / 8 lanes hold the
// key, the next D / 8 the value.
template <typename X, typename C, int D>
__device__ __forceinline__ void write_newest(const Task& task, const Newest& newest, int row,
                                             int kv_head) {
  constexpr int kLanes = D / 8;
  const int lane = threadIdx.x % 32, d = lane % kLanes * 8, is_value = lane / kLanes;
  const int head = task.heads + is_value * task.kv_heads + kv_head, slot = newest.slot;
  const X* const from = static_cast<const X*>(task.qkv) + row * task.qkv_stride + head * D + d;
  const bool has = lane < 2 * kLanes;
  const uint4 words = has ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  const bool rotates = task.rotary_size && is_value == 0;
  float cosine[8] = {}, sine[8] = {}, values[8];
  if (rotates) {
    const int64_t angle = angle_index(newest.position, D, d % (D / 2), false);
    load8(task.cos + angle, cosine);
    load8(task.sin + angle, sine);
  }
  rotate_eight<X, D>(words, d, rotates, cosine, sine, values);
  if constexpr (std::is_same<C, X>::value) {
    if (has) write_cache<X>(task, slot, head, d, values);
  } else {
    const CacheRounding<C> rounding = rounding_of<X, C, kLanes>(values);
    alignas(8) C stored[8];
    rounding.store(values, stored);
    if (has) write_rounded(task, slot, head, d, stored, rounding.scale);
  }
  __syncwarp();
}

}  // namespace
}  // namespace tridecode
