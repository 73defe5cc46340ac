// out = epilogue(x * weight^T) with TMA and wgmma, for any number of tokens.
//
// A cluster of two blocks computes a tile of 256 weight rows times N tokens, 128 rows per block and
// 64 per consumer warp group. A producer warp keeps a ring of TMA loads in flight: 128 rows of 64
// inputs of the weight for its own block, and half of the tokens' inputs, multicast to both.
// SwiGLU's gate and up rows alternate in groups of 8, so that a thread holds both of a pair.
//
// Few tokens are bound by memory bandwidth: with stream_k every cluster takes the same number of
// stages, whatever tile they belong to. A tile that several clusters share is finished by the one
// that has its first inputs. Finishing is the last thing that a cluster does; its partial sums of
// another cluster's tile are the first. Without stream_k each cluster takes whole tiles, those of a
// wave close together.
//
// The ring fills with weights before the wait for the kernel that computes x. Results and the
// residual pass through shared memory, where they are transposed from weight rows to tokens.
//
// Bytes moved: outputs * inputs * sizeof(X), once, with few tokens.
// Bench: python -m tridecode.kernels.bench linear
#include "gemm_sm90_mainloop.cuh"

namespace tridecode {
namespace {

constexpr int kClusterRows = 2 * kBlockRows;

struct Division {
  int row_tiles, token_tiles;
  int steps;     // of a tile: stages of 64 inputs
  int near;      // row tiles whose token tiles are taken together
  int clusters;  // launched
  bool shared;   // stream-K: tiles are shared by clusters, each takes the same number of steps

  // The first step of a cluster, counted over all tiles.
  __host__ __device__ int first_step(int cluster) const {
    return int(int64_t(row_tiles) * token_tiles * steps * cluster / clusters);
  }
  // The cluster that computes the step before `step`.
  __device__ int owner_before(int step) const {
    const int64_t all = int64_t(row_tiles) * token_tiles * steps;
    int cluster = int(int64_t(step - 1) * clusters / all);
    while (first_step(cluster + 1) < step) ++cluster;
    return cluster;
  }
};

// A part of a tile that one cluster computes: its steps from begin to end.
struct Part {
  int tile, row_tile, token_tile, begin, end;
};

// The parts of a cluster, one after the other.
struct Walk {
  int next, last;

  __device__ Walk(const Division& division, int cluster) {
    const int tiles = division.row_tiles * division.token_tiles;
    if (division.shared) {
      next = division.first_step(cluster), last = division.first_step(cluster + 1);
    } else {
      next = cluster, last = tiles;
    }
  }

  __device__ bool take(const Division& division, Part& part) {
    if (next >= last) return false;
    if (division.shared) {
      part.tile = next / division.steps, part.begin = next % division.steps;
      part.end = min(division.steps, part.begin + last - next);
      next += part.end - part.begin;
    } else {
      part.tile = next, part.begin = 0, part.end = division.steps;
      next += division.clusters;
    }
    const int together = division.near * division.token_tiles, first = part.tile / together;
    const int rows = min(division.near, division.row_tiles - first * division.near);
    const int rest = part.tile - first * together;
    part.row_tile = first * division.near + rest % rows, part.token_tile = rest / rows;
    return true;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The stages of a cluster in order, as the producer loads them.
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
                                            const GemmTask& task, const Division& division,
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

// A cluster writes the partial sums of one part at most: the first of its walk. They are stored per
// thread, in register order.
template <int N>
__device__ __forceinline__ float4* partial_of(const GemmTask& task, int cluster, int group) {
  const int block = cluster * 2 + cluster_rank();
  return static_cast<float4*>(task.partials) + int64_t(block * kGroups + group) * (N / 8) * 128 +
         threadIdx.x % 128;
}

__device__ __forceinline__ unsigned int* flag_of(const GemmTask& task, int cluster, int group) {
  return task.counters + (cluster * 2 + cluster_rank()) * kGroups + group;
}

// The flag is set by an idle warp: the fence before it takes microseconds while TMA loads are in
// flight, and the mainloop goes on.
template <int N>
__device__ __forceinline__ void write_partial(const float (&c)[N / 2], const GemmTask& task,
                                              int cluster, int group) {
  float4* const to = partial_of<N>(task, cluster, group);
#pragma unroll
  for (int i = 0; i < N / 8; ++i)
    __stcg(to + i * 128, make_float4(c[4 * i], c[4 * i + 1], c[4 * i + 2], c[4 * i + 3]));
  asm volatile("bar.arrive %0, 160;" ::"r"(kGroups + 1 + group) : "memory");
}

// Called by one warp per consumer warp group: sets the flag of its partial sums, if it writes any.
__device__ __forceinline__ void signal_partial(const GemmTask& task, const Division& division,
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

// Adds the partial sums of the `sharers` clusters after this one.
template <int N>
__device__ __forceinline__ void add_partials(float (&c)[N / 2], const GemmTask& task, int cluster,
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
    gemm_sm90_stream_k(const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap out_map,
                       const __grid_constant__ CUtensorMap residual_map,
                       const __grid_constant__ GemmTask task,
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
      const int index = threadIdx.x - kGroups * 128 - 32;  // not the producer thread's warp
      if (index >= 0)
        Finish<X, N, MODE>::prefetch_tables(task, blockIdx.x * 96 + index, gridDim.x * 96);
      const int helped = threadIdx.x / 32 % 4 - 1;
      if (helped >= 0 && helped < kGroups) signal_partial(task, division, cluster, helped);
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
        finish.load_first_residuals(column, token);
      if (finishes) finish.load_biases(column);
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
  cluster_sync();  // no load or arrival from the other block is in flight
#endif
}

template <typename X, int N, Mode MODE>
int run(const GemmTask& task, const Division& division, void* stream) {
  Maps maps;
  if (int status = encode_maps(maps, task, MODE, N / 2, Shape<N>::kPart)) return status;
  return launch("gemm_sm90_stream_k", gemm_sm90_stream_k<X, N, MODE>, 2 * division.clusters,
                kThreads, Shape<N>::kSharedBytes, stream, maps.weight, maps.x, maps.out,
                maps.residual, task, division);
}

// (tokens of a tile, epilogue). gemm_table.py chooses among them. SwiGLU stores groups of 32
// tokens.
// clang-format off
#define TRIDECODE_INSTANCES(_)                                                                      \
  _(16, kPlain) _(16, kQkv) _(16, kQkvRotary)                                                       \
  _(32, kPlain) _(32, kQkv) _(32, kQkvRotary)                                                       \
  _(64, kPlain) _(64, kQkv) _(64, kQkvRotary)                                                       \
  _(32, kGated) _(64, kGated) _(96, kGated) _(128, kGated) _(192, kGated) _(256, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_stream_k(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const Mode mode = mode_of(task);
  int status = check_task("gemm_sm90_stream_k", task, mode);
  if (status) return status;
  const int n = task.tile_tokens;
  if (task.clusters < 1 || n < 1)
    return fail("gemm_sm90_stream_k: %d clusters, a tile of %d tokens", task.clusters, n);
  Division division;
  division.token_tiles = ceil_div(task.tokens, n);
  division.row_tiles = ceil_div(task.outputs, kClusterRows);
  division.steps = ceil_div(task.inputs, kStageInputs);
  division.near = 8;
  division.clusters = task.clusters;
  division.shared = task.stream_k != 0;
  const int64_t needed = int64_t(division.clusters) * 2 * kGroups * (n / 8) * 128 * 16;
  if (division.shared &&
      (needed > task.partial_bytes || division.clusters * 2 * kGroups > task.num_counters))
    return fail("gemm_sm90_stream_k: %lld bytes of partial sums; the scratch has %lld",
                (long long)needed, (long long)task.partial_bytes);
  return for_16_bit_dtype(task.dtype, "gemm_sm90_stream_k", [&](auto zero) {
    using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_) \
  if (n == tokens_ && mode == mode_) return run<X, tokens_, mode_>(task, division, stream);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return fail("gemm_sm90_stream_k: no instance for a tile of %d tokens, epilogue %d", n,
                int(mode));
  });
}
