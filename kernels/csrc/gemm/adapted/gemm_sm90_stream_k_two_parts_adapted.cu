// gemm_sm90_stream_k_two_parts.cu for rows with adapters.
// Bench: python -m tridecode.tools.bench.studies.adapters --quantization int8
#include "api/adapted_gemm.h"
#include "api/operands.h"
#include "gemm/adapted/gemm_sm90_adapters.cuh"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_stream_k.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue): those of decode steps of up to 64 rows.
// clang-format off
#define TRIDECODE_INSTANCES(_)                                                                      \
  _(16, kPlain) _(16, kQkv) _(16, kQkvRotary)                                                       \
  _(32, kPlain) _(32, kQkv) _(32, kQkvRotary)                                                       \
  _(64, kPlain) _(64, kQkv) _(64, kQkvRotary)                                                       \
  _(32, kGated) _(64, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_stream_k_two_parts_adapted(const tridecode_adapted_gemm_task* given,
                                                   void* stream) {
  AdaptedTask task = adapted(*given);
  const char* const name = "gemm_sm90_stream_k_two_parts";
  if (task.operand != kOperandTwoParts)
    return fail("%s: operand code %d; wanted %d", name, task.operand, kOperandTwoParts);
  if (int status = as_16_bit(name, task)) return status;
  if (int status = check_adapters(name, task)) return status;
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
