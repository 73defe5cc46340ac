// Rows of several queries: decode_attention.cuh over an 8-bit cache.
#include "api/attention.h"
#include "attention/decode_attention.cuh"

int tridecode::run_several_queries_8bit(const tridecode_attention_task& task, void* stream) {
  return for_dtype(task.dtype, "decode_attention", [&](auto zero) {
    return for_cache_format(task.cache_format, "decode_attention", [&](auto number) {
      return run_cache_of<decltype(zero), decltype(number), kSeveral>(task, stream);
    });
  });
}
