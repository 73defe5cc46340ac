// prefill_split.cuh with a window or a soft cap, over an 8-bit cache.
#include "attention/prefill/prefill_split.cuh"

int tridecode::run_split_limited_8bit(const PrefillTask& task, void* stream) {
  return run_split_rounded<true>(task, stream);
}
