// GEMMs that keep the products of some rows beside their activated results. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// A GEMM of up to 256 tokens with a gated activation and no bias: its epilogue also stores the
// products of rows with an adapter, to which an adapter is added before the activation.
typedef struct {
  const void* gemm;  // a tridecode_gemm_task
  const int* slots;  // (tokens) slot of the row's adapter; below 0: none
  void* product;     // (tokens, outputs) of the task's dtype; other rows are left as they are
  int64_t product_stride;
} tridecode_kept_gemm_task;
int tridecode_gemm_sm90_stream_k_kept(const tridecode_kept_gemm_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
