// out = epilogue(x * weight^T): gemm_sm90_even_split.cuh with 16-bit operands.
// Bench: python -m tridecode.kernels.bench linear
#include "api/gemm.h"
#include "gemm/sm90/gemm_sm90_even_split.cuh"

using namespace tridecode;

int tridecode_gemm_sm90_even_split(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const char* const name = "gemm_sm90_even_split";
  return divided_evenly(name, task, [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
      return run_instance<X, X>(name, task, mode, division, stream);
    });
  });
}
