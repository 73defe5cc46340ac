// out = epilogue(x * weight^T) for up to 64 tokens: gemm_sm90_split_k.cuh with 16-bit operands.
// Bench: python -m tridecode.kernels.bench linear
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

int64_t tridecode_gemm_sm90_clusters(int split) {
  constexpr auto kernel = &gemm_sm90_split_k<half, half, 16, kPlain, 3>;
  constexpr int kShared = SplitShape<16, 3>::kSharedBytes;
  cudaLaunchAttribute attribute = clusters_of(split);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(split * 32);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kShared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (status == cudaSuccess) return clusters;
  cudaGetLastError();  // the next launch must not report this error
  return 0;
}

int tridecode_gemm_sm90_split_k(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const char* const name = "gemm_sm90_split_k";
  return checked(name, task, [&](Mode mode) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_, split_)                               \
  if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) \
    return run<X, X, tokens_, mode_, split_>(task, stream);
      TRIDECODE_INSTANCES(TRIDECODE_RUN)
      return fail("%s: no instance for a tile of %d tokens, epilogue %d, split %d", name,
                  task.tile_tokens, int(mode), task.split);
    });
  });
}
