// The task of prefill_attention.cu, part of which prefill_attention_sm90a.cu takes.
#pragma once
#include "common.cuh"

namespace tridecode {

struct PrefillTask {
  void* out;
  const void* qkv;
  const void* cache;
  const int* block_tables;
  const int* context_lens;
  const int* query_starts;
  const float* slopes;
  float scale;
  int first_row, heads, kv_heads, head_size, block_tokens;
  int64_t qkv_stride, out_stride, table_stride;
  int rows, max_query, tokens;
};

// Whether the device and the shapes suit prefill_attention_sm90a.cu.
bool takes_prefill_sm90a(const PrefillTask& task);
int run_prefill_sm90a(const PrefillTask& task, int dtype, void* stream);

}  // namespace tridecode
