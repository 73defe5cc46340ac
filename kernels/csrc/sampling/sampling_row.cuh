// A row of logits for sampling: order of logits, random numbers, and the effects of masks,
// temperature and penalties on a logit.
#pragma once
#include "api/sampling.h"
#include "sampling/sampling_exchange.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kChunk = 8 * kThreads;  // ids
constexpr int kSegment = 64;          // ids
constexpr int kCandidates = 4096;
constexpr int kMostDrafts = 15;       // tokens of a decode row after its first
constexpr int kTopPSegments = 256;    // the candidates' segments for top-p without top-k
constexpr float kMostGumbel = 22.9f;  // no draw is larger: -log(2^-33) is 22.87

using u64 = unsigned long long;

using Slot = tridecode_sampling_slot;

struct Task : tridecode_sample_task {
  int chunks, segments, chunks_each;  // of a row, of a row, of a block
  int64_t row_bytes;                  // of scratch
};
// Parameters of ranks that share the vocabulary.
struct SharedTask : Task {
  char* exchanges[kMostRanks];  // address in the memory of each rank
};
// Rows of logits after the tokens of decode rows: neighbours may have the same slot. A row's draw
// takes the tokens before it into account, and no slot is updated.
struct VerifyTask : Task {
  const int* token_ids;  // (num_rows), the token that each row of logits follows
};

// Maps float32 to unsigned integers of the same order.
__device__ __forceinline__ unsigned order_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_order(unsigned order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}
// Ranks compare by value, then by the lower id.
__device__ __forceinline__ u64 rank_of(float x, int id) {
  return u64(order_of(x)) << 32 | (0xffffffffu - unsigned(id));
}
__device__ __forceinline__ int id_of(u64 rank) { return int(0xffffffffu - unsigned(rank)); }
__device__ __forceinline__ float value_of(u64 rank) { return from_order(unsigned(rank >> 32)); }

// Greater than any number: the maximum of a row with NaN.
constexpr u64 kNanRank = u64(0xffc00000u) << 32;

__device__ __forceinline__ u64 warp_largest(u64 rank) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const u64 other = __shfl_xor_sync(kAll, rank, offset);
    rank = other > rank ? other : rank;
  }
  return rank;
}

__device__ __forceinline__ u64 block_largest(u64 rank, u64* shared) {
  rank = warp_largest(rank);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = rank;
  __syncthreads();
  return warp_largest(shared[threadIdx.x % kWarps]);
}

// Philox-4x32-10, Salmon et al. 2011.
__device__ __forceinline__ uint4 philox(unsigned k0, unsigned k1, unsigned c0, unsigned c1) {
  unsigned c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
    const unsigned high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

__device__ __forceinline__ float gumbel(unsigned word) {
  const float u = float((double(word) + 0.5) * 2.3283064365386963e-10);
  return -logf(-log1pf(-u));
}

// An upper bound of gumbel(word) that takes few instructions: -log(u) and 0.001 for rounding, since
// -log1p(-u) is at least u.
__device__ __forceinline__ float gumbel_bound(unsigned word) {
  return 22.181710f - 0.69314718f * __log2f(float(word));
}

// log-sum-exp in parts: a maximum and the sum relative to it.
struct Sum {
  float most, sum;
};
__device__ __forceinline__ Sum merge(Sum a, Sum b) {
  const float most = fmaxf(a.most, b.most);
  if (most == -CUDART_INF_F) return {most, 0.0f};
  return {most, a.sum * expf(a.most - most) + b.sum * expf(b.most - most)};
}
__device__ __forceinline__ Sum warp_merge(Sum mine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    Sum other;
    other.most = __shfl_xor_sync(kAll, mine.most, offset);
    other.sum = __shfl_xor_sync(kAll, mine.sum, offset);
    mine = merge(mine, other);
  }
  return mine;
}

// One row: the fields of its slot that the sweep reads, and its logits after temperature, penalties
// and minimum length. A column is an id, counted from the rank's first one.
template <bool SHARED, bool SEVERAL = false>
struct Row {
  static constexpr bool kShared = SHARED;
  const float* logits;
  const int16_t* counts;  // null: no penalties
  const unsigned* mask;   // null: every id is possible
  float temperature, repetition, presence, frequency, top_p, min_p;
  int top_k, generated, vocab;
  int first_id;  // SHARED
  uint64_t seed;
  bool greedy, log_probs, decays, typical;  // typical: typical_p is below 1
  bool remembers;                           // bad words or n-grams need the history
  bool edited;        // single logits change before the sweep: sampling_edits.cuh
  bool wide;          // float4 loads
  const int* drafts;  // SEVERAL: tokens that count as sampled before this one
  int num_drafts;

  __device__ __forceinline__ bool limited() const {
    return !greedy && (top_k > 0 || top_p < 1.0f || min_p > 0.0f || typical);
  }
  __device__ __forceinline__ bool drawn_at_once() const { return !greedy && !limited(); }
  __device__ __forceinline__ bool summed() const { return log_probs || (limited() && top_k == 0); }
  // Returns whether mask, temperature and penalties leave every logit as it is.
  __device__ __forceinline__ bool unchanged() const {
    return temperature == 1.0f && !counts && !mask;
  }
  __device__ __forceinline__ int id_at(int column) const {
    return SHARED ? first_id + column : column;
  }
  // The random words of ids 4 * group .. 4 * group + 3.
  __device__ __forceinline__ uint4 random(unsigned group) const {
    return philox(unsigned(seed), unsigned(seed >> 32), group, unsigned(generated));
  }

  // Occurrences of the id at a column, under penalties.
  __device__ __forceinline__ int count_at(int column) const {
    int count = counts[column];
    if constexpr (SEVERAL) {
      for (int i = 0; i < num_drafts; ++i) count += drafts[i] == id_at(column);
      count = min(count, INT16_MAX);
    }
    return count;
  }
  __device__ __forceinline__ float adjust(float x, int column) const {
    if (temperature != 1.0f) x = x / temperature;
    if (counts) {
      const int count = count_at(column);
      if (count > 0) {
        x = x < 0.0f ? x * repetition : x / repetition;
        x = __fsub_rn(x, __fadd_rn(presence, __fmul_rn(frequency, float(count))));
      }
    }
    return x;
  }
  // The bits of the mask from the id at a column to the end of its word.
  __device__ __forceinline__ unsigned mask_at(int column) const {
    const unsigned id = unsigned(id_at(column));
    return mask ? __ldg(mask + id / 32) >> (id % 32) : ~0u;
  }
  __device__ __forceinline__ float value_at(int column) const {
    return mask_at(column) & 1u ? adjust(logits[column], column) : -CUDART_INF_F;
  }
  // Loads the logits of columns first .. first + 3, first a multiple of 4; -inf beyond the
  // vocabulary. If `wide`, padding in the last four columns is loaded as it is.
  __device__ __forceinline__ void load4_unchanged(int first, float (&x)[4]) const {
    if (wide && first < vocab) {
      const float4 four = *reinterpret_cast<const float4*>(logits + first);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = first + i < vocab ? logits[first + i] : -CUDART_INF_F;
    }
  }
  // Applies mask, temperature and penalties to what load4_unchanged loaded.
  __device__ __forceinline__ void change4(int first, float (&x)[4]) const {
    if (unchanged() && first + 4 <= vocab) return;
    const unsigned possible = first < vocab ? mask_at(first) : 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < vocab)
        x[i] = possible >> i & 1u ? adjust(x[i], first + i) : -CUDART_INF_F;
      else if (SHARED)
        x[i] = -CUDART_INF_F;
    }
  }
  // Columns first .. first + 3, first a multiple of 4; -inf beyond the vocabulary.
  __device__ __forceinline__ void load4(int first, float (&x)[4]) const {
    load4_unchanged(first, x);
    change4(first, x);
  }
  // The smallest logit that min-p keeps, as order_of; 0: it is off.
  __device__ __forceinline__ unsigned min_p_bound(float most) const {
    return min_p > 0.0f ? order_of(most + logf(min_p)) : 0u;
  }
  __device__ __forceinline__ float noise(int column) const {
    const int id = id_at(column);
    const uint4 words = random(unsigned(id) / 4);
    return gumbel(id % 4 == 0 ? words.x : id % 4 == 1 ? words.y : id % 4 == 2 ? words.z : words.w);
  }
};

template <bool SHARED>
__device__ __forceinline__ Row<SHARED> row_at(const Task& task, int index, int slot) {
  const Slot& s = task.state[slot];
  Row<SHARED> row;
  row.first_id = task.first_id;
  row.logits = task.logits + index * task.logits_stride;
  row.vocab = task.vocab_size;
  row.temperature = s.temperature != 0.0f ? s.temperature : 1.0f;
  row.repetition = s.repetition_penalty, row.presence = s.presence_penalty,
  row.frequency = s.frequency_penalty;
  const bool neutral = row.repetition == 1.0f && row.presence == 0.0f && row.frequency == 0.0f;
  const int columns = SHARED ? task.counts_stride : task.vocab_size;
  row.counts = neutral ? nullptr : task.counts + int64_t(slot) * columns;
  const int mask_row = s.masked > 1 ? s.masked : slot;
  row.mask = s.masked ? task.masks + int64_t(mask_row) * task.mask_words : nullptr;
  row.generated = s.generated;
  row.greedy = s.top_k == 1 || s.temperature == 0.0f;
  row.log_probs = s.return_log_probs;
  row.decays = s.top_p_decay < 1.0f;
  row.remembers = s.num_bad_words > 0 || s.no_repeat_ngram_size > 0;
  row.edited = row.remembers || s.num_biases > 0 || s.generated < s.min_tokens;
  const int every = SHARED ? task.whole_vocab_size : task.vocab_size;
  row.top_k = s.top_k > 0 && s.top_k < every ? s.top_k : 0;
  row.top_p = row.greedy ? 1.0f : s.top_p_now;
  row.min_p = row.greedy ? 0.0f : s.min_p;
  row.typical = s.typical_p < 1.0f;
  row.seed = s.seed;
  row.wide = (SHARED || task.vocab_size % 4 == 0) && task.logits_stride % 4 == 0;
  return row;
}

// top_p of a slot after one more token.
__device__ __forceinline__ float decayed(const Slot& s, float top_p, int token) {
  return token == s.top_p_reset_id ? s.top_p : fmaxf(top_p * s.top_p_decay, s.top_p_min);
}

// The row of logits after token `index`, given the tokens of its decode row before that one.
__device__ __forceinline__ Row<false, true> verified_row_at(const VerifyTask& task, int index,
                                                            int slot) {
  const Row<false> first = row_at<false>(task, index, slot);
  const Slot& s = task.state[slot];
  Row<false, true> row;
  row.logits = first.logits, row.counts = first.counts, row.mask = first.mask;
  row.temperature = first.temperature, row.repetition = first.repetition;
  row.presence = first.presence, row.frequency = first.frequency;
  row.top_p = first.top_p, row.min_p = first.min_p, row.top_k = first.top_k;
  row.vocab = first.vocab, row.first_id = first.first_id, row.seed = first.seed;
  row.greedy = first.greedy, row.log_probs = first.log_probs, row.decays = first.decays;
  row.remembers = first.remembers, row.edited = first.edited, row.wide = first.wide;
  row.typical = first.typical;
  int before = 0;  // tokens of the decode row before this one; neighbouring rows have other slots
  while (before < index && before < kMostDrafts && task.slots[index - before - 1] == slot) ++before;
  if (s.masked > 1) row.mask += int64_t(before) * task.mask_words;  // one for each of its tokens
  row.drafts = task.token_ids + index - before + 1;
  row.num_drafts = before;
  row.generated = s.generated + before;
  if (row.decays && !row.greedy)
    for (int i = 0; i < before; ++i) row.top_p = decayed(s, row.top_p, row.drafts[i]);
  return row;
}

}  // namespace
}  // namespace tridecode
