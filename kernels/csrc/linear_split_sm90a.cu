// The product of up to 64 tokens with a matrix of few rows: out = activation(x * weight^T + bias)
// + residual, with Hopper's own instructions; linear_many_sm90a.cu's other half.
//
// A block computes 128 rows of the weight, 64 a warp group, times all tokens. Where that would
// leave the chip idle, a cluster of 2 or 3 blocks shares a tile's inputs. Each block then finishes
// the sums of its share of the tokens, which the others send straight to its shared memory: no sums
// go through memory, and no block waits for one that has something else to do first.
//
// The ring fills with weights before the wait for the kernel that computes x. What a share's end
// needs (bias, residual, angles) is asked for before the products.
//
// Bytes moved: outputs * inputs * sizeof(X), once.
// Bench: python -m tridecode.kernels.bench linear
#include "linear_many_stages.cuh"

namespace tridecode {
namespace {

template <int N, int SPLIT>
struct SplitShape {
  // blocks that finish a share of the tokens, 16 at least
  static constexpr int kFinishers = SPLIT > 1 && N > 16 ? 2 : 1;
  static constexpr int kTokens = N / kFinishers;
  static constexpr int kShare = kTokens / 2;  // of a thread's sums
  using Results = Shape<kTokens>;
  static constexpr int kWeightBytes = Shape<N>::kWeightBytes;
  static constexpr int kStageBytes = Shape<N>::kStageBytes;
  static constexpr int kSent = 128 * kShare * 4;  // by a warp group to a finisher
  static constexpr int kReceivedBytes = (SPLIT - 1) * kGroups * kSent;
  static constexpr int kRoom = 227 * 1024 - 1024 - 512 - kReceivedBytes - Results::kStoreBytes;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + kReceivedBytes + Results::kStoreBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Stages `first` to `last` of a tile, in one thread.
template <Mode MODE, typename S>
__device__ __forceinline__ void copy_part(const CUtensorMap* weight_map, const CUtensorMap* x_map,
                                          const ProductTask& task, int row, int first, int last,
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

// The sums of this block's share of the tokens, of all blocks' parts of the inputs, added in the
// order of the blocks. False: this block has no share.
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

template <typename X, int N, Mode MODE, int SPLIT>
__global__ void __launch_bounds__(kThreads, 2)
    linear_split(const __grid_constant__ CUtensorMap weight_map,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap out_map,
                 const __grid_constant__ CUtensorMap residual_map,
                 const __grid_constant__ ProductTask task, int steps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = SplitShape<N, SPLIT>;
  using R = typename S::Results;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  char* const stores = base + S::kStages * S::kStageBytes;
  char* const received = stores + R::kStoreBytes;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], arrived[kGroups][kBuffers],
      all_received[kGroups];
  const int group = threadIdx.x / 128, rank = SPLIT > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 4 * kGroups);  // warps
    }
    for (int i = 0; i < kGroups * kBuffers; ++i) barrier_init(&arrived[0][0] + i, 1);
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(all_received + i, 1);
      barrier_expect(all_received + i, (SPLIT - 1) * S::kSent);
    }
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
      wait_for_predecessor();
      const int index = threadIdx.x - kGroups * 128 - 32;  // not beside the copying thread
      if (index >= 0)
        Finish<X, S::kTokens, MODE>::prefetch_tables(task, blockIdx.x * 96 + index, gridDim.x * 96);
    }
    __syncwarp();
    if (SPLIT > 1) cluster_wait();
  } else {
    wait_for_predecessor();
    using F = Finish<X, S::kTokens, MODE>;
    F finish{task,           &out_map, &residual_map, stores + group * kBuffers * R::kBufferBytes,
             arrived[group], group};
    const int column = finish.first_column(row), token = rank * S::kTokens;
    const bool finishes = rank < S::kFinishers;
    constexpr bool kAngles = MODE == kRotated && F::kBatch * 4 == S::kTokens;
    typename F::Angles angles;
    if (finishes) {
      if (MODE == kPlain && task.residual && threadIdx.x % 128 == 0)
        finish.ask_first_residuals(column, token);
      finish.ask_biases(column);
      if (kAngles && finish.rotates(column)) finish.ask_angles(angles, column, token, 0);
    }
    float c[N / 2], sums[S::kShare];
    Products<X, N, S, 1> products{base, full, empty};
    products.add_up(c, last - first, group);
    if (SPLIT > 1) {
      cluster_wait();
      if (!exchange<N, SPLIT>(c, sums, received, all_received + group, rank, group)) return;
    } else {
#pragma unroll
      for (int i = 0; i < S::kShare; ++i) sums[i] = c[i];
    }
    finish.activate_all(sums);
    if (kAngles) {
      if (finish.rotates(column)) finish.turn(sums, angles, 0);
    } else if (MODE == kRotated) {
      finish.rotate_all(sums, column, token);
    }
    if (MODE == kPlain && task.out_float32) {
      finish.store_float32(sums, column, token);
    } else {
#pragma unroll
      for (int i = 0; i < F::kParts; ++i) finish.store_part(sums, column, token, i);
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  }
#endif
}

template <typename X, int N, Mode MODE, int SPLIT>
int run(const ProductTask& task, int dtype, void* stream) {
  using S = SplitShape<N, SPLIT>;
  constexpr int kWidth = MODE == kRotated ? 32 : 64, kPart = S::Results::kPart;
  CUtensorMap weight_map, x_map, out_map = {}, residual_map = {};
  int status = encode_weight(&weight_map, task, MODE, dtype);
  if (!status)
    status =
        encode(&x_map, task.x, task.tokens, task.inputs, task.x_stride, N, kStageInputs, dtype);
  if (!status && !task.out_float32)
    status = encode(&out_map, task.out, task.tokens, task.outputs, task.out_stride, kPart, kWidth,
                    dtype);
  if (!status && task.residual)
    status = encode(&residual_map, task.residual, task.tokens, task.outputs, task.residual_stride,
                    kPart, kWidth, dtype);
  if (status) return status;
  return launch_in_clusters("linear_split", linear_split<X, N, MODE, SPLIT>, SPLIT,
                            SPLIT * ceil_div(task.outputs, kBlockRows), kThreads, S::kSharedBytes,
                            stream, weight_map, x_map, out_map, residual_map, task,
                            ceil_div(task.inputs, kStageInputs));
}

template <typename X, int N, Mode MODE>
int run_split(const ProductTask& task, int split, int dtype, void* stream) {
  if (split == 3) return run<X, N, MODE, 3>(task, dtype, stream);
  if (split == 2) return run<X, N, MODE, 2>(task, dtype, stream);
  return run<X, N, MODE, 1>(task, dtype, stream);
}

template <typename X, int N>
int run_mode(const ProductTask& task, Mode mode, int split, int dtype, void* stream) {
  if (mode == kRotated) return run_split<X, N, kRotated>(task, split, dtype, stream);
  if (mode == kCached) return run_split<X, N, kCached>(task, split, dtype, stream);
  return run_split<X, N, kPlain>(task, split, dtype, stream);
}

// Clusters of 1, 2 or 3 blocks that the device holds at once: less than its multiprocessors would,
// where a part of the chip has no multiple of 3 of them.
int clusters_at_once(int size) {
  static const auto count = [](int each) {
    constexpr auto kernel = &linear_split<half, 16, kPlain, 3>;
    constexpr int kShared = SplitShape<16, 3>::kSharedBytes;
    cudaLaunchAttribute attribute = clusters_of(each);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(each * 32);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kShared;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) clusters = 0;
    return clusters;
  };
  static const int clusters[] = {count(1), count(2), count(3)};
  return clusters[size - 1];
}

}  // namespace

// As measured on an H200: two thirds of the chip read as fast as all of it, and leave the others to
// the kernel that comes next; but a block that reads more than 80 stages takes longer than shares
// of equal length do.
int split_of(const ProductTask& task, Mode mode) {
  if (mode == kGated || task.tokens > kMostSplitTokens) return 0;
  const int tiles = ceil_div(task.outputs, kBlockRows), steps = ceil_div(task.inputs, kStageInputs);
  int split = 0;
  for (int each : {1, 2, 3})
    if (tiles <= clusters_at_once(each) && steps >= each * kLeastSteps) split = each;
  const bool fills = tiles * split * 3 >= device().multiprocessors * 2;
  return fills && steps <= 80 * split ? split : 0;
}

int run_linear_split(const ProductTask& task, Mode mode, int split, void* stream) {
  const int dtype = task.dtype;
  const int steps = ceil_div(task.inputs, kStageInputs);
  if (split > steps) split = steps;
  return for_16_bit_dtype(dtype, "linear_split", [&](auto zero) {
    using X = decltype(zero);
    if (task.tokens <= 16) return run_mode<X, 16>(task, mode, split, dtype, stream);
    if (task.tokens <= 32) return run_mode<X, 32>(task, mode, split, dtype, stream);
    return run_mode<X, 64>(task, mode, split, dtype, stream);
  });
}

}  // namespace tridecode
