// Decode rows whose tokens, positions or lengths only the device knows: a warp places a row behind
// the tokens that its slot has in the cache, a lane each token.
// Bytes moved: a few hundred a row.   No bench: a launch takes microseconds.
#include "api/rows.h"
#include "common/common.cuh"

namespace tridecode {
namespace {

constexpr int kMostTokens = 32;  // of a row: a lane each

struct Task : tridecode_place_task {};

__global__ void __launch_bounds__(kMostTokens) place_rows(const __grid_constant__ Task task) {
  wait_for_predecessor();
  const int row = blockIdx.x, lane = threadIdx.x;
  const int first = task.query_starts[row], count = task.query_starts[row + 1] - first;
  if (count <= 0) return;
  const int slot = task.slots[first], context = task.context_lens[row];
  const int length = slot < 0 ? 0 : task.lengths[slot];
  __syncwarp();  // all lanes have read what lane 0 writes
  if (context < 0 && lane == 0) task.context_lens[row] = length + count;
  if (lane >= count) return;
  const int token = first + lane;
  if (task.token_ids[token] < 0) {
    int id = 0;
    if (slot >= 0 && lane == 0) id = task.last_tokens[slot];
    if (slot >= 0 && lane > 0 && lane <= task.num_drafts)
      id = task.drafts[int64_t(slot) * task.num_drafts + lane - 1];
    task.token_ids[token] = id;
  }
  if (context >= 0) return;
  const int place = length + lane, column = place / task.block_tokens;
  task.positions[token] += place;
  task.kv_slots[token] =
      column < task.columns
          ? task.block_tables[row * task.table_stride + column] * task.block_tokens +
                place % task.block_tokens
          : -1;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_place_rows(const tridecode_place_task* given, void* stream) {
  if (given->num_rows <= 0) return 0;
  return launch("place_rows", place_rows, given->num_rows, kMostTokens, 0, stream, Task{*given});
}
