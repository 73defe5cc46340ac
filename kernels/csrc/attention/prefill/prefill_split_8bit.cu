// prefill_split.cuh over an 8-bit cache.
#include "attention/prefill/prefill_split.cuh"

int tridecode::run_split_8bit(const PrefillTask& task, void* stream) {
  return for_16_bit_dtype(task.dtype, "prefill_attention", [&](auto zero) {
    return for_cache_format(task.cache_format, "prefill_attention", [&](auto number) {
      return run_split_of<decltype(zero), decltype(number)>(task, stream);
    });
  });
}
