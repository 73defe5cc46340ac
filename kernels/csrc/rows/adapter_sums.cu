// sums = norm(x) * a^T for the rows of a step that have a LoRA adapter, and normed = norm(x) for
// all rows.
//
// A cluster of eight blocks multiplies 16 ranks of an adapter by up to 16 rows that use it. Each
// block takes an eighth of the inputs, its warps take turns, and the blocks add up their sums
// through shared memory. An RMSNorm is applied to the sums: x is multiplied by the weight of the
// norm, and the sum by the norm of its row.
//
// Before its wait, a block looks up its adapter and prefetches its part of a, and lets the GEMM
// start, which prefetches its weights. Its shared memory fits beside a block of a GEMM.
//
// Bytes moved: rank * inputs * sizeof(X) per adapter, and the rows of x once per 16 ranks, from L2.
// Bench: python -m tridecode.tools.bench.studies.adapters
#include "api/adapters.h"
#include "common/common.cuh"
#include "common/hopper.cuh"
#include "common/row_norm.cuh"
#include "rows/cluster_memory.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSlices = 8;                  // blocks per cluster
constexpr int kRanks = 16;                  // of an instruction
constexpr int kChunk = 32;                  // inputs of two instructions
constexpr int kEights = 2;                  // eights of rows at a time
constexpr int kRankBlocks = 4, kItems = 8;  // clusters: ranks, and items, computed at once
constexpr int kNormVectors = 4;             // of 8 inputs of a row of `normed`, per thread

using Task = tridecode_adapter_sums_task;
using Pair = tridecode_adapter_pair;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The sum of `own` over the blocks of the cluster.
__device__ __forceinline__ float sum_of_blocks(const float* own) {
  float sum = 0.0f;
#pragma unroll
  for (int block = 0; block < kSlices; ++block) sum += load_from(own, block);
  return sum;
}

struct Shared {
  float parts[kWarps][kEights][8 * kRanks];  // [token][rank]
  float squares[kWarps][kEights * 8];
  float sums[kEights][8 * kRanks];
  float total_squares[kEights * 8];
  float norm_sums[2][32];
};

// The chunks of inputs of this block.
struct Slice {
  int begin, end;
  __device__ explicit Slice(int inputs) {
    const int chunks = (inputs + kChunk - 1) / kChunk;
    begin = chunks * int(blockIdx.x) / kSlices, end = chunks * (int(blockIdx.x) + 1) / kSlices;
  }
};

// Multiplies ranks from `first` on by the rows of `order` from `begin` to `end`, at most 8 *
// kEights, and writes the sums of this warp.
template <typename X, bool NORM>
__device__ __forceinline__ void multiply_rows(const Task& task, const Pair& pair, int first,
                                              int begin, int end, Shared& shared) {
  // powers of two that keep x * weight in the range of float16
  constexpr uint32_t kNoRow = ~0u;
  constexpr float kBefore = std::is_same<X, half>::value ? 1.0f / 64 : 1.0f;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const X* const x = static_cast<const X*>(task.x);
  const X* const weight = static_cast<const X*>(task.norm_weight);
  const X* const a = static_cast<const X*>(pair.a) + int64_t(first + g) * task.inputs;
  const bool has_low = first + g < pair.rank, has_high = first + g + 8 < pair.rank;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  uint32_t rows[kEights];  // where they begin in x
  float sums[kEights][4] = {}, squares[kEights] = {};
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const int at = begin + 8 * j + g;
    rows[j] = at < end ? task.order[at] * uint32_t(task.x_stride) : kNoRow;
  }
  const Slice slice(task.inputs);
#pragma unroll(NORM ? 1 : 2)
  for (int chunk = slice.begin + warp; chunk < slice.end; chunk += kWarps) {
    const int input = kChunk * chunk + 8 * t;
    const bool inside = input < task.inputs;
    uint4 words[kEights];
    const uint4 low = inside && has_low ? load_stream(a + input) : zeros;
    const uint4 high =
        inside && has_high ? load_stream(a + int64_t(8) * task.inputs + input) : zeros;
#pragma unroll
    for (int j = 0; j < kEights; ++j)
      words[j] = inside && rows[j] != kNoRow
                     ? __ldcg(reinterpret_cast<const uint4*>(x + (rows[j] + uint32_t(input))))
                     : zeros;
    if constexpr (NORM) {
      float factors[8] = {};
      if (inside) load8(weight + input, factors);
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 both = unpack<X>(get(words[j], i));
          squares[j] = fmaf(both.x, both.x, fmaf(both.y, both.y, squares[j]));
          put(words[j], i,
              pack<X>(both.x * factors[2 * i] * kBefore, both.y * factors[2 * i + 1] * kBefore));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      multiply_add<X>(sums[j], low.x, high.x, low.y, high.y, words[j].x, words[j].y);
      multiply_add<X>(sums[j], low.z, high.z, low.w, high.w, words[j].z, words[j].w);
    }
  }
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    float* const to = shared.parts[warp][j];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[(2 * t + i % 2) * kRanks + g + i / 2 * 8] = sums[j][i] * (NORM ? 1.0f / kBefore : 1.0f);
    if constexpr (NORM) {
      squares[j] += __shfl_xor_sync(kAll, squares[j], 1);
      squares[j] += __shfl_xor_sync(kAll, squares[j], 2);
      if (t == 0) shared.squares[warp][8 * j + g] = squares[j];
    }
  }
}

// Adds up the sums of all warps and blocks and stores them.
template <typename X, bool NORM>
__device__ __forceinline__ void store_sums(const Task& task, int first, int begin, int end,
                                           Shared& shared) {
  __syncthreads();
  for (int i = threadIdx.x; i < kEights * 8 * kRanks; i += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += (&shared.parts[warp][0][0])[i];
    (&shared.sums[0][0])[i] = sum;
  }
  if (NORM && threadIdx.x < kEights * 8) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += shared.squares[warp][threadIdx.x];
    shared.total_squares[threadIdx.x] = sum;
  }
  cluster_sync_memory();
  constexpr int kOwn = kEights * 8 / kSlices;
  const int row = int(blockIdx.x) * kOwn + threadIdx.x / kRanks, rank = threadIdx.x % kRanks;
  if (threadIdx.x < kOwn * kRanks && begin + row < end) {
    float sum = sum_of_blocks(&shared.sums[0][0] + row * kRanks + rank);
    if (NORM)
      sum *= rsqrtf(sum_of_blocks(shared.total_squares + row) / task.inputs + task.norm_eps);
    if (first + rank < task.sum_ranks)
      task.sums[int64_t(task.order[begin + row]) * task.sum_ranks + first + rank] = sum;
  }
  cluster_sync_memory();  // no block overwrites its sums, or exits, before all have read them
}

#endif

// Writes a row of `normed`, in all threads of a block.
template <typename X>
__device__ __forceinline__ void norm_one_row(const Task& task, float (&shared)[2][32]) {
  const int row = int(blockIdx.z) * kSlices + int(blockIdx.x);
  const X* const weight = static_cast<const X*>(task.norm_weight);
  const X* const x = static_cast<const X*>(task.x) + row * task.x_stride;
  X* const out = static_cast<X*>(task.normed) + row * task.normed_stride;
  uint4 factors[kNormVectors] = {};
  float v[kNormVectors][8] = {};
  auto each_item = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const int column = 8 * (threadIdx.x + i * kThreads);
      if (row < task.tokens && column < task.inputs) body(i, column);
    }
  };
  each_item([&](int i, int c) { factors[i] = *reinterpret_cast<const uint4*>(weight + c); });
  let_successor_start();
  wait_for_predecessor_alone();
  each_item([&](int i, int c) { load8(x + c, v[i]); });
  const RowNorm norm = block_row_norm(v, each_item, false, task.inputs, task.norm_eps, shared);
  each_item([&](int i, int c) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 both = unpack<X>(get(factors[i], j));
      v[i][2 * j] = norm(v[i][2 * j], both.x, 0.0f);
      v[i][2 * j + 1] = norm(v[i][2 * j + 1], both.y, 0.0f);
    }
    store8(out + c, v[i]);
  });
}

// Up to 8 * kEights rows of an adapter.
struct Item {
  int slot, begin, end;
};

// Returns item `number` of a step, with slot -1 behind the last.
__device__ __forceinline__ Item find_item(const Task& task, int number) {
  for (int group = 0; group < task.num_groups; ++group) {
    const int slot = task.groups[2 * group];
    if (slot < 0) break;
    const int begin = task.groups[2 * group + 1], end = task.groups[2 * group + 3];
    const int items = (end - begin + 8 * kEights - 1) / (8 * kEights);
    const int row = begin + 8 * kEights * number;
    if (number < items) return {slot, row, min(end, row + 8 * kEights)};
    number -= items;
  }
  return {-1, 0, 0};
}

template <typename X, bool NORM>
__global__ void __launch_bounds__(kThreads, 4) adapter_sums(const __grid_constant__ Task task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ Shared shared;
  if constexpr (NORM) {
    if (blockIdx.y == kRankBlocks) {
      norm_one_row<X>(task, shared.norm_sums);
      return;
    }
  }
  int number = blockIdx.z;
  Item item = find_item(task, number);
  Pair pair = {};
  if (item.slot >= 0) pair = task.pairs[item.slot * task.pair_stride];
  // Blocks without work end at once, except those of the first cluster, which keep this kernel from
  // ending before its predecessor.
  const bool idle = kRanks * int(blockIdx.y) >= pair.rank;
  if (idle && number + blockIdx.y > 0 && find_item(task, number + kItems).slot < 0) return;
  if (!idle) {
    const Slice slice(task.inputs);
    const int first = kRanks * blockIdx.y, lines = (slice.end - slice.begin + 1) / 2;  // 128 bytes
    for (int i = threadIdx.x; i < kRanks * lines; i += kThreads) {
      const int rank = first + i / lines, input = kChunk * (slice.begin + i % lines * 2);
      if (rank < pair.rank && input < task.inputs)
        prefetch_l2(static_cast<const X*>(pair.a) + int64_t(rank) * task.inputs + input);
    }
  }
  let_successor_start();
  wait_for_predecessor_alone();
  while (item.slot >= 0) {
    for (int first = kRanks * blockIdx.y; first < pair.rank; first += kRanks * kRankBlocks) {
      multiply_rows<X, NORM>(task, pair, first, item.begin, item.end, shared);
      store_sums<X, NORM>(task, first, item.begin, item.end, shared);
    }
    number += kItems;
    item = find_item(task, number);
    if (item.slot >= 0) pair = task.pairs[item.slot * task.pair_stride];
  }
#endif
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_adapter_sums(const tridecode_adapter_sums_task* given, void* stream) {
  const Task& task = *given;
  if (device().capability < 90) return fail("adapter_sums: needs compute capability 9.0");
  if (task.inputs % 8 || task.x_stride % 8 || !aligned16(task.x) || !aligned16(task.norm_weight))
    return fail("adapter_sums: %d inputs, stride %lld, or an array, not in whole vectors",
                task.inputs, (long long)task.x_stride);
  if (task.normed &&
      (!task.norm_weight || task.inputs > 8 * kThreads * kNormVectors ||
       task.tokens > kSlices * kItems || task.normed_stride % 8 || !aligned16(task.normed)))
    return fail("adapter_sums: %d normed rows of %d; wanted up to %d of %d, in whole vectors",
                task.tokens, task.inputs, kSlices * kItems, 8 * kThreads * kNormVectors);
  return for_16_bit_dtype(task.dtype, "adapter_sums", [&](auto zero) {
    using X = decltype(zero);
    const auto kernel = task.norm_weight ? adapter_sums<X, true> : adapter_sums<X, false>;
    return launch_in_clusters("adapter_sums", kernel, kSlices,
                              dim3(kSlices, kRankBlocks + (task.normed != nullptr), kItems),
                              kThreads, 0, stream, task);
  });
}
