// out = epilogue(x * weight^T) for any number of tokens: gemm_sm90_stream_k.cuh with 16-bit
// operands. Bench: python -m tridecode.kernels.bench linear
#include "api/gemm.h"
#include "gemm/sm90/gemm_sm90_stream_k.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue). table_sm90.py chooses among them. SwiGLU stores groups of 32
// tokens.
// clang-format off
#define TRIDECODE_INSTANCES(_)                                                                      \
  _(16, kPlain) _(16, kQkv) _(16, kQkvRotary)                                                       \
  _(32, kPlain) _(32, kQkv) _(32, kQkvRotary)                                                       \
  _(64, kPlain) _(64, kQkv) _(64, kQkvRotary)                                                       \
  _(32, kGated) _(64, kGated) _(96, kGated) _(128, kGated)                                          \
  _(160, kGated) _(192, kGated) _(224, kGated) _(256, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_stream_k(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const char* const name = "gemm_sm90_stream_k";
  return divided(name, task, [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_)               \
  if (task.tile_tokens == tokens_ && mode == mode_) \
    return run<X, X, tokens_, mode_>(task, division, stream);
      TRIDECODE_INSTANCES(TRIDECODE_RUN)
      return fail("%s: no instance for a tile of %d tokens, epilogue %d", name, task.tile_tokens,
                  int(mode));
    });
  });
}
