// out[t, :] = residual[t, :] + biases + the sum over the ranks of partial[t, :], and
// normed[t, :] = norm(out[t, :]).  One block per row, which stays in registers.
//
// This file sums in one shot; all_reduce_two_shots.cu needs two shots but sends fewer bytes for
// more than two ranks.
//
// One shot: a block pushes its row into the memory of every peer with 16-byte stores, then waits
// until the rows of the peers have arrived in its own memory. Only data is exchanged, without
// flags: empty memory holds the bits of -0.0, and a -0.0 in the data is sent as 0.0. The reader
// empties what it has read. Two alternating buffers suffice: a peer writes to a buffer again only
// after it has received the rows of the launch in between, which this rank sends when its reads are
// over. A counter in device memory selects the buffer, so that a CUDA graph may be replayed.
//
// With two ranks, a GEMM may have sent the rows that it computed (sent_task.cuh); a block then only
// waits.
//
// Every rank adds in rank order in float32, so that all get the same bits.
//
// Bytes moved: (ranks - 1) * T * C * sizeof(X) in and out, and about 6 times that in local memory.
// Bench: python -m tridecode.tools.bench.studies.all_reduce (two GPUs)
//
// The push without flags is that of NCCL's LL protocols and of TensorRT-LLM's Lamport kernels.
#include <cstring>
#include <type_traits>

#include "api/ranks.h"
#include "ranks/peer_rows.cuh"

namespace tridecode {
using namespace peers;
namespace {

constexpr int kFillThreads = 256;

template <typename X, int ITEMS, int RANKS>
__global__ void __launch_bounds__(kThreads, 1) all_reduce_rows(const __grid_constant__ Rows rows) {
  constexpr int N = Unit<X>::kNumbers;
  constexpr uint32_t kEmpty = empty_word<X>();
  constexpr bool kAhead = ITEMS <= 2;  // registers suffice to load the norm's constants ahead
  const auto& task = rows.task;
  __shared__ float shared[2][32];
  __shared__ unsigned int shared_turn;
  const int first = threadIdx.x * N, step = blockDim.x * N;
  const int64_t row = blockIdx.x;
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (first + i * step < task.columns) body(i, first + i * step);
  };
  // Same order as in norm.cu. task.early: the data that is loaded before the wait was written by
  // kernels older than the predecessor.
  let_successor_start();
  if (!task.early) wait_for_predecessor_alone();
  if (threadIdx.x == 0) shared_turn = take_turn(task);
  float v[ITEMS][N] = {};  // addends of the sum
  Unit<X> weight[ITEMS], shift[ITEMS];
  load_constants<kAhead>(task, row, true, each_item, v, weight, shift);
  __syncthreads();
  const int64_t turn = shared_turn;
  if (task.early) wait_for_predecessor_alone();
  // The predecessor may be a GEMM that reads the word: not before the wait.
  if (RANKS == 2 && row == 0 && threadIdx.x == 0)
    static_cast<State*>(task.memory)->next = 1 - unsigned(turn);

  // The address in a rank's memory of another rank's data.
  auto place = [&](int owner, int sender, int c) {
    const int64_t slot = turn * (task.ranks - 1) + sender - (sender > owner);
    return rows.memory[owner] + kPeerHeader + slot * task.slot_bytes +
           (row * task.columns + c) * int64_t(sizeof(X));
  };
  Unit<X> mine[ITEMS];
  each_item([&](int i, int c) { mine[i].load(task.partial, row * task.partial_stride + c); });
  each_item([&](int i, int c) {
    mine[i].fill_empty();
    if (RANKS == 2 && task.sent) return;
#pragma unroll
    for (int peer = 0; peer < RANKS; ++peer)
      if (peer < task.ranks && peer != task.rank)
        store_system(place(peer, task.rank, c), mine[i].words);
  });

  std::conditional_t<RANKS == 2, RowPatience, SharedPatience> patience{rows};
  each_item([&](int i, int c) {
    Unit<X> theirs[RANKS];
    int missing;
    do {
      missing = -1;
#pragma unroll
      for (int peer = 0; peer < RANKS; ++peer) {
        theirs[peer] = mine[i];
        if (peer < task.ranks && peer != task.rank)
          theirs[peer].words = load_system(place(task.rank, peer, c));
      }
#pragma unroll
      for (int peer = 0; peer < RANKS; ++peer) {
        const uint4 words = theirs[peer].words;
        if (words.x == kEmpty || words.y == kEmpty || words.z == kEmpty || words.w == kEmpty)
          missing = peer;
      }
    } while (missing >= 0 && !patience.is_over(missing));
    float sums[N] = {};
#pragma unroll
    for (int peer = 0; peer < RANKS; ++peer) {
      if (peer < task.ranks) theirs[peer].add_to(sums);
      if (peer < task.ranks && peer != task.rank)
        store_system(place(task.rank, peer, c), make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
    }
    if constexpr (RANKS == 2) {
#pragma unroll
      for (int j = 0; j < N; ++j) v[i][j] = to_float(from_float<X>(sums[j] + v[i][j]));
      if (!task.out) return;
      Unit<X> rounded;
      rounded.round(v[i]);
      rounded.store(task.out, row * task.out_stride + c);
    } else {  // the bits of two shots
      const Unit<X> rounded = finish<X>(sums, v[i]);
      if (task.out) rounded.store(task.out, row * task.out_stride + c);
    }
  });
  if (task.norm_weight) store_norm<kAhead>(task, row, each_item, v, weight, shift, shared);
}

// The words of the sums' buffers; zeros before them and after them.
__global__ void fill_words(uint32_t* out, int64_t sum_words, int64_t count, uint32_t word) {
  wait_for_predecessor();
  for (int64_t i = blockIdx.x * int64_t(kFillThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kFillThreads)
    out[i] = i < kPeerHeader / 4 || i >= sum_words ? 0 : word;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_all_reduce(const tridecode_all_reduce_task* task, void* stream) {
  const auto& t = *task;
  if (t.ranks < 2 || t.ranks > kMostRanks || t.rank < 0 || t.rank >= t.ranks)
    return fail("all_reduce: rank %d of %d; wanted 2 to %d ranks", t.rank, t.ranks, kMostRanks);
  if (t.tokens < 0 || t.tokens >= int(kTickets / 2)) return fail("all_reduce: %d tokens", t.tokens);
  return for_dtype(t.dtype, "all_reduce", [&](auto zero) {
    using X = decltype(zero);
    constexpr int N = Unit<X>::kNumbers, kMost = kThreads * kItems * N;
    if (t.columns < N || t.columns % N || t.columns > kMost)
      return fail("all_reduce: %d columns; wanted a multiple of %d up to %d", t.columns, N, kMost);
    const int lines = t.two_shots ? 2 * ceil_div(t.tokens, t.ranks) : t.tokens;
    if (int64_t(lines) * t.columns * int64_t(sizeof(X)) > t.slot_bytes)
      return fail("all_reduce: %d rows of %d columns need more than %lld bytes", t.tokens,
                  t.columns, (long long)t.slot_bytes);
    const int64_t strides = t.partial_stride | t.residual_stride | t.out_stride | t.normed_stride;
    const bool aligned = aligned16(t.partial) && aligned16(t.residual) && aligned16(t.out) &&
                         aligned16(t.normed) && aligned16(t.bias) && aligned16(t.second_bias) &&
                         aligned16(t.norm_weight) && aligned16(t.norm_bias);
    if (strides % N || t.slot_bytes % 16 || !aligned)
      return fail("all_reduce: rows do not begin at multiples of 16 bytes");
    Rows rows{t, {}};
    void* const memory[] = {t.memory0, t.memory1, t.memory2, t.memory3,
                            t.memory4, t.memory5, t.memory6, t.memory7};
    std::memcpy(rows.memory, memory, sizeof(memory));
    const int items = ceil_div(t.columns, N * kThreads);
    const int threads = ceil_div(t.columns, N * (items > 2 ? 4 : items) * 32) * 32;
    if (t.sent && t.ranks != 2) return fail("all_reduce: %d ranks, rows sent by a GEMM", t.ranks);
    if (t.two_shots) return launch_two_shots(rows, items, threads, stream);
    auto kernel = all_reduce_rows<X, 4, kMostRanks>;
    if (t.ranks == 2) {
      kernel = items == 1   ? all_reduce_rows<X, 1, 2>
               : items == 2 ? all_reduce_rows<X, 2, 2>
                            : all_reduce_rows<X, 4, 2>;
    } else if (items <= 2) {
      kernel = items == 1 ? all_reduce_rows<X, 1, kMostRanks> : all_reduce_rows<X, 2, kMostRanks>;
    }
    return launch(launch_name(t), kernel, t.tokens, threads, 0, stream, rows);
  });
}

int64_t tridecode_peer_bytes(int ranks, int64_t slot_bytes) {
  return kPeerHeader + 2 * (ranks - 1) * slot_bytes;
}

int tridecode_peer_allocate(int64_t sum_bytes, int64_t bytes, int dtype, void* address,
                            void* handle) {
  void* made = nullptr;
  int status = check(cudaMalloc(&made, bytes), "cudaMalloc");
  if (status) return status;
  const uint32_t word = dtype == kFloat32 ? empty_word<float>() : empty_word<half>();
  status = launch("fill_words", fill_words, 132, kFillThreads, 0, nullptr, (uint32_t*)made,
                  sum_bytes / 4, bytes / 4, word);
  if (!status) status = check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  cudaIpcMemHandle_t found;
  if (!status) status = check(cudaIpcGetMemHandle(&found, made), "cudaIpcGetMemHandle");
  if (status) {
    cudaFree(made);
    return status;
  }
  std::memcpy(handle, &found, sizeof(found));
  std::memcpy(address, &made, sizeof(made));
  return 0;
}

int tridecode_peer_open(const void* handle, void* address) {
  cudaIpcMemHandle_t given;
  std::memcpy(&given, handle, sizeof(given));
  void* opened = nullptr;
  const int status = check(cudaIpcOpenMemHandle(&opened, given, cudaIpcMemLazyEnablePeerAccess),
                           "cudaIpcOpenMemHandle");
  if (!status) std::memcpy(address, &opened, sizeof(opened));
  return status;
}

int tridecode_peer_close(void* opened) {
  return check(cudaIpcCloseMemHandle(opened), "cudaIpcCloseMemHandle");
}

int tridecode_peer_free(void* allocated) { return check(cudaFree(allocated), "cudaFree"); }
