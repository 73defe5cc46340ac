// Shared by every kernel file: dtypes, 16-byte vectors, reductions, matrix instructions, launches
// and errors.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>
#include <stdint.h>

#include "api/base.h"

namespace tridecode {

using half = __half;
using bfloat16 = __nv_bfloat16;

enum Dtype { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// ---------------------------------------------------------------- host: errors, device, launches

// Sets the text of tridecode_error and returns a status other than 0.
int fail(const char* format, ...);
int check(cudaError_t status, const char* what);

struct Device {
  int multiprocessors = 0;
  int capability = 0;  // 10 * major + minor
  int shared_bytes = 0;
  bool dependent_launch = false;
};
const Device& device();

#ifdef TRIDECODE_DEBUG
// debug.cu. Fails if the kernel reads results before its wait, and the launch before it in the
// stream starts its successor before its own wait; see wait_for_predecessor. Called for each
// launch.
int check_order(const char* what, void* stream);
int start_debugging();
#endif

inline cudaLaunchAttribute clusters_of(int blocks) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// Launches with programmatic dependent launch if the device supports it: the kernel may start while
// its predecessor still runs, and must call wait_for_predecessor() before it accesses anything that
// an earlier kernel writes or reads. cluster: blocks per cluster; 0: no clusters.
template <typename... Parameters, typename... Arguments>
int launch_in_clusters(const char* what, void (*kernel)(Parameters...), int cluster, dim3 grid,
                       int threads, size_t shared, void* stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return 0;
#ifdef TRIDECODE_DEBUG
  if (int status = check_order(what, stream)) return status;
#endif
  if (shared >
      32 * 1024) {  // more than 48 KiB, static shared memory included, must be allowed explicitly
    int status = check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
        what);
    if (status) return status;
  }
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (device().dependent_launch) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster) attributes[count++] = clusters_of(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), what);
}

template <typename... Parameters, typename... Arguments>
int launch(const char* what, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared,
           void* stream, Arguments... arguments) {
  return launch_in_clusters(what, kernel, 0, grid, threads, shared, stream, arguments...);
}

// Calls body with a value of the C++ type of the dtype.
template <typename Body>
int for_dtype(int dtype, const char* what, Body body) {
  if (dtype == kFloat32) return body(float());
  if (dtype == kFloat16) return body(half());
  if (dtype == kBfloat16) {
    if (device().capability < 80) return fail("%s: bfloat16 needs compute capability 8.0", what);
    return body(bfloat16());
  }
  return fail("%s: dtype code %d; wanted 0, 1 or 2", what, dtype);
}

template <typename Body>
int for_16_bit_dtype(int dtype, const char* what, Body body) {
  if (dtype == kFloat32) return fail("%s: no kernel for float32", what);
  return for_dtype(dtype, what, [&](auto x) {
    if constexpr (sizeof(x) == 2) return body(x);
    return 0;
  });
}

__host__ __device__ constexpr int ceil_div(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

// ---------------------------------------------------------------- device: order between kernels

// Blocks until every earlier kernel of the stream has finished and its writes are visible, then
// lets the next kernel start. With this order, all kernels but the direct predecessor have finished
// while a kernel runs: before the wait it may read their results, and constants. Every block of
// every kernel calls it first, or after such reads, or calls its two halves in this order. Only
// norms, row quantisation and sums over ranks use the reverse order: the kernel after one of these
// may read only constants before its wait. tests/kernels/test_waits.py holds each kernel to this,
// debug.cu each pair of launches.
__device__ __forceinline__ void wait_for_predecessor_alone() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
  wait_for_predecessor_alone();
  let_successor_start();
}

// Device-scope acquire-release fence. __threadfence() is sequentially consistent, which takes
// microseconds while copies are in flight.
__device__ __forceinline__ void device_fence() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Acquire at device scope.
__device__ __forceinline__ unsigned int load_acquire(const unsigned int* from) {
  unsigned int value = 0;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
#endif
  return value;
}

// ---------------------------------------------------------------- device: numbers

constexpr float kLog2e = 1.4426950408889634f;

// 2^x; results below 2^-126 are 0.
__device__ __forceinline__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

template <typename X>
__device__ __forceinline__ float to_float(X x) {
  if constexpr (sizeof(X) == 4) {
    return x;
  } else if constexpr (std::is_same<X, half>::value) {
    return __half2float(x);
  } else {
    return __bfloat162float(x);
  }
}

template <typename X>
__device__ __forceinline__ X from_float(float x) {
  if constexpr (sizeof(X) == 4) {
    return x;
  } else if constexpr (std::is_same<X, half>::value) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Packs two 16-bit numbers into a word, the first in the low half.
template <typename X>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  if constexpr (std::is_same<X, half>::value) {
    __half2 both = __floats2half2_rn(first, second);
    return *reinterpret_cast<uint32_t*>(&both);
  } else {
    __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<uint32_t*>(&both);
  }
}

template <typename X>
__device__ __forceinline__ float2 unpack(uint32_t word) {
  if constexpr (std::is_same<X, half>::value) {
    return __half22float2(*reinterpret_cast<__half2*>(&word));
  } else {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&word));
  }
}

__device__ __forceinline__ void put(uint4& words, int i, uint32_t word) {
  reinterpret_cast<uint32_t*>(&words)[i] = word;
}
__device__ __forceinline__ uint32_t get(const uint4& words, int i) {
  return reinterpret_cast<const uint32_t*>(&words)[i];
}

// Eight consecutive numbers, at an address aligned to 16 bytes.
template <typename X>
__device__ __forceinline__ void load8(const X* from, float (&values)[8]) {
  if constexpr (sizeof(X) == 4) {
    float4 a = reinterpret_cast<const float4*>(from)[0],
           b = reinterpret_cast<const float4*>(from)[1];
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
    values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
  } else {
    uint4 words = *reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 both = unpack<X>(get(words, i));
      values[2 * i] = both.x, values[2 * i + 1] = both.y;
    }
  }
}

template <typename X>
__device__ __forceinline__ void store8(X* to, const float (&values)[8]) {
  if constexpr (sizeof(X) == 4) {
    reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
  } else {
    uint4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) put(words, i, pack<X>(values[2 * i], values[2 * i + 1]));
    *reinterpret_cast<uint4*>(to) = words;
  }
}

// WIDTH consecutive numbers: 8 at once, or one.
template <int WIDTH, typename X>
__device__ __forceinline__ void load_some(const X* from, float (&values)[WIDTH]) {
  if constexpr (WIDTH == 8) {
    load8(from, values);
  } else {
    values[0] = to_float(*from);
  }
}

template <int WIDTH, typename X>
__device__ __forceinline__ void store_some(X* to, const float (&values)[WIDTH]) {
  if constexpr (WIDTH == 8) {
    store8(to, values);
  } else {
    *to = from_float<X>(values[0]);
  }
}

inline bool aligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// x / by, correctly rounded, for divisors in this range and quotients that are not near the
// smallest normal number; inverse: __frcp_rn(by). As in a division, the exact remainder corrects
// the quotient twice, but -0 would become 0. Branch-free, so that many quotients are computed in
// parallel.
constexpr float kLeastDivisor = 1e-18f, kMostDivisor = 1e18f;
__device__ __forceinline__ float quotient(float x, float by, float inverse) {
  float q = x * inverse;
  q = fmaf(fmaf(-q, by, x), inverse, q);
  return copysignf(fmaf(fmaf(-q, by, x), inverse, q), x);
}

// ---------------------------------------------------------------- device: reductions

constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, offset));
  return x;
}

// The sum over the block, in every thread. shared: one float per warp, reusable after the next
// barrier.
__device__ __forceinline__ float block_sum(float x, float* shared) {
  const int warps = (blockDim.x + 31) / 32;
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : 0.0f;
  return warp_sum(x);
}

// ---------------------------------------------------------------- device: copies and matrix
// instructions

// Loads 16 bytes that are read once and that earlier kernels may have written (a KV cache), without
// allocating in L1.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// The same for read-only data: weights.
__device__ __forceinline__ uint4 load_stream(const void* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Copies 16 bytes from global to shared memory; zeros if not `valid`.
__device__ __forceinline__ void copy16_async(void* to, const void* from, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
}

__device__ __forceinline__ void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// c (16 x 8, float32) += a (16 x 16) * b (16 x 8). With g = lane / 4 and t = lane % 4, the lane
// holds these pairs of a: (row g, columns 2t), (row g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); of b:
// (rows 2t, column g), (rows 2t + 8, g); and these numbers of c: (g, 2t), (g, 2t + 1), (g + 8, 2t),
// (g + 8, 2t + 1). With E4M3, from compute capability 8.9 on, a is 16 x 32, b 32 x 8, with four
// numbers in place of a pair.
template <typename X>
__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(X) == 1) {
#if __CUDA_ARCH__ >= 890
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
  } else if constexpr (std::is_same<X, half>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#else
  if constexpr (std::is_same<X, half>::value) {  // sm_75: two instructions, for 8 columns of a each
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, "
        "%1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, "
        "%1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a2), "r"(a3), "r"(b1));
  } else {
    __trap();  // for_dtype refuses bfloat16 before sm_80
  }
#endif
}

// The same for int8, c in int32, from compute capability 8.0 on.
template <typename X>
__device__ __forceinline__ void multiply_add(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
  static_assert(std::is_same<X, int8_t>::value);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Transposes an 8 x 8 matrix of 16-bit numbers: the lane holds row lane / 4, columns 2 * (lane % 4)
// and the next.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t word) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}

}  // namespace tridecode
