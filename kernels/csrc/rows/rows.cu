// Gathers rows by index: token ids that only the device knows, embeddings, and the rows whose
// logits are needed; and columns by index: the inputs of a weight whose groups are sorted.
// Bytes moved: twice the rows.   No bench: a launch takes microseconds.
#include "api/rows.h"
#include "common/common.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;

__global__ void resolve_tokens(int* token_ids, const int* slots, const int* last_tokens,
                               int count) {
  wait_for_predecessor();
  int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count && token_ids[i] < 0) token_ids[i] = slots[i] < 0 ? 0 : last_tokens[slots[i]];
}

template <typename X>
__device__ __forceinline__ void clear_row(X* row, int columns) {
  for (int c = threadIdx.x; c < columns; c += kThreads) row[c] = from_float<X>(0.0f);
}

// One block per token. ids: the table holds rows ids.x .. ids.x + ids.y - 1.
template <typename X, int WIDTH>
__global__ void embed(X* out, const int* token_ids, const X* table, const int* positions,
                      const X* position_table, float factor, int columns, int2 ids) {
  wait_for_predecessor();
  const int64_t token = blockIdx.x;
  const int at = token_ids[token] - ids.x;
  if (at < 0 || at >= ids.y) return clear_row(out + token * columns, columns);
  const X* row = table + int64_t(at) * columns;
  const X* position_row =
      position_table ? position_table + int64_t(positions[token]) * columns : nullptr;
  for (int c = threadIdx.x * WIDTH; c < columns; c += kThreads * WIDTH) {
    float values[WIDTH];
    load_some<WIDTH>(row + c, values);
    if (position_row) {
      float more[WIDTH];
      load_some<WIDTH>(position_row + c, more);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[i] += more[i];
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] *= factor;
    store_some<WIDTH>(out + token * columns + c, values);
  }
}

// The same for an int8 table with one scale per row.
template <typename X, int WIDTH>
__global__ void embed_int8(X* out, const int* token_ids, const int8_t* table, const float* scales,
                           const int* positions, const X* position_table, float factor, int columns,
                           int2 ids) {
  wait_for_predecessor();
  const int64_t token = blockIdx.x;
  const int at = token_ids[token] - ids.x;
  if (at < 0 || at >= ids.y) return clear_row(out + token * columns, columns);
  const int8_t* row = table + int64_t(at) * columns;
  const float scale = scales[at];
  const X* position_row =
      position_table ? position_table + int64_t(positions[token]) * columns : nullptr;
  for (int c = threadIdx.x * WIDTH; c < columns; c += kThreads * WIDTH) {
    float values[WIDTH], more[WIDTH] = {};
    if (position_row) load_some<WIDTH>(position_row + c, more);
    if constexpr (WIDTH == 8) {
      const uint2 words = *reinterpret_cast<const uint2*>(row + c);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        values[i] = float(int8_t((i < 4 ? words.x : words.y) >> (i % 4 * 8)));
    } else {
      values[0] = float(row[c]);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = fmaf(values[i], scale, more[i]) * factor;
    store_some<WIDTH>(out + token * columns + c, values);
  }
}

// One block per row. Word: the unit of the copy.
template <typename Word>
__global__ void gather_rows(char* out, const char* x, const int* rows, int64_t words,
                            int64_t x_stride, int64_t out_stride) {
  wait_for_predecessor();
  const Word* from = reinterpret_cast<const Word*>(x + rows[blockIdx.x] * x_stride);
  Word* to = reinterpret_cast<Word*>(out + blockIdx.x * out_stride);
  for (int64_t i = threadIdx.x; i < words; i += kThreads) to[i] = from[i];
}

// One block per row.
__global__ void gather_columns(uint16_t* out, const uint16_t* x, const int* order, int columns,
                               int64_t x_stride) {
  wait_for_predecessor();
  const uint16_t* const row = x + blockIdx.x * x_stride;
  for (int c = threadIdx.x; c < columns; c += kThreads)
    out[int64_t(blockIdx.x) * columns + c] = row[order[c]];
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_resolve_tokens(int* token_ids, const int* slots, const int* last_tokens, int count,
                             void* stream) {
  return launch("resolve_tokens", resolve_tokens, ceil_div(count, kThreads), kThreads, 0, stream,
                token_ids, slots, last_tokens, count);
}

int tridecode_embed(void* out, const int* token_ids, const void* table, const float* scales,
                    const int* positions, const void* position_table, float factor, int num_tokens,
                    int columns, int first_id, int num_ids, int dtype, void* stream) {
  const int2 ids = make_int2(first_id, num_ids);
  return for_dtype(dtype, "embed", [&](auto x) {
    using X = decltype(x);
    const bool wide =
        columns % 8 == 0 && aligned16(out) && aligned16(table) && aligned16(position_table);
    if (scales)
      return launch("embed_int8", wide ? embed_int8<X, 8> : embed_int8<X, 1>, num_tokens, kThreads,
                    0, stream, (X*)out, token_ids, (const int8_t*)table, scales, positions,
                    (const X*)position_table, factor, columns, ids);
    return launch("embed", wide ? embed<X, 8> : embed<X, 1>, num_tokens, kThreads, 0, stream,
                  (X*)out, token_ids, (const X*)table, positions, (const X*)position_table, factor,
                  columns, ids);
  });
}

int tridecode_gather_columns(void* out, const void* x, const int* order, int num_tokens,
                             int columns, int64_t x_stride, void* stream) {
  return launch("gather_columns", gather_columns, num_tokens, kThreads, 0, stream, (uint16_t*)out,
                (const uint16_t*)x, order, columns, x_stride);
}

int tridecode_gather_rows(void* out, const void* x, const int* rows, int num_rows,
                          int64_t row_bytes, int64_t x_stride_bytes, int64_t out_stride_bytes,
                          void* stream) {
  const bool wide = row_bytes % 16 == 0 && x_stride_bytes % 16 == 0 && out_stride_bytes % 16 == 0 &&
                    aligned16(out) && aligned16(x);
  const int64_t words = wide ? row_bytes / 16 : row_bytes / 2;
  return launch("gather_rows", wide ? gather_rows<uint4> : gather_rows<uint16_t>, num_rows,
                kThreads, 0, stream, (char*)out, (const char*)x, rows, words, x_stride_bytes,
                out_stride_bytes);
}
