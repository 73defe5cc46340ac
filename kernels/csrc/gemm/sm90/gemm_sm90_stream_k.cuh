// out = epilogue(x * weight^T) with TMA and wgmma, for any number of tokens.
//
// A cluster of two blocks computes a tile of 256 weight rows times N tokens, 128 rows per block and
// 64 per consumer warp group. A producer warp keeps a ring of TMA loads in flight: 128 rows of 64
// inputs of the weight for its own block, and half of the tokens' inputs, multicast to both.
// SwiGLU's gate and up rows alternate in groups of 8, so that a thread holds both of a pair.
//
// With few tokens, memory bandwidth bounds: with stream_k every cluster takes the same number of
// stages, whatever tile they belong to. A tile that several clusters share is finished by the one
// that has its first inputs. A cluster computes its partial sums of another cluster's tile first
// and finishes its own tile last. Without stream_k each cluster takes whole tiles, those of a wave
// close together.
//
// The ring fills with weights before the wait for the kernel that computes x. Results and the
// residual pass through shared memory, where they are transposed from weight rows to tokens.
//
// Bytes moved: outputs * inputs * sizeof(Operand), once, with few tokens.
// Bench: python -m tridecode.kernels.bench linear
#pragma once
#include "gemm/adapted/adapted_task.cuh"
#include "gemm/sm90/gemm_sm90_walk.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename S, int N, Mode MODE>
__device__ __forceinline__ void copy_stages(const CUtensorMap* weight_map, const CUtensorMap* x_map,
                                            const GemmTask& task, const Division& division,
                                            char* base, uint64_t* full, uint64_t* empty) {
  constexpr int kRows = S::kColumns / 2;  // of x, of one block
  const int rank = cluster_rank(), cluster = blockIdx.x / 2;
  const uint64_t weight_policy = division.token_tiles == 1 ? evict_first() : evict_normally();
  const uint64_t x_policy = division.token_tiles == 1 ? evict_last() : evict_normally();
  auto copy_weights = [&](const Stages& at, int stage) {
    char* const to = base + stage * S::kStageBytes;
    const int row = at.part.row_tile * kClusterRows + rank * kBlockRows;
    const int missing = has_second_half<N>(at.part, task) ? 0 : kRows * 128;
    barrier_expect(full + stage, S::kStageBytes - missing);
    const int input = at.step * kStageInputs;
    copy_weight<MODE>(to, weight_map, input, row, task.head_size, full + stage, weight_policy);
  };
  auto copy_x = [&](const Stages& at, int stage) {
    if (rank == 1 && !has_second_half<N>(at.part, task)) return;
    copy_box_to_both(base + stage * S::kStageBytes + S::kWeightBytes + rank * kRows * 128, x_map,
                     at.step * kStageInputs, (2 * at.part.token_tile + rank) * kRows, full + stage,
                     x_policy);
  };
  prefetch_map(weight_map);
  prefetch_map(x_map);
  Stages weights(division, cluster), xs = weights;
  int ahead = 0;
  for (; ahead < S::kStages && weights.more; ++ahead, weights.advance(division))
    copy_weights(weights, ahead);
  wait_for_predecessor();
  for (int i = 0; i < ahead; ++i, xs.advance(division)) copy_x(xs, i);
  int stage = 0, parity = 0;
  for (; weights.more; weights.advance(division)) {
    barrier_wait(empty + stage, parity);
    copy_weights(weights, stage);
    copy_x(weights, stage);
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

// Fills the adapters of the tiles that this block finishes: the first round, or all others.
template <typename F, typename Adapters, typename Task>
__device__ __forceinline__ void fill_tiles(Adapters& adapters, const Task& task,
                                           const Division& division, bool first_round,
                                           int& rounds) {
  if constexpr (kAdapted<Task>) {
    Walk walk(division, blockIdx.x / 2);
    Part part;
    bool first_tile = true;
    while (walk.take(division, part)) {
      if (part.begin) continue;
      const int row = part.row_tile * kClusterRows + cluster_rank() * kBlockRows;
      adapters.fill_tile(
          task, first_tile && !first_round ? 1 : 0, first_round ? 1 : INT_MAX, rounds,
          [&](int group) {
            return F{task, nullptr, nullptr, nullptr, nullptr, group}.first_column(row);
          });
      if (first_round) return;
      first_tile = false;
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// X: of bias, residual and out. Operand: of weight and x, X or 8 bit. N: tokens of a tile.
template <typename X, typename Operand, int N, Mode MODE, typename Task = GemmTask>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, kResidentOf<Operand, N, Task>)
    gemm_sm90_stream_k(const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap out_map,
                       const __grid_constant__ CUtensorMap residual_map,
                       const __grid_constant__ Task task,
                       const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kScaled = !std::is_same<X, Operand>::value;
  constexpr int kBuffers = kBuffersOf<Task>;
  using F = Finish<X, N, MODE, kScaled, true, kBuffers>;
  using S = ShapeOf<N, kPartsOf<Operand>, Task>;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], arrived[kGroups][kBuffers];
  __shared__ float x_scales[kGroups][kScaled && S::kSlim ? N : 1];
  __shared__ BlockAdapters<X, N, MODE, Task> adapters;
  const int group = threadIdx.x / 128, cluster = blockIdx.x / 2;
  if (threadIdx.x == 0) {
    initialize_ring<S::kStages, kBuffers>(full, empty, &arrived[0][0], 2);
    adapters.initialize();
    fence_barriers();
  }
  cluster_sync();

  if (group == kGroups) {
    if (!S::kSlim) give_registers<kAdapted<Task> ? 56 : 40>();
    if (threadIdx.x == kGroups * 128) {
      copy_stages<S, N, MODE>(&weight_map, &x_map, task, division, base, full, empty);
    } else {
      const int index = threadIdx.x - kGroups * 128 - 32;  // except the producer thread's warp
      int rounds = 0;
      if (index >= 0) {
        adapters.find(task, index);
        fill_tiles<F>(adapters, task, division, true, rounds);
      }
      wait_for_predecessor();
      if (index >= 0) {
        F::prefetch_tables(task, blockIdx.x * 96 + index, gridDim.x * 96);
        adapters.fill_tokens(task, 0, index);
      }
      const int helped = threadIdx.x / 32 % 4 - 1;
      if (helped >= 0 && helped < kGroups) signal_partial(task, division, cluster, helped);
      if (index >= 0) fill_tiles<F>(adapters, task, division, false, rounds);
    }
  } else {
    if (!S::kSlim) take_registers<kAdapted<Task> ? 224 : 232>();
    wait_for_predecessor();
    Products<Operand, N, S, 2> products{base, full, empty};
    F finish{
        task,           &out_map,
        &residual_map,  base + S::kStages * S::kStageBytes + group * kBuffers * S::kBufferBytes,
        arrived[group], group};
    if (kScaled && S::kSlim) finish.x_scales = x_scales[group];
    Walk walk(division, cluster);
    Part part;
    int rounds = 0;  // of adapters
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
      if (kScaled && finishes && !in_blocks<Operand>(task)) finish.load_x_scales(token);
      float c[N / 2];
      products.add_up(c, part.end - part.begin, group,
                      finish.stage_scales(column, token, part.begin));
      if (!finishes) {
        write_partial<N>(c, task, cluster, group);
        continue;
      }
      if (part.end < division.steps)
        add_partials<N>(c, task, cluster,
                        division.owner_before((part.tile + 1) * division.steps) - cluster, group);
      if (kScaled && !in_blocks<Operand>(task)) finish.scale_all(c, token);
      adapters.add(c, task, rounds, column, token);
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

template <typename X, typename Operand, int N, Mode MODE, typename Task>
int run(const Task& task, const Division& division, void* stream) {
  using S = ShapeOf<N, kPartsOf<Operand>, Task>;
  Maps maps;
  if (int status = encode_maps(maps, task, MODE, S::kColumns / 2, S::kPart)) return status;
  return launch_resident("gemm_sm90_stream_k", gemm_sm90_stream_k<X, Operand, N, MODE, Task>,
                         2 * division.clusters, kThreads, S::kSharedBytes, stream, maps.weight,
                         maps.x, maps.out, maps.residual, task, division);
}

}  // namespace
}  // namespace tridecode
