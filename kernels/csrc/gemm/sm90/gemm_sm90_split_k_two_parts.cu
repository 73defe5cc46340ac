// out = epilogue(weight_scales * x_scales * (x * weight^T)) for up to 64 tokens, weight in int8 and
// x in two int8 parts (quantize_rows.cu), whose sums are exact: gemm_sm90_split_k.cuh, where a
// token has two columns of an instruction until the mainloop ends.
// Bench: python -m tridecode.kernels.bench two_parts
#include "api/gemm.h"
#include "api/operands.h"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_split_k.cuh"

using namespace tridecode;

int tridecode_gemm_sm90_split_k_two_parts(const tridecode_gemm_task* given, void* stream) {
  GemmTask task = *given;
  const char* const name = "gemm_sm90_split_k_two_parts";
  if (task.operand != kOperandTwoParts)
    return fail("%s: operand code %d; wanted %d", name, task.operand, kOperandTwoParts);
  if (int status = as_16_bit(name, task)) return status;
  return checked(name, task, [&](Mode mode) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
      return run_instance<X, TwoParts>(name, task, mode, stream);
    });
  });
}
