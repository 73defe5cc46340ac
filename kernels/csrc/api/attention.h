// Attention over the paged KV cache, rotation, and the write to the cache. Part of api.h.
#pragma once
#include <stdint.h>

#include "api/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// Rotates the query and key heads of out in place and writes key and value to the cache, after a
// GEMM whose epilogue did neither. Reads the task's fields from `cos` to `block_tokens`, out,
// out_stride, tokens and dtype. With an 8-bit cache, key and value in out are replaced by their
// dequantised values, and head_size is at most 256.
int tridecode_rotate_and_cache(const tridecode_gemm_task* task, void* stream);

// The same with a clamp and a norm of each query and key head before the rotation.
typedef struct {
  void* qkv;  // (tokens, (heads + 2 * kv_heads) * head_size), in place
  const float* cos;
  const float* sin;
  const int* positions;
  const int* kv_slots;
  void* cache;
  float* cache_scales;
  // (head_size) or, norm_per_head, (heads or kv_heads, head_size); no weight: no norm; no bias:
  // RMSNorm
  const void* query_weight;
  const void* query_bias;
  const void* key_weight;
  const void* key_bias;
  int64_t qkv_stride;
  float query_eps, key_eps;
  float limit;  // q, k and v are clamped to [-limit, limit]; 0: they are not
  int norm_per_head;
  int tokens, heads, kv_heads, head_size, rotary_size, interleaved, block_tokens;
  int cache_format, dtype;
} tridecode_heads_task;
int tridecode_finish_heads(const tridecode_heads_task* task, void* stream);

typedef struct {
  void* out;                // (tokens, heads * head_size)
  const void* qkv;          // (tokens, (heads + 2 * kv_heads) * head_size)
  void* cache;              // (blocks, 2, kv_heads, block_tokens, head_size)
  const int* block_tables;  // (num_rows, columns)
  const int* context_lens;  // (num_rows), in tokens of the cache
  const float* slopes;      // (heads), or null: no ALiBi
  int64_t qkv_stride, out_stride, table_stride;
  float scale;
  int num_rows, heads, kv_heads, head_size, block_tokens, dtype;
  // decode: 0: a cache of dtype; 1: int8, 2: e4m3, with scales (blocks, 2, kv_heads, block_tokens)
  int cache_format;
  float* cache_scales;
  // prefill: rows first_row .. num_rows - 1; qkv and out begin with the first token of origin_row
  const int* query_starts;  // (num_rows + 1)
  int first_row, origin_row;
  int max_query;  // maximum number of queries of a row; decode: above 1, query_starts counts
  int tokens;
  // limit for a block; 0: the device's limit, and the sm_90 kernel where there is one
  int shared_bytes;
  // whether to divide the keys of a row among blocks, for few queries after a long prefix. Requires
  // tridecode_prefill_attention_splits, no key_bias, and scratch. An 8-bit cache is allowed if it
  // also holds the keys and values of fresh prompts
  int split;
  // decode and split: scratch memory of tridecode_decode_attention_scratch(head_size) bytes, for
  // any batch; counters that are zero before and after each launch, one per row and group of 8
  // query heads
  void* scratch;
  unsigned int* counters;
  int num_counters;
  // decode: whether qkv is the output of a GEMM that neither rotated nor wrote to the cache. Then
  // keys and values are written first, as by tridecode_rotate_and_cache; qkv may or may not change.
  // The other fields are those of tridecode_gemm_task
  int unfinished;
  int rotary_size, interleaved;
  const float* cos;
  const float* sin;
  const int* positions;
  const int* kv_slots;
  // a query sees this many tokens, itself included; 0: all before it. Then rows are finished
  int window;
  float softcap;          // scores become softcap * tanh(score / softcap); 0: no cap
  const float* key_bias;  // (heads, bias_columns), or null; the last column also applies beyond it
  int bias_columns;
} tridecode_attention_task;

int64_t tridecode_decode_attention_scratch(int head_size);
int tridecode_decode_attention(const tridecode_attention_task* task, void* stream);
int tridecode_prefill_attention(const tridecode_attention_task* task, void* stream);
// Queries per block for shared_bytes of shared memory, without the kernels for specific devices; 1:
// the untuned kernel for any head size.
int64_t tridecode_prefill_attention_queries(int head_size, int shared_bytes);
// 1 if the device has a kernel for tasks with `split`, else 0. is_limited: with a window or a soft
// cap.
int64_t tridecode_prefill_attention_splits(int head_size, int dtype, int block_tokens,
                                           int is_limited);

// Expands blocks of an 8-bit cache for prefill_attention: out = stored * scale, for every row that
// has tokens from before this step. Column c of such a row goes to block row * columns + c of out.
typedef struct {
  void* out;                  // (num_rows * columns, 2, kv_heads, block_tokens, head_size)
  const void* cache;          // (blocks, 2, kv_heads, block_tokens, head_size)
  const float* cache_scales;  // (blocks, 2, kv_heads, block_tokens)
  const int* block_tables;    // (num_rows, at least columns); of the first row
  const int* context_lens;    // (num_rows), at most columns * block_tokens
  const int* query_starts;    // (num_rows + 1)
  int64_t table_stride;
  int num_rows, columns, kv_heads, head_size, block_tokens, dtype, cache_format;
} tridecode_expand_task;
int tridecode_expand_cache(const tridecode_expand_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
