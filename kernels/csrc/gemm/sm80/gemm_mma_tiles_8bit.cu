// gemm_mma_tiles.cuh with both operands in 8 bit: int8 from compute capability 8.0 on, E4M3 from
// 8.9 on. Without rotation and cache.
#include "api/gemm.h"
#include "api/operands.h"
#include "gemm/sm80/gemm_mma_tiles.cuh"

// (tokens of a tile, epilogue)
#define TRIDECODE_INSTANCES(_) \
  _(16, kPlain) _(32, kPlain) _(64, kPlain) _(16, kGated) _(32, kGated) _(64, kGated)

namespace tridecode {
namespace {

template <typename Operand>
int run(const char* name, const GemmTask& task, void* stream) {
  return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
    using X = decltype(zero);
    const Mode mode = mode_of(task);
#define TRIDECODE_RUN(tokens_, mode_)               \
  if (task.tile_tokens == tokens_ && mode == mode_) \
    return launch_tiles<X, Operand, tokens_, mode_>(name, task, stream);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return no_tile(name, task, mode);
  });
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_mma_tiles_8bit(const tridecode_gemm_task* given, void* stream) {
  const char* const name = "gemm_mma_tiles_8bit";
  const GemmTask& task = *given;
  const int least = task.operand == kOperandInt8 ? 80 : 89;
  if ((task.operand != kOperandInt8 && task.operand != kOperandFp8) || device().capability < least)
    return fail("%s: operand code %d on sm_%d; wanted 1 on sm_80 or 2 on sm_89, or later", name,
                task.operand, device().capability);
  if (task.cache || !task.weight_scales || !task.x_scales || task.inputs % 16)
    return fail("%s: %d inputs, %s scales, %s cache; wanted a multiple of 16, scales, no cache",
                name, task.inputs, task.weight_scales && task.x_scales ? "with" : "without",
                task.cache ? "with" : "without");
  if (int status = check_tiles(name, task, task.inputs / 2)) return status;
  return task.operand == kOperandInt8 ? run<int8_t>(name, task, stream)
                                      : run<__nv_fp8_e4m3>(name, task, stream);
}
