// out = epilogue(x * weight^T) with TMA and wgmma, for int4 with one group per granule and 129 or
// more tokens: gemm_packed_sm90.cu with tiles of 160 to 256 tokens (gemm_packed_wide_sm90.cuh).
//
// Bytes moved: outputs * inputs / 2 and 4 bytes of each group for each tile of tokens.
// Bench: python -m tridecode.kernels.bench packed_linear
#include "api/even_split.h"
#include "api/packed.h"
#include "gemm/packed/gemm_packed_wide_sm90.cuh"

namespace tridecode {
namespace {

template <typename X, int N, Mode MODE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_packed_wide_sm90(const __grid_constant__ CUtensorMap weight_map,
                          const __grid_constant__ CUtensorMap groups_map,
                          const __grid_constant__ CUtensorMap x_map,
                          const __grid_constant__ CUtensorMap out_map,
                          const __grid_constant__ CUtensorMap residual_map,
                          const __grid_constant__ GemmTask task,
                          const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = WideShape<N>;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], arrived[kGroups][kBuffers];
  const int group = threadIdx.x / 128, cluster = blockIdx.x / 2;
  if (threadIdx.x == 0) {
    initialize_ring<S::kStages>(full, empty, &arrived[0][0], 2);
    fence_barriers();
  }
  cluster_sync();

  if (group == kGroups) {
    give_registers<40>();
    if (threadIdx.x == kGroups * 128) {
      copy_wide_stages<N, MODE>(&weight_map, &groups_map, &x_map, task, division, base, full,
                                empty);
    } else {
      wait_for_predecessor();
      const int index = threadIdx.x - kGroups * 128 - 32;  // except the producer thread's warp
      if (index >= 0)
        Finish<X, N, MODE>::prefetch_tables(task, blockIdx.x * 96 + index, gridDim.x * 96);
      const int helped = threadIdx.x / 32 % 4 - 1;
      if (helped >= 0 && helped < kGroups) signal_partial(task, division, cluster, helped);
    }
  } else {
    take_registers<232>();
    wait_for_predecessor();
    WideProducts<X, N> products{{base, full, empty}};
    Finish<X, N, MODE> finish{
        task,
        &out_map,
        &residual_map,
        base + S::kStages * S::kStageBytes + group * kBuffers * Shape<N>::kBufferBytes,
        arrived[group],
        group};
    Walk walk(division, cluster);
    Part part;
    while (walk.take(division, part)) {
      const int column =
          finish.first_column(part.row_tile * kClusterRows + cluster_rank() * kBlockRows);
      const int token = part.token_tile * N;
      const bool finishes = part.begin == 0;
      if (MODE == kPlain && finishes && task.residual && threadIdx.x % 128 == 0)
        finish.load_first_residuals(column, token);
      if (finishes) {
        finish.load_biases(column);
        finish.load_slots(column, token);
      }
      float c[N / 2];
      products.add_up(c, part.end - part.begin, group);
      if (!finishes) {
        write_partial<N>(c, task, cluster, group);
        continue;
      }
      if (part.end < division.steps)
        add_partials<N>(c, task, cluster,
                        division.owner_before((part.tile + 1) * division.steps) - cluster, group);
      finish.activate_all(c);
      if (MODE == kQkvRotary) finish.rotate_all(c, column, token);
      finish.store_all(c, column, token);
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  }
  __syncwarp();
  cluster_sync();  // no load or arrival from the other block is in flight
#endif
}

template <typename X, int N, Mode MODE>
int run(const GemmTask& task, const Division& division, void* stream) {
  using S = WideShape<N>;
  Maps maps;
  int status = encode_granules(maps, task, MODE);
  if (!status) status = encode_rows(maps, task, MODE, N / 2, Shape<N>::kPart);
  if (status) return status;
  return launch_resident("gemm_packed_wide_sm90", gemm_packed_wide_sm90<X, N, MODE>,
                         2 * division.clusters, kThreads, S::kSharedBytes, stream, maps.weight,
                         maps.groups, maps.x, maps.out, maps.residual, task, division);
}

// (tokens of a tile, epilogue). packed_table.py chooses among them.
// clang-format off
#define TRIDECODE_INSTANCES(_)                                           \
  _(160, kPlain) _(192, kPlain) _(224, kPlain) _(256, kPlain)            \
  _(160, kGated) _(192, kGated) _(224, kGated) _(256, kGated)            \
  _(192, kQkv) _(192, kQkvRotary)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_packed_wide_sm90(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const char* const name = "gemm_packed_wide_sm90";
  if (int status = check_wide(name, task)) return status;
  auto run_mode = [&](Mode mode, const Division& division) {
    return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
      using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_)               \
  if (task.tile_tokens == tokens_ && mode == mode_) \
    return run<X, tokens_, mode_>(task, division, stream);
      TRIDECODE_INSTANCES(TRIDECODE_RUN)
      return fail("%s: no instance for a tile of %d tokens, epilogue %d", name, task.tile_tokens,
                  int(mode));
    });
  };
  return divided(name, task, run_mode, kStepInputs);
}
