// The draw after min-p, top-k, top-p and typical-p, of one rank and over all ranks.
#pragma once
#include "sampling/sampling_row.cuh"

namespace tridecode {
namespace {

constexpr int kStaged = 4352;  // segments whose maxima fit in shared memory: 278,528 ids

struct Shared {
  u64 ranks[kWarps];
  Sum sums[kThreads];
  u64 masses[256];
  unsigned histogram[256];
  unsigned prefix, count, listed;
  u64 above;
  float values[kCandidates];
  union {
    int ids[kCandidates];
    alignas(16) float maxima[kStaged];  // read before ids are written
  };
};

// Sums over the ranks, for a row whose vocabulary is on one rank and for one that is shared.
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

// Finds the bits of a threshold from the most significant down: `add(prefix, mask, shift)` fills
// the histogram of the next 8 bits of all values whose upper bits are `prefix`, and `ranks` adds
// those of the peers. Bins are taken from the largest until their sum reaches `wanted`. Returns the
// smallest order_of that is kept.
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

// Draws for a row with min-p, top-k, top-p or typical-p; returns the rank of the winner. each(body)
// calls body(value, column) for all ids that may be kept. total: if total_given, the mass that
// top-p takes as the whole.
template <typename RowOf, typename Ranks, typename Each>
__device__ u64 draw(Shared& shared, const RowOf& row, float most, double total, bool total_given,
                    float typical_p, Ranks ranks, Each each) {
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
  // typical-p: |log p + entropy| of an id is the distance of its logit from the mean logit
  float mean = 0.0f;  // of most - x
  unsigned nearest = 0;
  const auto nearness = [&](float x) { return order_of(-fabsf((most - x) - mean)); };
  if (row.typical) {
    u64 mass = 0, depth = 0;
    each([&](float x, int) {
      if (order_of(x) < threshold) return;
      mass += mass_of(x, most);
      depth += u64(expf(x - most) * (most - x) * 1099511627776.0f);
    });
    mass = ranks.total(block_total(shared, mass));
    depth = ranks.total(block_total(shared, depth));
    mean = float(double(depth) / double(mass));
    const u64 wanted = max(u64(1), u64(ceil(double(typical_p) * double(mass))));
    nearest = radix_threshold(shared, shared.masses, wanted, ranks,
                              [&](unsigned prefix, unsigned mask, int shift) {
                                each([&](float x, int) {
                                  const unsigned order = nearness(x);
                                  if (order_of(x) >= threshold && (order & mask) == prefix)
                                    add_mass(shared.masses, order >> shift & 255, mass_of(x, most));
                                });
                              });
  }
  const u64 best = each.winner(shared, row, [&](float x) {
    return order_of(x) >= threshold && !(nearest && nearness(x) < nearest);
  });
  return block_largest(best, shared.ranks);
}

// Copies the maxima of a row's segments to shared memory if they fit, so that each pass over them
// does not wait for the L2 cache. The caller waits for the copies and for the other threads.
__device__ __forceinline__ void request_maxima(Shared& shared, const float* maxima, int segments) {
  if (segments > kStaged) return;
#pragma unroll 4
  for (int i = threadIdx.x * 4; i < segments; i += kThreads * 4)
    copy16_async(shared.maxima + i, maxima + i, true);
  commit_copies();
}
__device__ __forceinline__ float maximum_at(const Shared& shared, const float* maxima, int segments,
                                            int i) {
  return segments <= kStaged ? shared.maxima[i] : __ldcg(maxima + i);
}

// The `wanted`-th largest of the segments' maxima, as order_of: no more than the `wanted`-th
// largest logit.
__device__ __forceinline__ unsigned maxima_threshold(Shared& shared, const float* maxima,
                                                     int segments, int wanted) {
  return radix_threshold(shared, shared.histogram, u64(wanted), Alone(),
                         [&](unsigned prefix, unsigned mask, int shift) {
                           for (int i = threadIdx.x; i < segments; i += kThreads) {
                             const unsigned order =
                                 order_of(maximum_at(shared, maxima, segments, i));
                             if ((order & mask) == prefix)
                               atomicAdd(shared.histogram + (order >> shift & 255), 1u);
                           }
                         });
}

constexpr int kRoom = kCandidates - kCandidates / 4;

// Lists the values of order `bound` and above, except -inf, and their columns, after the list of
// their segments. Returns false if there are too many.
template <typename RowOf>
__device__ __forceinline__ bool list_candidates(Shared& shared, const RowOf& row,
                                                const float* maxima, int segments, unsigned bound) {
  if (threadIdx.x == 0) shared.count = shared.listed = 0;
  __syncthreads();
  // a quarter of shared.values holds the list of these segments
  int* const list = reinterpret_cast<int*>(shared.values);
  for (int i = threadIdx.x; i < segments; i += kThreads) {
    if (order_of(maximum_at(shared, maxima, segments, i)) < bound) continue;
    const unsigned at = atomicAdd(&shared.listed, 1u);
    if (at < kCandidates / 4) list[at] = i;
  }
  __syncthreads();
  const int listed = shared.listed;
  if (listed > kCandidates / 4) return false;
  // the values of the candidates follow the list
  float* const values = shared.values + kCandidates / 4;
  constexpr int kLoads = 4, kFours = kSegment / 4;  // in flight per thread; loads per segment
  for (int item = threadIdx.x; item < listed * kFours; item += kLoads * kThreads) {
    float x[kLoads][4];
    int first[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int each = item + load * kThreads;
      first[load] =
          each < listed * kFours ? list[each / kFours] * kSegment + each % kFours * 4 : row.vocab;
      row.load4_unchanged(first[load], x[load]);
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      row.change4(first[load], x[load]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (order_of(x[load][i]) < bound || x[load][i] == -CUDART_INF_F) continue;
        const unsigned at = atomicAdd(&shared.count, 1u);
        if (at < kRoom) values[at] = x[load][i], shared.ids[at] = first[load] + i;
      }
    }
  }
  __syncthreads();
  return shared.count <= kRoom;
}

// Iterate, as `each` of the draw, over the listed candidates, and over all possible ids of a row.
// winner(shared, row, keeps) returns the thread's largest rank with noise among values it keeps.
struct OfList {
  const float* values;
  const int* columns;
  int count;
  template <typename Body>
  __device__ __forceinline__ void operator()(Body body) const {
    for (int i = threadIdx.x; i < count; i += kThreads) body(values[i], columns[i]);
  }
  template <typename RowOf, typename Keeps>
  __device__ __forceinline__ u64 winner(Shared&, const RowOf& row, Keeps keeps) const {
    u64 best = 0;
    (*this)([&](float x, int column) {
      if (!keeps(x) || (best && x + kMostGumbel <= value_of(best))) return;
      const u64 rank = rank_of(x + row.noise(column), row.id_at(column));
      best = rank > best ? rank : best;
    });
    return best;
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
  // First lists the kept ids of each kCandidates columns, so that full warps compute their noise.
  template <typename Keeps>
  __device__ __forceinline__ u64 winner(Shared& shared, const RowOf&, Keeps keeps) const {
    u64 best = 0;
    for (int tile = 0; tile < row.vocab; tile += kCandidates) {
      __syncthreads();  // the list of the previous tile has been read
      if (threadIdx.x == 0) shared.count = 0;
      __syncthreads();
#pragma unroll 1
      for (int part = 0; part < kCandidates; part += kThreads * 4) {
        const int first = tile + part + threadIdx.x * 4;
        float x[4];
        row.load4(first, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first + i >= row.vocab || x[i] == -CUDART_INF_F || !keeps(x[i])) continue;
          const unsigned at = atomicAdd(&shared.count, 1u);
          shared.values[at] = x[i], shared.ids[at] = first + i;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < int(shared.count); i += kThreads) {
        const float x = shared.values[i];
        if (best && x + kMostGumbel <= value_of(best)) continue;
        const u64 rank = rank_of(x + row.noise(shared.ids[i]), row.id_at(shared.ids[i]));
        best = rank > best ? rank : best;
      }
    }
    return best;
  }
};

// The mass of the whole vocabulary, for top-p without top-k.
__device__ __forceinline__ double whole_mass(Sum sum, float most) {
  return double(sum.sum) * exp(double(sum.most) - most) * 1099511627776.0;
}

template <bool SEVERAL>
__device__ int draw_limited(Shared& shared, const Row<false, SEVERAL>& row, const float* maxima,
                            int segments, float most, Sum sum, float typical_p) {
  // top-p over the whole vocabulary: neither top-k nor min-p precedes it
  const bool alone = row.top_k == 0 && row.min_p == 0.0f;
  const double total = alone ? whole_mass(sum, most) : 0.0;
  // typical-p alone needs the whole row
  const int tried = !alone ? row.top_k : row.top_p < 1.0f ? kTopPSegments : 0;
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
      if (enough) return id_of(draw(shared, row, most, total, alone, typical_p, Alone(), each));
    }
  }
  return id_of(
      draw(shared, row, most, total, alone, typical_p, Alone(), OfRow<Row<false, SEVERAL>>{row}));
}

// State of the last block of a row, first for this rank and then for all ranks. bound: ids below it
// are not needed, as order_of; 0: no bound. value: the winner's logit.
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

// draw_limited over all ranks; returns the winner's rank and logit. Each rank's bound is at most
// the top_k-th largest logit of all ranks, so the largest bound is, too. For top-p alone the bound
// must leave enough mass above it, summed over the ranks. A rank that cannot list its candidates
// uses its whole row: the search does not reach ids below the bound.
__device__ __forceinline__ Found draw_shared(Shared& shared, const Row<true>& row,
                                             const float* maxima, int segments, const Found& all,
                                             float typical_p, Exchange& exchange) {
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
  found.winner = listed
                     ? draw(shared, row, most, total, alone, typical_p, Across{exchange}, list)
                     : draw(shared, row, most, total, alone, typical_p, Across{exchange}, of_row);
  if (row.log_probs && found.winner) found.value = row.value_at(id_of(found.winner) - row.first_id);
  return of_all_ranks(exchange, found);
}

}  // namespace
}  // namespace tridecode
