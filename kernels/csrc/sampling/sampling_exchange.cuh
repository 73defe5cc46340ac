// Exchange between tensor ranks that share a vocabulary, while they sample a row: 64-bit words,
// from every thread of the block that finishes the row to the same thread on every other rank.
//
// A word is pushed into each peer's memory as {low, round, high, round} with one 16-byte store;
// either half carries the number of the round, so that a reader needs no order between them, and
// nothing is ever cleared. (The flags are those of NCCL's LL protocol.) Two alternating buffers
// suffice. A rank sends round n + 1 only after all its threads have read round n of every peer (a
// barrier is between), and each peer sends round n + 1 only after it has read round n. So a rank
// that sends round n + 2, into the buffer of round n, has received round n + 1 from all, and all
// have read round n. The number of the next round is kept in device memory for each row, so that
// CUDA graphs may be replayed; it stays equal on all ranks because all exchange for the same rows,
// and base each decision to exchange on exchanged words.
//
// Progress: only the last block of a row waits, when its rank has swept the row. Blocks are
// dispatched row by row, so on every rank the blocks of the lowest unfinished row run or have run,
// and none of them waits for a block that was not dispatched.
#pragma once
#include "api/sampling.h"
#include "ranks/peer_memory.cuh"

namespace tridecode {

constexpr int kExchangeThreads = 256;
constexpr int kExchangeBytes = 16 * kExchangeThreads;  // bytes of a round, from one rank to another
constexpr int kGathered = 4;                           // words of a rank in `Exchange::gather`

// The round numbers of max_rows rows are at the start of the exchange's part of peer memory.
__host__ __device__ constexpr int64_t round_bytes(int max_rows) {
  return (int64_t(max_rows) * sizeof(unsigned) + 255) / 256 * 256;
}

struct GatheredWords {
  unsigned long long of[kMostRanks][kGathered];
  unsigned long long total;
};

// All threads of the block call its functions, on every rank in the same order, and get the same
// results. A rank that does not arrive in time counts as zeros: the results are then wrong, but
// well-formed.
class Exchange {
 public:
  using u64 = unsigned long long;

  // memory: start of the exchange in each rank's memory. own: this rank's header.
  __device__ __forceinline__ Exchange(char* const* memory, const tridecode_sample_task& task,
                                      int row, GatheredWords& words)
      : memory_(memory),
        rank_(task.rank),
        ranks_(task.ranks),
        words_(words),
        patience_{static_cast<PeerState*>(task.memory), task.limit_ns, task.lost} {
    rounds_ = reinterpret_cast<unsigned*>(memory_[rank_]) + row;
    round_ = *rounds_;
    buffers_ = round_bytes(task.exchange_rows) + int64_t(row) * 2 * (ranks_ - 1) * kExchangeBytes;
  }

  // The sum of the words of all ranks.
  __device__ __forceinline__ u64 sum(u64 mine) {
    u64 total = 0;
    swap(mine, kExchangeThreads, [&](int, u64 word) { total += word; });
    return total;
  }

  // The words of the first `count` threads of every rank: words.of[rank][thread].
  __device__ __forceinline__ const GatheredWords& gather(u64 mine, int count) {
    __syncthreads();  // the words of the previous gather have been read
    swap(mine, count, [&](int rank, u64 word) { words_.of[rank][threadIdx.x] = word; });
    return words_;
  }

  // The sum over all ranks of a word that is the same in all threads of a rank.
  __device__ __forceinline__ u64 total(u64 mine) {
    gather(mine, 1);
    u64 all = 0;
    for (int rank = 0; rank < ranks_; ++rank) all += words_.of[rank][0];
    return all;
  }

  // Prepares the next launch.
  __device__ __forceinline__ void close() {
    if (threadIdx.x == 0) *rounds_ = round_;
  }

  __device__ __forceinline__ int ranks() const { return ranks_; }

 private:
  // The address in a rank's memory of the words that another rank sends to this thread.
  __device__ __forceinline__ char* place(int owner, int sender) const {
    const int64_t slot = (round_ % 2) * (ranks_ - 1) + sender - (sender > owner);
    return memory_[owner] + buffers_ + slot * kExchangeBytes + threadIdx.x * 16;
  }

  template <typename Take>
  __device__ __forceinline__ void swap(u64 mine, int count, Take take) {
    ++round_;
    if (int(threadIdx.x) < count) {
      const uint4 sent = make_uint4(unsigned(mine), round_, unsigned(mine >> 32), round_);
#pragma unroll
      for (int peer = 0; peer < kMostRanks; ++peer)
        if (peer < ranks_ && peer != rank_) store_system(place(peer, rank_), sent);
      uint4 words[kMostRanks];
      int missing;
      do {
        missing = -1;
#pragma unroll
        for (int peer = 0; peer < kMostRanks; ++peer) {
          words[peer] = sent;
          if (peer < ranks_ && peer != rank_) words[peer] = load_system(place(rank_, peer));
        }
#pragma unroll
        for (int peer = 0; peer < kMostRanks; ++peer)
          if (words[peer].y != round_ || words[peer].w != round_) missing = peer;
      } while (missing >= 0 && !patience_.is_over(missing));
#pragma unroll
      for (int peer = 0; peer < kMostRanks; ++peer) {
        if (peer >= ranks_) continue;
        const bool came = words[peer].y == round_ && words[peer].w == round_;
        take(peer, came ? u64(words[peer].z) << 32 | words[peer].x : 0);
      }
    }
    __syncthreads();
  }

  char* const* memory_;
  int rank_, ranks_;
  GatheredWords& words_;
  Patience patience_;
  unsigned* rounds_;
  unsigned round_;
  int64_t buffers_;
};

}  // namespace tridecode
