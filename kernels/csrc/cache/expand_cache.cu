// Dequantises blocks of an 8-bit cache to keys and values of X, for prefill attention of rows with
// tokens from earlier steps. A thread block dequantises the keys or the values of one head in one
// cache block.
// Bytes moved: (1 + sizeof(X)) * 2 * tokens * kv_heads * head_size, and the scales.
// Bench: python -m tridecode.kernels.bench prefill_attention
#include "api/attention.h"
#include "cache/kv_cache_8bit.cuh"

namespace tridecode {
namespace {

using Task = tridecode_expand_task;

constexpr int kThreads = 128;

// WIDTH 8 needs head_size % 8 == 0.
template <typename X, typename C, int WIDTH>
__global__ void expand_cache(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const int column = blockIdx.x, row = blockIdx.z, context = task.context_lens[row];
  const int queries = task.query_starts[row + 1] - task.query_starts[row];
  if (context == queries || column * task.block_tokens >= context) return;
  const int which = blockIdx.y / task.kv_heads, kv_head = blockIdx.y % task.kv_heads;
  const int id = task.block_tables[row * task.table_stride + column];
  const int64_t from = cache_row(id, which, kv_head, 0, task.kv_heads, task.block_tokens);
  const int64_t to =
      cache_row(row * task.columns + column, which, kv_head, 0, task.kv_heads, task.block_tokens);
  const C* const stored = static_cast<const C*>(task.cache) + from * task.head_size;
  X* const out = static_cast<X*>(task.out) + to * task.head_size;
  for (int i = threadIdx.x * WIDTH; i < task.block_tokens * task.head_size; i += kThreads * WIDTH) {
    const float scale = task.cache_scales[from + i / task.head_size];
    alignas(8) C some[WIDTH];
    if constexpr (WIDTH == 8) {
      *reinterpret_cast<uint2*>(some) = *reinterpret_cast<const uint2*>(stored + i);
    } else {
      some[0] = stored[i];
    }
    float values[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) values[j] = expand(some[j]) * scale;
    store_some<WIDTH>(out + i, values);
  }
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_expand_cache(const tridecode_expand_task* given, void* stream) {
  const Task& task = *given;
  return for_dtype(task.dtype, "expand_cache", [&](auto zero) {
    return for_cache_format(task.cache_format, "expand_cache", [&](auto number) {
      using X = decltype(zero);
      using C = decltype(number);
      const bool wide = task.head_size % 8 == 0 && aligned16(task.out) && aligned16(task.cache);
      return launch("expand_cache", wide ? expand_cache<X, C, 8> : expand_cache<X, C, 1>,
                    dim3(task.columns, 2 * task.kv_heads, task.num_rows), kThreads, 0, stream,
                    task);
    });
  });
}
