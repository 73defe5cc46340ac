// out = activation(x * weight^T + bias) + residual with Hopper's own instructions, for any number
// of tokens. Of few tokens and few rows: linear_split_sm90a.cu, which is launched from here.
//
// A cluster of two blocks computes 256 rows of the weight times N tokens, 128 rows a block and 64 a
// warp group. One warp keeps a ring of bulk copies in flight: 128 rows of 64 inputs of the weight
// for its own block, and half of the tokens' inputs for both. SwiGLU's gate and up rows are copied
// in turns of 8, so that a thread holds both of a pair.
//
// Few tokens are bound by memory: every cluster gets the same number of stages, whatever tile they
// belong to. A tile that several clusters share is finished by the one that has its first inputs:
// that is the last thing it does, and what the others add is the first thing they do. Where there
// are many tiles each cluster takes whole ones, those of a round close together.
//
// The ring fills with weights before the wait for the kernel that computes x. Results, and the
// residual, go through shared memory, where they turn from rows of the weight to rows of tokens.
//
// Bytes moved: outputs * inputs * sizeof(X), once, where tokens are few.
// Bench: python -m tridecode.kernels.bench linear
#include "linear_many_stages.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The stages of a cluster, one after the other: what the copying thread goes through.
struct Stages {
  Walk walk;
  Part part;
  int step = 0;
  bool more;

  __device__ Stages(const Division& division, int cluster) : walk(division, cluster) {
    more = walk.take(division, part);
    if (more) step = part.begin;
  }
  __device__ void advance(const Division& division) {
    if (++step < part.end) return;
    more = walk.take(division, part);
    if (more) step = part.begin;
  }
};

template <typename X, int N, Mode MODE>
__device__ __forceinline__ void copy_stages(const CUtensorMap* weight_map, const CUtensorMap* x_map,
                                            const ProductTask& task, const Division& division,
                                            char* base, uint64_t* full, uint64_t* empty) {
  using S = Shape<N>;
  const int rank = cluster_rank(), cluster = blockIdx.x / 2;
  const uint64_t weight_policy = division.token_tiles == 1 ? evict_first() : evict_normally();
  const uint64_t x_policy = division.token_tiles == 1 ? evict_last() : evict_normally();
  auto copy_weights = [&](const Stages& at, int stage) {
    char* const to = base + stage * S::kStageBytes;
    const int row = at.part.row_tile * kClusterRows + rank * kBlockRows;
    barrier_expect(full + stage, S::kStageBytes);
    const int input = at.step * kStageInputs;
    copy_weight<MODE>(to, weight_map, input, row, task.head_size, full + stage, weight_policy);
  };
  auto copy_x = [&](const Stages& at, int stage) {
    copy_box_to_both(base + stage * S::kStageBytes + S::kWeightBytes + rank * (N / 2) * 128, x_map,
                     at.step * kStageInputs, at.part.token_tile * N + rank * (N / 2), full + stage,
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

// ---------------------------------------------------------------- sums that clusters share

// A cluster leaves one part at most: the first of its walk. Thread by thread the sums lie as the
// registers do.
template <int N>
__device__ __forceinline__ float4* partial_of(const ProductTask& task, int cluster, int group) {
  const int block = cluster * 2 + cluster_rank();
  return static_cast<float4*>(task.partials) + int64_t(block * kGroups + group) * (N / 8) * 128 +
         threadIdx.x % 128;
}

__device__ __forceinline__ unsigned int* flag_of(const ProductTask& task, int cluster, int group) {
  return task.counters + (cluster * 2 + cluster_rank()) * kGroups + group;
}

// The flag is set by a warp that has nothing else to do: the fence before it takes microseconds
// while copies are on their way, and the products go on.
template <int N>
__device__ __forceinline__ void leave_sums(const float (&c)[N / 2], const ProductTask& task,
                                           int cluster, int group) {
  float4* const to = partial_of<N>(task, cluster, group);
#pragma unroll
  for (int i = 0; i < N / 8; ++i)
    __stcg(to + i * 128, make_float4(c[4 * i], c[4 * i + 1], c[4 * i + 2], c[4 * i + 3]));
  asm volatile("bar.arrive %0, 160;" ::"r"(kGroups + 1 + group) : "memory");
}

// In one warp for each group that multiplies: tells that its sums are there, where it leaves any.
__device__ __forceinline__ void tell_of_sums(const ProductTask& task, const Division& division,
                                             int cluster, int group) {
  Walk walk(division, cluster);
  Part part;
  if (!walk.take(division, part) || part.begin == 0) return;
  asm volatile("bar.sync %0, 160;" ::"r"(kGroups + 1 + group) : "memory");
  if (threadIdx.x % 32 == 0) {
    device_fence();
    atomicExch(flag_of(task, cluster, group), 1u);
  }
}

// Adds what the `sharers` clusters after this one have left.
template <int N>
__device__ __forceinline__ void add_sums(float (&c)[N / 2], const ProductTask& task, int cluster,
                                         int sharers, int group) {
  for (int i = threadIdx.x % 128; i < sharers; i += 128) {
    unsigned int* const flag = flag_of(task, cluster + 1 + i, group);
    while (!load_acquire(flag)) {
    }
    *flag = 0;  // for the next launch
  }
  group_sync(group);
#pragma unroll(N <= 32 ? 2 : 1)
  for (int from = cluster + 1; from <= cluster + sharers; ++from) {
    const float4* const more = partial_of<N>(task, from, group);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float4 sums = __ldcg(more + i * 128);
      c[4 * i] += sums.x, c[4 * i + 1] += sums.y;
      c[4 * i + 2] += sums.z, c[4 * i + 3] += sums.w;
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename X, int N, Mode MODE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, Shape<N>::kSlim ? 2 : 1)
    linear_many(const __grid_constant__ CUtensorMap weight_map,
                const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap out_map,
                const __grid_constant__ CUtensorMap residual_map,
                const __grid_constant__ ProductTask task,
                const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<N>;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], arrived[kGroups][kBuffers];
  const int group = threadIdx.x / 128, cluster = blockIdx.x / 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 2 * 4 * kGroups);  // the warps of both blocks
    }
    for (int i = 0; i < kGroups * kBuffers; ++i) barrier_init(&arrived[0][0] + i, 1);
    fence_barriers();
  }
  cluster_sync();

  if (group == kGroups) {
    if (!S::kSlim) give_registers<40>();
    if (threadIdx.x == kGroups * 128) {
      copy_stages<X, N, MODE>(&weight_map, &x_map, task, division, base, full, empty);
    } else {
      wait_for_predecessor();
      const int index = threadIdx.x - kGroups * 128 - 32;  // not beside the copying thread
      if (index >= 0)
        Finish<X, N, MODE>::prefetch_tables(task, blockIdx.x * 96 + index, gridDim.x * 96);
      const int helped = threadIdx.x / 32 % 4 - 1;
      if (helped >= 0 && helped < kGroups) tell_of_sums(task, division, cluster, helped);
    }
  } else {
    if (!S::kSlim) take_registers<232>();
    wait_for_predecessor();
    Products<X, N, S, 2> products{base, full, empty};
    Finish<X, N, MODE> finish{
        task,           &out_map,
        &residual_map,  base + S::kStages * S::kStageBytes + group * kBuffers * S::kBufferBytes,
        arrived[group], group};
    Walk walk(division, cluster);
    Part part;
    while (walk.take(division, part)) {
      const int column =
          finish.first_column(part.row_tile * kClusterRows + cluster_rank() * kBlockRows);
      const int token = part.token_tile * N;
      const bool finishes = part.begin == 0;
      if (MODE == kPlain && finishes && task.residual && threadIdx.x % 128 == 0)
        finish.ask_first_residuals(column, token);
      if (finishes) finish.ask_biases(column);
      float c[N / 2];
      products.add_up(c, part.end - part.begin, group);
      if (!finishes) {
        leave_sums<N>(c, task, cluster, group);
        continue;
      }
      if (part.end < division.steps)
        add_sums<N>(c, task, cluster,
                    division.owner_before((part.tile + 1) * division.steps) - cluster, group);
      finish.activate_all(c);
      if (MODE == kRotated) finish.rotate_all(c, column, token);
      if (MODE == kPlain && task.out_float32) {
        finish.store_float32(c, column, token);
      } else {
#pragma unroll
        for (int i = 0; i < finish.kParts; ++i) finish.store_part(c, column, token, i);
      }
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  }
  __syncwarp();
  cluster_sync();  // until nothing of the other block is on its way here
#endif
}

template <typename X, int N, Mode MODE>
int run(const ProductTask& task, const Division& division, int dtype, void* stream) {
  using S = Shape<N>;
  constexpr int kWidth = MODE == kGated || MODE == kRotated ? 32 : 64;
  const int columns = MODE == kGated ? task.outputs / 2 : task.outputs;
  CUtensorMap weight_map, x_map, out_map = {}, residual_map = {};
  int status = encode_weight(&weight_map, task, MODE, dtype);
  if (!status)
    status =
        encode(&x_map, task.x, task.tokens, task.inputs, task.x_stride, N / 2, kStageInputs, dtype);
  if (!status && !task.out_float32)
    status =
        encode(&out_map, task.out, task.tokens, columns, task.out_stride, S::kPart, kWidth, dtype);
  if (!status && task.residual)
    status = encode(&residual_map, task.residual, task.tokens, columns, task.residual_stride,
                    S::kPart, kWidth, dtype);
  if (status) return status;
  return launch("linear_many", linear_many<X, N, MODE>, 2 * division.clusters, kThreads,
                S::kSharedBytes, stream, weight_map, x_map, out_map, residual_map, task, division);
}

template <typename X, int N>
int run_mode(const ProductTask& task, Mode mode, const Division& division, int dtype,
             void* stream) {
  if constexpr (N < 256)  // whose rotation does not fit in the registers
    if (mode == kRotated) return run<X, N, kRotated>(task, division, dtype, stream);
  if (mode == kCached) return run<X, N, kCached>(task, division, dtype, stream);
  if constexpr (N > 16)  // SwiGLU stores four times 8 tokens at once
    if (mode == kGated) return run<X, N, kGated>(task, division, dtype, stream);
  return run<X, N, kPlain>(task, division, dtype, stream);
}

constexpr int kSizes[] = {16, 32, 64, 96, 128, 192, 256};

// Whole tiles, unless the last round would leave many clusters idle.
Division divide(const ProductTask& task, int n) {
  Division division;
  division.token_tiles = ceil_div(task.tokens, n);
  division.row_tiles = ceil_div(task.outputs, kClusterRows);
  division.steps = ceil_div(task.inputs, kStageInputs);
  division.near = 8;
  const int64_t tiles = int64_t(division.row_tiles) * division.token_tiles;
  const int clusters = device().multiprocessors / 2;
  const int64_t rounds = (tiles + clusters - 1) / clusters;
  division.shared = tiles * 20 < rounds * clusters * 19;
  const int64_t most = division.shared ? ceil_div(tiles * division.steps, kLeastSteps) : tiles;
  division.clusters = int(most < clusters ? most : clusters);
  return division;
}

// The fewest tiles of tokens, and of those the smallest.
int choose_tokens(int tokens, Mode mode) {
  const int most = mode == kRotated ? 192 : 256;
  const int each = ceil_div(tokens, ceil_div(tokens, most));
  for (int size : kSizes)
    if (size >= each && !(mode == kGated && size < 32)) return size;
  return most;
}

int check_task(const ProductTask& task, Mode mode) {
  if (device().capability != 90) return fail("linear_many: needs compute capability 9.0");
  if (mode != kPlain && (task.residual || task.out_float32))
    return fail("linear_many: a residual or a float32 result of SwiGLU or of queries and keys");
  if (task.residual && task.out_float32)
    return fail("linear_many: a residual and a float32 result");
  if (mode == kGated && task.outputs % 16)
    return fail("linear_many: SwiGLU of %d rows; wanted a multiple of 16", task.outputs);
  if (mode == kCached && task.head_size % 8)
    return fail("linear_many: head size %d; wanted a multiple of 8", task.head_size);
  if (mode == kRotated && task.head_size != 64 && task.head_size != 128 && task.head_size != 256)
    return fail("linear_many: rotated heads of %d; wanted 64, 128 or 256", task.head_size);
  return 0;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_linear_many(const tridecode_gemm_task* given, void* stream) {
  const ProductTask& task = *given;
  const Mode mode = task.cache                   ? task.rotary_size ? kRotated : kCached
                    : task.activation == kSwiglu ? kGated
                                                 : kPlain;
  int split = task.split;
  const int status = check_task(task, mode);
  if (status) return status;
  const bool can_split = mode != kGated && task.tokens <= kMostSplitTokens;
  if (split < 0) split = split_of(task, mode);
  if (split > 0 && can_split) return run_linear_split(task, mode, split, stream);
  const int n = choose_tokens(task.tokens, mode);
  const Division division = divide(task, n);
  const int64_t needed = int64_t(division.clusters) * 2 * kGroups * (n / 8) * 128 * 16;
  if (division.shared &&
      (needed > task.partial_bytes || division.clusters * 2 * kGroups > task.num_counters))
    return fail("linear_many: %lld bytes of partial sums; the scratch has %lld", (long long)needed,
                (long long)task.partial_bytes);
  const int dtype = task.dtype;
  return for_16_bit_dtype(dtype, "linear_many", [&](auto zero) {
    using X = decltype(zero);
    switch (n) {
      case 16:
        return run_mode<X, 16>(task, mode, division, dtype, stream);
      case 32:
        return run_mode<X, 32>(task, mode, division, dtype, stream);
      case 64:
        return run_mode<X, 64>(task, mode, division, dtype, stream);
      case 96:
        return run_mode<X, 96>(task, mode, division, dtype, stream);
      case 128:
        return run_mode<X, 128>(task, mode, division, dtype, stream);
      case 192:
        return run_mode<X, 192>(task, mode, division, dtype, stream);
      default:
        return run_mode<X, 256>(task, mode, division, dtype, stream);
    }
  });
}
