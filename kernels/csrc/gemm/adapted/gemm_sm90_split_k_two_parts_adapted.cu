// gemm_sm90_split_k_two_parts.cu for rows with adapters.
// Bench: python -m tridecode.tools.bench.studies.adapters --quantization int8
#include "api/adapted_gemm.h"
#include "api/operands.h"
#include "gemm/adapted/gemm_sm90_adapters.cuh"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_split_k.cuh"

using namespace tridecode;

int tridecode_gemm_sm90_split_k_two_parts_adapted(const tridecode_adapted_gemm_task* given,
                                                  void* stream) {
  AdaptedTask task = adapted(*given);
  const char* const name = "gemm_sm90_split_k_two_parts";
  if (task.operand != kOperandTwoParts)
    return fail("%s: operand code %d; wanted %d", name, task.operand, kOperandTwoParts);
  if (int status = as_16_bit(name, task)) return status;
  if (int status = check_adapters(name, task)) return status;
  return checked(name, task, [&](Mode mode) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
      return run_instance<X, TwoParts>(name, task, mode, stream);
    });
  });
}
