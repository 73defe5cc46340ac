// All layers of a small model in one launch. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// All pre-LayerNorm layers of a decoder for 1 to 4 tokens, each of a row of its own, on compute
// capability 9.0: see decoder_layers_sm90a.cu. 16-bit dtypes, head_size 64 or 128, hidden, heads *
// head_size and inner multiples of 64; the tokens' inputs of a product take at most 64 KiB.
typedef struct {
  const void* layers;  // what tridecode_decoder_table has written, in device memory
  void* x;             // (tokens, hidden), the residual stream, changed in place
  void* queries;       // scratch of (tokens, heads * head_size)
  void* context;       // scratch of (tokens, heads * head_size)
  void* mlp;           // scratch of (tokens, inner)
  const int* kv_slots;
  const int* block_tables;
  const int* context_lens;
  const float* slopes;  // (heads), or null
  int64_t table_stride;
  float scale, norm_eps;
  int num_layers, tokens, hidden, heads, head_size, inner;
  int activation, block_tokens, dtype;
  // scratch memory: parts of contexts, and counters that are zero before and after each launch
  void* partials;
  int64_t partial_bytes;
  unsigned int* counters;
  int num_counters;
} tridecode_decoder_task;
int tridecode_decoder_layers(const tridecode_decoder_task* task, void* stream);

// Writes the table of layers to host memory. tensors: per layer 13 pointers, see Tensors in
// decoder_layers_sm90a.cu. queries: heads * head_size.
int64_t tridecode_decoder_table_bytes(int num_layers);
int tridecode_decoder_table(void* table, const void* tensors, int num_layers, int hidden,
                            int queries, int inner, int dtype);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
