// Sampling of rows whose slots differ: the kernel is in sampling_kernel.cuh.
#include "api/sampling.h"
#include "sampling/sampling_kernel.cuh"

using namespace tridecode;

int64_t tridecode_sample_scratch(int max_rows, int vocab_size) {
  return max_rows * row_bytes(vocab_size);
}

int64_t tridecode_sample_exchange(int max_rows, int ranks) {
  return round_bytes(max_rows) + int64_t(max_rows) * 2 * (ranks - 1) * kExchangeBytes;
}

int tridecode_sample(const tridecode_sample_task* given, void* stream) {
  SharedTask task = {{*given}};
  const bool is_shared = task.ranks > 0;
  if (!aligned16(task.logits)) return fail("sample: the logits are not at a multiple of 16 bytes");
  if (is_shared) {
    if (task.ranks < 2 || task.ranks > kMostRanks || task.rank < 0 || task.rank >= task.ranks)
      return fail("sample: rank %d of %d; wanted 2 to %d ranks", task.rank, task.ranks, kMostRanks);
    if (task.num_rows > task.exchange_rows)
      return fail("sample: %d rows; the ranks exchange for %d", task.num_rows, task.exchange_rows);
    if ((task.vocab_size && task.first_id % 4) || task.logits_stride % 4 ||
        task.logits_stride < task.vocab_size)
      return fail("sample: ids from %d in rows of %lld columns; wanted multiples of 4",
                  task.first_id, (long long)task.logits_stride);
    void* const memory[] = {task.memory0, task.memory1, task.memory2, task.memory3,
                            task.memory4, task.memory5, task.memory6, task.memory7};
    for (int rank = 0; rank < task.ranks; ++rank)
      task.exchanges[rank] = static_cast<char*>(memory[rank]) + task.exchange_at;
  }
  const dim3 grid = grid_of_rows(task);
  if (is_shared) return launch("sample", sample<SharedTask>, grid, kThreads, 0, stream, task);
  return launch("sample", sample<Task>, grid, kThreads, 0, stream, static_cast<Task>(task));
}
