// The columns of a pass over a row of several queries: a column of the matrix instruction is a
// query and one of its heads; heads of a query are neighbours, queries follow each other. In a row
// of one query, columns are query heads.
//
// A window hides the first tiles of a row. These are skipped: tiles of a part, contexts and limits
// count from the first tile that the row's first query sees.
#pragma once
#include "api/attention.h"
#include "attention/decode_sources.cuh"
#include "attention/soft_cap.cuh"

namespace tridecode {
namespace {

constexpr int kGroup = 8;  // columns of a pass over the keys and values
constexpr int kWarps = 4;  // of a block

// The rows of a launch have one query each, or several; kLimited: any number, a window or a soft
// cap.
enum Mode { kOneQuery, kSeveral, kLimited };

struct Task : tridecode_attention_task {
  int group, groups;  // query heads of a kv head; passes of kGroup columns over it
};

// The number of tiles before the first one that a query of the row sees, in whole spans.
template <Mode MODE>
__device__ __forceinline__ int hidden_tiles(const Task& task, int row, int span) {
  if constexpr (MODE == kLimited) {
    if (!task.window) return 0;
    const int queries =
        task.max_query > 1 ? task.query_starts[row + 1] - task.query_starts[row] : 1;
    const int first = task.context_lens[row] - queries + 1 - task.window;  // key, of query 0
    return first > 0 ? first / (span * kTile) * span : 0;
  }
  return 0;
}

// Columns `first` .. first + count - 1 of a kv head of a row with the tokens token ..
// token + queries - 1; none (count 0) if the row has fewer queries than others.
struct Columns {
  int token, queries, context, kv_head, first, count;

  Columns() = default;
  // hidden: from hidden_tiles. LIMITED: rows may have one query, without query_starts.
  template <bool LIMITED>
  static __device__ __forceinline__ Columns of(const Task& task, int row, int pass, int hidden) {
    Columns columns;
    columns.token = row, columns.queries = 1;
    if (!LIMITED || task.max_query > 1) {
      columns.token = task.query_starts[row];
      columns.queries = task.query_starts[row + 1] - columns.token;
    }
    columns.context = task.context_lens[row] - hidden * kTile;
    columns.place(task, pass);
    return columns;
  }
  __device__ __forceinline__ void place(const Task& task, int pass) {
    kv_head = pass / task.groups;
    first = pass % task.groups * kGroup;
    count = max(0, min(kGroup, queries * task.group - first));
  }
  __device__ __forceinline__ int query_of(const Task& task, int column) const {
    return (first + column) / task.group;
  }
  __device__ __forceinline__ int head_of(const Task& task, int column) const {
    return kv_head * task.group + (first + column) % task.group;
  }
  template <typename X>
  __device__ __forceinline__ const X* query(const Task& task, int column, int head_size) const {
    return static_cast<const X*>(task.qkv) + (token + query_of(task, column)) * task.qkv_stride +
           head_of(task, column) * head_size;
  }
  template <typename X>
  __device__ __forceinline__ X* out(const Task& task, int column, int head_size) const {
    return static_cast<X*>(task.out) + (token + query_of(task, column)) * task.out_stride +
           head_of(task, column) * head_size;
  }
  // The number of tokens visible to a column; the whole context if there is no such column.
  __device__ __forceinline__ int seen(const Task& task, int column) const {
    return column < count ? context - queries + query_of(task, column) + 1 : context;
  }
};

// Writes zeros for all queries of a row; called by the whole block.
template <typename X>
__device__ __forceinline__ void zero_row(const Task& task, int row, int head_size) {
  const int first = task.query_starts[row], columns = task.heads * head_size;
  for (int token = first; token < task.query_starts[row + 1]; ++token) {
    X* const out = static_cast<X*>(task.out) + token * task.out_stride;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) out[i] = from_float<X>(0.0f);
  }
}

}  // namespace
}  // namespace tridecode
