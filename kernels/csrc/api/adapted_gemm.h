// GEMMs whose epilogue adds LoRA adapters. Apart from adapters.h, because these kernels take
// minutes to compile. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// The matrices of an adapter for one GEMM, in device memory, aligned to 16 bytes. rank 0: the
// adapter does not change the GEMM.
typedef struct {
  const void* a;          // (rank, inputs) of the task's dtype
  const void* b;          // (rank, outputs)
  const uint32_t* spans;  // (ceil(outputs / 64)): for each 64 outputs, the first rank with nonzero
                          // b in the low half, one past the last such rank in the high half
  int64_t rank;
} tridecode_adapter_pair;

// A GEMM of up to 64 tokens whose epilogue adds sums * b to the products of rows with an adapter,
// before everything else that it does.
typedef struct {
  const void* gemm;  // a tridecode_gemm_task
  const tridecode_adapter_pair* pairs;
  const int* slots;   // (tokens) slot of the row's adapter, up to 254; below 0: none
  const int* groups;  // (num_groups, 2): a slot of the rows and where its rows begin among those
                      // sorted by slot; then -1 and the number of rows with an adapter
  const float* sums;  // (tokens, sum_parts, sum_ranks): x * a^T, in parts to be added, from
                      // spread_adapters or adapter_sums; sum_ranks is a multiple of 4
  int64_t pair_stride;
  int sum_parts, sum_ranks, num_groups;
} tridecode_adapted_gemm_task;
int tridecode_gemm_sm90_split_k_adapted(const tridecode_adapted_gemm_task* task, void* stream);
int tridecode_gemm_sm90_stream_k_adapted(const tridecode_adapted_gemm_task* task, void* stream);
int tridecode_gemm_sm90_split_k_two_parts_adapted(const tridecode_adapted_gemm_task* task,
                                                  void* stream);
int tridecode_gemm_sm90_stream_k_two_parts_adapted(const tridecode_adapted_gemm_task* task,
                                                   void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
