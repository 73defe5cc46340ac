// out = epilogue(x * weight^T) for up to 64 tokens: gemm_sm90_split_k.cuh with 16-bit operands.
// Bench: python -m tridecode.kernels.bench linear
#include "api/gemm.h"
#include "gemm/sm90/gemm_sm90_split_k.cuh"

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
      return run_instance<X, X>(name, task, mode, stream);
    });
  });
}
