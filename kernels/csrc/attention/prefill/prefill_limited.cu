// Prefill attention with a window, a soft cap or biases of keys: prefill_tiles.cuh.
#include "attention/prefill/prefill_tiles.cuh"

int tridecode::run_limited_prefill(const PrefillTask& task, void* stream) {
  return for_dtype(task.dtype, "prefill_attention",
                   [&](auto zero) { return run_tiles<decltype(zero), true>(task, stream); });
}
