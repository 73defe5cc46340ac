// Rows of x for product_chain_sm90a.cu: every block waits for them, normalises them, quantises them
// for weights in 8 and 4 bit, and stores them in its shared memory.
#pragma once
#include "api/operands.h"
#include "common/row_norm.cuh"
#include "gemm/chain/product_chain.cuh"
#include "gemm/chain/product_chain_rounding.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename X, Values VALUES>
struct Rows {
  using F = Format<VALUES>;
  const Chain& chain;
  const Places& places;
  unsigned int launch;
  int lane, warp;
  int token, first, apart;  // the thread has the vectors first, first + apart, ... of a token's row
  uint32_t to, to_group;    // address of the first vector, and of the sum of its group
  int number = 0;           // of the product
  unsigned int before = 0;  // tiles of earlier GEMMs

  __device__ __forceinline__ Rows(const Chain& given, const Places& at, unsigned int its_launch,
                                  int own_lane, int own_warp)
      : chain(given), places(at), launch(its_launch), lane(own_lane), warp(own_warp) {
    const int warps = warps_of_token(chain.tokens);
    token = warp / warps, first = warp % warps * 32 + lane, apart = 32 * warps;
    const int column = F::kTwo ? 2 * token : token, columns = chain.columns;
    if constexpr (F::k4Bit) {
      const int c = 8 * first, step = c >> 5 & 3, half = (c >> 4 & 1) * 2;
      to = ((((c >> 7) * 2 + step / 2) * columns + column) * 4 + half) * 16 + step % 2 * 8 +
           (c >> 3 & 1) * 4;
    } else {
      constexpr int kApart = 16 / (8 * F::kXBytes);  // vectors of a piece of 16 bytes
      const int piece = first / kApart;
      to = (((piece / 8 * 2 + piece % 2) * columns + column) * 4 + piece % 8 / 2) * 16 +
           first % kApart * 8;
    }
    to += places.x, to_group = places.group_sums + (first / 16 * chain.tokens + token) * 4;
    keep(to), keep(to_group);
  }

  __device__ __forceinline__ bool has() const { return token < chain.tokens; }

  // Sums over the warps of a token. which: 0 or 1, each with separate shared memory.
  __device__ __forceinline__ float team_sum(float value, int which) const {
    value = warp_sum(value);
    if (lane == 0) store_shared(places.words(which * kWarps + warp), __float_as_uint(value));
    sync_consumers();
    const int warps = apart / 32;
    const uint32_t from = places.words(which * kWarps + warp / warps * warps);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps / 4; ++i) {
      if (4 * i >= warps) break;
      const uint4 four = load_shared4(from + 16 * i);
      total += (__uint_as_float(four.x) + __uint_as_float(four.y)) +
               (__uint_as_float(four.z) + __uint_as_float(four.w));
    }
    return total;
  }
  __device__ __forceinline__ unsigned int team_max(unsigned int value) const {
    value = __reduce_max_sync(kAll, value);
    const uint32_t largest = places.largest(number, token);
    if (lane == 0) raise_shared(largest, value);
    sync_consumers();
    return load_shared1(largest);
  }

  static __device__ __forceinline__ unsigned int largest_of(const uint4& words,
                                                            unsigned int largest) {
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = __vmaxu2(largest, get(words, j) & 0x7fff7fffu);
    return largest;
  }

  // Stores 8 inputs of a column in the consumers' layout. All lanes must call it.
  __device__ __forceinline__ void store_eight(uint2 eight, uint32_t at, bool valid) const {
    if constexpr (F::k4Bit) {
      eight = in_granule_order(eight, lane);
      if (!valid) return;
      store_shared(at, eight.x);
      store_shared(at + 16, eight.y);
    } else {
      if (valid) store_shared(at, eight);
    }
  }

  // Calls body(vector, i) for the thread's vectors from `from` on, in all lanes of a warp that has
  // one. The array is rotated through words[0] so that `body` is instantiated once: unrolled
  // copies, each run once per GEMM, would miss the instruction cache.
  template <int HELD, typename Body>
  __device__ __forceinline__ void each_held(uint4 (&words)[HELD], int from, int pieces,
                                            Body body) const {
#pragma unroll 1
    for (int i = 0; i < HELD; ++i) {
      if (from + i * apart - lane < pieces) body(words[0], i);
      rotate(words);
    }
  }
  template <int HELD>
  static __device__ __forceinline__ void rotate(uint4 (&words)[HELD]) {
    const uint4 first = words[0];
#pragma unroll
    for (int i = 0; i + 1 < HELD; ++i) words[i] = words[i + 1];
    words[HELD - 1] = first;
  }

  // Shared-memory address of the thread's vector `which`.
  __device__ __forceinline__ uint32_t place_of(int which) const {
    return to + which * apart * chain.columns * 8 * F::kXBytes;
  }

  // Quantises the thread's vector `which`. All lanes must call it.
  __device__ __forceinline__ void round_and_store(const Scaling<VALUES>& scaling,
                                                  const uint4& words, int which, bool valid) const {
    uint2 high, low = {};
    round_eight<X, VALUES>(words, scaling, high, low);
    const uint32_t at = place_of(which);
    store_eight(high, at, valid);
    if (F::kTwo) store_eight(low, at + 64, valid);
    if constexpr (F::k4Bit) {  // 16 lanes have the inputs of a group
      const int of_high = __dp4a(int(high.x), 0x01010101, __dp4a(int(high.y), 0x01010101, 0));
      int sum = __dp4a(int(low.x), 0x01010101, __dp4a(int(low.y), 0x01010101, of_high * 254));
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAll, sum, offset);
      if (lane % 16 == 0 && valid)
        store_shared(to_group + which * apart * chain.tokens / 4, uint32_t(sum));
    }
  }

  // Waits until all tiles of earlier GEMMs are finished, or nearly so, if x is a result of one.
  __device__ __forceinline__ void wait_for_tiles(const Step& step) const {
    if (warp == 0 && lane == 0) {
      Spin spin(kTilesBefore);
      while (step.x_words && before && load_relaxed(chain.counters) + kEarly < before) spin.again();
      barrier_arrive(places.begun(number));
    }
    sync_consumers();
  }

  // Loads the thread's vectors of a token's row, from `from` on. meanwhile(): called while they are
  // in flight.
  template <int HELD, typename Meanwhile>
  __device__ __forceinline__ void load_row(uint4 (&words)[HELD], const Step& step, int from,
                                           int pieces, Meanwhile meanwhile) const {
    const int inputs = step.given.inputs;
    if (!step.x_words) {
      const auto row = reinterpret_cast<const uint4*>(static_cast<const X*>(step.given.x) +
                                                      int64_t(token) * inputs);
#pragma unroll
      for (int i = 0; i < HELD; ++i)
        if (from + i * apart < pieces) words[i] = __ldcg(row + from + i * apart);
      meanwhile();
      return;
    }
    const uint64_t* const row = step.x_words + int64_t(token) * (inputs / 2);
    Eight eights[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (from + i * apart < pieces) eights[i].load(row + (from + i * apart) * 4);
    meanwhile();
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (from + i * apart >= pieces) break;
      Spin spin(kWordsOfX);
      while (!eights[i].is_of(launch)) {
        spin.again();
        eights[i].load(row + (from + i * apart) * 4);
      }
      words[i] = eights[i].numbers();
    }
  }

  // The statistics of the token's row. last: the `which` of team_sum for the last sum.
  template <int HELD, bool CENTRED>
  __device__ __forceinline__ RowNorm norm_of(uint4 (&words)[HELD], int inputs, float eps,
                                             int last) const {
    const int pieces = inputs / 8;
    RowNorm norm[1];
    float sums[1] = {};
    auto each = [&](auto body) {
      each_held(words, first, pieces, [&](uint4& vector, int i) {
        forget(vector);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 both = unpack<X>(get(vector, j));
          if (!CENTRED || first + i * apart < pieces) body(0, both.x), body(0, both.y);
        }
      });
    };
    if (CENTRED) each([&](int, float x) { sums[0] += x; });
    row_statistics(norm, sums, CENTRED, inputs, eps, each, [&](float (&sum)[1], int which) {
      sum[0] = team_sum(sum[0], CENTRED ? which : last);
    });
    return norm[0];
  }

  // Addresses of the stream's vector p in shared memory, and in memory.
  __device__ __forceinline__ uint32_t kept_at(const Step& step, int p) const {
    return places.stream + (token * (step.given.inputs / 8) + p) * 16;
  }
  __device__ __forceinline__ uint4* stored_at(const Step& step, int p) const {
    return static_cast<uint4*>(step.given.stream) + token * (step.given.inputs / 8) + p;
  }

  // Loads what add_to_stream reads and no GEMM of this launch computes: the stream, unless an
  // earlier GEMM has kept it, and the norm's weight. Returns the weight of the thread's first
  // vector.
  template <int HELD>
  __device__ __forceinline__ uint4 prepare_stream(const Step& step) const {
    const int pieces = step.given.inputs / 8;
    const auto weight = static_cast<const uint4*>(step.given.outer_weight);
#pragma unroll 1
    for (int p = first; p < pieces && has(); p += apart) {
      if (HELD > 1 && weight) prefetch_l2(weight + p);
      if (step.keeps) store_shared(kept_at(step, p), __ldcg(stored_at(step, p)));
    }
    return HELD == 1 && weight && first < pieces ? __ldg(weight + first) : uint4{};
  }

  // x = stream + norm(x) * weight. weight: that of the thread's first vector.
  template <int HELD>
  __device__ __forceinline__ void add_to_stream(uint4 (&words)[HELD], const Step& step,
                                                uint4 weight) const {
    const int pieces = step.given.inputs / 8;
    const float scale =
        norm_of<HELD, false>(words, step.given.inputs, step.given.outer_eps, 0).scale;
    each_held(words, first, pieces, [&](uint4& vector, int i) {
      forget(vector);
      const int p = first + i * apart;
      if (p >= pieces || !has()) return;  // the padding after the row stays 0
      if (HELD > 1) weight = __ldg(static_cast<const uint4*>(step.given.outer_weight) + p);
      const uint4 sum = load_shared4(kept_at(step, p));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = unpack<X>(get(vector, j)), y = unpack<X>(get(weight, j)),
                     z = unpack<X>(get(sum, j));
        put(vector, j, pack<X>(z.x + x.x * scale * y.x, z.y + x.y * scale * y.y));
      }
      keep_in_stream(step, p, vector);
    });
  }

  __device__ __forceinline__ void keep_in_stream(const Step& step, int p,
                                                 const uint4& vector) const {
    if (step.keeps)
      store_shared(kept_at(step, p), vector);
    else if (int(blockIdx.x) == step.first_block)
      *stored_at(step, p) = vector;
  }

  // x = stream + this rank's part, in words, + the other rank's; without the stream if the sum is
  // normalised before it is added. Both ranks add the same two parts, so they get the same bits.
  // theirs: if a thread has one vector, the other's part of it, loaded perhaps before it arrived.
  template <int HELD>
  __device__ __forceinline__ void add_theirs(uint4 (&words)[HELD], const Step& step,
                                             Eight theirs) const {
    const int pieces = step.given.inputs / 8;
    each_held(words, first, pieces, [&](uint4& vector, int i) {
      forget(vector);
      const int p = first + i * apart;
      if (p >= pieces || !has()) return;
      if (HELD > 1) theirs.load_theirs(their_words(step, p));
      Patience patience{chain.state, chain.limit_ns, chain.lost};
      while (!theirs.is_of(launch) && !patience.is_over(chain.peer))
        theirs.load_theirs(their_words(step, p));
      const bool normed = step.given.outer_weight;
      const uint4 part = theirs.numbers(), sum = normed ? uint4{} : load_shared4(kept_at(step, p));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = unpack<X>(get(vector, j)), y = unpack<X>(get(part, j)),
                     z = unpack<X>(get(sum, j));
        put(vector, j, pack<X>(z.x + (x.x + y.x), z.y + (x.y + y.y)));
      }
      if (!normed) keep_in_stream(step, p, vector);
    });
  }

  // The address of vector p of the other rank's part.
  __device__ __forceinline__ const uint64_t* their_words(const Step& step, int p) const {
    return step.their_words + (token * (step.given.inputs / 8) + p) * 4;
  }

  // Rows of x that fit in registers: added to the stream if there is one, normalised if there is a
  // norm, quantised, stored.
  template <int HELD, bool CENTRED>
  __device__ __forceinline__ void load_held(const Step& step) const {
    const int pieces = step.given.inputs / 8;
    const auto weight = static_cast<const uint4*>(step.given.norm_weight);
    const auto bias = static_cast<const uint4*>(step.given.norm_bias);
    uint4 words[HELD] = {}, w = {}, b = {}, outer = {};
    if (weight) {  // constants, before the wait
#pragma unroll 1
      for (int p = first; p < pieces; p += apart) {
        prefetch_l2(weight + p);
        if (CENTRED) prefetch_l2(bias + p);
      }
    }
    if (step.given.stream) outer = prepare_stream<HELD>(step);
    wait_for_tiles(step);
    auto load_norm = [&](int p) {
      w = {}, b = {};  // the padding after the row stays 0
      if (!weight || p >= pieces) return;
      w = __ldg(weight + p);
      if (CENTRED) b = __ldg(bias + p);
    };
    Eight theirs = {};
    if (has()) {
      load_row(words, step, first, pieces, [&] {
        if (HELD == 1 && step.their_words && first < pieces)
          theirs.load_theirs(their_words(step, first));
        load_norm(first);
      });
    }
    if (step.their_words) add_theirs(words, step, theirs);
    if (!CENTRED && step.given.outer_weight) add_to_stream(words, step, outer);
    if (weight) {
      const RowNorm norm = norm_of<HELD, CENTRED>(words, step.given.inputs, step.given.norm_eps, 1);
      each_held(words, first, pieces, [&](uint4& vector, int i) {
        forget(vector);
        if (i > 0) load_norm(first + i * apart);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 x = unpack<X>(get(vector, j)), y = unpack<X>(get(w, j)),
                       z = unpack<X>(get(b, j));
          put(vector, j,
              CENTRED ? pack<X>(norm(x.x, y.x, z.x), norm(x.y, y.y, z.y))
                      : pack<X>(x.x * norm.scale * y.x, x.y * norm.scale * y.y));
        }
      });
    }
    if constexpr (F::k16Bit) {
      if (has()) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
          if (first + i * apart < pieces) store_shared(place_of(i), words[i]);
      }
      sync_consumers();
      return;
    }
    unsigned int largest = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) largest = largest_of(words[i], largest);
    finish(largest, [&](const Scaling<VALUES>& scaling) {
      each_held(words, first, pieces, [&](uint4& vector, int i) {
        round_and_store(scaling, vector, i, has() && first + i * apart < pieces);
      });
    });
  }

  // store(how): stores the token's quantised row in shared memory. largest: maximum of the thread's
  // numbers, as two 16-bit numbers.
  template <typename Store>
  __device__ __forceinline__ void finish(unsigned int largest, Store store) const {
    largest = max(largest & 0xffffu, largest >> 16);
    const Scaling<VALUES> scaling(magnitude<X>(team_max(largest)));
    store(scaling);
    if (has() && first == 0)
      store_shared(places.x_scale(number, token), __float_as_uint(scaling.scale));
    sync_consumers();
  }

  // Longer rows, without a norm; if quantised, they are read twice.
  __device__ __forceinline__ void load_long(const Step& step) const {
    const int pieces = step.given.inputs / 8;
    wait_for_tiles(step);
    auto each_round = [&](auto body) {
#pragma unroll 1
      for (int round = 0; first + round * apart - lane < pieces; round += kHeld) {
        uint4 words[kHeld] = {};
        if (has()) load_row(words, step, first + round * apart, pieces, [] {});
        body(words, round);
      }
    };
    if constexpr (F::k16Bit) {
      each_round([&](uint4(&words)[kHeld], int round) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
          if (has() && first + (round + i) * apart < pieces)
            store_shared(place_of(round + i), words[i]);
      });
      sync_consumers();
      return;
    }
    unsigned int largest = 0;
    each_round([&](uint4(&words)[kHeld], int) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) largest = largest_of(words[i], largest);
    });
    finish(largest, [&](const Scaling<VALUES>& scaling) {
      each_round([&](uint4(&words)[kHeld], int round) {
        each_held(words, first + round * apart, pieces, [&](uint4& vector, int i) {
          const int which = round + i;
          round_and_store(scaling, vector, which, has() && first + which * apart < pieces);
        });
      });
    });
  }

  // Prepares the rows that GEMM `number` reads, in shared memory. before: number of tiles of
  // earlier GEMMs.
  __device__ __forceinline__ void load(const Step& step, int its_number,
                                       unsigned int tiles_before) {
    number = its_number, before = tiles_before;
    const int pieces = step.given.inputs / 8;
    if (pieces > kHeld * apart) {
      load_long(step);
    } else if (step.given.norm_bias) {
      pieces <= apart ? load_held<1, true>(step) : load_held<kHeld, true>(step);
    } else {
      pieces <= apart ? load_held<1, false>(step) : load_held<kHeld, false>(step);
    }
  }
};

#endif

}  // namespace
}  // namespace tridecode
