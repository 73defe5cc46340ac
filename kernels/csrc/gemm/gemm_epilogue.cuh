// The epilogue of gemv.cu, gemm_mma.cu and gemm_sm90_data_parallel.cu: which weight rows form a
// pair, and how the sums of a pair are finished.
#pragma once
#include "cache/kv_cache.cuh"
#include "cache/rotary.cuh"
#include "gemm/gemm.cuh"

namespace tridecode {

// The weight rows (outputs) of a pair, which one thread finishes: gate and up of SwiGLU, or the two
// dims of a rotation.
template <Mode MODE>
__device__ __forceinline__ int row_of(const GemmTask& task, int pair, int second) {
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

template <Mode MODE>
__device__ __forceinline__ bool is_row(const GemmTask& task, int pair, int row) {
  return row < task.outputs && (MODE != kGated || pair < task.outputs / 2);
}

// Epilogue operands of two rows and two tokens.
struct Extra {
  float bias[2];
  float residual[2][2];  // [token][row]
  int slots[2];          // of the cache, [token]: load_slots
};

template <typename X, Mode MODE>
__device__ __forceinline__ Extra load_extra(const GemmTask& task, int pair, int token) {
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

template <Mode MODE>
__device__ __forceinline__ void load_slots(const GemmTask& task, int token, Extra& extra) {
  if constexpr (MODE == kQkv) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      extra.slots[j] = token + j < task.tokens ? task.kv_slots[token + j] : -1;
  }
}

template <typename X>
__device__ __forceinline__ void store_out(const GemmTask& task, int token, int column,
                                          float value) {
  const int64_t at = token * task.out_stride + column;
  if (task.out_float32) {
    static_cast<float*>(task.out)[at] = value;
  } else {
    static_cast<X*>(task.out)[at] = from_float<X>(value);
  }
}

// Stores one number of a row (q | k | v) to out, and to the cache if it belongs to a key or value.
template <typename X, Mode MODE>
__device__ __forceinline__ void store_row(const GemmTask& task, int pair, int token, int row,
                                          int slot, float value) {
  if (!is_row<MODE>(task, pair, row)) return;
  store_out<X>(task, token, row, value);
  const float values[1] = {value};
  if (MODE == kQkv) write_cache<X>(task, slot, row / task.head_size, row % task.head_size, values);
}

// values: [token][row], the complete sums. All loads come before the stores, which would delay
// them.
template <typename X, Mode MODE>
__device__ __forceinline__ void finish(const GemmTask& task, int pair, int first_token,
                                       float (&values)[2][2], const Extra& extra) {
  const int row0 = row_of<MODE>(task, pair, 0), row1 = row_of<MODE>(task, pair, 1);
  const int d = MODE == kQkv ? row0 % task.head_size : 0;
  const bool rotated =
      MODE == kQkv && d < task.rotary_size && row0 / task.head_size < task.heads + task.kv_heads;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int token = first_token + j;
    float &a = values[j][0], &b = values[j][1];
    if (token >= task.tokens) continue;
    if (MODE == kGated) {
      a = finish_gated(a, extra.bias[0], b, extra.bias[1], task.activation, extra.residual[j][0]);
    } else if (MODE == kQkv) {
      a += extra.bias[0], b += extra.bias[1];
      if (rotated) {
        const int64_t angle =
            angle_index(task.positions[token], task.rotary_size, d, task.interleaved);
        rotate(a, b, task.cos[angle], task.sin[angle]);
      }
    } else {
      a = finish_sum(a, extra.bias[0], task.activation, extra.residual[j][0]);
      b = finish_sum(b, extra.bias[1], task.activation, extra.residual[j][1]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int token = first_token + j;
    if (token >= task.tokens) continue;
    if (MODE == kGated) {
      if (pair < task.outputs / 2) store_out<X>(task, token, pair, values[j][0]);
    } else {
      store_row<X, MODE>(task, pair, token, row0, extra.slots[j], values[j][0]);
      store_row<X, MODE>(task, pair, token, row1, extra.slots[j], values[j][1]);
    }
  }
}

}  // namespace tridecode
