// out = epilogue(x * weight^T): gemm_sm90_even_split.cuh with 16-bit operands.
// Bench: python -m tridecode.kernels.bench linear
#include "api/gemm.h"
#include "gemm/sm90/gemm_sm90_even_split.cuh"

namespace tridecode {
namespace {

// (tokens of a tile, epilogue, split). table_sm90.py chooses among them.
#define TRIDECODE_INSTANCES(_) _(128, kPlain, 4) _(192, kPlain, 4) _(256, kPlain, 4)

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_even_split(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const char* const name = "gemm_sm90_even_split";
  return divided_evenly(name, task, [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_, split_)                               \
  if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) \
    return run_even<X, X, tokens_, split_>(task, division, stream);
      TRIDECODE_INSTANCES(TRIDECODE_RUN)
      return no_instance(name, task, mode);
    });
  });
}
