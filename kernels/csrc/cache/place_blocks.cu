// Cache blocks from host memory: the copy engine fills a buffer, and one kernel writes its rows to
// the caches of a group of layers and adds up their checksums.  A block per 16 KiB of a row. Both
// run in a stream beside the steps, so the kernel waits for nothing and starts without dependent
// launch.  Bytes moved: 2 * num_blocks * row_bytes.
#include "api/blocks.h"
#include "common/common.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256, kSpan = 16 << 10, kUnit = 512;
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;  // kernels/block_copies.py

struct Task : tridecode_place_blocks_task {};

// The weight of the word at a byte of a slot: of its column in a unit, and of its unit.
__device__ __forceinline__ uint64_t weight_of(int64_t byte) {
  const uint64_t column = byte % kUnit / 8, unit = byte / kUnit;
  return 2 * ((column + 1) * kOdd | 1) + ((unit + 1) * kOdd | 1);
}

__global__ void __launch_bounds__(kThreads) place_blocks(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const int row = blockIdx.y;
  const int64_t begin = int64_t(blockIdx.x) * kSpan, end = min(begin + kSpan, task.row_bytes);
  const char* const source = static_cast<const char*>(task.staged) + row * task.row_bytes;
  const int64_t block = task.blocks[row];
  uint64_t sum = 0;
  int part = 0;
  for (int64_t at = begin + threadIdx.x * 16; at < end; at += kThreads * 16) {
    const ulonglong2 words = __ldcs(reinterpret_cast<const ulonglong2*>(source + at));
    const int64_t byte = task.first + at;  // of the slot
    sum += words.x * weight_of(byte) + words.y * weight_of(byte + 8);
    while (part < task.num_parts && task.parts[3 * part + 2] + task.parts[3 * part + 1] <= byte)
      ++part;
    if (part == task.num_parts || byte < task.parts[3 * part + 2]) continue;  // between tensors
    const int64_t size = task.parts[3 * part + 1], place = byte - task.parts[3 * part + 2];
    char* const target = reinterpret_cast<char*>(task.parts[3 * part]) + block * size + place;
    *reinterpret_cast<ulonglong2*>(target) = words;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(task.sums + row), (unsigned long long)sum);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_place_blocks(const tridecode_place_blocks_task* task, void* stream) {
  if (task->num_blocks == 0 || task->row_bytes == 0) return 0;
  if (task->num_blocks > 65535) return fail("place_blocks: %d blocks at once", task->num_blocks);
  const dim3 grid(ceil_div(task->row_bytes, kSpan), task->num_blocks);
  return launch("place_blocks", place_blocks, grid, kThreads, 0, stream, Task{*task});
}

int tridecode_copy_columns(void* target, int64_t target_pitch, const void* source,
                           int64_t source_pitch, const int64_t* runs, int num_runs, int64_t width,
                           void* stream) {
  for (int i = 0; i < num_runs; ++i) {
    char* const to = static_cast<char*>(target) + runs[3 * i] * target_pitch;
    const char* const from = static_cast<const char*>(source) + runs[3 * i + 1] * source_pitch;
    const int status =
        check(cudaMemcpy2DAsync(to, target_pitch, from, source_pitch, width, runs[3 * i + 2],
                                cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
              "copy_columns");
    if (status) return status;
  }
  return 0;
}
