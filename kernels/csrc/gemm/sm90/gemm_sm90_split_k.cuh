// out = epilogue(x * weight^T) with TMA and wgmma, for up to 64 tokens and few weight rows: split-K
// within a cluster.
//
// A block computes 128 weight rows, 64 per consumer warp group, times all tokens. A cluster of 1 to
// 3 blocks splits the inputs of a tile. Each block then finishes the sums of its share of the
// tokens, which the other blocks send to its shared memory: no partial sums pass through global
// memory, and no block waits for one that must first compute another tile.
//
// The ring fills with weights before the wait for the kernel that computes x. The epilogue's
// operands (bias, residual, angles) are loaded before the mainloop.
//
// Bytes moved: outputs * inputs * sizeof(Operand), once.
// Bench: python -m tridecode.kernels.bench linear
#pragma once
#include "gemm/adapted/adapted_task.cuh"
#include "gemm/sm90/gemm_sm90_mainloop.cuh"

namespace tridecode {
namespace {

// MORE: bytes of shared memory for other uses. BUFFERS: of results, per warp group.
template <int N, int SPLIT, int PARTS = 1, int MORE = 0, int BUFFERS = kBuffers>
struct SplitShape {
  // Number of blocks that finish a share of the tokens, at least 16 each.
  static constexpr int kFinishers = SPLIT > 1 && N > 16 ? 2 : 1;
  static constexpr int kTokens = N / kFinishers;
  static constexpr int kShare = kTokens / 2;  // of a thread's sums
  using Results = Shape<kTokens, 1, BUFFERS>;
  static constexpr int kWeightBytes = Shape<N, PARTS>::kWeightBytes;
  static constexpr int kStageBytes = Shape<N, PARTS>::kStageBytes;
  static constexpr int kSent = 128 * kShare * 4;  // by a warp group to a finisher
  static constexpr int kReceivedBytes = (SPLIT - 1) * kGroups * kSent;
  static constexpr int kRoom =
      227 * 1024 - 1024 - 512 - MORE - kReceivedBytes - Results::kStoreBytes;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + kReceivedBytes + Results::kStoreBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The producer: loads stages `first` to `last` of a tile, in one thread.
template <Mode MODE, typename S>
__device__ __forceinline__ void copy_part(const CUtensorMap* weight_map, const CUtensorMap* x_map,
                                          const GemmTask& task, int row, int first, int last,
                                          char* base, uint64_t* full, uint64_t* empty) {
  const uint64_t weight_policy = evict_first(), x_policy = evict_last();
  auto copy_weights = [&](int step, int stage) {
    barrier_expect(full + stage, S::kStageBytes);
    copy_weight<MODE>(base + stage * S::kStageBytes, weight_map, step * kStageInputs, row,
                      task.head_size, full + stage, weight_policy);
  };
  auto copy_x = [&](int step, int stage) {
    copy_box(base + stage * S::kStageBytes + S::kWeightBytes, x_map, step * kStageInputs, 0,
             full + stage, x_policy);
  };
  prefetch_map(weight_map);
  prefetch_map(x_map);
  const int ahead = min(last, first + S::kStages);
  for (int step = first; step < ahead; ++step) copy_weights(step, step - first);
  wait_for_predecessor();
  for (int step = first; step < ahead; ++step) copy_x(step, step - first);
  int stage = 0, parity = 0;
  for (int step = ahead; step < last; ++step) {
    barrier_wait(empty + stage, parity);
    copy_weights(step, stage);
    copy_x(step, stage);
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

// Adds up the sums of this block's share of the tokens over all blocks' parts of the inputs, in the
// order of the blocks. Returns false if this block has no share.
template <int N, int SPLIT>
__device__ __forceinline__ bool exchange(const float (&c)[N / 2],
                                         float (&sums)[SplitShape<N, SPLIT>::kShare],
                                         char* received, uint64_t* all_received, int rank,
                                         int group) {
  using S = SplitShape<N, SPLIT>;
  constexpr int kPieces = S::kShare / 4;
  const int offset = group * S::kSent + threadIdx.x % 128 * 16;
#pragma unroll
  for (int to = 0; to < S::kFinishers; ++to) {
    if (to == rank) {
#pragma unroll
      for (int i = 0; i < S::kShare; ++i) sums[i] = c[to * S::kShare + i];
      continue;
    }
    const int place = (rank < to ? rank : rank - 1) * kGroups * S::kSent + offset;
    const uint32_t there = address_in(received + place, to), barrier = address_in(all_received, to);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int first = to * S::kShare + 4 * i;
      send(there + i * 2048, c[first], c[first + 1], c[first + 2], c[first + 3], barrier);
    }
  }
  if (rank >= S::kFinishers) return false;
  barrier_wait_for_cluster(all_received, 0);
  float own[S::kShare];
#pragma unroll
  for (int i = 0; i < S::kShare; ++i) own[i] = sums[i], sums[i] = 0.0f;
#pragma unroll
  for (int from = 0; from < SPLIT; ++from) {
    if (from == rank) {
#pragma unroll
      for (int i = 0; i < S::kShare; ++i) sums[i] += own[i];
      continue;
    }
    const int place = (from < rank ? from : from - 1) * kGroups * S::kSent + offset;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(received + place + i * 2048);
      sums[4 * i] += four.x, sums[4 * i + 1] += four.y;
      sums[4 * i + 2] += four.z, sums[4 * i + 3] += four.w;
    }
  }
  return true;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// X: of bias, residual and out. Operand: of weight and x, X or 8 bit. N: tokens of a tile.
template <typename X, typename Operand, int N, Mode MODE, int SPLIT, typename Task = GemmTask>
__global__ void __launch_bounds__(kThreads, kResidentOf<Operand, N, Task>)
    gemm_sm90_split_k(const __grid_constant__ CUtensorMap weight_map,
                      const __grid_constant__ CUtensorMap x_map,
                      const __grid_constant__ CUtensorMap out_map,
                      const __grid_constant__ CUtensorMap residual_map,
                      const __grid_constant__ Task task, int steps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kBuffers = kBuffersOf<Task>;
  using S = SplitShape<N, SPLIT, kPartsOf<Operand>, kAdapterBytes<N, Task>, kBuffers>;
  using R = typename S::Results;
  constexpr bool kScaled = !std::is_same<X, Operand>::value;
  using F = Finish<X, S::kTokens, MODE, kScaled, true, kBuffers>;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  char* const stores = base + S::kStages * S::kStageBytes;
  char* const received = stores + R::kStoreBytes;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], arrived[kGroups][kBuffers],
      all_received[kGroups];
  __shared__ float x_scales[kGroups][kScaled ? S::kTokens : 1];
  __shared__ BlockAdapters<X, S::kTokens, MODE, Task> adapters;
  const int group = threadIdx.x / 128, rank = SPLIT > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    initialize_ring<S::kStages, kBuffers>(full, empty, &arrived[0][0], 1);
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(all_received + i, 1);
      barrier_expect(all_received + i, (SPLIT - 1) * S::kSent);
    }
    adapters.initialize();
    fence_barriers();
  }
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();
  const int row = blockIdx.x / SPLIT * kBlockRows;
  const int first = steps * rank / SPLIT, last = steps * (rank + 1) / SPLIT;

  if (group == kGroups) {
    if (threadIdx.x == kGroups * 128) {
      copy_part<MODE, S>(&weight_map, &x_map, task, row, first, last, base, full, empty);
    } else {
      const int index = threadIdx.x - kGroups * 128 - 32;  // except the producer thread's warp
      int rounds = 0;
      auto fill_rounds = [&](int first, int last) {
        adapters.fill_tile(task, first, last, rounds, [&](int group) {
          return F{task, nullptr, nullptr, nullptr, nullptr, group}.first_column(row);
        });
      };
      if (index >= 0 && rank < S::kFinishers) {
        adapters.find(task, index);
        fill_rounds(0, 1);
      }
      wait_for_predecessor();
      if (index >= 0) {
        F::prefetch_tables(task, blockIdx.x * 96 + index, gridDim.x * 96);
        if (rank < S::kFinishers) {
          adapters.fill_tokens(task, rank * S::kTokens, index);
          fill_rounds(1, INT_MAX);
        }
      }
    }
    __syncwarp();
    if (SPLIT > 1) cluster_wait();
  } else {
    F finish{task,           &out_map, &residual_map, stores + group * kBuffers * R::kBufferBytes,
             arrived[group], group};
    if (kScaled) finish.x_scales = x_scales[group];
    const int column = finish.first_column(row), token = rank * S::kTokens;
    const bool finishes = rank < S::kFinishers;
    if (finishes) finish.load_biases(column);
    wait_for_predecessor();
    constexpr bool kAngles = MODE == kQkvRotary && F::kBatch * 4 == S::kTokens;
    typename F::Angles angles;
    if (finishes) {
      if (MODE == kPlain && task.residual && threadIdx.x % 128 == 0)
        finish.load_first_residuals(column, token);
      finish.load_slots(column, token);
      if (kScaled && !in_blocks<Operand>(task)) finish.load_x_scales(token);
      if (kAngles && finish.rotates(column)) finish.load_angles(angles, column, token, 0);
    }
    float c[N / 2], sums[S::kShare];
    Products<Operand, N, S, 1> products{base, full, empty};
    products.add_up(c, last - first, group, finish.stage_scales(column, 0, first));
    if (SPLIT > 1) {
      cluster_wait();
      if (!exchange<N, SPLIT>(c, sums, received, all_received + group, rank, group)) return;
    } else {
#pragma unroll
      for (int i = 0; i < S::kShare; ++i) sums[i] = c[i];
    }
    if (kScaled && !in_blocks<Operand>(task)) finish.scale_all(sums, token);
    int rounds = 0;
    adapters.add(sums, task, rounds, column, token);
    finish.activate_all(sums);
    if (kAngles) {
      if (finish.rotates(column)) finish.rotate_batch(sums, angles, 0);
    } else if (MODE == kQkvRotary) {
      finish.rotate_all(sums, column, token);
    }
    finish.store_all(sums, column, token);
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  }
#endif
}

template <typename X, typename Operand, int N, Mode MODE, int SPLIT, typename Task>
int run(const Task& task, void* stream) {
  constexpr int kParts = kPartsOf<Operand>;
  using S = SplitShape<N, SPLIT, kParts, kAdapterBytes<N, Task>, kBuffersOf<Task>>;
  Maps maps;
  if (int status = encode_maps(maps, task, MODE, N * kParts, S::Results::kPart)) return status;
  return launch_in_clusters(
      "gemm_sm90_split_k", gemm_sm90_split_k<X, Operand, N, MODE, SPLIT, Task>, SPLIT,
      SPLIT * ceil_div(task.outputs, kBlockRows), kThreads, S::kSharedBytes, stream, maps.weight,
      maps.x, maps.out, maps.residual, task, ceil_div(task.inputs, kStageInputs));
}

// Checks the task and calls run(mode).
template <typename Run>
int checked(const char* what, const GemmTask& task, Run run) {
  const Mode mode = mode_of(task);
  if (int status = check_task(what, task, mode)) return status;
  const int steps = ceil_div(task.inputs, kStageInputs), n = task.tile_tokens;
  if (task.tokens > n || task.split > steps)
    return fail("%s: %d tokens in a tile of %d, split %d of %d stages", what, task.tokens, n,
                task.split, steps);
  return run(mode);
}

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

// Runs the instance that the task names, with operands of a type.
template <typename X, typename Operand, typename Task>
int run_instance(const char* what, const Task& task, Mode mode, void* stream) {
#define TRIDECODE_RUN(tokens_, mode_, split_)                               \
  if (task.tile_tokens == tokens_ && mode == mode_ && task.split == split_) \
    return run<X, Operand, tokens_, mode_, split_>(task, stream);
  TRIDECODE_INSTANCES(TRIDECODE_RUN)
  return fail("%s: no instance for a tile of %d tokens, epilogue %d, split %d", what,
              task.tile_tokens, int(mode), task.split);
}

}  // namespace
}  // namespace tridecode
