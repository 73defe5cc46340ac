// out = epilogue(weight_scales * x_scales * (x * weight^T)) for up to 64 tokens:
// gemm_sm90_split_k.cuh with 8-bit operands (gemm_sm90_8bit.cuh).
// Bench: python -m tridecode.kernels.bench w8a8
#include "api/gemm.h"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_split_k.cuh"

using namespace tridecode;

int tridecode_gemm_sm90_split_k_8bit(const tridecode_gemm_task* given, void* stream) {
  GemmTask task = *given;
  const char* const name = "gemm_sm90_split_k_8bit";
  if (int status = as_16_bit(name, task)) return status;
  return checked(name, task, [&](Mode mode) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      return for_operand(task.operand, name, [&](auto value) {
        using X = decltype(zero);
        using Operand = decltype(value);
        return run_instance<X, Operand>(name, task, mode, stream);
      });
    });
  });
}
