// Drafts for rows of several tokens: the tokens that followed the longest earlier occurrence of a
// sequence's newest tokens, in the sequence itself or in a ring of finished answers.
// One launch, which is part of the CUDA graphs of steps: blocks of a row compare places of history
// and ring with the newest tokens, and the last of them to finish appends these tokens and copies
// the drafts. Bytes moved: 4 * (length + ring) per row, from L2.   Bench: tridecode bench speculate
#include <algorithm>

#include "api/drafts.h"
#include "common/common.cuh"

namespace tridecode {
namespace {

constexpr int kWarp = 32, kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kLoads = 4;          // in flight per thread
constexpr int kPlaces = 16;        // per thread of a full ring, unless there would be more than
constexpr int kMostBlocks = 1024;  // blocks, which would wait for a multiprocessor
constexpr int kMostMatch = 32, kLeastMatch = 2;  // kernels/draft_history.py
constexpr int kOwn = 1, kAnswer = 2, kClient = 3;
constexpr int kOwnShift = 32, kMatchShift = 33;

struct Task : tridecode_look_up_task {};

// The tokens of a slot after the step: those of the history, then the step's, which it lacks yet.
struct Tokens {
  const int* history;
  const int* added;
  int before, length;

  __device__ __forceinline__ int operator[](int64_t place) const {
    return place < before ? history[place] : max(added[place - before], 0);
  }
};

struct Row {
  int slot, first, count;
  Tokens tokens;
};

__device__ __forceinline__ Row row_of(const Task& task, int number) {
  const int* const entry = task.rows + 3 * number;
  Row row = {entry[0], entry[1], entry[2]};
  if (row.slot < 0) return row;
  row.count = row.count < 0 ? 1 : task.accepted[row.count];
  const int length = task.lengths[row.slot];
  const int kept = max(min(int64_t(row.count), task.width - length), int64_t(0));
  row.tokens = {task.tokens + row.slot * task.width, task.sampled + row.first, length,
                length + kept};
  return row;
}

// The number of tokens up to `place` that equal the newest ones; suffix: the newest first.
template <typename Text>
__device__ __forceinline__ int64_t matched(const Text& text, int64_t place, const int* suffix,
                                           int most) {
  int count = 0;
  while (count < most && place >= count && text[place - count] == suffix[count]) ++count;
  return count;
}

// Calls check(place) for this thread's places of [1, end) where the newest token is.
template <typename Text, typename Check>
__device__ __forceinline__ void for_newest(const Text& text, int64_t end, int newest,
                                           int64_t stride, Check check) {
  for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < end; at += kLoads * stride) {
    unsigned hits = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      hits |= unsigned(at + i * stride < end && text[at + i * stride] == newest) << i;
    for (; hits > 0; hits &= hits - 1) {
      const int64_t place = at + (__ffs(hits) - 1) * stride;
      if (place > 0) check(place);
    }
  }
}

// The best match among the places of this block, in all of its threads: length, whether it is the
// sequence's own, and place. ring_size: tokens of the ring that the row may read. blocks: with
// places.
__device__ __forceinline__ int64_t best_of_block(const Task& task, const Row& row, int ring_size,
                                                 int blocks) {
  __shared__ int suffix[kMostMatch];
  __shared__ int64_t of_warps[kWarps];
  const int length = row.tokens.length, most = min(length, kMostMatch);
  if (threadIdx.x < most) suffix[threadIdx.x] = row.tokens[length - 1 - threadIdx.x];
  __syncthreads();
  const int newest = suffix[0], before = suffix[1];
  const int64_t stride = int64_t(blocks) * kThreads;
  int64_t best = 0;
  for_newest(row.tokens, length - 1, newest, stride, [&](int64_t at) {
    if (row.tokens[at - 1] != before) return;
    const int64_t count = matched(row.tokens, at, suffix, most);
    best = max(best, (count << kMatchShift) | (int64_t(1) << kOwnShift) | at);
  });
  const int shared = task.scopes[2 * row.slot], client = task.scopes[2 * row.slot + 1];
  for_newest(task.ring, ring_size - 1, newest, stride, [&](int64_t at) {
    if (task.ring[at - 1] != before) return;
    const int scope = task.ring_scopes[at];
    if (scope < 0 || (scope != shared && scope != client)) return;
    best = max(best, (matched(task.ring, at, suffix, most) << kMatchShift) | at);
  });
  for (int step = kWarp / 2; step > 0; step /= 2)
    best = max(best, int64_t(__shfl_xor_sync(0xffffffffu, best, step)));
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = best;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) best = max(best, of_warps[warp]);
  return best;
}

// Adds the match of a block to those of its row; returns whether it is the last one, with the best.
// Every block counts, also without a place: the last one changes what all have read. Scratch is
// left as it was found: 0.
__device__ __forceinline__ bool is_last_block(const Task& task, int64_t* best) {
  if (gridDim.x == 1) return true;
  __shared__ int64_t of_all;
  if (threadIdx.x == 0) {
    auto* const of_row = reinterpret_cast<unsigned long long*>(task.best + 2 * blockIdx.y);
    auto* const done = reinterpret_cast<unsigned int*>(of_row + 1);
    if (*best > 0) {
      atomicMax(of_row, (unsigned long long)*best);
      device_fence();
    }
    of_all = -1;
    if (atomicInc(done, gridDim.x - 1) == gridDim.x - 1) {
      device_fence();
      of_all = int64_t(atomicExch(of_row, 0ull));
    }
  }
  __syncthreads();
  *best = of_all;
  return of_all >= 0;
}

// One warp appends the step's tokens and writes the drafts behind the best match, and `found`.
__device__ __forceinline__ void store(const Task& task, const Row& row, int64_t best) {
  const int lane = threadIdx.x, slot = row.slot, length = row.tokens.length;
  int* const drafts = task.drafts + int64_t(slot) * task.num_drafts;
  const bool agrees = row.count > 0 && drafts[0] == task.sampled[row.first];
  const int end = int(best & 0xffffffff);
  const bool is_own = (best >> kOwnShift) & 1;
  int draft = -1;
  if (best > 0 && lane < task.num_drafts) {
    int place = end + 1 + lane;
    if (is_own) {
      const int period = length - 1 - end;  // what repeats is continued beyond the newest token
      if (place >= length) place -= ((place - length) / period + 1) * period;
      draft = row.tokens[place];
    } else if (place < *task.used) {
      draft = task.ring[place];
    }
  }
  // a draft behind a separator belongs to another answer
  const unsigned ends = __ballot_sync(0xffffffffu, draft < 0);
  const bool is_inside = (ends & ((2u << lane) - 1)) == 0;
  for (int place = row.tokens.before + lane; place < length; place += kWarp)
    task.tokens[slot * task.width + place] = row.tokens[place];
  if (lane < task.num_drafts) drafts[lane] = is_inside ? draft : 0;
  if (lane > 0) return;
  task.lengths[slot] = length;
  int source = 0;
  if (best > 0)
    source = is_own ? kOwn : task.ring_scopes[end] == task.scopes[2 * slot + 1] ? kClient : kAnswer;
  int* const found = task.found + 3 * blockIdx.y;
  found[0] = int(best >> kMatchShift), found[1] = source, found[2] = agrees;
}

__global__ void __launch_bounds__(kThreads) look_up(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const Row row = row_of(task, blockIdx.y);
  if (row.slot < 0) {
    if (blockIdx.x == 0 && threadIdx.x < 3) task.found[3 * blockIdx.y + threadIdx.x] = 0;
    return;
  }
  int64_t best = 0;
  if (task.searches && row.tokens.length >= kLeastMatch) {
    const bool reads_ring = max(task.scopes[2 * row.slot], task.scopes[2 * row.slot + 1]) >= 0;
    const int ring_size = reads_ring ? *task.used : 0;
    const int blocks = min(int(gridDim.x), ceil_div(max(row.tokens.length, ring_size), kThreads));
    if (blockIdx.x < blocks) best = best_of_block(task, row, ring_size, blocks);
  }
  if (is_last_block(task, &best) && threadIdx.x < kWarp) store(task, row, best);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_look_up(const tridecode_look_up_task* given, void* stream) {
  if (given->num_rows <= 0) return 0;
  if (given->num_drafts >= kWarp) return fail("look_up: %d drafts; wanted 31", given->num_drafts);
  const Task task = {*given};
  const int64_t places = given->searches ? std::max(given->width, given->ring_size) : 1;
  const int most = std::max(kMostBlocks / given->num_rows, 1);
  const dim3 grid(std::min(most, ceil_div(places, kThreads * kPlaces)), given->num_rows);
  return launch("look_up", look_up, grid, kThreads, 0, stream, task);
}
