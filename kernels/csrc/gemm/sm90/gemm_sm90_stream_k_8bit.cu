// out = epilogue(weight_scales * x_scales * (x * weight^T)) for any number of tokens:
// gemm_sm90_stream_k.cuh with 8-bit operands (gemm_sm90_8bit.cuh).
// Bench: python -m tridecode.kernels.bench w8a8
#include "api/gemm.h"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_stream_k.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue). table_sm90.py chooses among them. SwiGLU stores groups of 32
// tokens. E4M3, with its two sets of accumulators, has tiles of up to 128 tokens.
// clang-format off
#define TRIDECODE_INSTANCES(_)                                                                      \
  _(16, kPlain) _(32, kPlain) _(64, kPlain) _(96, kPlain) _(128, kPlain)                            \
  _(160, kPlain) _(192, kPlain) _(224, kPlain) _(256, kPlain)                                       \
  _(16, kQkv) _(32, kQkv) _(64, kQkv) _(96, kQkv) _(128, kQkv)                                      \
  _(192, kQkv) _(256, kQkv)                                                                         \
  _(16, kQkvRotary) _(32, kQkvRotary) _(64, kQkvRotary) _(96, kQkvRotary) _(128, kQkvRotary)        \
  _(192, kQkvRotary) _(256, kQkvRotary)                                                             \
  _(32, kGated) _(64, kGated) _(96, kGated) _(128, kGated)                                          \
  _(160, kGated) _(192, kGated) _(224, kGated) _(256, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_stream_k_8bit(const tridecode_gemm_task* given, void* stream) {
  GemmTask task = *given;
  const char* const name = "gemm_sm90_stream_k_8bit";
  if (int status = as_16_bit(name, task)) return status;
  return divided(name, task, [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      return for_operand(task.operand, name, [&](auto value) {
        using X = decltype(zero);
        using Operand = decltype(value);
#define TRIDECODE_RUN(tokens_, mode_)                                     \
  if constexpr (tokens_ <= 128 || std::is_same<Operand, int8_t>::value) { \
    if (task.tile_tokens == tokens_ && mode == mode_)                     \
      return run<X, Operand, tokens_, mode_>(task, division, stream);     \
  }
        TRIDECODE_INSTANCES(TRIDECODE_RUN)
        return fail("%s: no instance for a tile of %d tokens, epilogue %d", name, task.tile_tokens,
                    int(mode));
      });
    });
  });
}
