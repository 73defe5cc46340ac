// Version, error text and device properties of the library.
#include <cstdarg>
#include <cstdio>

#include "api/version.h"
#include "common/hopper.cuh"

#ifndef TRIDECODE_BUILD_INFO
#define TRIDECODE_BUILD_INFO "unknown"
#endif

namespace tridecode {
namespace {
thread_local char error_text[512] = "";
Device current;
}  // namespace

int fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error_text, sizeof(error_text), format, arguments);
  va_end(arguments);
  return 1;
}

int check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return 0;
  cudaGetLastError();  // the next launch must not report this one's failure
  fail("%s: %s (%s)", what, cudaGetErrorString(status), cudaGetErrorName(status));
  return static_cast<int>(status);
}

const Device& device() { return current; }

namespace {
using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                       &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<Encode>(found);
}
}  // namespace

static int encode(CUtensorMap* map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                  const void* tensor, int dimensions, const cuuint64_t* sizes,
                  const cuuint64_t* strides, const cuuint32_t* box) {
  static const Encode call = find_encode();
  if (!call) return fail("the driver has no cuTensorMapEncodeTiled");
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const CUresult status =
      call(map, type, dimensions, const_cast<void*>(tensor), sizes, strides, box, steps,
           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS
             ? 0
             : fail("cuTensorMapEncodeTiled failed with CUresult %d", int(status));
}

int encode_map(CUtensorMap* map, const void* tensor, int dimensions, const cuuint64_t* sizes,
               const cuuint64_t* strides, const cuuint32_t* box, int dtype) {
  return encode(
      map, dtype == kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, tensor, dimensions,
      sizes, strides, box);
}

int encode_words(CUtensorMap* map, const void* tensor, int dimensions, const cuuint64_t* sizes,
                 const cuuint64_t* strides, const cuuint32_t* box) {
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT32, CU_TENSOR_MAP_SWIZZLE_NONE, tensor, dimensions,
                sizes, strides, box);
}

}  // namespace tridecode

using tridecode::check;

int tridecode_abi_version(void) { return TRIDECODE_ABI_VERSION; }
const char* tridecode_build_info(void) { return TRIDECODE_BUILD_INFO; }
const char* tridecode_error(void) { return tridecode::error_text; }

int tridecode_initialize(int device, int dependent_launch, int* properties) {
  int major = 0, minor = 0, multiprocessors = 0, shared_bytes = 0, mps = 0;
  int status = check(cudaSetDevice(device), "cudaSetDevice");
  if (status) return status;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {{cudaDevAttrComputeCapabilityMajor, &major},
                {cudaDevAttrComputeCapabilityMinor, &minor},
                {cudaDevAttrMultiProcessorCount, &multiprocessors},
                {cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes},
                {cudaDevAttrMpsEnabled, &mps}};
  for (const auto& each : wanted) {
    status =
        check(cudaDeviceGetAttribute(each.value, each.attribute, device), "cudaDeviceGetAttribute");
    if (status) return status;
  }
  tridecode::current.multiprocessors = multiprocessors;
  tridecode::current.capability = 10 * major + minor;
  tridecode::current.shared_bytes = shared_bytes;
  tridecode::current.dependent_launch = dependent_launch != 0 && major >= 9;
  properties[0] = multiprocessors, properties[1] = 10 * major + minor, properties[2] = shared_bytes;
  properties[3] = mps;
#ifdef TRIDECODE_DEBUG
  return tridecode::start_debugging();
#else
  return 0;
#endif
}
