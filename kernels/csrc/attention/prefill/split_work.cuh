// Divides prefill attention of few queries after a long prefix among blocks. A column is a query of
// one head; heads of a query are adjacent. An item is a group of columns of one row and kv head.
// The key tiles of each item are split into parts of nearly equal length, about as many in total as
// there are blocks. A chunk is one part of one item; each block computes several chunks.
//
// The device computes the division from query_starts and context_lens, so that the grid does not
// depend on them.
#pragma once
#include "api/attention.h"
#include "common/common.cuh"

namespace tridecode {
namespace {

constexpr int kLeastTiles = 4;  // minimum tiles of a part

// Keys per tile.
__host__ __device__ constexpr int keys_of(int head_size) { return head_size <= 128 ? 64 : 32; }

struct SplitTask : tridecode_attention_task {
  int group;    // query heads per kv head
  int columns;  // columns per item
  int blocks;   // blocks that share the tiles
  int keys;     // keys per tile

  // The first tile that a query at `position` sees.
  __device__ __forceinline__ int first_tile(int position) const {
    return window ? max(0, position + 1 - window) / keys : 0;
  }
};

struct SplitRow {
  int start, queries;  // first token and number of tokens
  int before;          // tokens from earlier steps
  int tiles, items;    // tiles visible to any of its queries, items of the row
  int parts;           // maximum parts of an item

  // length: maximum tiles of a part.
  static __device__ __forceinline__ SplitRow of(const SplitTask& task, int row, int length) {
    SplitRow found;
    found.start = task.query_starts[row] - task.query_starts[task.origin_row];
    found.queries = task.query_starts[row + 1] - task.query_starts[row];
    const int context = task.context_lens[row];
    found.before = context - found.queries;
    found.tiles = found.queries > 0
                      ? (context + task.keys - 1) / task.keys - task.first_tile(found.before)
                      : 0;
    found.items = (found.queries * task.group + task.columns - 1) / task.columns * task.kv_heads;
    found.parts = (found.tiles + length - 1) / length;
    return found;
  }
};

// The columns of an item and the keys visible to any of them.
struct SplitItem {
  int first, count;  // columns
  int first_query;
  int visible, first_tile, tiles, parts;

  static __device__ __forceinline__ SplitItem of(const SplitTask& task, const SplitRow& row,
                                                 int number) {
    SplitItem found;
    found.first = number * task.columns;
    found.count = min(task.columns, row.queries * task.group - found.first);
    found.first_query = found.first / task.group;
    found.visible = row.before + (found.first + found.count - 1) / task.group + 1;
    found.first_tile = task.first_tile(row.before + found.first_query);
    found.tiles = (found.visible + task.keys - 1) / task.keys - found.first_tile;
    found.parts = min(row.parts, found.tiles);
    return found;
  }
};

// before[r]: chunks of the rows before row first_row + r, and their parts in scratch memory.
struct Division {
  const int2* before;
  int rows, length;

  __device__ __forceinline__ int chunks() const { return before[rows].x; }
  __device__ __forceinline__ int parts() const { return before[rows].y; }
  __device__ __forceinline__ int row_of(int chunk) const {
    int low = 0, high = rows;  // before[low] <= chunk < before[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (before[middle].x <= chunk ? low : high) = middle;
    }
    return low;
  }
};

inline int division_bytes(const SplitTask& task) {
  return (task.num_rows - task.first_row + 1) * int(sizeof(int2));
}

// Called by all threads of the block. before: division_bytes of shared memory.
__device__ __forceinline__ Division divide(const SplitTask& task, int2* before) {
  __shared__ int shared_length;
  const int rows = task.num_rows - task.first_row;
  if (threadIdx.x < 32) {
    int tiles = 0;
    for (int r = threadIdx.x; r < rows; r += 32) {
      const SplitRow row = SplitRow::of(task, task.first_row + r, 1);
      tiles += row.items * row.tiles;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) tiles += __shfl_xor_sync(kAll, tiles, offset);
    const int length = max(kLeastTiles, (tiles + task.blocks - 1) / task.blocks);
    int2 all = {};
    for (int first = 0; first < rows; first += 32) {
      const int r = first + threadIdx.x;
      int2 sum = {};
      if (r < rows) {
        const SplitRow row = SplitRow::of(task, task.first_row + r, length);
        sum.x = row.items * row.parts;
        sum.y = row.parts > 1 ? sum.x : 0;
      }
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int x = __shfl_up_sync(kAll, sum.x, offset), y = __shfl_up_sync(kAll, sum.y, offset);
        if (int(threadIdx.x) >= offset) sum.x += x, sum.y += y;
      }
      sum.x += all.x, sum.y += all.y;
      if (r < rows) before[r + 1] = sum;
      all.x = __shfl_sync(kAll, sum.x, 31), all.y = __shfl_sync(kAll, sum.y, 31);
    }
    if (threadIdx.x == 0) before[0] = make_int2(0, 0), shared_length = length;
  }
  __syncthreads();
  return {before, rows, shared_length};
}

// Floats of scratch memory for a column of a part: its output, maximum and sum. There are at most
// two parts per block, because a row is divided only if it has more than `length` tiles.
__host__ __device__ constexpr int64_t parts_of(int blocks) { return 2 * int64_t(blocks); }

template <int D>
__device__ __forceinline__ float* part_output(const SplitTask& task, int part, int column) {
  return static_cast<float*>(task.scratch) + (int64_t(part) * task.columns + column) * D;
}
template <int D>
__device__ __forceinline__ float2* part_totals(const SplitTask& task, int part, int column) {
  float* const totals =
      static_cast<float*>(task.scratch) + parts_of(task.blocks) * task.columns * D;
  return reinterpret_cast<float2*>(totals) + int64_t(part) * task.columns + column;
}

}  // namespace
}  // namespace tridecode
