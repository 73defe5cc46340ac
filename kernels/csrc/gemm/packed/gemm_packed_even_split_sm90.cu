// out = epilogue(x * weight^T) with TMA and wgmma for int4 with one group per granule, 129 to 256
// tokens and few weight rows: SPLIT clusters share every tile in equal parts, as in
// gemm_sm90_even_split.cuh. The mainloop is that of gemm_packed_wide_sm90.cuh.
//
// Clusters of a tile wait for each other, so all must be resident at once.
//
// Bytes moved: outputs * inputs / 2 and 4 bytes of each group, once, and 4 * tokens * outputs *
// (SPLIT - 1) twice, to the L2 cache and back.
// Bench: python -m tridecode.kernels.bench packed_linear
#include "api/even_split.h"
#include "api/packed.h"
#include "gemm/packed/gemm_packed_wide_sm90.cuh"
#include "gemm/sm90/gemm_sm90_even_split.cuh"

namespace tridecode {
namespace {

// N: tokens of a tile.
template <typename X, int N, int SPLIT>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_packed_even_split_sm90(const __grid_constant__ CUtensorMap weight_map,
                                const __grid_constant__ CUtensorMap groups_map,
                                const __grid_constant__ CUtensorMap x_map,
                                const __grid_constant__ CUtensorMap out_map,
                                const __grid_constant__ CUtensorMap residual_map,
                                const __grid_constant__ GemmTask task,
                                const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  share_tile<X, X, N, SPLIT, WideShape<N>>(
      &out_map, &residual_map, task, division,
      [&](char* base, uint64_t* full, uint64_t* empty) {
        copy_wide_stages<N, kPlain>(&weight_map, &groups_map, &x_map, task, division, base, full,
                                    empty);
      },
      [&](float (&c)[N / 2], int steps, int group, const StageScales&, const char* base,
          uint64_t* full,
          uint64_t* empty) { WideProducts<X, N>{{base, full, empty}}.add_up(c, steps, group); });
#endif
}

template <typename X, int N, int SPLIT>
int run(const GemmTask& task, const Division& division, void* stream) {
  using S = WideShape<N>;
  Maps maps;
  int status = encode_granules(maps, task, kPlain);
  if (!status) status = encode_rows(maps, task, kPlain, N / 2, Shape<N / SPLIT>::kPart);
  if (status) return status;
  return launch_resident("gemm_packed_even_split_sm90", gemm_packed_even_split_sm90<X, N, SPLIT>,
                         2 * division.clusters, kThreads, kEvenBytes<S, N, SPLIT>, stream,
                         maps.weight, maps.groups, maps.x, maps.out, maps.residual, task, division);
}

// (tokens of a tile, epilogue, split). packed_table.py chooses among them.
#define TRIDECODE_INSTANCES(_) _(192, kPlain, 4) _(256, kPlain, 4)

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_packed_even_split_sm90(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const char* const name = "gemm_packed_even_split_sm90";
  if (int status = check_wide(name, task)) return status;
  return divided_evenly(
      name, task,
      [&](Mode mode, const Division& division) {
        return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
          using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_, split_)                               \
  if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) \
    return run<X, tokens_, split_>(task, division, stream);
          TRIDECODE_INSTANCES(TRIDECODE_RUN)
          return no_instance(name, task, mode);
        });
      },
      kStepInputs);
}
