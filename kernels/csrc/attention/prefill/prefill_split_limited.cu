// prefill_split.cuh with a window or a soft cap.
#include "attention/prefill/prefill_split.cuh"

int tridecode::run_split_limited(const PrefillTask& task, void* stream) {
  return run_split_exact<true>(task, stream);
}
