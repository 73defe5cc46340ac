// The next token of each row, in one launch: biases, mask, bad words, n-grams, temperature,
// penalties, minimum length, log-probability, then the largest logit or a draw after min-p, top-k,
// top-p and typical-p, and the update of the sequence's slot.
//
// Several blocks sweep a row once, in chunks of 2048 ids whose results do not depend on how many
// blocks there are; the last block to arrive finishes the row. Greedy rows without penalties, mask
// and log-probs have a loop of their own with more loads in flight. Greedy rows and rows that draw
// from the whole vocabulary (the largest logit plus Gumbel noise) then only need the best of the
// blocks' winners. For top-k and top-p the sweep stores the maximum of every 64 ids: the k-th
// largest maximum is a lower bound of the k-th largest logit, so that few ids are read again. The
// last block reads the maxima several times, from a copy in shared memory. Min-p
// keeps the logits from the largest one plus log(min_p) on, which is such a bound, too. Typical-p
// without any of them reads the whole row again.
// Thresholds are found by a radix search over float32 in the order of integers; probabilities are
// summed as integers, so that the order of additions does not matter. If the candidates do not
// suffice, the search reads the whole row.
//
// Where the tensor ranks share the vocabulary, each sweeps the logits of its ids. The last block of
// a row then exchanges with the peers (sampling_exchange.cuh): once (best id, winner of the draw,
// log-sum-exp), and for top-k and top-p the histogram of each pass of the search. No logits are
// gathered, and the tokens equal those of a single rank. Only log-sum-exp is summed in another
// order: rank by rank.
//
// A NaN among a row's logits counts as its largest one, so the row has no token.
//
// Bytes moved: 4 * R * V, and 2 * R * V more under penalties. Exchanged with each peer in shared
// rows: 64 bytes, and 4 KiB for each of 4 (top-k or top-p) or 8 (both) passes. Bench: python -m
// tridecode.kernels.bench sample
#pragma once
#include "sampling/sampling_draw.cuh"
#include "sampling/sampling_edits.cuh"

namespace tridecode {
namespace {

template <typename TaskOf>
__device__ __forceinline__ auto row_of(const TaskOf& task, int index, int slot) {
  if constexpr (std::is_same<TaskOf, VerifyTask>::value)
    return verified_row_at(task, index, slot);
  else
    return row_at<std::is_same<TaskOf, SharedTask>::value>(task, index, slot);
}

// Returns the rank of the largest of a thread's logits in chunks first .. end - 1, for a row that
// needs nothing else. Each thread has eight loads in flight.
template <typename RowOf>
__device__ __forceinline__ u64 largest_unchanged(const RowOf& row, int first, int end,
                                                 bool& has_nan) {
  constexpr int kLoads = 8, kStride = kChunk / 2;  // columns from load to load
  const int columns = min(end * kChunk, row.vocab);
  int column = first * kChunk + threadIdx.x * 4;
  const float4* next = reinterpret_cast<const float4*>(row.logits + column);
  const float4 none = make_float4(-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F);
  float most = -CUDART_INF_F;
  int at = 0;
  for (; column < columns; column += kLoads * kStride, next += kLoads * kStride / 4) {
    float4 x[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
      x[load] = column + load * kStride < columns ? next[load * kStride / 4] : none;
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const float values[4] = {x[load].x, x[load].y, x[load].z, x[load].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int each = column + load * kStride + i;
        if (RowOf::kShared && each >= columns) continue;  // padding after the rank's ids
        has_nan |= values[i] != values[i];
        if (values[i] > most) most = values[i], at = each;
      }
    }
  }
  return rank_of(most + 0.0f, row.id_at(at));  // -0 equals 0
}

// The value of the largest rank of the warp; -inf if there is none.
__device__ __forceinline__ float largest_of_warp(u64 rank) {
  float value = rank ? value_of(rank) : -CUDART_INF_F;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAll, value, offset));
  return value;
}

// The sum of a chunk, given those of its warps.
__device__ __forceinline__ Sum sum_of_chunk(const Sum* of_warps) {
  float2 parts[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) parts[w] = __ldcg(reinterpret_cast<const float2*>(of_warps + w));
  Sum whole = {parts[0].x, parts[0].y};
#pragma unroll
  for (int w = 1; w < kWarps; ++w) whole = merge(whole, {parts[w].x, parts[w].y});
  return whole;
}

// Blocks per multiprocessor: four leave 64 registers, which do not spill.
template <typename TaskOf>
constexpr int kLeastBlocks = std::is_same<TaskOf, SharedTask>::value ? 2 : 4;

template <typename TaskOf>
__global__ void __launch_bounds__(kThreads, kLeastBlocks<TaskOf>)
    sample(const __grid_constant__ TaskOf task) {
  constexpr bool kShared = std::is_same<TaskOf, SharedTask>::value;
  constexpr bool kSeveral = std::is_same<TaskOf, VerifyTask>::value;
  __shared__ Shared shared;
  __shared__ bool is_last;
  wait_for_predecessor();
  const int index = blockIdx.y, slot = task.slots[index];
  if (slot < 0) return;
  const Row<kShared, kSeveral> row = row_of(task, index, slot);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // scratch of a row: two ranks per block, a Sum per warp and chunk, a maximum per segment
  u64* const ranks =
      reinterpret_cast<u64*>(static_cast<char*>(task.scratch) + index * task.row_bytes);
  Sum* const sums = reinterpret_cast<Sum*>(ranks + 2 * task.chunks);
  float* const maxima = reinterpret_cast<float*>(sums + kWarps * task.chunks);

  // ---- the sweep
  const int first_chunk = blockIdx.x * task.chunks_each,
            last_chunk = min(first_chunk + task.chunks_each, task.chunks);
  if (row.edited)
    edit_logits<kShared>(task, index, slot, first_chunk * kChunk, last_chunk * kChunk,
                         kSeveral ? row.drafts : nullptr, kSeveral ? row.num_drafts : 0);
  const bool summed = row.summed(), limited = row.limited(), drawn = row.drawn_at_once();
  u64 largest = 0, winner = 0;
  bool has_nan = false;
  const bool plain = row.greedy && !summed && row.wide && row.unchanged();
  if (plain) largest = largest_unchanged(row, first_chunk, last_chunk, has_nan);
  for (int chunk = plain ? last_chunk : first_chunk; chunk < last_chunk; ++chunk) {
    const int first = chunk * kChunk + threadIdx.x * 4;
    float x[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) row.load4_unchanged(first + half * (kChunk / 2), x[half]);
#pragma unroll
    for (int half = 0; half < 2; ++half) row.change4(first + half * (kChunk / 2), x[half]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int id = first + half * (kChunk / 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) has_nan |= x[half][i] != x[half][i];
      float most = x[half][0];
      int at = 0;
#pragma unroll
      for (int i = 1; i < 4; ++i)
        if (x[half][i] > most) most = x[half][i], at = i;
      if (id < task.vocab_size) {
        const u64 rank = rank_of(most + 0.0f, row.id_at(id + at));  // -0 equals 0
        largest = rank > largest ? rank : largest;
      }
      // a draw below the best one of the warp so far cannot win
      const float drawn_before = drawn ? largest_of_warp(winner) : 0.0f;
      if (drawn && most > -CUDART_INF_F && most + kMostGumbel >= drawn_before) {
        const uint4 words = row.random(unsigned(row.id_at(id)) / 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (x[half][i] == -CUDART_INF_F ||
              x[half][i] + gumbel_bound(get(words, i)) < drawn_before)
            continue;
          const u64 rank = rank_of(x[half][i] + gumbel(get(words, i)), row.id_at(id + i));
          winner = rank > winner ? rank : winner;
        }
      }
      if (limited) {
        float segment = most;
#pragma unroll
        for (int offset = 1; offset < kSegment / 4; offset *= 2)
          segment = fmaxf(segment, __shfl_xor_sync(kAll, segment, offset));
        if (lane % (kSegment / 4) == 0 && id < task.vocab_size)
          __stcg(maxima + id / kSegment, segment);
      }
    }
    if (summed) {
      Sum mine = {-CUDART_INF_F, 0.0f};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mine.most = fmaxf(mine.most, x[half][i]);
      }
      if (mine.most > -CUDART_INF_F) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 4; ++i) mine.sum += expf(x[half][i] - mine.most);
        }
      }
      mine = warp_merge(mine);
      if (lane == 0) sums[kWarps * chunk + warp] = mine;
    }
  }
  largest = block_largest(has_nan ? kNanRank : largest, shared.ranks);
  if (drawn) winner = block_largest(winner, shared.ranks);
  if (threadIdx.x == 0) {
    __stcg(ranks + 2 * blockIdx.x, largest);
    __stcg(ranks + 2 * blockIdx.x + 1, winner);
  }
  device_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(task.counters + index, 1u) == gridDim.x - 1;
    if (is_last) task.counters[index] = 0;  // for the next launch
  }
  __syncthreads();
  if (!is_last) return;
  device_fence();

  // ---- the last block of the row
  if (limited) request_maxima(shared, maxima, task.segments);
  largest = winner = 0;
  for (int i = threadIdx.x; i < int(gridDim.x); i += kThreads) {
    const u64 a = __ldcg(ranks + 2 * i), b = __ldcg(ranks + 2 * i + 1);
    largest = a > largest ? a : largest;
    winner = b > winner ? b : winner;
  }
  largest = block_largest(largest, shared.ranks);
  if (drawn) winner = block_largest(winner, shared.ranks);
  Sum sum = {-CUDART_INF_F, 0.0f};
  if (summed) {  // every warp computes the same result
    for (int first = 0; first < task.chunks; first += kThreads) {
      __syncthreads();
      const int count = min(kThreads, task.chunks - first);
      if (int(threadIdx.x) < count)
        shared.sums[threadIdx.x] = sum_of_chunk(sums + kWarps * (first + threadIdx.x));
      __syncthreads();
      for (int i = lane; i < count; i += 32) sum = merge(sum, shared.sums[i]);
    }
    sum = warp_merge(sum);
    sum.most = __shfl_sync(kAll, sum.most, 0);  // the same bits everywhere
    sum.sum = __shfl_sync(kAll, sum.sum, 0);
  }
  if (limited) {
    wait_copies<0>();
    __syncthreads();
  }
  float value = 0.0f;  // the token's logit, if log_probs and kShared
  if constexpr (kShared) {
    __shared__ GatheredWords gathered;
    Exchange exchange(task.exchanges, task, index, gathered);
    Found found = {largest, winner, sum, 0, 0.0f};
    const int tried = row.top_k > 0                           ? row.top_k
                      : row.min_p > 0.0f || row.top_p >= 1.0f ? 0
                                                              : max(kTopPSegments / task.ranks, 1);
    if (limited && tried > 0 && tried <= task.segments)
      found.bound = maxima_threshold(shared, maxima, task.segments, tried);
    if (drawn && row.log_probs && winner) found.value = row.value_at(id_of(winner) - row.first_id);
    found = of_all_ranks(exchange, found);
    largest = found.largest, winner = found.winner, sum = found.sum;
    value = row.greedy ? value_of(largest) : found.value;
    if (limited && value_of(largest) < CUDART_INF_F && value_of(largest) > -CUDART_INF_F) {
      found = draw_shared(shared, row, maxima, task.segments, found, task.state[slot].typical_p,
                          exchange);
      winner = found.winner, value = found.value;
    }
    exchange.close();
  }
  const float most = value_of(largest);
  const bool impossible = most == -CUDART_INF_F;
  const bool broken = !(most < CUDART_INF_F);  // +inf or NaN
  int token;
  if (broken || impossible) {
    token = 0;
  } else if (row.greedy) {
    token = id_of(largest);
  } else if (kShared) {
    token = max(id_of(winner), 0);  // none if a rank did not arrive
  } else if (drawn) {
    token = id_of(winner);
  } else {
    if constexpr (!kShared)
      token =
          draw_limited(shared, row, maxima, task.segments, most, sum, task.state[slot].typical_p);
  }

  // ---- the update of the slot
  if (threadIdx.x != 0) return;
  float log_prob = 0.0f;
  if (row.log_probs && !impossible && !broken) {
    if constexpr (!kShared) value = row.value_at(token);
    log_prob = value - (sum.most + logf(sum.sum));
  }
  task.tokens[index] = broken ? -1 : impossible ? -2 : token;  // BROKEN_LOGITS, NO_TOKEN
  task.log_probs[index] = log_prob;
  if constexpr (kSeveral) return;
  task.last_tokens[slot] = token;
  Slot& s = task.state[slot];
  s.generated = row.generated + 1;
  if (row.remembers && s.history_length < task.history_size)
    task.history[int64_t(slot) * task.history_size + s.history_length++] = token;
  const int column = token - (kShared ? task.first_id : 0);
  if (row.counts && (!kShared || (column >= 0 && column < task.vocab_size))) {
    int16_t& count = const_cast<int16_t*>(row.counts)[column];
    if (count < INT16_MAX) count += 1;
  }
  if (row.decays)
    s.top_p_now =
        token == s.top_p_reset_id ? s.top_p : fmaxf(s.top_p_now * s.top_p_decay, s.top_p_min);
}

int64_t row_bytes(int vocab) {
  const int64_t chunks = ceil_div(vocab > 0 ? vocab : 1, kChunk),
                segments = ceil_div(vocab, kSegment);
  const int64_t bytes_per_chunk = 2 * sizeof(u64) + kWarps * sizeof(Sum);
  return (chunks * bytes_per_chunk + segments * sizeof(float) + 15) / 16 * 16;
}

// Computes the grid of a launch over task.num_rows rows; completes the task.
dim3 grid_of_rows(Task& task) {
  task.chunks = task.vocab_size > 0 ? ceil_div(task.vocab_size, kChunk) : 1;
  task.segments = ceil_div(task.vocab_size, kSegment);
  // 16 blocks per multiprocessor, shared by the rows
  const int blocks = 16 * device().multiprocessors / (task.num_rows > 0 ? task.num_rows : 1);
  const int splits = blocks < 1 ? 1 : blocks < task.chunks ? blocks : task.chunks;
  task.chunks_each = ceil_div(task.chunks, splits);
  task.row_bytes = row_bytes(task.vocab_size);
  return dim3(ceil_div(task.chunks, task.chunks_each), task.num_rows);
}

}  // namespace
}  // namespace tridecode
