// Drafts for rows of several tokens: the tokens that followed the longest earlier occurrence of a
// sequence's newest tokens, in the sequence itself or in a ring of finished answers.
// Three launches: a warp per row appends the step's tokens; blocks compare every place of history
// and ring with the newest tokens, and keep the best by an atomic maximum; a warp per row copies.
// Bytes moved: 4 * (length + ring) per row, from L2.   Bench: tridecode bench speculate
#include "api/drafts.h"
#include "common/common.cuh"

namespace tridecode {
namespace {

constexpr int kWarp = 32, kThreads = 256, kPlaces = 16;  // places per thread
constexpr int kMostMatch = 32, kLeastMatch = 2;          // kernels/draft_history.py
constexpr int kOwn = 1, kAnswer = 2, kClient = 3;
constexpr int kOwnShift = 32, kMatchShift = 33;

struct Task : tridecode_look_up_task {};

struct Row {
  int slot, first, counted;
};

__device__ __forceinline__ Row row_of(const Task& task, int row) {
  return {task.rows[3 * row], task.rows[3 * row + 1], task.rows[3 * row + 2]};
}

__global__ void __launch_bounds__(kWarp) append_tokens(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const int lane = threadIdx.x;
  const Row row = row_of(task, blockIdx.x);
  const int count = row.counted < 0 ? 1 : task.accepted[row.counted];
  const int length = task.lengths[row.slot];
  const int kept = max(min(int64_t(count), task.width - length), int64_t(0));
  __syncwarp();  // all lanes have read what lane 0 writes
  for (int i = lane; i < kept; i += kWarp)
    task.tokens[row.slot * task.width + length + i] = max(task.sampled[row.first + i], 0);
  if (lane > 0) return;
  const int draft = task.drafts[int64_t(row.slot) * task.num_drafts];
  task.found[3 * blockIdx.x + 2] = count > 0 && draft == task.sampled[row.first];
  task.lengths[row.slot] = length + kept;
  task.best[blockIdx.x] = 0;
}

// The number of tokens up to `place` that equal the newest ones; suffix: the newest first.
__device__ __forceinline__ int matched(const int* tokens, int place, const int* suffix, int most) {
  int count = 0;
  while (count < most && place >= count && tokens[place - count] == suffix[count]) ++count;
  return count;
}

__global__ void __launch_bounds__(kThreads) find_match(const __grid_constant__ Task task) {
  __shared__ int suffix[kMostMatch];
  wait_for_predecessor();
  const int slot = task.rows[3 * blockIdx.y];
  const int length = task.lengths[slot];
  if (length < kLeastMatch) return;
  const int most = min(length, kMostMatch);
  const int* const own = task.tokens + slot * task.width;
  if (threadIdx.x < most) suffix[threadIdx.x] = own[length - 1 - threadIdx.x];
  __syncthreads();
  const int newest = suffix[0], before = suffix[1];
  const int shared = task.scopes[2 * slot], client = task.scopes[2 * slot + 1];
  const bool reads_ring = shared >= 0 || client >= 0;
  const int64_t block = int64_t(blockIdx.x) * kThreads * kPlaces + threadIdx.x;
  int64_t best = 0;
  for (int i = 0; i < kPlaces; ++i) {
    const int64_t at = block + i * kThreads;
    if (at < task.longest) {
      if (at < 1 || at >= length - 1 || own[at] != newest || own[at - 1] != before) continue;
      const int64_t count = matched(own, at, suffix, most);
      best = max(best, (count << kMatchShift) | (int64_t(1) << kOwnShift) | at);
    } else {
      const int64_t place = at - task.longest;
      if (!reads_ring) break;
      if (place < 1 || place >= task.ring_size - 1) continue;
      if (task.ring[place] != newest || task.ring[place - 1] != before) continue;
      const int scope = task.ring_scopes[place];
      if (scope < 0 || (scope != shared && scope != client)) continue;
      const int64_t count = matched(task.ring, place, suffix, most);
      best = max(best, (count << kMatchShift) | place);
    }
  }
  for (int step = kWarp / 2; step > 0; step /= 2)
    best = max(best, int64_t(__shfl_xor_sync(0xffffffffu, best, step)));
  if (threadIdx.x % kWarp == 0 && best > 0)
    atomicMax(reinterpret_cast<long long*>(task.best + blockIdx.y), (long long)best);
}

__global__ void __launch_bounds__(kWarp) copy_drafts(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const int lane = threadIdx.x, slot = task.rows[3 * blockIdx.x];
  const int length = task.lengths[slot];
  const int* const own = task.tokens + slot * task.width;
  const int64_t best = task.best[blockIdx.x];
  const int end = int(best & 0xffffffff);
  const bool is_own = (best >> kOwnShift) & 1;
  int draft = -1;
  if (best > 0 && lane < task.num_drafts) {
    int64_t place = int64_t(end) + 1 + lane;
    if (is_own) {
      const int period = length - 1 - end;  // what repeats is continued beyond the newest token
      if (place >= length) place -= ((place - length) / period + 1) * period;
      draft = own[place];
    } else if (place < task.ring_size) {
      draft = task.ring[place];
    }
  }
  // a draft behind a separator belongs to another answer
  const unsigned ends = __ballot_sync(0xffffffffu, draft < 0);
  const bool is_inside = (ends & ((2u << lane) - 1)) == 0;
  if (lane < task.num_drafts)
    task.drafts[int64_t(slot) * task.num_drafts + lane] = is_inside ? draft : 0;
  if (lane > 0) return;
  int source = 0;
  if (best > 0)
    source = is_own ? kOwn : task.ring_scopes[end] == task.scopes[2 * slot + 1] ? kClient : kAnswer;
  task.found[3 * blockIdx.x] = int(best >> kMatchShift);
  task.found[3 * blockIdx.x + 1] = source;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_look_up(const tridecode_look_up_task* given, void* stream) {
  if (given->num_rows <= 0) return 0;
  if (given->num_drafts >= kWarp) return fail("look_up: %d drafts; wanted 31", given->num_drafts);
  const Task task = {*given};
  if (int status = launch("look_up", append_tokens, given->num_rows, kWarp, 0, stream, task))
    return status;
  if (given->longest > 0) {
    const int64_t places = int64_t(given->longest) + given->ring_size;
    const dim3 grid(ceil_div(places, kThreads * kPlaces), given->num_rows);
    if (int status = launch("look_up", find_match, grid, kThreads, 0, stream, task)) return status;
  }
  return launch("look_up", copy_drafts, given->num_rows, kWarp, 0, stream, task);
}
