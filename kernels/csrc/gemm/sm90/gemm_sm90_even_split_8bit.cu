// out = epilogue(weight_scales * x_scales * (x * weight^T)): gemm_sm90_even_split.cuh with 8-bit
// operands (gemm_sm90_8bit.cuh).
// Bench: python -m tridecode.kernels.bench w8a8
#include "api/gemm.h"
#include "gemm/sm90/gemm_sm90_8bit.cuh"
#include "gemm/sm90/gemm_sm90_even_split.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue, split). table_sm90.py chooses among them. E4M3, which has two sets
// of sums, has tiles of 128 tokens.
#define TRIDECODE_INSTANCES(_) \
  _(128, kPlain, 2) _(128, kPlain, 4) _(192, kPlain, 4) _(256, kPlain, 4)

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_even_split_8bit(const tridecode_gemm_task* given, void* stream) {
  GemmTask task = *given;
  const char* const name = "gemm_sm90_even_split_8bit";
  if (int status = as_16_bit(name, task)) return status;
  return divided_evenly(name, task, [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      return for_operand(task.operand, name, [&](auto value) {
        using X = decltype(zero);
        using Operand = decltype(value);
#define TRIDECODE_RUN(tokens_, mode_, split_)                                 \
  if constexpr (tokens_ <= 128 || std::is_same<Operand, int8_t>::value) {     \
    if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) \
      return run_even<X, Operand, tokens_, split_>(task, division, stream);   \
  }
        TRIDECODE_INSTANCES(TRIDECODE_RUN)
        return no_instance(name, task, mode);
      });
    });
  });
}
