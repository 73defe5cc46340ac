// Shared by gemm_mma.cu and gemm_packed_mma.cu, the products of 1 to 8 tokens by mma.sync: the
// division of a product into tiles of 16 weight rows times slices of the inputs.
#pragma once
#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_norm.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;                           // of a tile
constexpr int kMaxTokens = 8;                       // columns of the instruction
constexpr int kBuffers = 2;                         // of the warps' sums
constexpr int kSums = kWarps * kRows * kMaxTokens;  // floats of a buffer
constexpr int kMaxNormTokens = 2;

// Return 0, or fail if the kernel has no instance for the task or scratch memory does not suffice.
int check_units(const char* name, const GemmTask& task) {
  if (int status = check_exact_cache(name, task)) return status;
  if (task.tokens > kMaxTokens || task.split < 1 ||
      (task.norm_weight && (task.split > 1 || task.tokens > kMaxNormTokens)))
    return fail("%s: no instance for %d tokens, split %d, %s norm", name, task.tokens, task.split,
                task.norm_weight ? "with" : "without");
  const int tiles = ceil_div(task.outputs, kRows);
  const int64_t needed = int64_t(tiles) * task.split * (kRows / 2) * ((task.tokens + 1) / 2) * 16;
  if (task.split > 1 && (needed > task.partial_bytes || tiles > task.num_counters))
    return fail("%s: %lld bytes of partial sums and %d counters; there are %lld and %d", name,
                (long long)needed, tiles, (long long)task.partial_bytes, task.num_counters);
  return 0;
}

// Return the number of blocks for `units`. shared: bytes per block; most: blocks per
// multiprocessor.
int blocks_of(int units, int shared, int most) {
  const int fit = device().shared_bytes / (shared + 2048);
  const int room = device().multiprocessors * (fit < 1 ? 1 : fit < most ? fit : most);
  return units < room ? units : room;
}

}  // namespace
}  // namespace tridecode
