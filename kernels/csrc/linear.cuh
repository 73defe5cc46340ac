// What the three kernels of a small product share: what is to be done, which rows make a pair, and
// how a pair is finished.
#pragma once
#include "epilogue.cuh"
#include "kv_cache.cuh"
#include "rotary.cuh"

namespace tridecode {

enum LinearMode { kPlain = 0, kGated = 1, kQkv = 2 };

using LinearTask = tridecode_gemm_task;

inline LinearMode mode_of(const LinearTask& task) {
  return task.cache ? kQkv : task.activation == kSwiglu ? kGated : kPlain;
}

// Rows come in pairs that one thread finishes together: gate and up, or the two halves of a
// rotation.
template <int MODE>
__device__ __forceinline__ int row_of(const LinearTask& task, int pair, int second) {
  if (MODE == kGated) return pair + second * (task.outputs / 2);
  if (MODE == kQkv && task.rotary_size) {
    if (task.interleaved) return 2 * pair + second;
    const int half_head = task.head_size / 2, half = task.rotary_size / 2;
    const int head = pair / half_head, d = pair % half_head, rest = d - half;
    if (rest < 0) return head * task.head_size + d + second * half;
    const bool eights = half_head % 8 == 0 && half % 8 == 0;
    const int behind = eights ? rest / 8 * 16 + rest % 8 + 8 * second : 2 * rest + second;
    return head * task.head_size + task.rotary_size + behind;
  }
  return pair / 8 * 16 + pair % 8 + 8 * second;
}

template <int MODE>
__device__ __forceinline__ bool is_row(const LinearTask& task, int pair, int row) {
  return row < task.outputs && (MODE != kGated || pair < task.outputs / 2);
}

// What a thread needs besides the sums of two rows and two tokens.
struct Extra {
  float bias[2];
  float residual[2][2];  // [token][row]
};

template <typename X, int MODE>
__device__ __forceinline__ Extra load_extra(const LinearTask& task, int pair, int token) {
  Extra extra = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row_of<MODE>(task, pair, i);
    if (!is_row<MODE>(task, pair, row)) continue;
    if (task.bias) extra.bias[i] = to_float(static_cast<const X*>(task.bias)[row]);
    if (!task.residual || (MODE == kGated && i == 1)) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (token + j < task.tokens)
        extra.residual[j][i] = to_float(
            static_cast<const X*>(task.residual)[(token + j) * task.residual_stride + row]);
  }
  return extra;
}

template <typename X>
__device__ __forceinline__ void store_out(const LinearTask& task, int token, int column,
                                          float value) {
  const int64_t at = token * task.out_stride + column;
  if (task.out_float32) {
    static_cast<float*>(task.out)[at] = value;
  } else {
    static_cast<X*>(task.out)[at] = from_float<X>(value);
  }
}

template <typename X>
__device__ __forceinline__ void store_cached(const LinearTask& task, int token, int row,
                                             float value) {
  const int head = row / task.head_size;
  const int slot = task.kv_slots[token];
  if (head < task.heads || slot < 0) return;
  const int is_value = head >= task.heads + task.kv_heads;
  const int kv_head = head - task.heads - is_value * task.kv_heads;
  const int64_t block = slot / task.block_tokens, offset = slot % task.block_tokens;
  const int64_t at =
      (((block * 2 + is_value) * task.kv_heads + kv_head) * task.block_tokens + offset) *
      task.head_size;
  static_cast<X*>(task.cache)[at + row % task.head_size] = from_float<X>(value);
}

// values: [token][row], the finished products.
template <typename X, int MODE>
__device__ __forceinline__ void finish(const LinearTask& task, int pair, int first_token,
                                       float (&values)[2][2], const Extra& extra) {
  const int row0 = row_of<MODE>(task, pair, 0), row1 = row_of<MODE>(task, pair, 1);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int token = first_token + j;
    if (token >= task.tokens) continue;
    float a = values[j][0] + extra.bias[0], b = values[j][1] + extra.bias[1];
    if (MODE == kGated) {
      if (pair < task.outputs / 2)
        store_out<X>(task, token, pair, silu(a) * b + extra.residual[j][0]);
      continue;
    }
    if (MODE == kQkv) {
      const int d = row0 % task.head_size;
      if (d < task.rotary_size && row0 / task.head_size < task.heads + task.kv_heads) {
        const int64_t angle = int64_t(task.positions[token]) * (task.rotary_size / 2) +
                              (task.interleaved ? d / 2 : d);
        const float cosine = task.cos[angle], sine = task.sin[angle];
        const float turned = a * cosine - b * sine;
        b = b * cosine + a * sine;
        a = turned;
      }
    } else {
      a = activate(a, task.activation) + extra.residual[j][0];
      b = activate(b, task.activation) + extra.residual[j][1];
    }
    if (is_row<MODE>(task, pair, row0)) {
      store_out<X>(task, token, row0, a);
      if (MODE == kQkv) store_cached<X>(task, token, row0, a);
    }
    if (is_row<MODE>(task, pair, row1)) {
      store_out<X>(task, token, row1, b);
      if (MODE == kQkv) store_cached<X>(task, token, row1, b);
    }
  }
}

// linear_few.cu: the same product for 1 or 2 tokens.
bool few_linear_takes(const LinearTask& task);
int few_linear(const LinearTask& task, void* stream);

// linear_sm90a.cu: the same product with Hopper's bulk copies and matrix instructions.
bool hopper_linear_takes(const LinearTask& task);
int hopper_linear(const LinearTask& task, void* stream);

}  // namespace tridecode
