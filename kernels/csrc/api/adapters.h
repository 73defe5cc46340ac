// Deltas of LoRA adapters. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// The matrices of one adapter for one product, in device memory, aligned to 16 bytes. rank 0: the
// adapter does not change the product.
typedef struct {
  const void* a;          // (rank, inputs) of the task's dtype
  const void* b;          // (rank, outputs)
  const uint32_t* spans;  // (ceil(outputs / 64)): of each 64 outputs the first rank whose b is not
                          // 0 in the low half, and the rank behind the last one in the high half
  int64_t rank;
} tridecode_adapter_pair;

// out = activation(product + x * a^T * b) + residual, with the adapter of each row's slot; and
// normed = norm(out), rounded, if there is a norm. kernels/ops.py (add_adapters).
typedef struct {
  void* out;             // (tokens, columns); may be product or residual
  const void* product;   // (tokens, outputs)
  const void* x;         // (tokens, inputs), written before the kernel that writes product
  const void* residual;  // (tokens, columns), or null
  const tridecode_adapter_pair* pairs;  // that of slot i is pairs[i * pair_stride]
  const int* slots;                     // (tokens) the row's adapter; below 0: none
  const int* rows;  // (tokens) every row once, those with adapters first; null: in their order
  void* normed;     // (tokens, columns), or null
  const void* norm_weight;  // (columns)
  const void* norm_bias;    // (columns), or null: an RMSNorm
  int64_t out_stride, product_stride, x_stride, residual_stride, normed_stride, pair_stride;
  float norm_eps;
  int tokens, inputs, outputs;
  int activation;  // as tridecode_gemm_task's, or a tridecode_rows_activation
  int blocks;      // that share a row: 1, 2, 4 or 8; 1 with a norm
  int dtype;
} tridecode_adapters_task;
int tridecode_add_adapters(const tridecode_adapters_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
