// The paged key-value cache, (blocks, 2, kv_heads, block_tokens, head_size): keys at [:, 0], values
// at [:, 1]. A slot is block * block_tokens + offset. No other device code depends on the layout,
// and every write goes through write_cache() or, in 8 bits, write_rounded() of kv_cache_8bit.cuh.
#pragma once
#include "common/common.cuh"

namespace tridecode {

// The row index, in rows of head_size numbers, of a token's key (which 0) or value (which 1). A
// layer has fewer than 2^32 rows, 550 GB at head_size 64, so that 32-bit arithmetic suffices.
__device__ __forceinline__ int64_t cache_row(unsigned block, unsigned which, unsigned kv_head,
                                             unsigned offset, unsigned kv_heads,
                                             unsigned block_tokens) {
  return ((block * 2 + which) * kv_heads + kv_head) * block_tokens + offset;
}

// Distance from a token's key to its value, in numbers.
__device__ __forceinline__ int64_t value_offset(int kv_heads, int block_tokens, int head_size) {
  return int64_t(kv_heads) * block_tokens * head_size;
}

// The cache_row of head `head` of a token's row (q | k | v), for the key or value of a token with a
// slot. Task: any struct with cache, heads, kv_heads, head_size and block_tokens.
template <typename Task>
__device__ __forceinline__ int64_t row_of_head(const Task& task, int slot, int head) {
  const int is_value = head >= task.heads + task.kv_heads;
  const int kv_head = head - task.heads - is_value * task.kv_heads;
  return cache_row(slot / task.block_tokens, is_value, kv_head, slot % task.block_tokens,
                   task.kv_heads, task.block_tokens);
}

// The cache address of head `head` of a token's row (q | k | v); nullptr for a query and for a
// padded token (slot -1).
template <typename X, typename Task>
__device__ __forceinline__ X* cache_place(const Task& task, int slot, int head) {
  if (head < task.heads || slot < 0) return nullptr;
  return static_cast<X*>(task.cache) + row_of_head(task, slot, head) * task.head_size;
}

// Writes numbers d, d + 1, ... of a head of a token's row (q | k | v) if it is the key or value of
// a token with a slot. WIDTH: 1, or 8 at a multiple of 8.
template <typename X, typename Task, int WIDTH>
__device__ __forceinline__ void write_cache(const Task& task, int slot, int head, int d,
                                            const float (&values)[WIDTH]) {
  if (X* const to = cache_place<X>(task, slot, head)) store_some<WIDTH>(to + d, values);
}

// The same for eight 16-bit numbers.
template <typename X, typename Task>
__device__ __forceinline__ void write_cache(const Task& task, int slot, int head, int d,
                                            uint4 words) {
  if (X* const to = cache_place<X>(task, slot, head)) *reinterpret_cast<uint4*>(to + d) = words;
}

}  // namespace tridecode
