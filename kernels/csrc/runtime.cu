// Versions, error texts and the device: what library.py asks of the library itself.
#include <cstdarg>
#include <cstdio>

#include "common.cuh"

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

}  // namespace tridecode

using tridecode::check;

int tridecode_abi_version(void) { return TRIDECODE_ABI_VERSION; }
const char* tridecode_build_info(void) { return TRIDECODE_BUILD_INFO; }
const char* tridecode_error(void) { return tridecode::error_text; }

int tridecode_initialize(int device, int dependent_launch, int* properties) {
  int major = 0, minor = 0, multiprocessors = 0, shared_bytes = 0;
  int status = check(cudaSetDevice(device), "cudaSetDevice");
  if (status) return status;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {{cudaDevAttrComputeCapabilityMajor, &major},
                {cudaDevAttrComputeCapabilityMinor, &minor},
                {cudaDevAttrMultiProcessorCount, &multiprocessors},
                {cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes}};
  for (const auto& each : wanted) {
    status = check(cudaDeviceGetAttribute(each.value, each.attribute, device), "cudaDeviceGetAttribute");
    if (status) return status;
  }
  tridecode::current.multiprocessors = multiprocessors;
  tridecode::current.capability = 10 * major + minor;
  tridecode::current.shared_bytes = shared_bytes;
  tridecode::current.dependent_launch = dependent_launch != 0 && major >= 9;
  properties[0] = multiprocessors, properties[1] = 10 * major + minor, properties[2] = shared_bytes;
  return 0;
}
