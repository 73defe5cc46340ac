// Primitives of the sm_90a kernels: mbarriers in shared memory, TMA loads and stores, clusters.
#pragma once
#include <cuda.h>

#include "common/common.cuh"

namespace tridecode {

// ---------------------------------------------------------------- host: tensor maps

// A tensor map of 16-bit numbers with 2 to 5 dimensions, the innermost first and contiguous. Boxes
// have an innermost size of 64 or 32, and a swizzle of the same width in bytes. strides: bytes, of
// the dimensions after the first. Outside the tensor a load returns zeros and a store does nothing.
int encode_map(CUtensorMap* map, const void* tensor, int dimensions, const cuuint64_t* sizes,
               const cuuint64_t* strides, const cuuint32_t* box, int dtype);

// The same for 32-bit words, without a swizzle.
int encode_words(CUtensorMap* map, const void* tensor, int dimensions, const cuuint64_t* sizes,
                 const cuuint64_t* strides, const cuuint32_t* box);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ---------------------------------------------------------------- device: barriers

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

// Call after the last barrier_init, in the same thread.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrive at a barrier, given by its shared-memory address or by a pointer.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  barrier_arrive(shared_address(barrier));
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  barrier_wait(shared_address(barrier), parity);
}

// ---------------------------------------------------------------- device: TMA

// L2 eviction policies of loads.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_normally() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Loads `bytes` bytes; size and addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, uint64_t* barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Loads `bytes` bytes, a multiple of 16, to the L2 cache.
__device__ __forceinline__ void prefetch_bulk(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Loads the box of a matrix at (input, row).
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int input, int row,
                                         uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(input), "r"(row), "r"(shared_address(barrier)),
      "l"(policy)
      : "memory");
}

// Loads the box of a matrix in blocks of 64 inputs, at row `row` of block `block`.
__device__ __forceinline__ void copy_blocks(void* to, const CUtensorMap* map, int row, int block,
                                            uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(0), "r"(row), "r"(block),
      "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Loads groups of 8 rows of two halves of a matrix, mapped as (inputs, 8, 2, groups): from group
// `group` on, 8 rows of the first half alternate with the same 8 of the second.
__device__ __forceinline__ void copy_paired(void* to, const CUtensorMap* map, int input, int group,
                                            uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(input), "r"(0), "r"(group),
      "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Loads groups of 8 rows of two halves of each head, mapped as (inputs, 8, 2, groups, heads).
__device__ __forceinline__ void copy_heads(void* to, const CUtensorMap* map, int input, int group,
                                           int head, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(input), "r"(0), "r"(group), "r"(head),
      "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Loads the box of a tensor of 3, 4 or 5 dimensions at (0, second, third, fourth, fifth).
template <int DIMENSIONS>
__device__ __forceinline__ void copy_granules(void* to, const CUtensorMap* map, int second,
                                              int third, int fourth, int fifth, uint64_t* barrier,
                                              uint64_t policy) {
  const uint32_t address = shared_address(to), arrival = shared_address(barrier);
  const uint64_t from = reinterpret_cast<uint64_t>(map);
  if constexpr (DIMENSIONS == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(address),
        "l"(from), "r"(0), "r"(second), "r"(third), "r"(arrival), "l"(policy)
        : "memory");
  } else if constexpr (DIMENSIONS == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(address),
        "l"(from), "r"(0), "r"(second), "r"(third), "r"(fourth), "r"(arrival), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(address),
        "l"(from), "r"(0), "r"(second), "r"(third), "r"(fourth), "r"(fifth), "r"(arrival),
        "l"(policy)
        : "memory");
  }
}

// copy_box, multicast to both blocks of a cluster of two: same address, same mbarrier.
__device__ __forceinline__ void copy_box_to_both(void* to, const CUtensorMap* map, int input,
                                                 int row, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(
          shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(input), "r"(row), "r"(shared_address(barrier)),
      "h"(uint16_t(3)), "l"(policy)
      : "memory");
}

// Stores a box from shared memory to a matrix. fence_copies() orders earlier writes to `from`
// before it; commit_stores() groups the stores of a thread.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* from, int column,
                                          int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(column), "r"(row), "r"(shared_address(from))
               : "memory");
}

// Orders earlier writes of this thread to global memory before later bulk copies from there.
__device__ __forceinline__ void fence_global_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void fence_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last PENDING store groups of this thread have read their shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// ---------------------------------------------------------------- device: clusters

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
__device__ __forceinline__ int cluster_size() {  // in blocks
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return int(size);
}

// The barrier of all threads of a cluster, whole or as its two halves. It orders no memory except
// the initialisation of mbarriers before fence_barriers().
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address in block `rank` that corresponds to `pointer` in this one.
__device__ __forceinline__ uint32_t address_in(const void* pointer, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(shared_address(pointer)), "r"(rank));
  return there;
}

// Stores 16 bytes to another block's shared memory and counts them at an mbarrier of that block.
__device__ __forceinline__ void send(uint32_t to, float a, float b, float c, float d,
                                     uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
}

// Waits for data sent by other blocks.
__device__ __forceinline__ void barrier_wait_for_cluster(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Arrives at the corresponding mbarrier of block `rank` of the cluster. Only for mbarriers that
// order TMA loads: a release at cluster scope would be a fence, which takes a microsecond.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

#endif

}  // namespace tridecode
