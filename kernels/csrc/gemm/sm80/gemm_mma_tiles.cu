// gemm_mma_tiles.cuh with 16-bit operands.
#include "api/gemm.h"
#include "gemm/sm80/gemm_mma_tiles.cuh"

// (tokens of a tile, epilogue); kQkv with or without rotation.
#define TRIDECODE_INSTANCES(_) \
  _(16, kPlain)                \
  _(32, kPlain)                \
  _(64, kPlain) _(16, kGated) _(32, kGated) _(64, kGated) _(16, kQkv) _(32, kQkv) _(64, kQkv)

using namespace tridecode;

int tridecode_gemm_mma_tiles(const tridecode_gemm_task* given, void* stream) {
  const char* const name = "gemm_mma_tiles";
  const GemmTask& task = *given;
  if (int status = check_exact_cache(name, task)) return status;
  if (int status = check_tiles(name, task, task.inputs)) return status;
  return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
    using X = decltype(zero);
    const Mode mode = mode_of(task) == kQkvRotary ? kQkv : mode_of(task);
#define TRIDECODE_RUN(tokens_, mode_)               \
  if (task.tile_tokens == tokens_ && mode == mode_) \
    return launch_tiles<X, X, tokens_, mode_>(name, task, stream);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return no_tile(name, task, mode);
  });
}
