// all_reduce.cu's sums in two shots, for more than two ranks: row r is added up by rank r % ranks,
// its owner.  One block per row.
//
// A block of another rank's row pushes its part to the owner, waits for the finished row (the sum,
// biases and residual, rounded), and computes the norm of it itself. The owner's block waits for
// the parts, adds them in rank order in float32, and pushes the finished row to every peer. The
// result is bit-identical to one shot, on every rank: the owner's biases and residual are used.
//
// A slot holds the data from one rank to another: two lines for each group of `ranks` rows, the
// part of the row that the receiver owns, and the finished row that the sender owns.
//
// Empty memory holds the bits of -0.0, as in one shot, and two alternating buffers suffice here
// too, even if launches of one and of two shots alternate. A rank ends a launch only after it has
// seen every other rank's contribution: it has received that rank's part, or a finished row
// computed from it. A rank sends a part only after its own reads of the previous launch are over.
// So once a rank has ended launch n + 1, no rank still reads launch n, whose buffer is written
// next.
//
// A waiting launch does not block the launches that it waits for: blocks start in the order of
// rows, and the first unfinished row is running on every rank.
//
// Bytes moved: 2 * (ranks - 1) / ranks * T * C * sizeof(X) in and out; in one shot ranks - 1.
// Bench: python -m tridecode.tools.bench.studies.all_reduce --ranks 4
//
// Two shots: a reduce-scatter and an all-gather, as in Thakur, Rabenseifner and Gropp 2005.
#include "ranks/peer_rows.cuh"

namespace tridecode {
using namespace peers;
namespace {

// Place in a rank's peer memory of the block's row that another rank sends.
template <typename X>
struct Place {
  const Rows& rows;
  int64_t turn;
  int owner;

  __device__ __forceinline__ char* operator()(int receiver, int sender, int c) const {
    const auto& task = rows.task;
    const int64_t slot = turn * (task.ranks - 1) + sender - (sender > receiver);
    const int64_t line = blockIdx.x / unsigned(task.ranks) * 2 + (sender == owner);
    return rows.memory[receiver] + kHeader + slot * task.slot_bytes +
           (line * task.columns + c) * int64_t(sizeof(X));
  }
};

// Waits for a unit of every rank's part, adds them up and pushes the finished unit, unless a part
// did not arrive.
template <typename X>
__device__ __forceinline__ Unit<X> add_up(const Rows& rows, const Place<X>& place, int c,
                                          const Unit<X>& mine, SharedPatience& patience,
                                          float (&v)[Unit<X>::kNumbers]) {
  const auto& task = rows.task;
  Unit<X> parts[kMostRanks];
  int missing;
  do {
    missing = -1;
#pragma unroll
    for (int peer = 0; peer < kMostRanks; ++peer) {
      parts[peer] = mine;
      if (peer < task.ranks && peer != task.rank)
        parts[peer].words = load_system(place(task.rank, peer, c));
    }
#pragma unroll
    for (int peer = 0; peer < kMostRanks; ++peer)
      if (parts[peer].is_missing()) missing = peer;
  } while (missing >= 0 && !patience.is_over(missing));
  float sums[Unit<X>::kNumbers] = {};
#pragma unroll
  for (int peer = 0; peer < kMostRanks; ++peer) {
    if (peer < task.ranks) parts[peer].add_to(sums);
    if (peer < task.ranks && peer != task.rank) empty_unit<X>(place(task.rank, peer, c));
  }
  const Unit<X> finished = finish<X>(sums, v);
#pragma unroll
  for (int peer = 0; peer < kMostRanks; ++peer)
    if (missing < 0 && peer < task.ranks && peer != task.rank)
      store_system(place(peer, task.rank, c), finished.words);
  return finished;
}

// Waits for a unit of the finished row from its owner.
template <typename X>
__device__ __forceinline__ Unit<X> receive(const Rows& rows, const Place<X>& place, int c,
                                           SharedPatience& patience) {
  char* const from = place(rows.task.rank, place.owner, c);
  Unit<X> finished;
  do {
    finished.words = load_system(from);
  } while (finished.is_missing() && !patience.is_over(place.owner));
  empty_unit<X>(from);
  return finished;
}

template <typename X, int ITEMS>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_owned_rows(const __grid_constant__ Rows rows) {
  constexpr int N = Unit<X>::kNumbers;
  constexpr bool kAhead = ITEMS <= 2;  // registers suffice to load the norm's constants ahead
  const auto& task = rows.task;
  __shared__ float shared[2][32];
  __shared__ unsigned int shared_turn;
  const int first = threadIdx.x * N, step = blockDim.x * N;
  const int64_t row = blockIdx.x;
  const int owner = blockIdx.x % unsigned(task.ranks);
  const bool owns = owner == task.rank;
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (first + i * step < task.columns) body(i, first + i * step);
  };
  // as in all_reduce.cu
  let_successor_start();
  if (!task.early) wait_for_predecessor_alone();
  if (threadIdx.x == 0) shared_turn = take_turn(task);
  float v[ITEMS][N] = {};  // addends of the sum, then the row
  Unit<X> weight[ITEMS], shift[ITEMS];
  load_constants<kAhead>(task, row, owns, each_item, v, weight, shift);
  __syncthreads();
  const Place<X> place{rows, shared_turn, owner};
  if (task.early) wait_for_predecessor_alone();

  Unit<X> mine[ITEMS];
  each_item([&](int i, int c) {
    mine[i].load(task.partial, row * task.partial_stride + c);
    mine[i].fill_empty();
  });
  if (!owns)
    each_item([&](int i, int c) { store_system(place(owner, task.rank, c), mine[i].words); });

  // An owner that arrived in time has already named the missing rank when the others give up
  // waiting for the owner.
  SharedPatience patience(rows, owns ? 1 : 2);
  each_item([&](int i, int c) {
    Unit<X> finished;
    if (owns) {
      finished = add_up<X>(rows, place, c, mine[i], patience, v[i]);
    } else {
      finished = receive<X>(rows, place, c, patience);
      finished.add_to(v[i]);
    }
    if (task.out) finished.store(task.out, row * task.out_stride + c);
  });
  if (task.norm_weight) store_norm<kAhead>(task, row, each_item, v, weight, shift, shared);
}

}  // namespace

int peers::launch_two_shots(const Rows& rows, int items, int threads, void* stream) {
  const auto& t = rows.task;
  return for_dtype(t.dtype, "all_reduce", [&](auto zero) {
    using X = decltype(zero);
    auto kernel = items == 1   ? all_reduce_owned_rows<X, 1>
                  : items == 2 ? all_reduce_owned_rows<X, 2>
                               : all_reduce_owned_rows<X, 4>;
    return launch(launch_name(t), kernel, t.tokens, threads, 0, stream, rows);
  });
}

}  // namespace tridecode
