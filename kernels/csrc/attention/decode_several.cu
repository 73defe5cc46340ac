// Rows of several queries: decode_attention.cuh over a cache of the activations' dtype.
#include "api/attention.h"
#include "attention/decode_attention.cuh"

namespace tridecode {

int run_several_queries(const tridecode_attention_task& task, void* stream) {
  return for_dtype(task.dtype, "decode_attention", [&](auto zero) {
    using X = decltype(zero);
    return run_cache_of<X, X, kSeveral>(task, stream);
  });
}

}  // namespace tridecode
