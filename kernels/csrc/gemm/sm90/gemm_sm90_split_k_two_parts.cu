// out = epilogue(weight_scales * x_scales * (x * weight^T)) for up to 64 tokens, weight in int8 and
// x in two int8 parts (quantize_rows.cu), whose sums are exact: gemm_sm90_split_k.cuh, where a
// token has two columns of an instruction until the mainloop ends.
// Bench: python -m tridecode.kernels.bench two_parts
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_split_k.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue, split). gemm_table.py chooses among them.
// clang-format off
#define TRIDECODE_INSTANCES(_) \
  _(16, kPlain, 1) _(16, kPlain, 2) _(16, kPlain, 3) \
  _(16, kQkv, 1) _(16, kQkv, 2) _(16, kQkv, 3) \
  _(16, kQkvRotary, 1) _(16, kQkvRotary, 2) _(16, kQkvRotary, 3) \
  _(32, kPlain, 1) _(32, kPlain, 2) _(32, kPlain, 3) \
  _(32, kQkv, 1) _(32, kQkv, 2) _(32, kQkv, 3) \
  _(32, kQkvRotary, 1) _(32, kQkvRotary, 2) _(32, kQkvRotary, 3) \
  _(64, kPlain, 1) _(64, kPlain, 2) _(64, kPlain, 3) \
  _(64, kQkv, 1) _(64, kQkv, 2) _(64, kQkv, 3) \
  _(64, kQkvRotary, 1) _(64, kQkvRotary, 2) _(64, kQkvRotary, 3)
// clang-format on

}  // namespace
}  // namespace tridecode

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
#define TRIDECODE_RUN(tokens_, mode_, split_)                               \
  if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) \
    return run<X, TwoParts, tokens_, mode_, split_>(task, stream);
      TRIDECODE_INSTANCES(TRIDECODE_RUN)
      return fail("%s: no instance for a tile of %d tokens, epilogue %d, split %d", name,
                  task.tile_tokens, int(mode), task.split);
    });
  });
}
