// decode_attention.cuh over a cache of the activations' dtype.
#include "api/attention.h"
#include "attention/decode_attention.cuh"

using namespace tridecode;

int64_t tridecode_decode_attention_scratch(int head_size) {
  return int64_t(kMaxBlocks) * kWarps * 2 * slot_floats(head_size) * sizeof(float);
}

int tridecode_decode_attention(const tridecode_attention_task* task, void* stream) {
  const bool several = task->max_query > 1, is_exact = task->cache_format == kCacheOfDtype;
  if (task->window || task->softcap > 0.0f || task->key_bias)
    return (is_exact ? run_limited : run_limited_8bit)(*task, stream);
  if (several) return (is_exact ? run_several_queries : run_several_queries_8bit)(*task, stream);
  if (!is_exact) return run_decode_8bit(*task, stream);
  if (takes_wide(*task)) return run_wide(*task, stream);
  return for_dtype(task->dtype, "decode_attention", [&](auto zero) {
    using X = decltype(zero);
    return run_cache_of<X, X>(*task, stream);
  });
}
