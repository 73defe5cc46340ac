// Deltas of LoRA adapters. Part of api.h.
#pragma once
#include <stdint.h>

#include "api/adapted_gemm.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// out = activation(product + x * a^T * b) + residual, with the adapter of each row's slot; then
// normed = norm(out), rounded, if there is a norm. See add_adapters in
// kernels/adapters/operation.py.
typedef struct {
  void* out;             // (tokens, columns); may be product or residual
  const void* product;   // (tokens, outputs)
  const void* x;         // (tokens, inputs), written before the kernel that writes product
  const void* residual;  // (tokens, columns), or null
  const tridecode_adapter_pair* pairs;  // that of slot i is pairs[i * pair_stride]
  const int* slots;                     // (tokens) slot of the row's adapter; below 0: none
  const int* rows;  // (tokens) a permutation, rows with adapters first; null: ascending rows
  void* normed;     // (tokens, columns), or null
  const void* norm_weight;  // (columns)
  const void* norm_bias;    // (columns), or null: an RMSNorm
  int64_t out_stride, product_stride, x_stride, residual_stride, normed_stride, pair_stride;
  float norm_eps;
  int tokens, inputs, outputs;
  int activation;  // as tridecode_gemm_task's, or a tridecode_rows_activation
  int blocks;      // per row: 1, 2, 4 or 8; 1 with a norm
  int dtype;
  // Only of spread_adapters:
  const float* sums;  // (tokens, sum_parts, sum_ranks), next_sums of an earlier launch whose result
                      // is x; null: computed here, only with a norm
  const tridecode_adapter_pair* next_pairs;  // of the GEMM that reads normed or, without a norm,
                                             // out; or null
  float* next_sums;  // (tokens, blocks, next_ranks): the parts of its products with a
  int64_t next_pair_stride;
  int sum_parts, sum_ranks, next_ranks;
  int share;               // vectors of 8 columns per block: 32, 64, 128 or 256
  const int* num_adapted;  // number of rows with an adapter, the first of `rows`; null: unknown
  int complete;            // 1: rows without an adapter are complete in out; only without a norm
} tridecode_adapters_task;
int tridecode_add_adapters(const tridecode_adapters_task* task, void* stream);
// The same for capability 9.0, with products that an earlier launch computed.
int tridecode_spread_adapters(const tridecode_adapters_task* task, void* stream);

// sums = norm(x) * a^T for the rows with an adapter. Of 16-bit dtypes, compute capability 9.0 and
// later.
typedef struct {
  float* sums;                          // (tokens, sum_ranks), sum_ranks at least the largest rank
  const void* x;                        // (tokens, inputs)
  const void* norm_weight;              // (inputs), an RMSNorm; null: x is not normalised
  const tridecode_adapter_pair* pairs;  // that of slot i is pairs[i * pair_stride]
  const int* order;                     // (tokens), rows with adapters first, by slot
  const int* groups;  // (num_groups, 2): a slot and where its rows begin in order; then -1 and the
                      // number of rows with an adapter
  void* normed;  // (tokens, inputs): norm(x) of all rows, rounded, for up to 64 tokens and 8192
                 // inputs; or null
  int64_t x_stride, normed_stride, pair_stride;
  float norm_eps;
  int tokens, inputs, sum_ranks, num_groups, dtype;
} tridecode_adapter_sums_task;
int tridecode_adapter_sums(const tridecode_adapter_sums_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
