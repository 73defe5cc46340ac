// Reads of the shared memory of other blocks of a cluster.
#pragma once
#include "common/hopper.cuh"

namespace tridecode {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A number in the shared memory of block `rank`.
__device__ __forceinline__ float load_from(const float* pointer, int rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_in(pointer, rank)));
  return value;
}

// A cluster barrier that makes earlier writes to shared memory visible to the cluster.
__device__ __forceinline__ void cluster_sync_memory() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#endif

}  // namespace tridecode
