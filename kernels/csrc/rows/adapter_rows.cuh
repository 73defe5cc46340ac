// Parts of the kernels that add LoRA adapters to rows: loads, x * a^T, and sums over a cluster.
#pragma once
#include "api/adapters.h"
#include "api/rows.h"
#include "common/epilogue.cuh"
#include "common/hopper.cuh"
#include "rows/cluster_memory.cuh"

namespace tridecode {

constexpr int kThreads = 256;
constexpr int kRanks = 64;  // ranks whose sums are in shared memory at a time
constexpr int kSpan = 64;   // outputs per span

using Task = tridecode_adapters_task;
using Pair = tridecode_adapter_pair;

__host__ __device__ constexpr bool joins_halves(int activation) {
  return is_gated(activation) || activation == kRowsGeglu;
}

// Loads eight elements that another kernel wrote, from the L2 cache.
template <typename X>
__device__ __forceinline__ void load8_shared(const X* from, float (&values)[8]) {
  uint4 words[sizeof(X) / 2];
#pragma unroll
  for (int i = 0; i < int(sizeof(X) / 2); ++i)
    words[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
  load8(reinterpret_cast<const X*>(words), values);
}

// Loads eight elements that are read once.
template <typename X>
__device__ __forceinline__ void load8_once(const X* from, float (&values)[8]) {
  uint4 words[sizeof(X) / 2];
#pragma unroll
  for (int i = 0; i < int(sizeof(X) / 2); ++i)
    words[i] = load_stream(reinterpret_cast<const uint4*>(from) + i);
  load8(reinterpret_cast<const X*>(words), values);
}

// sums[r] = x * a[r]^T over this block's share of the inputs, r < count. Each warp computes two
// sums at a time. AHEAD: loads in flight per sum.
template <typename X, int AHEAD>
__device__ __forceinline__ void shrink(const X* x, const X* a, int inputs, int count, float* sums) {
  const int warps = kThreads / 32, lane = threadIdx.x % 32, vectors = inputs / 8;
  const int begin = int64_t(vectors) * blockIdx.x / gridDim.x;
  const int end = int64_t(vectors) * (blockIdx.x + 1) / gridDim.x;
  for (int r = threadIdx.x / 32; r < count; r += 2 * warps) {
    const bool both = r + warps < count;
    const X* const row = a + int64_t(r) * inputs;
    const X* const second = both ? row + int64_t(warps) * inputs : row;
    float sum[2] = {};
#pragma unroll AHEAD
    for (int v = begin + lane; v < end; v += 32) {
      float values[8], w[2][8];
      load8_shared(x + 8 * v, values);
      load8_once(row + 8 * v, w[0]);
      if (both) load8_once(second + 8 * v, w[1]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[0] = fmaf(values[j], w[0][j], sum[0]);
        if (both) sum[1] = fmaf(values[j], w[1][j], sum[1]);
      }
    }
    sum[0] = warp_sum(sum[0]);
    sum[1] = warp_sum(sum[1]);
    if (lane == 0) {
      sums[r] = sum[0];
      if (both) sums[r + warps] = sum[1];
    }
  }
}

// The sums of kRanks ranks in shared memory.
struct Sums {
  float* own;     // over this block's inputs
  float* joined;  // over all inputs

  // Returns the sums over all inputs. Every thread of the cluster calls it, and then `leave`.
  __device__ __forceinline__ const float* join(int count) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (gridDim.x > 1) {
      cluster_sync_memory();
      if (threadIdx.x < count) {
        float sum = 0.0f;
        for (int block = 0; block < int(gridDim.x); ++block)
          sum += load_from(own + threadIdx.x, block);
        joined[threadIdx.x] = sum;
      }
      __syncthreads();
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");  // `own` has been read
      return joined;
    }
#endif
    __syncthreads();
    return own;
  }

  // Waits until `own` may be overwritten, or the block may exit.
  __device__ __forceinline__ void leave() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (gridDim.x > 1) cluster_wait();
#endif
    __syncthreads();
  }
};

__device__ __forceinline__ float gate(float x, int activation) {
  return activation == kRowsGeglu ? activate(x, kGelu) : activate_gate(x, activation);
}
__device__ __forceinline__ float activate_plain(float x, int activation) {
  return activation == kRowsSilu ? silu(x) : activate(x, activation);
}

}  // namespace tridecode
