// Checks of a debug build (kernels/build.py --debug): the order of kernels that start early, the
// residency of blocks that wait for each other, and a report of waits that exceed their limit.
// Other builds compile none of it.
#include "common/spin.cuh"

#ifdef TRIDECODE_DEBUG
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace tridecode {
namespace {

// Kernels that release their successor before their own wait, by the name of their launch. While
// the successor runs ahead of its wait, the kernel before one of these may still be running, so the
// successor may read only constants.
const char* const kReleasesFirst[] = {"norm",       "add_normed",       "quantize_rows",
                                      "all_reduce", "early all_reduce", "spread_adapters_norm",
                                      "add_copied", "adapter_sums"};
// Kernels that read results of earlier kernels before their own wait: those of all but their direct
// predecessor.
const char* const kReadsAhead[] = {"decode_attention", "prefill_attention",    "add_adapters",
                                   "spread_adapters",  "spread_adapters_norm", "early all_reduce",
                                   "rotate_and_cache"};

template <size_t COUNT>
bool has(const char* const (&names)[COUNT], const char* name) {
  for (const char* each : names)
    if (!std::strcmp(each, name)) return true;
  return false;
}

// The texts of Wait.
const char* const kWaits[] = {"nothing",
                              "partial sums of the clusters after this one",
                              "sums of the tile's other clusters",
                              "tiles of the products before",
                              "words of x from the product before",
                              "words of the residual from an earlier product"};
static_assert(sizeof(kWaits) / sizeof(*kWaits) == kWordsOfResidual + 1);

struct Waiting {
  const char* kernel;
  int (*set)(SpinRecord*);
};

std::vector<Waiting>& waiting() {
  static std::vector<Waiting> all;
  return all;
}

// Pinned. Not allocated by CUDA, which would free it at exit under the thread that reads it.
constexpr size_t kPage = 4096;
alignas(kPage) char page[kPage];
SpinRecord* const records = reinterpret_cast<SpinRecord*>(page);

void print_records() {
  for (size_t i = 0;; i = (i + 1) % waiting().size()) {
    const volatile SpinRecord& of = records[i];
    if (of.wait != kNothing) {
      std::fprintf(
          stderr,
          "tridecode: %s: block %u of %u, thread %u, has waited %u s for %s; the kernel is "
          "stopped\n",
          waiting()[i].kernel, of.block, of.blocks, of.thread, kSpinLimit / 1000, kWaits[of.wait]);
      std::fflush(stderr);
      return;
    }
    if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace

void at_initialize(const char* kernel, int (*set)(SpinRecord*)) {
  waiting().push_back({kernel, set});
}

int start_debugging() {
  const size_t count = waiting().size();
  if (count == 0 || count > kPage / sizeof(SpinRecord))
    return fail("%d kernels wait; there are %d records", int(count),
                int(kPage / sizeof(SpinRecord)));
  static bool started = false;
  if (!started) {
    const unsigned int flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    if (int status = check(cudaHostRegister(page, kPage, flags), "spin records")) return status;
    std::thread(print_records).detach();
    started = true;
  }
  void* mapped = nullptr;
  if (int status = check(cudaHostGetDevicePointer(&mapped, page, 0), "spin records")) return status;
  for (size_t i = 0; i < count; ++i)
    if (int status = waiting()[i].set(static_cast<SpinRecord*>(mapped) + i)) return status;
  return 0;
}

int resident_blocks(const char* what, const void* kernel, int threads, size_t shared, int* blocks) {
  cudaFuncAttributes of;
  if (int status = check(cudaFuncGetAttributes(&of, kernel), what)) return status;
  if (int status = check(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)),
          what))
    return status;
  const int cluster = of.requiredClusterWidth;
  if (cluster < 2) {
    const int status =
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared), what);
    *blocks *= device().multiprocessors;
    return status;
  }
  cudaLaunchAttribute attribute = clusters_of(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const int status = check(cudaOccupancyMaxActiveClusters(blocks, kernel, &config), what);
  *blocks *= cluster;
  return status;
}

int check_order(const char* what, void* given) {
  if (!device().dependent_launch) return 0;
  static std::mutex mutex;
  static std::map<std::pair<cudaStream_t, unsigned long long>, const char*> last;
  const auto stream = static_cast<cudaStream_t>(given);
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  if (int failed = check(cudaStreamGetCaptureInfo(stream, &status, &capture), "check_order"))
    return failed;
  if (status == cudaStreamCaptureStatusNone) capture = 0;
  std::lock_guard<std::mutex> lock(mutex);
  const char*& before = last[{stream, capture}];
  const bool idle = !capture && cudaStreamQuery(stream) == cudaSuccess;
  if (before && !idle && has(kReadsAhead, what) && has(kReleasesFirst, before))
    return fail(
        "%s follows %s, which starts it before the kernel ahead of both has ended; %s reads "
        "results before its own wait",
        what, before, what);
  before = what;
  return 0;
}

}  // namespace tridecode

#endif  // TRIDECODE_DEBUG
