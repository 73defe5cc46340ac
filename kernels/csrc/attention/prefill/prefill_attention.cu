// Causal attention of many query tokens per row: chooses the kernel. prefill_attention_sm90a.cu is
// for head sizes 64 and 128 on Hopper, prefill_limited.cu for windows, soft caps and biases of
// keys, prefill_split.cuh for few queries, prefill_tiles.cuh for everything else.
#include "api/attention.h"
#include "attention/prefill/prefill_tiles.cuh"
#include "cache/kv_cache_8bit.cuh"

using namespace tridecode;

int64_t tridecode_prefill_attention_queries(int head_size, int shared_bytes) {
  const int queries = for_tile(head_size, shared_bytes, [](auto tile) { return tile.kQueries; });
  return queries == kNoTile ? 1 : queries;
}

int tridecode_prefill_attention(const tridecode_attention_task* given, void* stream) {
  const PrefillTask& task = *given;
  if (task.split) {
    if (task.key_bias || !task.scratch || !is_aligned(task))
      return fail("prefill_attention: no kernel that splits keys takes these rows");
    const bool is_exact = task.cache_format == kCacheOfDtype;
    if (task.window || task.softcap > 0.0f)
      return (is_exact ? run_split_limited : run_split_limited_8bit)(task, stream);
    return (is_exact ? run_split : run_split_8bit)(task, stream);
  }
  if (task.head_size > 256)
    return fail("prefill_attention: head size %d; at most 256", task.head_size);
  if (task.window || task.softcap > 0.0f || task.key_bias) return run_limited_prefill(task, stream);
  return for_dtype(task.dtype, "prefill_attention", [&](auto zero) {
    using X = decltype(zero);
    if (sizeof(X) == 2 && is_aligned(task) && !task.shared_bytes && takes_prefill_sm90a(task))
      return run_prefill_sm90a(task, stream);
    return run_tiles<X, false>(task, stream);
  });
}
