// Sharing of a GEMM's tiles among clusters of two blocks: the parts that a cluster computes, in
// order, and the partial sums of tiles that several clusters share. For gemm_sm90_stream_k.cuh and
// gemm_packed_sm90.cu.
#pragma once
#include "common/spin.cuh"
#include "gemm/sm90/gemm_sm90_mainloop.cuh"

namespace tridecode {
namespace {

constexpr int kClusterRows = 2 * kBlockRows;

struct Division {
  int row_tiles, token_tiles;
  int steps;     // of a tile: pipeline stages
  int near;      // row tiles whose token tiles are taken together
  int clusters;  // launched
  bool shared;   // stream-K: clusters share tiles, and each takes the same number of steps

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

// Iterates over the parts of a cluster.
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

// Return whether the second half of the part's tile of N tokens has any tokens. If not, its load of
// x is skipped: a TMA load that is entirely out of bounds takes several times as long as others.
// Stale stage contents only reach accumulators that are not stored.
template <int N>
__device__ __forceinline__ bool has_second_half(const Part& part, const GemmTask& task) {
  return part.token_tile * N + N / 2 < task.tokens;
}

// Iterates over the stages of a cluster, in the producer's order.
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

// ---------------------------------------------------------------- sums that clusters share

// A cluster writes partial sums of at most one part, the first of its walk. They are stored per
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

// An idle warp sets the flag: the fence before it takes microseconds while TMA loads are in flight,
// and the mainloop continues meanwhile.
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
    Spin spin(kSumsBehind);
    while (!load_acquire(flag)) spin.again();
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

// stage_inputs: of a pipeline stage.
Division divide(const GemmTask& task, int stage_inputs) {
  Division division;
  division.token_tiles = ceil_div(task.tokens, task.tile_tokens);
  division.row_tiles = ceil_div(task.outputs, kClusterRows);
  division.steps = ceil_div(task.inputs, stage_inputs);
  division.near = 8;
  division.clusters = task.clusters;
  division.shared = task.stream_k != 0;
  return division;
}

// Check that the scratch memory has room for the partial sums that clusters share.
int check_sums(const char* what, const GemmTask& task) {
  const int64_t needed = int64_t(task.clusters) * 2 * kGroups * (task.tile_tokens / 8) * 128 * 16;
  if (task.stream_k &&
      (needed > task.partial_bytes || task.clusters * 2 * kGroups > task.num_counters))
    return fail("%s: %lld bytes of partial sums; the scratch has %lld", what, (long long)needed,
                (long long)task.partial_bytes);
  return 0;
}

// Checks the task and calls run(mode, division). stage_inputs: of a step of the division.
template <typename Run>
int divided(const char* what, const GemmTask& task, Run run, int stage_inputs = kStageInputs) {
  const Mode mode = mode_of(task);
  int status = check_task(what, task, mode);
  if (status) return status;
  const int n = task.tile_tokens;
  if (task.clusters < 1 || n < 1)
    return fail("%s: %d clusters, a tile of %d tokens", what, task.clusters, n);
  status = check_sums(what, task);
  if (status) return status;
  return run(mode, divide(task, stage_inputs));
}

}  // namespace
}  // namespace tridecode
