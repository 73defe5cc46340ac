// prefill_split.cuh over an 8-bit cache.
#include "attention/prefill/prefill_split.cuh"

int tridecode::run_split_8bit(const PrefillTask& task, void* stream) {
  return run_split_rounded<false>(task, stream);
}
