// all_reduce.cu's sum of two ranks, whose rows copy engines exchange: out[t, :] = residual[t, :] +
// biases + both partials, and normed[t, :] = norm(out[t, :]). One block per row.
//
// A copy engine needs no multiprocessor, so the copy runs on a second stream next to a GEMM. A
// kernel that sends rows would not: a GEMM's blocks take all registers of a multiprocessor. Behind
// its rows each rank copies a word, for which the blocks of the sum wait.
//
// The sum of two numbers does not depend on their order: both ranks get the bits of all_reduce.cu.
//
// Bytes moved, besides the copies: T * C * sizeof(X) for each of partial, copied, residual, out and
// normed.
#include "ranks/peer_rows.cuh"

namespace tridecode {
using namespace peers;
namespace {

// The rows that a copy engine wrote before this word are visible after it. A fence instead would
// take microseconds in every block.
__device__ __forceinline__ unsigned int load_arrival(const unsigned int* from) {
  unsigned int word;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

// Three blocks of a multiprocessor keep enough rows in flight; more units leave no registers.
template <typename X, int ITEMS>
__global__ void __launch_bounds__(kThreads, ITEMS == 1 ? 3 : 1)
    add_copied_rows(const __grid_constant__ Rows rows) {
  constexpr int N = Unit<X>::kNumbers;
  // The norm's constants are loaded late, from the L2 cache, so that they take no registers before.
  constexpr bool kAhead = false;
  const auto& task = rows.task;
  __shared__ float shared[2][32];
  let_successor_start();
  wait_for_predecessor_alone();
  const int first = threadIdx.x * N, step = blockDim.x * N;
  const int64_t row = blockIdx.x;
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (first + i * step < task.columns) body(i, first + i * step);
  };
  float v[ITEMS][N] = {};  // addends of the sum, then the row
  Unit<X> weight[ITEMS], shift[ITEMS], mine[ITEMS], theirs[ITEMS];
  if (threadIdx.x == 0) {
    RowPatience patience{rows};
    const auto word = static_cast<const unsigned int*>(task.arrived) + (row >= task.first_part);
    while (load_arrival(word) != unsigned(task.arrival) && !patience.is_over(1 - task.rank)) {
    }
  }
  __syncthreads();
  each_item([&](int i, int c) {
    mine[i].load(task.partial, row * task.partial_stride + c);
    theirs[i].words = __ldcg(reinterpret_cast<const uint4*>(static_cast<const X*>(task.copied) +
                                                            row * task.columns + c));
  });
  load_constants<kAhead>(task, row, true, each_item, v, weight, shift);
  each_item([&](int i, int c) {
    mine[i].fill_empty(), theirs[i].fill_empty();  // as rows that are sent without flags
    float sums[N] = {};
    mine[i].add_to(sums), theirs[i].add_to(sums);
#pragma unroll
    for (int j = 0; j < N; ++j) v[i][j] = to_float(from_float<X>(sums[j] + v[i][j]));
    if (!task.out) return;
    Unit<X> rounded;
    rounded.round(v[i]);
    rounded.store(task.out, row * task.out_stride + c);
  });
  if (task.norm_weight) store_norm<kAhead>(task, row, each_item, v, weight, shift, shared);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_copy_rows(void* to, const void* rows, int64_t bytes, void* word_to, const void* word,
                        void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const int status =
      check(cudaMemcpyAsync(to, rows, bytes, cudaMemcpyDeviceToDevice, on), "copy_rows");
  if (status) return status;
  return check(cudaMemcpyAsync(word_to, word, 4, cudaMemcpyDeviceToDevice, on), "copy_rows");
}

int tridecode_add_copied(const tridecode_all_reduce_task* task, void* stream) {
  const auto& t = *task;
  if (t.ranks != 2) return fail("add_copied: %d ranks; wanted 2", t.ranks);
  return for_dtype(t.dtype, "add_copied", [&](auto zero) {
    using X = decltype(zero);
    constexpr int N = Unit<X>::kNumbers, kMost = kThreads * kItems * N;
    if (t.columns < N || t.columns % N || t.columns > kMost)
      return fail("add_copied: %d columns; wanted a multiple of %d up to %d", t.columns, N, kMost);
    const Rows rows{t, {}};
    const int items = ceil_div(t.columns, N * kThreads);
    const int threads = ceil_div(t.columns, N * (items > 2 ? 4 : items) * 32) * 32;
    const auto kernel = items == 1   ? add_copied_rows<X, 1>
                        : items == 2 ? add_copied_rows<X, 2>
                                     : add_copied_rows<X, 4>;
    return launch("add_copied", kernel, t.tokens, threads, 0, stream, rows);
  });
}
