// The most likely tokens of rows that request them, by the logits before biases, bans, temperature
// and penalties; and the rank and log-probability of the token that `sample` chose.
//
// keep_raw runs before `sample` and saves the logits that `sample` edits. top_log_probs runs after
// it and restores them. Several blocks scan a row in chunks of 4096 ids; the results of a chunk do
// not depend on the number of blocks. The last block to arrive merges the chunks. Blocks of other
// rows return at once, so that both kernels can be in every CUDA graph.
//
// Top 20 of a chunk: every thread finds the best of its 16 ids. The 20th best of these 256 is a
// threshold that at least 20 and at most 20 * 16 ids reach. These ids are listed and sorted 32 at a
// time. Keys include the id, so that the lower of two ids with equal logits comes first.
//
// Bytes moved: 4 * V per row that requests them.
#include "api/sampling.h"
#include "sampling/sampling_row.cuh"

namespace tridecode {
namespace {

constexpr int kTop = 20;                       // tokens per row, besides the chosen one
constexpr int kOutputs = 1 + kTop;             // ids, or values, per row
constexpr int kLanes = 32;                     // length of a sorted list: one key per lane
constexpr int kEach = 16;                      // ids per thread
constexpr int kTopChunk = kEach * kThreads;    // ids per chunk
constexpr int kMostCandidates = kTop * kEach;  // per chunk
constexpr int kEndIds = sizeof(Slot::end_ids) / sizeof(int);
constexpr int kKeepThreads = 128;

struct TopTask : tridecode_top_log_probs_task {
  int chunks, chunks_each;  // per row, per block
  int64_t row_bytes;        // scratch bytes per row
};

// Calls body(id, place) for ids whose logits `sample` may edit. place: index in the saved values.
template <typename Body>
__device__ __forceinline__ void each_edited(const TopTask& task, const Slot& s, int slot,
                                            Body body) {
  const auto visit = [&](int id, int place) {
    if (id >= 0 && id < task.vocab_size) body(id, place);
  };
  const int* const biases = task.biases + int64_t(slot) * 2 * task.bias_size;
  for (int i = threadIdx.x; i < s.num_biases; i += blockDim.x) visit(biases[2 * i], i);
  if (s.min_tokens > 0 && threadIdx.x < kEndIds)
    visit(s.end_ids[threadIdx.x], task.bias_size + threadIdx.x);
  const int* const ids = task.bad_ids + int64_t(slot) * task.bad_size;
  const int* const ends = task.bad_ends + int64_t(slot) * task.bad_size;
  for (int word = threadIdx.x; word < s.num_bad_words; word += blockDim.x)
    if (ends[word] > 0) visit(ids[ends[word] - 1], task.bias_size + kEndIds + word);
}

__global__ void __launch_bounds__(kKeepThreads) keep_raw(const __grid_constant__ TopTask task) {
  wait_for_predecessor();
  const int index = blockIdx.x, slot = task.slots[index];
  if (slot < 0) return;
  const Slot& s = task.state[slot];
  if (s.top_log_probs < 0) return;
  const float* const logits = task.logits + index * task.logits_stride;
  float* const kept = task.kept + index * task.kept_stride;
  each_edited(task, s, slot, [&](int id, int place) { kept[place] = logits[id]; });
}

// ---- sorted lists of 32 keys, the largest in lane 0

__device__ __forceinline__ u64 exchanged(u64 key, int distance, bool takes_larger) {
  const u64 other = __shfl_xor_sync(kAll, key, distance);
  return (other > key) == takes_larger ? other : key;
}

__device__ __forceinline__ u64 sorted(u64 key, int lane) {
#pragma unroll
  for (int size = 2; size <= kLanes; size *= 2) {
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2)
      key = exchanged(key, distance, ((lane & distance) == 0) == ((lane & size) == 0));
  }
  return key;
}

// Returns the 32 largest keys of two sorted lists, sorted.
__device__ __forceinline__ u64 joined(u64 a, u64 b, int lane) {
  const u64 reversed = __shfl_sync(kAll, b, kLanes - 1 - lane);
  u64 key = a > reversed ? a : reversed;
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    key = exchanged(key, distance, (lane & distance) == 0);
  return key;
}

struct TopShared {
  u64 lists[kWarps][kLanes];
  u64 candidates[kMostCandidates];
  Sum sums[kWarps];
  float chosen;
  int count, reached;
  bool is_last;
};

// Merges the sorted lists of all warps into shared.lists[0], which every thread may then read.
__device__ __forceinline__ void join_warps(TopShared& shared, u64 list) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  shared.lists[warp][lane] = list;
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
    __syncthreads();
    if (warp < half) {
      list = joined(list, shared.lists[warp + half][lane], lane);
      shared.lists[warp][lane] = list;
    }
  }
  __syncthreads();
}

struct Values {
  float x[kEach];
  int first, vocab;
  // Returns the i-th id of this thread, in ascending order.
  __device__ __forceinline__ int id(int i) const { return first + i / 4 * (4 * kThreads) + i % 4; }
  __device__ __forceinline__ bool has(int i) const { return id(i) < vocab; }
  // Adds 0, so that -0 equals 0.
  __device__ __forceinline__ u64 key(int i) const { return rank_of(x[i] + 0.0f, id(i)); }
  // Loads the logits; minus infinity beyond the vocabulary. wide: float4 loads.
  __device__ __forceinline__ void load(const float* logits, bool wide) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      if (wide && id(i) + 3 < vocab) {
        const float4 four = *reinterpret_cast<const float4*>(logits + id(i));
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      } else {
#pragma unroll
        for (int j = i; j < i + 4; ++j) x[j] = has(j) ? logits[id(j)] : -CUDART_INF_F;
      }
    }
  }
  // Returns the key of the best id; 0: none.
  __device__ __forceinline__ u64 best(float& most) const {
    int at = 0;
    most = x[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (x[i] > most) most = x[i], at = id(i) - first;
    return has(0) ? rank_of(most + 0.0f, first + at) : 0;
  }
  __device__ __forceinline__ Sum sum(float most) const {
    Sum mine = {most, 0.0f};
    if (most == -CUDART_INF_F) return mine;
#pragma unroll
    for (int i = 0; i < kEach; ++i) mine.sum += expf(x[i] - most);
    return mine;
  }
  __device__ __forceinline__ int reaching(float bound) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) count += has(i) && x[i] >= bound;
    return count;
  }
};

// Writes the best 32 keys of a chunk, its log-sum-exp, and the number of its logits that are at
// least the chosen token's.
__device__ __forceinline__ void sweep_chunk(TopShared& shared, const Values& values, u64* list,
                                            Sum* sum, int* reached) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  float most;
  const u64 best = values.best(most);
  const Sum mine = warp_merge(values.sum(most));
  if (threadIdx.x == 0) shared.count = shared.reached = 0;
  if (lane == 0) shared.sums[warp] = mine;
  join_warps(shared, sorted(best, lane));
  const u64 bound = shared.lists[0][kTop - 1];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!values.has(i) || values.key(i) < bound) continue;
    const int at = atomicAdd(&shared.count, 1);
    if (at < kMostCandidates) shared.candidates[at] = values.key(i);
  }
  int count = values.reaching(shared.chosen);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    count += __shfl_xor_sync(kAll, count, offset);
  if (lane == 0) atomicAdd(&shared.reached, count);
  __syncthreads();
  if (warp > 0) return;
  const int listed = min(shared.count, kMostCandidates);
  u64 found = 0;
  for (int first = 0; first < listed; first += kLanes) {
    const int at = first + lane;
    found = joined(found, sorted(at < listed ? shared.candidates[at] : 0, lane), lane);
  }
  __stcg(list + lane, found);
  if (lane > 0) return;
  Sum all = shared.sums[0];
  for (int w = 1; w < kWarps; ++w) all = merge(all, shared.sums[w]);
  __stcg(&sum->most, all.most);
  __stcg(&sum->sum, all.sum);
  __stcg(reached, shared.reached);
}

// Restores the saved values of columns first .. end - 1, and finds the chosen token's logit.
__device__ __forceinline__ void restore(TopShared& shared, const TopTask& task, const Slot& s,
                                        int slot, int index, int first, int end) {
  float* const logits = task.logits + index * task.logits_stride;
  const float* const kept = task.kept + index * task.kept_stride;
  const int chosen = min(max(task.tokens[index], 0), task.vocab_size - 1);
  // another block may be writing this column, but then the saved value replaces the one read here
  if (threadIdx.x == 0) shared.chosen = __ldcg(logits + chosen);
  __syncthreads();
  each_edited(task, s, slot, [&](int id, int place) {
    if (id >= first && id < end) logits[id] = kept[place];
    if (id == chosen) shared.chosen = kept[place];
  });
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 4) top_log_probs(const __grid_constant__ TopTask task) {
  __shared__ TopShared shared;
  wait_for_predecessor();
  const int index = blockIdx.y, slot = task.slots[index];
  if (slot < 0) return;
  const Slot& s = task.state[slot];
  if (s.top_log_probs < 0) return;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const float* const logits = task.logits + index * task.logits_stride;
  // scratch of a row: a list, a Sum and a count per chunk
  u64* const lists =
      reinterpret_cast<u64*>(static_cast<char*>(task.scratch) + index * task.row_bytes);
  Sum* const sums = reinterpret_cast<Sum*>(lists + kLanes * task.chunks);
  int* const reached = reinterpret_cast<int*>(sums + task.chunks);

  const int first_chunk = blockIdx.x * task.chunks_each,
            last_chunk = min(first_chunk + task.chunks_each, task.chunks);
  restore(shared, task, s, slot, index, first_chunk * kTopChunk, last_chunk * kTopChunk);
  const bool wide =
      task.logits_stride % 4 == 0 && reinterpret_cast<uintptr_t>(task.logits) % 16 == 0;
  for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
    Values values;
    values.first = chunk * kTopChunk + int(threadIdx.x) * 4, values.vocab = task.vocab_size;
    values.load(logits, wide);
    __syncthreads();  // the previous chunk has been written
    sweep_chunk(shared, values, lists + kLanes * chunk, sums + chunk, reached + chunk);
  }
  device_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.is_last = atomicAdd(task.counters + index, 1u) == gridDim.x - 1;
    if (shared.is_last) task.counters[index] = 0;  // for the next launch
  }
  __syncthreads();
  if (!shared.is_last) return;
  device_fence();

  // ---- the last block of the row
  u64 list = 0;
  for (int chunk = warp; chunk < task.chunks; chunk += kWarps)
    list = joined(list, __ldcg(lists + kLanes * chunk + lane), lane);
  join_warps(shared, list);
  if (warp > 0) return;
  Sum sum = {-CUDART_INF_F, 0.0f};
  int rank = 0;
  for (int i = lane; i < task.chunks; i += kLanes) {
    sum = merge(sum, {__ldcg(&sums[i].most), __ldcg(&sums[i].sum)});
    rank += __ldcg(reached + i);
  }
  sum = warp_merge(sum);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    rank += __shfl_xor_sync(kAll, rank, offset);
  const float rest = logf(__shfl_sync(kAll, sum.sum, 0));
  const float most = __shfl_sync(kAll, sum.most, 0);
  int* const ids = task.top + int64_t(index) * 2 * kOutputs;
  float* const values = reinterpret_cast<float*>(ids + kOutputs);
  if (lane == 0) ids[0] = rank, values[0] = (shared.chosen - most) - rest;
  const u64 key = shared.lists[0][lane];
  if (lane < kTop) {
    ids[1 + lane] = key ? id_of(key) : -1;  // the vocabulary may have fewer
    values[1 + lane] = key ? (value_of(key) - most) - rest : -CUDART_INF_F;
  }
}

int64_t top_row_bytes(int chunks) {
  const int64_t bytes = chunks * int64_t(kLanes * sizeof(u64) + sizeof(Sum) + sizeof(int));
  return (bytes + 15) / 16 * 16;
}

TopTask top_task(const tridecode_top_log_probs_task& given) {
  TopTask task = {given};
  task.chunks = ceil_div(task.vocab_size, kTopChunk);
  // 8 blocks per multiprocessor, shared by the rows
  const int blocks = 8 * device().multiprocessors / task.num_rows;
  const int splits = blocks < 1 ? 1 : blocks < task.chunks ? blocks : task.chunks;
  task.chunks_each = ceil_div(task.chunks, splits);
  task.row_bytes = top_row_bytes(task.chunks);
  return task;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int64_t tridecode_top_log_probs_scratch(int max_rows, int vocab_size) {
  return max_rows * top_row_bytes(ceil_div(vocab_size, kTopChunk));
}

int tridecode_keep_raw_logits(const tridecode_top_log_probs_task* given, void* stream) {
  if (given->num_rows <= 0) return 0;
  return launch("keep_raw_logits", keep_raw, given->num_rows, kKeepThreads, 0, stream,
                top_task(*given));
}

int tridecode_top_log_probs(const tridecode_top_log_probs_task* given, void* stream) {
  if (given->num_rows <= 0) return 0;
  const TopTask task = top_task(*given);
  const dim3 grid(ceil_div(task.chunks, task.chunks_each), task.num_rows);
  return launch("top_log_probs", top_log_probs, grid, kThreads, 0, stream, task);
}
