// out = epilogue(weight_scales * x_scales * (x * weight^T)), weight in int8 and x in two int8
// parts: gemm_sm90_even_split.cuh, where a token has two columns of an instruction until the
// mainloop ends. Bench: python -m tridecode.kernels.bench two_parts
#include "api/even_split.h"
#include "api/operands.h"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_even_split.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue, split). table_sm90.py chooses among them.
#define TRIDECODE_INSTANCES(_) _(96, kPlain, 2) _(128, kPlain, 2) _(128, kPlain, 4)

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_even_split_two_parts(const tridecode_gemm_task* given, void* stream) {
  GemmTask task = *given;
  const char* const name = "gemm_sm90_even_split_two_parts";
  if (task.operand != kOperandTwoParts)
    return fail("%s: operand code %d; wanted %d", name, task.operand, kOperandTwoParts);
  if (int status = as_16_bit(name, task)) return status;
  return divided_evenly(name, task, [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_, split_)                               \
  if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) \
    return run_even<X, TwoParts, tokens_, split_>(task, division, stream);
      TRIDECODE_INSTANCES(TRIDECODE_RUN)
      return no_instance(name, task, mode);
    });
  });
}
