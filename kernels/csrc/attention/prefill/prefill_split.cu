// prefill_split.cuh over a cache of the activations' dtype.
#include "attention/prefill/prefill_split.cuh"

using namespace tridecode;

int64_t tridecode_prefill_attention_splits(int head_size, int dtype, int block_tokens) {
  const bool takes_size =
      head_size == 64 || head_size == 80 || head_size == 96 || head_size == 112 || head_size == 128;
  // of the largest block, with a margin for the division of many rows
  const int bytes = SplitTiles<half, half, 128>::kBytes + (8 << 10);
  return takes_size && dtype != kFloat32 && block_tokens % 16 == 0 && device().capability >= 80 &&
         device().shared_bytes >= bytes;
}

int tridecode::run_split(const PrefillTask& task, void* stream) {
  return for_16_bit_dtype(task.dtype, "prefill_attention", [&](auto zero) {
    using X = decltype(zero);
    return run_split_of<X, X>(task, stream);
  });
}
