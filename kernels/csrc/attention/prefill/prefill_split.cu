// prefill_split.cuh over a cache of the activations' dtype.
#include "api/attention.h"
#include "attention/prefill/prefill_split.cuh"

using namespace tridecode;

int64_t tridecode_prefill_attention_splits(int head_size, int dtype, int block_tokens,
                                           int is_limited) {
  // shared memory of the largest block, with a margin for the division of many rows
  const int bytes = SplitTiles<half, half, 128>::kBytes + (8 << 10);
  return takes_split_size(head_size, is_limited) && dtype != kFloat32 && block_tokens % 16 == 0 &&
         device().capability >= 80 && device().shared_bytes >= bytes;
}

int tridecode::run_split(const PrefillTask& task, void* stream) {
  return run_split_exact<false>(task, stream);
}
