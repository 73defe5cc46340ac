// out = epilogue(weight_scales * x_scales * (x * weight^T)) for any number of tokens, weight in
// int8 and x in two int8 parts (quantize_rows.cu), whose sums are exact:
// gemm_sm90_stream_k.cuh, where a token has two columns of an instruction until the mainloop ends.
// Bench: python -m tridecode.kernels.bench two_parts
#include "api/gemm.h"
#include "api/operands.h"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_stream_k.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue). table_sm90.py chooses among them. SwiGLU stores groups of 32
// tokens.
// clang-format off
#define TRIDECODE_INSTANCES(_)                                                                      \
  _(16, kPlain) _(32, kPlain) _(64, kPlain) _(96, kPlain) _(128, kPlain)                            \
  _(16, kQkv) _(32, kQkv) _(64, kQkv) _(96, kQkv) _(128, kQkv)                                      \
  _(16, kQkvRotary) _(32, kQkvRotary) _(64, kQkvRotary) _(96, kQkvRotary) _(128, kQkvRotary)        \
  _(32, kGated) _(64, kGated) _(96, kGated) _(128, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_stream_k_two_parts(const tridecode_gemm_task* given, void* stream) {
  GemmTask task = *given;
  const char* const name = "gemm_sm90_stream_k_two_parts";
  if (task.operand != kOperandTwoParts)
    return fail("%s: operand code %d; wanted %d", name, task.operand, kOperandTwoParts);
  if (int status = as_16_bit(name, task)) return status;
  return divided(name, task, [&](Mode mode, Division division) {
    if (division.shared) division.near = division.row_tiles;
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_)               \
  if (task.tile_tokens == tokens_ && mode == mode_) \
    return run<X, TwoParts, tokens_, mode_>(task, division, stream);
      TRIDECODE_INSTANCES(TRIDECODE_RUN)
      return fail("%s: no instance for a tile of %d tokens, epilogue %d", name, task.tile_tokens,
                  int(mode));
    });
  });
}
