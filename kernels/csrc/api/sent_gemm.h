// GEMMs whose epilogue sends the result to the other of two tensor ranks. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// A GEMM without activation, residual and heads, with a 16-bit out: this rank's part of a sum. Its
// result is stored to out and to the other rank's memory; the next tridecode_all_reduce of both
// ranks, with `sent`, adds up the parts. outputs: columns of the sum.
typedef struct {
  const void* gemm;    // a tridecode_gemm_task
  const void* memory;  // as in tridecode_all_reduce_task: this rank's memory,
  void* peer_memory;   // the other rank's, as mapped in this process,
  int64_t slot_bytes;  // and the bytes for the rows of one rank
} tridecode_sent_gemm_task;
int tridecode_gemm_sm90_split_k_sent(const tridecode_sent_gemm_task* task, void* stream);
int tridecode_gemm_sm90_split_k_8bit_sent(const tridecode_sent_gemm_task* task, void* stream);
int tridecode_gemm_sm90_stream_k_8bit_sent(const tridecode_sent_gemm_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
