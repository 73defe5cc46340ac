// The next token of each row, in one launch: bad words, temperature, penalties, minimum length,
// log-probability, then the largest logit or a draw after min-p, top-k and top-p, and the update of
// the sequence's slot.
//
// Several blocks sweep a row once, in chunks of 2048 ids whose results do not depend on how many
// blocks there are; the last block to arrive finishes the row. Greedy rows and rows that draw
// from the whole vocabulary (the largest logit plus Gumbel noise) then only need the best of the
// blocks' winners. For top-k and top-p the sweep stores the maximum of every 64 ids: the k-th
// largest maximum is a lower bound of the k-th largest logit, so that few ids are read again. Min-p
// keeps the logits from the largest one plus log(min_p) on, which is such a bound, too.
// Thresholds are found by a radix search over float32 in the order of integers; probabilities are
// summed as integers, so that the order of additions does not matter. If the candidates do not
// suffice, the search reads the whole row.
//
// Where the tensor ranks share the vocabulary, each sweeps the logits of its ids. The last block of
// a row then exchanges with the peers (sampling_exchange.cuh): once (best id, winner of the draw,
// log-sum-exp), and for top-k and top-p the histogram of each pass of the search. No logits are
// gathered, and the tokens are those of one rank. Only log-sum-exp is added in another order than
// on one rank: in that of the ranks.
//
// A NaN among a row's logits counts as its largest one, so the row has no token.
//
// Bytes moved: 4 * R * V, and 2 * R * V more under penalties. Exchanged with each peer in shared
// rows: 64 bytes, and 4 KiB for each of 4 (top-k or top-p) or 8 (both) passes. Bench: python -m
// tridecode.kernels.bench sample
#include "sampling/sampling_exchange.cuh"

namespace tridecode {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kChunk = 8 * kThreads;  // ids
constexpr int kSegment = 64;          // ids
constexpr int kCandidates = 4096;
constexpr int kTopPSegments = 256;    // the candidates' segments for top-p without top-k
constexpr float kMostGumbel = 22.9f;  // no draw is larger: -log(2^-33) is 22.87

using u64 = unsigned long long;

using Slot = tridecode_sampling_slot;

struct Task : tridecode_sample_task {
  int chunks, segments, chunks_each;  // of a row, of a row, of a block
  int64_t row_bytes;                  // of scratch
};
// Of ranks that share the vocabulary.
struct SharedTask : Task {
  char* exchanges[kMostRanks];  // of each rank, in its memory
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

// More than any number: the largest of a row with a NaN.
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

// One row: what the sweep reads of its slot, and its logits after temperature, penalties and
// minimum length. A column is an id, counted from the rank's first one.
template <bool SHARED>
struct Row {
  const float* logits;
  const int16_t* counts;  // null: no penalties
  float temperature, repetition, presence, frequency, top_p, min_p;
  int top_k, generated, vocab;
  int first_id;  // SHARED
  uint64_t seed;
  bool greedy, log_probs, decays, bad_words, held_back;  // held_back: no end id yet
  bool wide;                                             // float4 loads

  __device__ __forceinline__ bool limited() const {
    return !greedy && (top_k > 0 || top_p < 1.0f || min_p > 0.0f);
  }
  __device__ __forceinline__ bool drawn_at_once() const { return !greedy && !limited(); }
  __device__ __forceinline__ bool summed() const { return log_probs || (limited() && top_k == 0); }
  __device__ __forceinline__ int id_at(int column) const {
    return SHARED ? first_id + column : column;
  }
  // The random words of ids 4 * group .. 4 * group + 3.
  __device__ __forceinline__ uint4 random(unsigned group) const {
    return philox(unsigned(seed), unsigned(seed >> 32), group, unsigned(generated));
  }

  __device__ __forceinline__ float adjust(float x, int column) const {
    if (temperature != 1.0f) x = x / temperature;
    if (counts) {
      const int count = counts[column];
      if (count > 0) {
        x = x < 0.0f ? x * repetition : x / repetition;
        x = __fsub_rn(x, __fadd_rn(presence, __fmul_rn(frequency, float(count))));
      }
    }
    return x;
  }
  __device__ __forceinline__ float value_at(int column) const {
    return adjust(logits[column], column);
  }
  // Columns first .. first + 3, first a multiple of 4; -inf beyond the vocabulary.
  __device__ __forceinline__ void load4(int first, float (&x)[4]) const {
    if (wide && first < vocab) {
      const float4 four = *reinterpret_cast<const float4*>(logits + first);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = first + i < vocab ? logits[first + i] : -CUDART_INF_F;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < vocab)
        x[i] = adjust(x[i], first + i);
      else if (SHARED)
        x[i] = -CUDART_INF_F;
    }
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
  row.generated = s.generated;
  row.greedy = s.top_k == 1 || s.temperature == 0.0f;
  row.log_probs = s.return_log_probs;
  row.decays = s.top_p_decay < 1.0f;
  row.bad_words = s.num_bad_words > 0;
  row.held_back = s.generated < s.min_tokens;
  const int every = SHARED ? task.whole_vocab_size : task.vocab_size;
  row.top_k = s.top_k > 0 && s.top_k < every ? s.top_k : 0;
  row.top_p = row.greedy ? 1.0f : s.top_p_now;
  row.min_p = row.greedy ? 0.0f : s.min_p;
  row.seed = s.seed;
  row.wide = (SHARED || task.vocab_size % 4 == 0) && task.logits_stride % 4 == 0;
  return row;
}

// Makes the last id of each matching bad word impossible, and the end ids while they are held back,
// for those in the columns first .. end - 1: minus infinity stays what it is under a temperature
// and under penalties.
template <bool SHARED>
__device__ __forceinline__ void ban_ids(const Task& task, int index, int slot, int first, int end,
                                        bool held_back) {
  const int* const ids = task.bad_ids + int64_t(slot) * task.bad_size;
  const int* const ends = task.bad_ends + int64_t(slot) * task.bad_size;
  const int* const history = task.history + int64_t(slot) * task.history_size;
  const Slot& s = task.state[slot];
  const int length = s.history_length, words = s.num_bad_words;
  const auto ban = [&](int id) {
    const int column = id - (SHARED ? task.first_id : 0);
    if (column >= first && column < end && column < task.vocab_size)
      task.logits[index * task.logits_stride + column] = -CUDART_INF_F;
  };
  for (int word = threadIdx.x; word < words; word += kThreads) {
    const int begin = word ? ends[word - 1] : 0, before = ends[word] - begin - 1;
    if (before < 0 || before > length) continue;
    bool matches = true;
    for (int i = 0; i < before && matches; ++i)
      matches = history[length - before + i] == ids[begin + i];
    if (matches) ban(ids[begin + before]);
  }
  constexpr int kEndIds = sizeof(s.end_ids) / sizeof(int);
  if (held_back && threadIdx.x < kEndIds && s.end_ids[threadIdx.x] >= 0)
    ban(s.end_ids[threadIdx.x]);
  __syncthreads();
}

struct Shared {
  u64 ranks[kWarps];
  Sum sums[2][kWarps];
  u64 masses[256];
  unsigned histogram[256];
  unsigned prefix, count, listed;
  u64 above;
  float values[kCandidates];
  int ids[kCandidates];
};

// Sums over the ranks of a row whose vocabulary is on one rank, and of one that is shared.
struct Alone {
  template <typename Weight>
  __device__ __forceinline__ void add_bins(Weight*) {}
  __device__ __forceinline__ u64 total(u64 mine) { return mine; }
};
struct Across {
  Exchange& exchange;
  template <typename Weight>
  __device__ __forceinline__ void add_bins(Weight* bins) {
    bins[threadIdx.x] = Weight(exchange.sum(bins[threadIdx.x]));
    __syncthreads();
  }
  __device__ __forceinline__ u64 total(u64 mine) { return exchange.total(mine); }
};

// Finds the bits of a threshold from the top: `add(prefix, mask, shift)` fills the histogram of the
// next 8 bits of all values whose upper bits are `prefix`, and `ranks` adds those of the peers.
// Bins are taken from the largest until their sum reaches `wanted`. Returns the smallest order_of
// that is kept.
template <typename Weight, typename Ranks, typename Add>
__device__ unsigned radix_threshold(Shared& shared, Weight* bins, u64 wanted, Ranks ranks,
                                    Add add) {
  unsigned prefix = 0;
  u64 above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    bins[threadIdx.x] = 0;
    __syncthreads();
    add(prefix, shift == 24 ? 0u : ~0u << (shift + 8), shift);
    __syncthreads();
    ranks.add_bins(bins);
    if (threadIdx.x < 32) {  // lane l owns bins 255 - 8 l downwards
      u64 mine = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) mine += bins[255 - 8 * threadIdx.x - i];
      u64 before = mine;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const u64 other = __shfl_up_sync(kAll, before, offset);
        if (int(threadIdx.x) >= offset) before += other;
      }
      before += above - mine;
      const bool here = before < wanted && before + mine >= wanted;
      const unsigned found = __ballot_sync(kAll, here);
      if (here) {
        int bin = 255 - 8 * threadIdx.x;
        while (before + bins[bin] < wanted) before += bins[bin--];
        shared.prefix = prefix | unsigned(bin) << shift;
        shared.above = before;
      } else if (found == 0 && threadIdx.x == 0) {
        shared.prefix = prefix;  // the sum of all bins is too small: keep all
        shared.above = above;
      }
    }
    __syncthreads();
    prefix = shared.prefix, above = shared.above;
  }
  return prefix;
}

__device__ __forceinline__ u64 mass_of(float x, float most) {
  return u64(expf(x - most) * 1099511627776.0f);  // 2^40
}

// bins[bin] += mass. The lanes of a warp with the same bin add up first: contended 64-bit atomics
// in shared memory are slow.
__device__ __forceinline__ void add_mass(u64* bins, unsigned bin, u64 mass) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned peers = __match_any_sync(__activemask(), bin);
  const unsigned low = __reduce_add_sync(peers, unsigned(mass) & 0xfffffu);
  const unsigned high = __reduce_add_sync(peers, unsigned(mass >> 20));
  if (int(threadIdx.x % 32) == __ffs(peers) - 1)
    atomicAdd(bins + bin, u64(low) + (u64(high) << 20));
#else
  atomicAdd(bins + bin, mass);
#endif
}

// The sum of the threads' masses over the block, in every thread.
__device__ __forceinline__ u64 block_total(Shared& shared, u64 mine) {
  __syncthreads();
  if (threadIdx.x == 0) shared.above = 0;
  __syncthreads();
  atomicAdd(&shared.above, mine);
  __syncthreads();
  return shared.above;
}

// The draw of a row with min-p, top-k or top-p: the rank of the rank's winner. each(body) calls
// body(value, column) for all ids that may be kept. total: the mass that top-p takes its share of,
// where total_given.
template <typename RowOf, typename Ranks, typename Each>
__device__ u64 draw(Shared& shared, const RowOf& row, float most, double total, bool total_given,
                    Ranks ranks, Each each) {
  // impossible ids are never kept
  unsigned threshold = max(order_of(-CUDART_INF_F) + 1, row.min_p_bound(most));
  if (row.top_k > 0) {
    const unsigned kth =
        radix_threshold(shared, shared.histogram, u64(row.top_k), ranks,
                        [&](unsigned prefix, unsigned mask, int shift) {
                          each([&](float x, int) {
                            const unsigned order = order_of(x);
                            if ((order & mask) == prefix)
                              atomicAdd(shared.histogram + (order >> shift & 255), 1u);
                          });
                        });
    threshold = kth > threshold ? kth : threshold;
  }
  if (row.top_p < 1.0f) {
    u64 wanted = 1;
    if (!total_given) {
      u64 mine = 0;
      each([&](float x, int) {
        if (order_of(x) >= threshold) mine += mass_of(x, most);
      });
      total = double(ranks.total(block_total(shared, mine)));
    }
    const double share = ceil(double(row.top_p) * total);
    if (share > 1.0) wanted = u64(share);
    const unsigned least = threshold;
    const unsigned nucleus = radix_threshold(
        shared, shared.masses, wanted, ranks, [&](unsigned prefix, unsigned mask, int shift) {
          each([&](float x, int) {
            const unsigned order = order_of(x);
            if (order >= least && (order & mask) == prefix)
              add_mass(shared.masses, order >> shift & 255, mass_of(x, most));
          });
        });
    threshold = nucleus > threshold ? nucleus : threshold;
  }
  u64 best = 0;
  each([&](float x, int column) {
    if (order_of(x) < threshold || (best && x + kMostGumbel <= value_of(best))) return;
    const u64 rank = rank_of(x + row.noise(column), row.id_at(column));
    best = rank > best ? rank : best;
  });
  return block_largest(best, shared.ranks);
}

// The `wanted`-th largest of the segments' maxima, as order_of: no more than the `wanted`-th
// largest logit.
__device__ __forceinline__ unsigned maxima_threshold(Shared& shared, const float* maxima,
                                                     int segments, int wanted) {
  return radix_threshold(shared, shared.histogram, u64(wanted), Alone(),
                         [&](unsigned prefix, unsigned mask, int shift) {
                           for (int i = threadIdx.x; i < segments; i += kThreads) {
                             const unsigned order = order_of(__ldcg(maxima + i));
                             if ((order & mask) == prefix)
                               atomicAdd(shared.histogram + (order >> shift & 255), 1u);
                           }
                         });
}

constexpr int kRoom = kCandidates - kCandidates / 4;

// Lists the values of order `bound` and above, but -inf, and their columns, behind the list of
// their segments. False: they are too many.
template <typename RowOf>
__device__ __forceinline__ bool list_candidates(Shared& shared, const RowOf& row,
                                                const float* maxima, int segments, unsigned bound) {
  if (threadIdx.x == 0) shared.count = shared.listed = 0;
  __syncthreads();
  // a quarter of shared.values holds the list of these segments
  int* const list = reinterpret_cast<int*>(shared.values);
  for (int i = threadIdx.x; i < segments; i += kThreads) {
    if (order_of(__ldcg(maxima + i)) < bound) continue;
    const unsigned at = atomicAdd(&shared.listed, 1u);
    if (at < kCandidates / 4) list[at] = i;
  }
  __syncthreads();
  const int listed = shared.listed;
  if (listed > kCandidates / 4) return false;
  // the values of the candidates follow the list
  float* const values = shared.values + kCandidates / 4;
  for (int item = threadIdx.x; item < listed * (kSegment / 4); item += kThreads) {
    const int first = list[item / (kSegment / 4)] * kSegment + item % (kSegment / 4) * 4;
    float x[4];
    row.load4(first, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (order_of(x[i]) < bound || x[i] == -CUDART_INF_F) continue;
      const unsigned at = atomicAdd(&shared.count, 1u);
      if (at < kRoom) values[at] = x[i], shared.ids[at] = first + i;
    }
  }
  __syncthreads();
  return shared.count <= kRoom;
}

// The listed candidates, and all of a row that is possible, as `each` of draw.
struct OfList {
  const float* values;
  const int* columns;
  int count;
  template <typename Body>
  __device__ __forceinline__ void operator()(Body body) const {
    for (int i = threadIdx.x; i < count; i += kThreads) body(values[i], columns[i]);
  }
};
__device__ __forceinline__ OfList of_list(const Shared& shared) {
  return {shared.values + kCandidates / 4, shared.ids, int(shared.count)};
}
template <typename RowOf>
struct OfRow {
  const RowOf& row;
  template <typename Body>
  __device__ __forceinline__ void operator()(Body body) const {
    for (int first = threadIdx.x * 4; first < row.vocab; first += kThreads * 4) {
      float x[4];
      row.load4(first, x);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (first + i < row.vocab && x[i] != -CUDART_INF_F) body(x[i], first + i);
    }
  }
};

// Of top-p without top-k: the mass of the whole vocabulary.
__device__ __forceinline__ double whole_mass(Sum sum, float most) {
  return double(sum.sum) * exp(double(sum.most) - most) * 1099511627776.0;
}

__device__ int draw_limited(Shared& shared, const Row<false>& row, const float* maxima,
                            int segments, float most, Sum sum) {
  // top-p of the whole vocabulary: neither top-k nor min-p goes before it
  const bool alone = row.top_k == 0 && row.min_p == 0.0f;
  const double total = alone ? whole_mass(sum, most) : 0.0;
  const int tried = alone ? kTopPSegments : row.top_k;
  unsigned bound = row.min_p_bound(most);
  if (tried > 0 && tried <= segments)
    bound = max(bound, maxima_threshold(shared, maxima, segments, tried));
  if (bound > 0) {
    if (list_candidates(shared, row, maxima, segments, bound)) {
      const OfList each = of_list(shared);
      bool enough = true;
      if (alone) {
        u64 mine = 0;
        each([&](float x, int) { mine += mass_of(x, most); });
        enough = double(block_total(shared, mine)) >= ceil(double(row.top_p) * total);
      }
      if (enough) return id_of(draw(shared, row, most, total, alone, Alone(), each));
    }
  }
  return id_of(draw(shared, row, most, total, alone, Alone(), OfRow<Row<false>>{row}));
}

// What the last block of a row knows, of this rank and then of all. bound: no id below it is
// needed, as order_of; 0: there is no such bound. value: of the winner's logit.
struct Found {
  u64 largest, winner;
  Sum sum;
  unsigned bound;
  float value;
};

__device__ __forceinline__ Found of_all_ranks(Exchange& exchange, const Found& mine) {
  const u64 sum = u64(__float_as_uint(mine.sum.most)) << 32 | __float_as_uint(mine.sum.sum);
  const u64 rest = u64(mine.bound) << 32 | __float_as_uint(mine.value);
  const int i = threadIdx.x;
  const auto& words = exchange.gather(i == 0   ? mine.largest
                                      : i == 1 ? mine.winner
                                      : i == 2 ? sum
                                               : rest,
                                      4);
  Found all = {0, 0, {-CUDART_INF_F, 0.0f}, 0, 0.0f};
  for (int rank = 0; rank < exchange.ranks(); ++rank) {
    const u64* const of = words.of[rank];
    if (of[1] > all.winner) all.winner = of[1], all.value = __uint_as_float(unsigned(of[3]));
    all.largest = of[0] > all.largest ? of[0] : all.largest;
    all.sum =
        merge(all.sum, {__uint_as_float(unsigned(of[2] >> 32)), __uint_as_float(unsigned(of[2]))});
    all.bound = max(all.bound, unsigned(of[3] >> 32));
  }
  return all;
}

// draw_limited over all ranks; the winner's rank and logit. Each rank's bound is at most the
// top_k-th largest logit of all, so the largest bound is, too. For top-p alone the mass above it
// decides, by the sum over the ranks. A rank that cannot list its candidates takes all of its row:
// what is below the bound is not reached by the search.
__device__ __forceinline__ Found draw_shared(Shared& shared, const Row<true>& row,
                                             const float* maxima, int segments, const Found& all,
                                             Exchange& exchange) {
  const bool alone = row.top_k == 0 && row.min_p == 0.0f;
  const float most = value_of(all.largest);
  const unsigned bound = max(all.bound, row.min_p_bound(most));
  const double total = alone ? whole_mass(all.sum, most) : 0.0;
  const OfRow<Row<true>> of_row{row};
  bool listed = bound > 0 && list_candidates(shared, row, maxima, segments, bound);
  const OfList list = of_list(shared);
  if (bound > 0 && alone) {
    u64 mine = 0;
    auto add = [&](float x, int) {
      if (order_of(x) >= bound) mine += mass_of(x, most);
    };
    if (listed) {
      list(add);
    } else {
      of_row(add);
    }
    const u64 mass = exchange.total(block_total(shared, mine));
    listed = listed && double(mass) >= ceil(double(row.top_p) * total);
  }
  Found found = {};
  found.winner = listed ? draw(shared, row, most, total, alone, Across{exchange}, list)
                        : draw(shared, row, most, total, alone, Across{exchange}, of_row);
  if (row.log_probs && found.winner) found.value = row.value_at(id_of(found.winner) - row.first_id);
  return of_all_ranks(exchange, found);
}

template <typename TaskOf>
__global__ void __launch_bounds__(kThreads) sample(const __grid_constant__ TaskOf task) {
  constexpr bool kShared = std::is_same<TaskOf, SharedTask>::value;
  __shared__ Shared shared;
  __shared__ bool is_last;
  wait_for_predecessor();
  const int index = blockIdx.y, slot = task.slots[index];
  if (slot < 0) return;
  const Row<kShared> row = row_at<kShared>(task, index, slot);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // scratch of a row: two ranks a block, a Sum a chunk, a maximum a segment
  u64* const ranks =
      reinterpret_cast<u64*>(static_cast<char*>(task.scratch) + index * task.row_bytes);
  Sum* const sums = reinterpret_cast<Sum*>(ranks + 2 * task.chunks);
  float* const maxima = reinterpret_cast<float*>(sums + task.chunks);

  // ---- the sweep
  const int first_chunk = blockIdx.x * task.chunks_each,
            last_chunk = min(first_chunk + task.chunks_each, task.chunks);
  if (row.bad_words || row.held_back)
    ban_ids<kShared>(task, index, slot, first_chunk * kChunk, last_chunk * kChunk, row.held_back);
  const bool summed = row.summed(), limited = row.limited(), drawn = row.drawn_at_once();
  u64 largest = 0, winner = 0;
  bool has_nan = false;
  for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
    const int first = chunk * kChunk + threadIdx.x * 4;
    float x[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) row.load4(first + half * (kChunk / 2), x[half]);
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
        const u64 rank = rank_of(most, row.id_at(id + at));
        largest = rank > largest ? rank : largest;
      }
      if (drawn && most > -CUDART_INF_F && (!winner || most + kMostGumbel > value_of(winner))) {
        const uint4 words = row.random(unsigned(row.id_at(id)) / 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (x[half][i] == -CUDART_INF_F ||
              (winner && x[half][i] + kMostGumbel <= value_of(winner)))
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
      if (lane == 0) shared.sums[chunk % 2][warp] = mine;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int w = 1; w < kWarps; ++w) mine = merge(mine, shared.sums[chunk % 2][w]);
        sums[chunk] = mine;
      }
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
  largest = winner = 0;
  for (int i = threadIdx.x; i < int(gridDim.x); i += kThreads) {
    const u64 a = __ldcg(ranks + 2 * i), b = __ldcg(ranks + 2 * i + 1);
    largest = a > largest ? a : largest;
    winner = b > winner ? b : winner;
  }
  largest = block_largest(largest, shared.ranks);
  if (drawn) winner = block_largest(winner, shared.ranks);
  Sum sum = {-CUDART_INF_F, 0.0f};
  if (summed) {  // every warp computes the same
    for (int i = lane; i < task.chunks; i += 32)
      sum = merge(sum, {__ldcg(&sums[i].most), __ldcg(&sums[i].sum)});
    sum = warp_merge(sum);
    sum.most = __shfl_sync(kAll, sum.most, 0);  // the same bits everywhere
    sum.sum = __shfl_sync(kAll, sum.sum, 0);
  }
  float value = 0.0f;  // the token's logit, if log_probs and kShared
  if constexpr (kShared) {
    __shared__ GatheredWords gathered;
    Exchange exchange(task.exchanges, task, index, gathered);
    Found found = {largest, winner, sum, 0, 0.0f};
    const int tried = row.top_k > 0      ? row.top_k
                      : row.min_p > 0.0f ? 0
                                         : max(kTopPSegments / task.ranks, 1);
    if (limited && tried > 0 && tried <= task.segments)
      found.bound = maxima_threshold(shared, maxima, task.segments, tried);
    if (drawn && row.log_probs && winner) found.value = row.value_at(id_of(winner) - row.first_id);
    found = of_all_ranks(exchange, found);
    largest = found.largest, winner = found.winner, sum = found.sum;
    value = row.greedy ? value_of(largest) : found.value;
    if (limited && value_of(largest) < CUDART_INF_F && value_of(largest) > -CUDART_INF_F) {
      found = draw_shared(shared, row, maxima, task.segments, found, exchange);
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
    token = max(id_of(winner), 0);  // there is none if a rank did not come
  } else if (drawn) {
    token = id_of(winner);
  } else {
    if constexpr (!kShared) token = draw_limited(shared, row, maxima, task.segments, most, sum);
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
  task.last_tokens[slot] = token;
  Slot& s = task.state[slot];
  s.generated = row.generated + 1;
  if (row.bad_words && s.history_length < task.history_size)
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
  return (chunks * (2 * sizeof(u64) + sizeof(Sum)) + segments * sizeof(float) + 15) / 16 * 16;
}

}  // namespace
}  // namespace tridecode

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
  task.chunks = task.vocab_size > 0 ? ceil_div(task.vocab_size, kChunk) : 1;
  task.segments = ceil_div(task.vocab_size, kSegment);
  // 16 blocks per multiprocessor, shared by the rows
  const int blocks = 16 * device().multiprocessors / (task.num_rows > 0 ? task.num_rows : 1);
  const int splits = blocks < 1 ? 1 : blocks < task.chunks ? blocks : task.chunks;
  task.chunks_each = ceil_div(task.chunks, splits);
  task.row_bytes = row_bytes(task.vocab_size);
  const dim3 grid(ceil_div(task.chunks, task.chunks_each), task.num_rows);
  if (is_shared) return launch("sample", sample<SharedTask>, grid, kThreads, 0, stream, task);
  return launch("sample", sample<Task>, grid, kThreads, 0, stream, static_cast<Task>(task));
}
