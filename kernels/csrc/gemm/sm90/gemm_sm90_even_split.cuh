// out = epilogue(x * weight^T) with TMA and wgmma, for 65 to some hundred
// tokens and few weight rows: every tile is shared by SPLIT clusters in equal
// parts.
//
// Tiles, loads and mainloop are those of gemm_sm90_stream_k.cuh, whose division of steps is even
// with SPLIT clusters per tile. There, the cluster with a tile's first inputs finishes the tile
// while the others are done; here each finishes a SPLIT-th of the tokens. The others store the sums
// that it needs in scratch memory, all at about the same time, and it adds them in the order of the
// inputs.
//
// Clusters of a tile wait for each other, so all must be resident at once.
//
// Bytes moved: outputs * inputs * sizeof(Operand) for each tile of tokens, and 4 * tokens * outputs
// * (SPLIT - 1) twice, to the L2 cache and back.
// Bench: python -m tridecode.kernels.bench linear, w8a8, two_parts
#pragma once
#include "gemm/sm90/gemm_sm90_stream_k.cuh"

namespace tridecode {
namespace {

// The buffers of the epilogue are those of a cluster's share of the tokens.
template <typename S, int N, int SPLIT>
constexpr int kEvenBytes = 1024 + S::kStages * S::kStageBytes + Shape<N / SPLIT>::kStoreBytes;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A counter of the clusters of a tile: each adds one when its sums are written, and one when it has
// seen all clusters' sums. The last one resets it for the next launch.
template <int SPLIT>
__device__ __forceinline__ void meet(unsigned int* counter, int group) {
  group_sync(group);
  if (threadIdx.x % 128 == 0) {
    device_fence();
    atomicAdd(counter, 1u);
    Spin spin(kSumsOfTile);
    while (load_acquire(counter) < SPLIT) spin.again();
    if (atomicAdd(counter, 1u) == 2 * SPLIT - 1) *counter = 0;
  }
  group_sync(group);
}

// sums: for the tokens that this cluster finishes, over all of the tile's clusters. tokens: those
// of the tile; shares beyond them are skipped.
template <int N, int SPLIT>
__device__ __forceinline__ void exchange_shares(const float (&c)[N / 2],
                                                float (&sums)[N / 2 / SPLIT], const GemmTask& task,
                                                int cluster, int group, int tokens) {
  constexpr int kShare = N / 2 / SPLIT, kPieces = kShare / 4;
  const int own = cluster % SPLIT;
  float4* const left = partial_of<N>(task, cluster, group);
#pragma unroll
  for (int share = 0; share < SPLIT; ++share) {
    if (share == own) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) sums[i] = c[share * kShare + i];
    } else if (share * (N / SPLIT) < tokens) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float* const four = c + share * kShare + 4 * i;
        __stcg(left + (share * kPieces + i) * 128, make_float4(four[0], four[1], four[2], four[3]));
      }
    }
  }
  meet<SPLIT>(flag_of(task, cluster - own, group), group);
  if (own * (N / SPLIT) >= tokens) return;
  float mine[kShare];
#pragma unroll
  for (int i = 0; i < kShare; ++i) mine[i] = sums[i], sums[i] = 0.0f;
#pragma unroll
  for (int from = 0; from < SPLIT; ++from) {
    if (from == own) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) sums[i] += mine[i];
      continue;
    }
    const float4* const theirs = partial_of<N>(task, cluster - own + from, group);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float4 four = __ldcg(theirs + (own * kPieces + i) * 128);
      sums[4 * i] += four.x, sums[4 * i + 1] += four.y;
      sums[4 * i + 2] += four.z, sums[4 * i + 3] += four.w;
    }
  }
}

// The kernel of a block. X, Operand: as below; S: the shape of the ring. copy(base, full, empty),
// in one thread, loads the stages of the cluster's part of a tile, and add_up(c, steps, group,
// scales, base, full, empty) computes its sums.
template <typename X, typename Operand, int N, int SPLIT, typename S, typename Copy, typename AddUp>
__device__ __forceinline__ void share_tile(const CUtensorMap* out_map,
                                           const CUtensorMap* residual_map, const GemmTask& task,
                                           const Division& division, Copy copy, AddUp add_up) {
  constexpr int kTokens = N / SPLIT;  // of the share that a cluster finishes
  constexpr bool kScaled = !std::is_same<X, Operand>::value;
  using F = Finish<X, kTokens, kPlain, kScaled>;
  static_assert(kEvenBytes<S, N, SPLIT> <= 226 * 1024);
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], arrived[kGroups][kBuffers];
  __shared__ float x_scales[kGroups][kScaled ? kTokens : 1];
  const int group = threadIdx.x / 128, cluster = blockIdx.x / 2;
  if (threadIdx.x == 0) {
    initialize_ring<S::kStages>(full, empty, &arrived[0][0], 2);
    fence_barriers();
  }
  cluster_sync();

  if (group == kGroups) {
    give_registers<40>();
    if (threadIdx.x == kGroups * 128) {
      copy(base, full, empty);
    } else {
      wait_for_predecessor();
    }
  } else {
    take_registers<232>();
    wait_for_predecessor();
    F finish{
        task,           out_map,
        residual_map,   base + S::kStages * S::kStageBytes + group * kBuffers * F::S::kBufferBytes,
        arrived[group], group};
    if (kScaled) finish.x_scales = x_scales[group];
    Walk walk(division, cluster);
    Part part;
    walk.take(division, part);  // the only one
    const int column =
        finish.first_column(part.row_tile * kClusterRows + cluster_rank() * kBlockRows);
    const int first = part.token_tile * N, token = first + cluster % SPLIT * kTokens;
    const bool finishes = token < task.tokens, scales = kScaled && !in_blocks<Operand>(task);
    if (finishes) {
      if (task.residual && threadIdx.x % 128 == 0) finish.load_first_residuals(column, token);
      finish.load_biases(column);
      if (scales) finish.load_x_scales(token);
    }
    float c[N / 2], sums[kTokens / 2];
    add_up(c, part.end - part.begin, group, finish.stage_scales(column, first, part.begin), base,
           full, empty);
    exchange_shares<N, SPLIT>(c, sums, task, cluster, group, task.tokens - first);
    if (finishes) {
      if (scales) finish.scale_all(sums, token);
      finish.activate_all(sums);
      finish.store_all(sums, column, token);
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  }
  __syncwarp();
  cluster_sync();  // no load or arrival from the other block is in flight
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// X: of bias, residual and out. Operand: of weight and x, X or 8 bit. N: tokens of a tile.
template <typename X, typename Operand, int N, int SPLIT>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_sm90_even_split(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap x_map,
                         const __grid_constant__ CUtensorMap out_map,
                         const __grid_constant__ CUtensorMap residual_map,
                         const __grid_constant__ GemmTask task,
                         const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<N, kPartsOf<Operand>>;
  static_assert(!S::kSlim, "a warp group holds a whole tile in registers");
  share_tile<X, Operand, N, SPLIT, S>(
      &out_map, &residual_map, task, division,
      [&](char* base, uint64_t* full, uint64_t* empty) {
        copy_stages<S, N, kPlain>(&weight_map, &x_map, task, division, base, full, empty);
      },
      [&](float (&c)[N / 2], int steps, int group, const StageScales& scales, const char* base,
          uint64_t* full, uint64_t* empty) {
        Products<Operand, N, S, 2, true>{base, full, empty}.add_up(c, steps, group, scales);
      });
#endif
}

template <typename X, typename Operand, int N, int SPLIT>
int run_even(const GemmTask& task, const Division& division, void* stream) {
  using S = Shape<N, kPartsOf<Operand>>;
  Maps maps;
  if (int status = encode_maps(maps, task, kPlain, S::kColumns / 2, Shape<N / SPLIT>::kPart))
    return status;
  return launch_resident("gemm_sm90_even_split", gemm_sm90_even_split<X, Operand, N, SPLIT>,
                         2 * division.clusters, kThreads, kEvenBytes<S, N, SPLIT>, stream,
                         maps.weight, maps.x, maps.out, maps.residual, task, division);
}

// Checks the task and calls run(mode, division). stage_inputs: of a step of the mainloop.
template <typename Run>
int divided_evenly(const char* what, const GemmTask& task, Run run,
                   int stage_inputs = kStageInputs) {
  auto run_even = [&](Mode mode, const Division& division) {
    const int tiles = division.row_tiles * division.token_tiles;
    if (!division.shared || task.split < 2 || division.clusters != tiles * task.split ||
        task.split > division.steps || mode != kPlain)
      return fail("%s: %d clusters for %d tiles of %d stages, split %d, epilogue %d", what,
                  division.clusters, tiles, division.steps, task.split, int(mode));
    if (2 * division.clusters > device().multiprocessors)  // because clusters wait for each other
      return fail("%s: %d clusters of two blocks; %d multiprocessors", what, division.clusters,
                  device().multiprocessors);
    return run(mode, division);
  };
  return divided(what, task, run_even, stage_inputs);
}

int no_instance(const char* what, const GemmTask& task, Mode mode) {
  return fail("%s: no instance for a tile of %d tokens, epilogue %d, split %d", what,
              task.tile_tokens, int(mode), task.split);
}

}  // namespace
}  // namespace tridecode
