// Operations on rows: embedding, norms, gathers, quantisation of activations. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

int tridecode_resolve_tokens(int* token_ids, const int* slots, const int* last_tokens, int count,
                             void* stream);

// Completes decode rows whose tokens, positions or lengths only the device knows: kernels/ops.py
// (place_rows).
typedef struct {
  int* token_ids;           // (num_tokens)
  int* positions;           // (num_tokens)
  int* kv_slots;            // (num_tokens)
  int* context_lens;        // (num_rows); below 0: the row is placed
  const int* block_tables;  // (num_rows, columns)
  const int* query_starts;  // (num_rows + 1); a row has at most 32 tokens
  const int* slots;         // (num_tokens), those of the tokens
  const int* last_tokens;   // (slots)
  const int* lengths;       // (slots)
  const int* drafts;        // (slots, num_drafts)
  int64_t table_stride;
  int num_rows, columns, block_tokens, num_drafts;
} tridecode_place_task;
int tridecode_place_rows(const tridecode_place_task* task, void* stream);

// out = factor * (table row + position row). scales: null: table has dtype; else table is int8,
// with one scale per row. first_id, num_ids: ids of the table's rows; a token with any other id
// gets a row of zeros.
int tridecode_embed(void* out, const int* token_ids, const void* table, const float* scales,
                    const int* positions, const void* position_table, float factor, int num_tokens,
                    int columns, int first_id, int num_ids, int dtype, void* stream);

int tridecode_norm(void* out, const void* x, const void* weight, const void* bias, float eps,
                   int num_tokens, int columns, int64_t x_stride, int64_t out_stride, int dtype,
                   void* stream);

// residual = residual + norm(x), rounded; normed = next_norm(residual). Without weight, x is not
// normalised; without bias, an RMSNorm. Without next_weight, normed is not written; it may be x.
typedef struct {
  void* residual;  // (tokens, columns), as x and normed
  const void* x;
  void* normed;
  const void* weight;
  const void* bias;
  const void* next_weight;
  const void* next_bias;
  int64_t residual_stride, x_stride, normed_stride;
  float eps, next_eps;
  int tokens, columns, dtype;
} tridecode_add_normed_task;
int tridecode_add_normed(const tridecode_add_normed_task* task, void* stream);

// out = activation(product + bias) + residual. Gated activations: product and bias have 2 * columns
// columns, the gate's first; out = activation(gate) * value + residual.
enum tridecode_rows_activation { kRowsGeglu = 6, kRowsSilu = 7 };
typedef struct {
  void* out;             // (tokens, columns), of dtype or float32
  const void* product;   // (tokens, columns or 2 * columns)
  const void* bias;      // or null
  const void* residual;  // (tokens, columns), or null; may be out
  int64_t out_stride, product_stride, residual_stride;
  int tokens, columns, activation, out_float32, dtype;
} tridecode_activate_task;
int tridecode_activate_rows(const tridecode_activate_task* task, void* stream);

// x[i] = cap * tanh(x[i] / cap).
int tridecode_soft_cap(float* x, int64_t count, float cap, void* stream);

// out[t, c] = x[t, order[c]], of rows of `columns` 16-bit numbers; rows of out are contiguous.
int tridecode_gather_columns(void* out, const void* x, const int* order, int num_tokens,
                             int columns, int64_t x_stride, void* stream);

int tridecode_gather_rows(void* out, const void* x, const int* rows, int num_rows,
                          int64_t row_bytes, int64_t x_stride_bytes, int64_t out_stride_bytes,
                          void* stream);

// Quantises rows of activations for a tridecode_operand.
//
// kOperandInt8, kOperandFp8: values[t, :] = x[t, :] / scales[t], rounded to the nearest, halves to
// even; scales[t] = max|x[t, :]| / 127 or / 448, 1 for a row of zeros. A row with NaN or infinity
// has values 0 and a non-finite scale. With norm_weight, x is norm(x), rounded to dtype, first.
// Rows of values are contiguous. 16-bit dtypes, compute capability 9.0.
//
// kOperandTwoParts: x[t, :] = scales[t] * (high + low / 254), scales as for int8; high is the
// nearest integer, low the rounded remainder. Row 16 b + i of values is the high part of token 8 b
// + i, row 16 b + 8 + i its low part; for tokens beyond the last, up to a multiple of 8, both are
// zeros. kOperandTwoPartsInt4: the same with the inputs in the order of a granule of 4-bit weights
// (packed_weight.cuh): of each 32, input 16 i + 8 h + 2 t + j is at 16 h + 4 t + 2 j + i. Columns
// are a multiple of 32. With order (columns), x[t, c] above is x[t, order[c]], and a norm's weight
// and bias likewise.
//
// kOperandFp8Blocks: each 128 columns of a row have a scale of their own; scales is
// (ceil(columns / 128), num_tokens).
int tridecode_quantize_rows(void* values, float* scales, const void* x, const int* order,
                            const void* norm_weight, const void* norm_bias, float eps,
                            int num_tokens, int columns, int64_t x_stride, int operand, int dtype,
                            void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
