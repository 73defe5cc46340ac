// gemm_sm90_split_k.cu for rows with adapters.
// Bench: python -m tridecode.tools.bench.studies.adapters
#include "api/adapted_gemm.h"
#include "gemm/adapted/gemm_sm90_adapters.cuh"
#include "gemm/sm90/gemm_sm90_split_k.cuh"

using namespace tridecode;

int tridecode_gemm_sm90_split_k_adapted(const tridecode_adapted_gemm_task* given, void* stream) {
  const AdaptedTask task = adapted(*given);
  const char* const name = "gemm_sm90_split_k";
  if (int status = check_adapters(name, task)) return status;
  return checked(name, task, [&](Mode mode) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
      return run_instance<X, X>(name, task, mode, stream);
    });
  });
}
