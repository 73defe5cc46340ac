// Products of 1 to 4 tokens, each of the result of the one before it, in one launch, with weights
// in 8 or 4 bit: of a decoder's layer the projection of attention's result, the MLP, and the next
// layer's projection to queries, keys and values.
//
// One persistent block per multiprocessor: a producer warp, two teams of eight consumer warps, and
// warps that finish tiles. The producer copies the weights of all products through one ring of
// shared memory, so that memory stays busy while the consumers wait for the other blocks between
// two products. A tile is 16 rows of a weight, as twice 8 rows; of SwiGLU, 8 gate rows and their 8
// up rows. Tiles are dealt round-robin, continuing from product to product. A stage is a tile times
// some inputs; the teams take turns at the stages, whose inputs their warps share, and multiply
// them by mma.sync: weights are the 16 rows of that instruction, columns of x its 8 columns. The
// finishers add up the warps' sums and apply the epilogue.
//
// Results that a later product reads go through the exchange in global memory: words of two numbers
// and the launch's number. A fence would wait for all copies in flight, microseconds; a word that
// has this launch's number is whole without one. A product has begun in a block when it has all
// words of the one before it, which is therefore finished everywhere. A counter of finished tiles
// tells when it is worth while to look at the words. Every block rounds the rows of x for itself,
// after the norm, int8 and E4M3 as kernels/quantized.py says.
//
// A token takes columns 2 t and 2 t + 1, of x in two int8 parts one for each, else the first: so a
// lane has the sums of one token.
//
// Weights in 8 bit are rows; a box is 128 inputs of 8 rows, in the swizzle of 128 bytes. Weights in
// 4 bit are granules (packed_weight.cuh) with their words of scale and zero.
//
// Bytes moved: all weights, once.
// Bench: python -m tridecode.kernels.bench product_chain
#include "epilogue.cuh"
#include "hopper.cuh"
#include "packed_weight.cuh"
#include "rounding.cuh"
#include "row_norm.cuh"

namespace tridecode {
namespace {

constexpr int kTeams = 2;  // of consumer warps, which take turns at the stages
constexpr int kTeamWarps = 8;
constexpr int kWarps = kTeams * kTeamWarps;
constexpr int kConsumers = 32 * kWarps;
constexpr int kThreads = kConsumers + 128;  // and a producer warp and finishers
constexpr int kMaxSteps = 4;
constexpr int kMaxStages = 16;
constexpr int kLeastStages = 4;
constexpr int kInFlight = 3;  // stages: enough to keep memory busy; loads of x queue behind them
constexpr int kMaxTokens = 4;
constexpr int kSharedLeft = 26 * 1024;  // for blocks of the kernel behind this one
constexpr unsigned int kEarly = 80;     // tiles that are not finished when blocks look for results
constexpr int kHeld = 4;                // vectors of 8 numbers of x that a thread holds

// tiles: of 16 weight rows. second: the eight rows of a tile's second half come so many eights
// behind those of the first: 1, of SwiGLU the number of tiles.
// x_words, residual_words: of the exchange, where an earlier product of the chain leaves these
// numbers; null: they are in memory. out_words: where this product's results go for later ones, or
// null. stores: they go to memory, too.
struct Step {
  tridecode_chain_step given;
  int tiles, second;
  bool gated, stores;
  const uint64_t *x_words, *residual_words;
  uint64_t* out_words;
};

struct Chain {
  Step steps[kMaxSteps];
  int count, tokens, columns, stages, in_flight, x_bytes;
  unsigned int* counters;  // of finished tiles, zero between launches; of launches
};

struct Maps {
  CUtensorMap of[kMaxSteps];  // of weights in 8 bit
};

template <Values VALUES>
struct Format {
  static constexpr bool k4Bit = VALUES == kTwoPartsOf4Bit;
  static constexpr bool kTwo = kInTwoParts<VALUES>;
  static constexpr int kWarpUnits = k4Bit ? 2 : 1;  // of 128 inputs: chunks of granules, or boxes
  static constexpr int kUnits = kTeamWarps * kWarpUnits;  // of a stage
  static constexpr int kEightBytes = k4Bit ? kUnits * kGranuleBytes : kUnits * 1024;
  static constexpr int kGroupBytes = k4Bit ? kUnits * kGranuleRows * 4 : 0;
  static constexpr int kStageBytes = 2 * (kEightBytes + kGroupBytes);
  // of a lane's sums, of rows g and g + 8
  using Sum = typename std::conditional<VALUES == kAsInt8 || VALUES == kTwoParts, int, float>::type;
  static constexpr int kSums = k4Bit ? 2 : 4;
  // Warps that finish tiles, and buffers of sums: a finisher waits for a buffer's next round only
  // when its last one is over, since tiles are sent in order.
  static constexpr int kFinishers = k4Bit ? 3 : 2;
  static constexpr int kBuffers = k4Bit ? 4 : 2;
  static_assert(kBuffers >= kFinishers);
  static constexpr int kBufferBytes = kWarps * 32 * kSums * 4;  // [warp][lane]
  static constexpr int kSumBytes = kBuffers * kBufferBytes;
};

// How the consumer warps share the tokens.
__host__ __device__ constexpr int warps_of_token(int tokens) {
  return tokens == 1 ? kWarps : tokens == 2 ? kWarps / 2 : kWarps / 4;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The barrier of the consumer warps.
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// c (16 x 8) += a (16 x 32) * b (32 x 8), int8. The lane's words are 4 inputs: of a rows g and g +
// 8 at 4 t, then both at 4 t + 16; of b column g, the same inputs; c as multiply_add's.
__device__ __forceinline__ void multiply_add_bytes(int (&c)[4], uint32_t a0, uint32_t a1,
                                                   uint32_t a2, uint32_t a3, uint32_t b0,
                                                   uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same of E4M3.
__device__ __forceinline__ void multiply_add_bytes(float (&c)[4], uint32_t a0, uint32_t a1,
                                                   uint32_t a2, uint32_t a3, uint32_t b0,
                                                   uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The compiler knows nothing of the words' numbers: it would keep what it has unpacked of them.
__device__ __forceinline__ void forget(uint4& words) {
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// Two words of the exchange: four numbers.
__device__ __forceinline__ void load_words(const uint64_t* from, uint64_t& first,
                                           uint64_t& second) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(from));
}
__device__ __forceinline__ uint64_t load_word(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from));
  return word;
}
__device__ __forceinline__ void store_word(uint64_t* to, uint32_t pair, unsigned int launch) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(pair | uint64_t(launch) << 32)
               : "memory");
}
__device__ __forceinline__ unsigned int load_relaxed(const unsigned int* from) {
  unsigned int value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

// Eight numbers of the exchange.
struct Eight {
  uint64_t words[4];
  __device__ __forceinline__ void load(const uint64_t* from) {
    load_words(from, words[0], words[1]), load_words(from + 2, words[2], words[3]);
  }
  __device__ __forceinline__ bool is_of(unsigned int launch) const {
    unsigned int other = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) other |= unsigned(words[i] >> 32) ^ launch;
    return other == 0;
  }
  __device__ __forceinline__ uint4 numbers() const {
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// The eight rows of a tile's first half; those of the second half come `second` eights behind them.
__device__ __forceinline__ int eight_of(const Step& step, int tile) {
  return step.gated ? tile : 2 * tile;
}

// A block's tiles of a product are those where (tile + turn) % blocks is its number.
__device__ __forceinline__ int first_tile(int turn) {
  const int first = int(blockIdx.x) - turn;
  return first < 0 ? first + int(gridDim.x) : first;
}

// Blocks start at different stages: rows are a power of two apart, and blocks that all started at
// the first input would contend for few memory channels. from: blockIdx.x % stages.
__device__ __forceinline__ int rotated(int stage, int from, int stages) {
  const int at = stage + from;
  return at < stages ? at : at - stages;
}

// The producer's warp.
template <Values VALUES>
struct Producer {
  using F = Format<VALUES>;
  const Chain& chain;
  const Maps& maps;
  char* ring;
  uint64_t *full, *empty;
  int slot = 0, parity = 1, issued = 0;
  int oldest = 0, oldest_parity = 0;  // the slot of the oldest copy in flight

  // Granules of four places side by side: values of both eights, then their groups.
  __device__ __forceinline__ void copy_granules_of(const Step& step, int first, int unit, int units,
                                                   char* to, uint64_t policy) const {
    const int lane = threadIdx.x % 32;
    const int bytes = lane < 2 ? units * kGranuleBytes : units * kGranuleRows * 4;
    if (lane == 0) barrier_expect(full + slot, 2 * units * (kGranuleBytes + kGranuleRows * 4));
    __syncwarp();
    if (lane >= 4) return;
    const int chunks = step.given.inputs / 128;
    const int eight = first + lane % 2 * step.second;
    const int64_t at = int64_t(eight) * chunks + unit;
    const char* const from =
        lane < 2 ? static_cast<const char*>(step.given.weight) + at * kGranuleBytes
                 : reinterpret_cast<const char*>(step.given.weight_groups) + at * kGranuleRows * 4;
    const int place =
        lane < 2 ? lane * F::kEightBytes : 2 * F::kEightBytes + (lane - 2) * F::kGroupBytes;
    copy_bulk(to + place, from, bytes, full + slot, policy);
  }

  __device__ __forceinline__ void copy_boxes(const Step& step, const CUtensorMap* map, int first,
                                             int unit, char* to, uint64_t policy) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) barrier_expect(full + slot, F::kStageBytes);
    __syncwarp();
    if (lane >= 2) return;
    const int eight = first + lane * step.second;
    copy_blocks(to + lane * F::kEightBytes, map, eight * 8, unit, full + slot, policy);
  }

  __device__ __forceinline__ void run() {
    const uint64_t policy = evict_first();
    int turn = 0;
    for (int i = 0; i < chain.count; ++i) {
      const Step& step = chain.steps[i];
      const int units = step.given.inputs / 128, stages = ceil_div(units, F::kUnits);
      const int from = blockIdx.x % stages;
      for (int tile = first_tile(turn); tile < step.tiles; tile += gridDim.x) {
        const int eight = eight_of(step, tile);
        for (int stage = 0; stage < stages; ++stage) {
          barrier_wait(empty + slot, parity);
          if (issued++ >= chain.in_flight) {
            barrier_wait(full + oldest, oldest_parity);
            if (++oldest == chain.stages) oldest = 0, oldest_parity ^= 1;
          }
          const int unit = rotated(stage, from, stages) * F::kUnits;
          char* const to = ring + slot * F::kStageBytes;
          if constexpr (F::k4Bit) {
            copy_granules_of(step, eight, unit, min(F::kUnits, units - unit), to, policy);
          } else {
            copy_boxes(step, maps.of + i, eight, unit, to, policy);
          }
          if (++slot == chain.stages) slot = 0, parity ^= 1;
        }
      }
      turn = (turn + step.tiles) % int(gridDim.x);
    }
  }
};

// Between the consumers and the finishers. `sent`: the sums of a tile are in their buffer; `read`:
// they have been read; `begun`: a product has begun, all before it are finished or nearly so.
struct Handover {
  static constexpr int kMost = 4;
  uint64_t sent[kMost], read[kMost], begun;

  __device__ __forceinline__ void initialize() {
    for (int i = 0; i < kMost; ++i) barrier_init(sent + i, kWarps), barrier_init(read + i, 1);
    barrier_init(&begun, 1);
  }
};

// What a lane's rows of a tile are multiplied with and what is added: loaded ahead.
struct Constants {
  float scales[2];
  unsigned short bias[2];
};

template <typename X>
__device__ __forceinline__ float to_number(unsigned short word) {
  return to_float(*reinterpret_cast<const X*>(&word));
}

// The consumer warps: their shared memory and position in the ring.
template <typename X, Values VALUES>
struct Consumer {
  using F = Format<VALUES>;
  using Sum = typename F::Sum;
  const Chain& chain;
  char* ring;
  uint4* xs;        // columns of x, see store_eight()
  int* group_sums;  // 4 bit: [128 inputs][token]: the sum of 254 * high + low
  char* sums;
  unsigned int* shared;  // [3][warp]
  float* x_scales;       // of the tokens
  Handover& handover;
  uint64_t *full, *empty;
  unsigned int launch;
  int lane, warp, slot, parity = 0;     // slot: of the warp's next stage
  int stage = 0, number = 0, turn = 0;  // of all products: the next tile's first stage, its number
  unsigned int before = 0;              // tiles of earlier products

  // ---- rows of x

  struct Team {
    int warps, token, part;
  };
  __device__ __forceinline__ Team team() const {
    const int warps = warps_of_token(chain.tokens);
    return {warps, warp / warps, warp % warps};
  }

  // Over the warps of a token. which: 0 or 1, other shared memory each; the maximum has its own.
  __device__ __forceinline__ float team_sum(float value, const Team& team, int which) {
    value = warp_sum(value);
    if (lane == 0) shared[which * kWarps + warp] = __float_as_uint(value);
    sync_consumers();
    const int first = which * kWarps + warp / team.warps * team.warps;
    return warp_sum(lane < team.warps ? __uint_as_float(shared[first + lane]) : 0.0f);
  }
  __device__ __forceinline__ unsigned int team_max(unsigned int value, const Team& team) {
    value = __reduce_max_sync(kAll, value);
    if (lane == 0) shared[2 * kWarps + warp] = value;
    sync_consumers();
    const int first = 2 * kWarps + warp / team.warps * team.warps;
    return __reduce_max_sync(kAll, lane < team.warps ? shared[first + lane] : 0u);
  }

  static __device__ __forceinline__ unsigned int largest_of(const uint4& words,
                                                            unsigned int largest) {
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = __vmaxu2(largest, get(words, j) & 0x7fff7fffu);
    return largest;
  }

  // Stores inputs 8 p to 8 p + 7 of a column where piece_of_x finds them. All lanes
  // take part.
  __device__ __forceinline__ void store_eight(uint2 eight, int p, int column, bool valid) {
    const int columns = chain.columns;
    if constexpr (F::k4Bit) {
      eight = in_granule_order(eight);
      const int c = 8 * p, step = c >> 5 & 3, first = (c >> 4 & 1) * 2;
      char* const to =
          reinterpret_cast<char*>(xs + (((c >> 7) * 2 + step / 2) * columns + column) * 4 + first) +
          step % 2 * 8 + (c >> 3 & 1) * 4;
      if (!valid) return;
      *reinterpret_cast<uint32_t*>(to) = eight.x;
      *reinterpret_cast<uint32_t*>(to + 16) = eight.y;
    } else {
      if (!valid) return;
      const int piece = p / 2;  // of 16 inputs
      uint4* const to = xs + ((piece / 8 * 2 + piece % 2) * columns + column) * 4 + piece % 8 / 2;
      reinterpret_cast<uint2*>(to)[p % 2] = eight;
    }
  }

  // How a row is rounded. A row with NaN or infinity has the scale NaN and any values.
  struct Scaling {
    float scale, inverse;
    float by, correction;  // of an exact division; 0 where that would leave float32's range
    __device__ __forceinline__ explicit Scaling(unsigned int largest) {
      constexpr float kLimit = VALUES == kAsE4m3 ? 448.0f : 127.0f;
      const float most = __uint_as_float(largest);
      scale = largest == 0 ? 1.0f : largest >= 0x7f800000u ? CUDART_NAN_F : __fdiv_rn(most, kLimit);
      inverse = __frcp_rn(scale);
      const bool plain = scale > kLeastDivisor && scale < kMostDivisor;
      by = plain ? scale : 0.0f, correction = plain ? inverse : 0.0f;
    }
    // As tridecode::quotient.
    __device__ __forceinline__ float quotient(float x) const {
      float q = x * inverse;
      q = fmaf(fmaf(-q, by, x), correction, q);
      return fmaf(fmaf(-q, by, x), correction, q);
    }
  };

  static __device__ __forceinline__ uint32_t four_bytes(const uint32_t* of) {  // the lowest ones
    return __byte_perm(__byte_perm(of[0], of[1], 0x0040), __byte_perm(of[2], of[3], 0x0040),
                       0x5410);
  }

  // Of 8 numbers the values, or their high and low parts. The low parts have what products with the
  // inverse, not exact quotients, make of the high ones.
  static __device__ __forceinline__ void round_eight(const uint4& words, const Scaling& scaling,
                                                     uint2& high, uint2& low) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: a sum's last byte is the nearest integer
    uint32_t h[8], l[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = unpack<X>(get(words, i));
      if constexpr (VALUES == kAsE4m3)
        h[i] = Rounding<kAsE4m3>::pair(scaling.quotient(both.x), scaling.quotient(both.y));
#pragma unroll
      for (int j = 0; j < 2 && VALUES != kAsE4m3; ++j) {
        const float x = j ? both.y : both.x;
        if constexpr (F::kTwo) {
          const float shifted = fmaf(x, scaling.inverse, kShift);
          const float rest = fmaf(x, scaling.inverse, kShift - shifted);
          h[2 * i + j] = __float_as_uint(shifted);
          l[2 * i + j] = __float_as_uint(fmaf(rest, 254.0f, kShift));
        } else {
          h[2 * i + j] = __float_as_uint(scaling.quotient(x) + kShift);
        }
      }
    }
    if constexpr (VALUES == kAsE4m3) {
      high = make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
    } else {
      high = make_uint2(four_bytes(h), four_bytes(h + 4));
      if (F::kTwo) low = make_uint2(four_bytes(l), four_bytes(l + 4));
    }
  }

  // Rounds the vectors first, first + apart, ... All lanes take part.
  __device__ __forceinline__ void store_all(const Scaling& scaling, const uint4 (&words)[kHeld],
                                            int first, int apart, int pieces, int token, bool has) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int p = first + i * apart;
      if (p - lane >= pieces) break;
      const bool valid = has && p < pieces;
      uint2 high, low = {};
      round_eight(words[i], scaling, high, low);
      store_eight(high, p, F::kTwo ? 2 * token : token, valid);
      if (F::kTwo) store_eight(low, p, 2 * token + 1, valid);
      if constexpr (F::k4Bit) {  // 16 lanes have the inputs of a group
        const int of_high = __dp4a(int(high.x), 0x01010101, __dp4a(int(high.y), 0x01010101, 0));
        int sum = __dp4a(int(low.x), 0x01010101, __dp4a(int(low.y), 0x01010101, of_high * 254));
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAll, sum, offset);
        if (lane % 16 == 0 && valid) group_sums[p / 16 * chain.tokens + token] = sum;
      }
    }
  }

  // Waits until all tiles before this product are finished, or nearly so.
  __device__ __forceinline__ void wait_for_tiles() {
    if (threadIdx.x == 0) {
      while (before && load_relaxed(chain.counters) + kEarly < before) {
      }
      barrier_arrive(&handover.begun);
    }
    sync_consumers();
  }

  // The vectors first, first + apart, ... of a token's row. meanwhile(): called while they come.
  template <typename Meanwhile>
  __device__ __forceinline__ void load_row(uint4 (&words)[kHeld], const Step& step, int token,
                                           int first, int apart, int pieces,
                                           Meanwhile meanwhile) const {
    const int inputs = step.given.inputs;
    if (!step.x_words) {
      const auto row = reinterpret_cast<const uint4*>(static_cast<const X*>(step.given.x) +
                                                      int64_t(token) * inputs);
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (first + i * apart < pieces) words[i] = __ldcg(row + first + i * apart);
      meanwhile();
      return;
    }
    const uint64_t* const row = step.x_words + int64_t(token) * (inputs / 2);
    Eight eights[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (first + i * apart < pieces) eights[i].load(row + (first + i * apart) * 4);
    meanwhile();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * apart >= pieces) break;
      while (!eights[i].is_of(launch)) eights[i].load(row + (first + i * apart) * 4);
      words[i] = eights[i].numbers();
    }
  }

  // The rows of x that a thread can hold: normalised where there is a norm, rounded, stored.
  __device__ __forceinline__ void load_held(const Step& step) {
    const Team mine = team();
    const bool has = mine.token < chain.tokens;
    const int first = mine.part * 32 + lane, apart = 32 * mine.warps;
    const int pieces = step.given.inputs / 8;
    const X* const weight = static_cast<const X*>(step.given.norm_weight);
    const X* const bias = static_cast<const X*>(step.given.norm_bias);
    uint4 words[kHeld] = {}, w[kHeld];
    if (weight) {  // constants, before the wait
#pragma unroll 1
      for (int p = first; p < pieces; p += apart) {
        prefetch_l2(reinterpret_cast<const uint4*>(weight) + p);
        if (bias) prefetch_l2(reinterpret_cast<const uint4*>(bias) + p);
      }
    }
    wait_for_tiles();
    if (has) {
      load_row(words, step, mine.token, first, apart, pieces, [&] {
        if (!weight) return;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const int p = first + i * apart;
          if (p >= pieces) break;
          w[i] = __ldg(reinterpret_cast<const uint4*>(weight) + p);
        }
      });
    }
    if (weight) {
      float total = 0.0f;
      auto each = [&](auto body) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          if (first + i * apart >= pieces) break;
          forget(words[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 both = unpack<X>(get(words[i], j));
            body(0, both.x), body(0, both.y);
          }
        }
      };
      each([&](int, float x) { total += x; });
      RowNorm norm[1];
      float partial[1] = {total};
      row_statistics(
          norm, partial, bias != nullptr, step.given.inputs, step.given.norm_eps, each,
          [&](float (&both)[1], int which) { both[0] = team_sum(both[0], mine, which); });
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int p = first + i * apart;
        if (p >= pieces) break;
        forget(words[i]);
        const uint4 b = bias ? __ldg(reinterpret_cast<const uint4*>(bias) + p) : uint4{};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 x = unpack<X>(get(words[i], j)), y = unpack<X>(get(w[i], j)),
                       z = unpack<X>(get(b, j));
          put(words[i], j, pack<X>(norm[0](x.x, y.x, z.x), norm[0](x.y, y.y, z.y)));
        }
      }
    }
    unsigned int largest = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) largest = largest_of(words[i], largest);
    largest = max(largest & 0xffffu, largest >> 16);
    const Scaling scaling(magnitude<X>(team_max(largest, mine)));
    store_all(scaling, words, first, apart, pieces, mine.token, has);
    if (has && mine.part == 0 && lane == 0) x_scales[mine.token] = scaling.scale;
    sync_consumers();
  }

  // Longer rows, without a norm: they are read twice.
  __device__ __forceinline__ void load_long(const Step& step) {
    const Team mine = team();
    const bool has = mine.token < chain.tokens;
    const int first = mine.part * 32 + lane, apart = 32 * mine.warps;
    const int pieces = step.given.inputs / 8;
    wait_for_tiles();
    auto each_round = [&](auto body) {
#pragma unroll 1
      for (int from = first; from - lane < pieces; from += kHeld * apart) {
        uint4 words[kHeld] = {};
        if (has) load_row(words, step, mine.token, from, apart, pieces, [] {});
        body(words, from);
      }
    };
    unsigned int largest = 0;
    each_round([&](const uint4(&words)[kHeld], int) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) largest = largest_of(words[i], largest);
    });
    largest = max(largest & 0xffffu, largest >> 16);
    const Scaling scaling(magnitude<X>(team_max(largest, mine)));
    each_round([&](const uint4(&words)[kHeld], int from) {
      store_all(scaling, words, from, apart, pieces, mine.token, has);
    });
    if (has && mine.part == 0 && lane == 0) x_scales[mine.token] = scaling.scale;
    sync_consumers();
  }

  // ---- products

  __device__ __forceinline__ uint4 piece_of_x(int index) const {  // of 4 lanes for each column
    const int column = F::kTwo ? lane / 4 : lane / 8;
    const bool has = column < chain.columns && (F::kTwo || lane / 4 % 2 == 0);
    return has ? xs[(index * chain.columns + column) * 4 + lane % 4] : make_uint4(0, 0, 0, 0);
  }

  // sum += the warp's unit of a stage of 8-bit weights. The lanes of a row read its pieces of 16
  // inputs 0, 2, 4, 6, then 1, 3, 5, 7.
  __device__ __forceinline__ void multiply_box(Sum (&sum)[4], const char* weights, int unit) const {
    const int g = lane / 4, t = lane % 4;
    const char* const rows = weights + warp % kTeamWarps * 1024 + g * 128;
    Sum c[4] = {}, d[4] = {};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const char* const at = rows + ((2 * t + odd) ^ g) * 16;
      const uint4 a0 = *reinterpret_cast<const uint4*>(at);
      const uint4 a1 = *reinterpret_cast<const uint4*>(at + F::kEightBytes);
      const uint4 b = piece_of_x(unit * 2 + odd);
      multiply_add_bytes(c, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
      multiply_add_bytes(d, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += c[i] + d[i];
  }

  // sum += the warp's chunk `which` of a stage of 4-bit weights: of token t, rows g and g + 8, 254
  // times the numbers that x's high part stands for. The values are multiplied as they are, 0 to
  // 15, and the zero with the sum of the group's inputs.
  __device__ __forceinline__ void multiply_chunk(float (&sum)[2], const char* weights, int which,
                                                 int unit) const {
    const int at = warp % kTeamWarps * F::kWarpUnits + which, t = lane % 4;
    uint4 words[2];
    uint32_t groups[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = *reinterpret_cast<const uint4*>(weights + i * F::kEightBytes + at * kGranuleBytes +
                                                 lane * 16);
      groups[i] = *reinterpret_cast<const uint32_t*>(
          weights + 2 * F::kEightBytes + i * F::kGroupBytes + (at * kGranuleRows + lane / 4) * 4);
    }
    int c[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 b = piece_of_x(unit * 2 + half);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t first = get(words[0], half * 2 + k), second = get(words[1], half * 2 + k);
        constexpr uint32_t kLow = 0x0f0f0f0fu;
        multiply_add_bytes(c[k], first & kLow, second & kLow, first >> 4 & kLow, second >> 4 & kLow,
                           k ? b.z : b.x, k ? b.w : b.y);
      }
    }
    const int all = t < chain.tokens ? group_sums[unit * chain.tokens + t] : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      constexpr int kPlace = std::is_same<X, half>::value ? 22 : 19;  // as zero_of's
      const int zero = groups[i] >> kPlace & 15;
      const int high = c[0][2 * i] + c[1][2 * i], low = c[0][2 * i + 1] + c[1][2 * i + 1];
      sum[i] = fmaf(scale_of<X>(groups[i]), float(high * 254 + low - zero * all), sum[i]);
    }
  }

  // unit: the stage's first; units: those that it has.
  __device__ __forceinline__ void multiply_stage(Sum (&sum)[F::kSums], int unit, int units) {
    const char* const weights = ring + slot * F::kStageBytes;
    const int own = warp % kTeamWarps * F::kWarpUnits;
    barrier_wait(full + slot, parity);
    if constexpr (F::k4Bit) {
#pragma unroll
      for (int i = 0; i < F::kWarpUnits; ++i)
        if (own + i < units) multiply_chunk(sum, weights, i, unit + own + i);
    } else {
      if (own < units) multiply_box(sum, weights, unit + own);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + slot);
  }

  // Gives the sums of a tile to a finisher.
  __device__ __forceinline__ void send_sums(const Sum (&sum)[F::kSums]) {
    const int buffer = number % F::kBuffers;
    barrier_wait(handover.read + buffer, number / F::kBuffers % 2 ^ 1);
    Sum* const own =
        reinterpret_cast<Sum*>(sums + buffer * F::kBufferBytes) + threadIdx.x * F::kSums;
    if constexpr (F::kSums == 4) {
      *reinterpret_cast<uint4*>(own) = reinterpret_cast<const uint4&>(sum);
    } else {
      *reinterpret_cast<uint2*>(own) = reinterpret_cast<const uint2&>(sum);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(handover.sent + buffer);
    ++number;
  }

  __device__ __forceinline__ void multiply(const Step& step) {
    const int units = step.given.inputs / 128, stages = ceil_div(units, F::kUnits);
    const int from = blockIdx.x % stages, ring_stages = chain.stages;
    int tile = first_tile(turn);
    turn = (turn + step.tiles) % int(gridDim.x);
    if (tile >= step.tiles) {
      before += step.tiles;
      return;
    }
    if (step.given.inputs / 8 <= kHeld * 32 * team().warps) {
      load_held(step);
    } else {
      load_long(step);
    }
#pragma unroll 1
    for (; tile < step.tiles; tile += gridDim.x) {
      Sum sum[F::kSums] = {};
#pragma unroll 1
      for (int i = (warp / kTeamWarps + stage) % kTeams; i < stages; i += kTeams) {
        const int unit = rotated(i, from, stages) * F::kUnits;
        multiply_stage(sum, unit, units - unit);
        if ((slot += kTeams) >= ring_stages) slot -= ring_stages, parity ^= 1;
      }
      stage += stages;
      send_sums(sum);
    }
    before += step.tiles;
  }
};

// The warps that finish tiles, in turns.
template <typename X, Values VALUES>
struct Finisher {
  using F = Format<VALUES>;
  using Sum = typename F::Sum;
  const Chain& chain;
  const char* sums;
  const float* x_scales;
  Handover& handover;
  unsigned int launch;
  int lane, which;

  __device__ __forceinline__ int token() const { return lane % 4; }

  // eight: of the tile's first half.
  __device__ __forceinline__ void load_constants(Constants& to, const Step& step, int eight) const {
    const auto bias = static_cast<const unsigned short*>(step.given.bias);
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int row = (eight + second * step.second) * 8 + lane / 4;
      to.scales[second] = F::k4Bit ? 1.0f / 254 : __ldg(step.given.weight_scales + row);
      to.bias[second] = bias ? __ldg(bias + row) : 0;
    }
  }

  __device__ __forceinline__ void load_residual(unsigned short (&residual)[2], const Step& step,
                                                int eight) const {
    const auto from = static_cast<const unsigned short*>(step.given.residual);
    residual[0] = residual[1] = 0;
    if (!from || token() >= chain.tokens) return;
    const int columns = step.gated ? step.given.outputs / 2 : step.given.outputs;
    const int64_t row = int64_t(token()) * columns + eight * 8 + lane / 4;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      if (step.gated && second) break;
      const int64_t at = row + second * 8;
      if (!step.residual_words) {
        residual[second] = __ldcg(from + at);
        continue;
      }
      uint64_t word = load_word(step.residual_words + at / 2);
      while (unsigned(word >> 32) != launch) word = load_word(step.residual_words + at / 2);
      residual[second] = at % 2 ? uint32_t(word) >> 16 : uint32_t(word) & 0xffffu;
    }
  }

  // The sums of all warps, of the lane's token and its rows.
  __device__ __forceinline__ void add_up(const char* buffer, float (&values)[2]) const {
    Sum total[F::kSums] = {};
#pragma unroll 8
    for (int i = 0; i < kWarps; ++i) {
      const auto part = reinterpret_cast<const Sum*>(buffer) + (i * 32 + lane) * F::kSums;
#pragma unroll
      for (int k = 0; k < F::kSums; ++k) total[k] += part[k];
    }
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      if constexpr (F::k4Bit) {
        values[second] = total[second];
      } else {
        values[second] = float(total[2 * second]);
        if (F::kTwo)
          values[second] = fmaf(float(total[2 * second + 1]), 1.0f / 254, values[second]);
      }
    }
  }

  __device__ __forceinline__ void store(const Step& step, int eight, const Constants& constants,
                                        const unsigned short (&residual)[2],
                                        const float (&values)[2]) const {
    const auto& given = step.given;
    const int g = lane / 4;
    const float scale = x_scales[token()];
    float v[2];
#pragma unroll
    for (int second = 0; second < 2; ++second)
      v[second] = fmaf(values[second] * constants.scales[second], scale,
                       to_number<X>(constants.bias[second]));
    if (step.gated) {
      v[0] = silu(v[0]) * v[1] + to_number<X>(residual[0]);
    } else {
#pragma unroll
      for (int second = 0; second < 2; ++second)
        v[second] = activate(v[second], given.activation) + to_number<X>(residual[second]);
    }
    // Rows g and g + 1: a lane of an even g has those of the first half of the tile, its neighbour
    // those of the second.
    const float other = __shfl_xor_sync(kAll, g % 2 ? v[0] : v[1], 4);
    const uint32_t pair = g % 2 ? pack<X>(other, v[1]) : pack<X>(v[0], other);
    if (token() >= chain.tokens || (step.gated && g % 2)) return;
    const int columns = step.gated ? given.outputs / 2 : given.outputs;
    const int64_t at = int64_t(token()) * columns + (eight + g % 2) * 8 + g / 2 * 2;
    if (step.out_words) store_word(step.out_words + at / 2, pair, launch);
    if (step.stores) *reinterpret_cast<uint32_t*>(static_cast<X*>(given.out) + at) = pair;
  }

  // Counts tiles of this warp. all: 0, or of the last product the number of all tiles.
  __device__ __forceinline__ void count(unsigned int tiles, unsigned int all) const {
    if (lane != 0 || tiles == 0) return;
    if (!all) {
      asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(chain.counters), "r"(tiles)
                   : "memory");
    } else if (atomicAdd(chain.counters, tiles) + tiles == all) {
      chain.counters[0] = 0;  // only blocks that have tiles still to finish look at it
      chain.counters[1] = launch;
    }
  }

  __device__ __forceinline__ void run() {
    unsigned int all = 0;
    int number = 0, turn = 0;  // of the block's tiles, as the consumers count
    int begun = 0;             // products
    for (int i = 0; i < chain.count; ++i) {
      const Step& step = chain.steps[i];
      int tile = first_tile(turn);
      turn = (turn + step.tiles) % int(gridDim.x);
      const int others =
          (which + F::kFinishers - number % F::kFinishers) % F::kFinishers;  // tiles before its own
      const int of_block = tile < step.tiles ? ceil_div(step.tiles - tile, gridDim.x) : 0;
      tile += others * gridDim.x;
      const int apart = F::kFinishers * gridDim.x;
      int eight = eight_of(step, tile);
      Constants next;
      if (tile < step.tiles) load_constants(next, step, eight);
      // of every product of which the block has a tile, or the parity would be ambiguous
      if (of_block) barrier_wait(&handover.begun, begun++ % 2);
      unsigned int finished = 0;
#pragma unroll 1
      for (int at = others; at < of_block; at += F::kFinishers, tile += apart) {
        const Constants constants = next;
        const int of_next = eight_of(step, tile + apart);
        if (at + F::kFinishers < of_block) load_constants(next, step, of_next);
        unsigned short residual[2];
        load_residual(residual, step, eight);
        const int buffer = (number + at) % F::kBuffers;
        barrier_wait(handover.sent + buffer, (number + at) / F::kBuffers % 2);
        float values[2];
        add_up(sums + buffer * F::kBufferBytes, values);
        __syncwarp();
        if (lane == 0) barrier_arrive(handover.read + buffer);
        store(step, eight, constants, residual, values);
        eight = of_next;
        ++finished;
      }
      number += of_block;
      all += step.tiles;
      count(finished, i == chain.count - 1 ? all : 0);
    }
  }
};

#endif

template <typename X, Values VALUES>
__global__ void __launch_bounds__(kThreads, 1)
    product_chain_sm90a(const __grid_constant__ Chain chain, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using F = Format<VALUES>;
  extern __shared__ char raw[];
  char* const ring = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ unsigned int shared[3 * kWarps];
  __shared__ float x_scales[kMaxTokens];
  __shared__ Handover handover;
  if (threadIdx.x == 0) {
    for (int i = 0; i < chain.stages; ++i)
      barrier_init(full + i, 1), barrier_init(empty + i, kTeamWarps);
    handover.initialize();
    fence_barriers();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  char* const sums = ring + chain.stages * F::kStageBytes;
  int* const group_sums = reinterpret_cast<int*>(sums + F::kSumBytes + chain.x_bytes);
  if (warp >= kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    if (warp == kWarps + F::kFinishers) Producer<VALUES>{chain, maps, ring, full, empty}.run();
    if (warp < kWarps + F::kFinishers) {
      wait_for_predecessor();
      const unsigned int launch = load_relaxed(chain.counters + 1) + 1;
      Finisher<X, VALUES>{chain, sums, x_scales, handover, launch, lane, warp - kWarps}.run();
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
  wait_for_predecessor();
  const unsigned int launch = load_relaxed(chain.counters + 1) + 1;
  Consumer<X, VALUES> consumer = {chain,
                                  ring,
                                  reinterpret_cast<uint4*>(sums + F::kSumBytes),
                                  group_sums,
                                  sums,
                                  shared,
                                  x_scales,
                                  handover,
                                  full,
                                  empty,
                                  launch,
                                  lane,
                                  warp,
                                  warp / kTeamWarps};
  for (int i = 0; i < chain.count; ++i) consumer.multiply(chain.steps[i]);
#endif
}

constexpr int kHeaderWords = 32;  // of the exchange
constexpr int kAlignment = 1024,
              kDeclared = 2048;  // bytes: of the ring, of what the kernel declares

// Bytes of shared memory for rows of x and the sums of their groups.
template <Values VALUES>
constexpr int64_t row_bytes(int inputs, int tokens) {
  using F = Format<VALUES>;
  return int64_t(inputs) * (F::kTwo ? 2 * tokens : tokens) +
         (F::k4Bit ? inputs / 128 * tokens * 4 : 0);
}

template <Values VALUES>
int stages_of(int inputs, int tokens) {
  using F = Format<VALUES>;
  if (tokens > kMaxTokens) return 0;
  const int64_t rest = device().shared_bytes - kSharedLeft - kAlignment - kDeclared - F::kSumBytes -
                       row_bytes<VALUES>(inputs, tokens);
  const int64_t stages = rest / F::kStageBytes;
  return rest < 0 ? 0 : stages < kMaxStages ? int(stages) : kMaxStages;
}

template <typename Body>
int for_values(int operand, Body body) {
  if (operand == kAsInt8) return body(std::integral_constant<Values, kAsInt8>());
  if (operand == kAsE4m3) return body(std::integral_constant<Values, kAsE4m3>());
  if (operand == kTwoParts) return body(std::integral_constant<Values, kTwoParts>());
  if (operand == kTwoPartsOf4Bit) return body(std::integral_constant<Values, kTwoPartsOf4Bit>());
  return fail("product_chain_sm90a: operand code %d; wanted 1 to 4", operand);
}

int check_step(const Step& step, int number) {
  const auto& given = step.given;
  if (given.inputs % 128 || given.outputs % (step.gated ? 32 : 16) || given.inputs <= 0)
    return fail(
        "product_chain_sm90a: product %d has %d inputs, %d outputs; wanted multiples of "
        "128 and %d",
        number, given.inputs, given.outputs, step.gated ? 32 : 16);
  const void* const read[] = {given.out,      given.x,           given.weight,
                              given.residual, given.norm_weight, given.norm_bias};
  for (const void* each : read)
    if (!aligned16(each))
      return fail("product_chain_sm90a: product %d has an address that is no multiple of 16",
                  number);
  return 0;
}

int encode_rows(CUtensorMap* map, const tridecode_chain_step& step, int boxes) {
  const cuuint64_t sizes[] = {64, cuuint64_t(step.outputs), cuuint64_t(step.inputs / 128)};
  const cuuint64_t strides[] = {cuuint64_t(step.inputs), 128};
  const cuuint32_t box[] = {64, 8, cuuint32_t(boxes)};  // two 8-bit inputs are a 16-bit number
  return encode_map(map, step.weight, 3, sizes, strides, box, kFloat16);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int64_t tridecode_product_chain_stages(int inputs, int tokens, int operand) {
  return for_values(
      operand, [&](auto values) { return stages_of<decltype(values)::value>(inputs, tokens); });
}

int tridecode_product_chain_sm90a(const tridecode_chain_task* task, void* stream) {
  const char* const name = "product_chain_sm90a";
  const auto given = static_cast<const tridecode_chain_step*>(task->steps);
  if (task->num_steps < 1 || task->num_steps > kMaxSteps || device().capability != 90)
    return fail("%s: %d products on sm_%d; wanted 1 to %d on sm_90", name, task->num_steps,
                device().capability, kMaxSteps);
  Chain chain = {};
  chain.count = task->num_steps, chain.tokens = task->tokens;
  chain.counters = static_cast<unsigned int*>(task->exchange);
  uint64_t* words = static_cast<uint64_t*>(task->exchange) + kHeaderWords;
  int most_inputs = 0;
  for (int i = 0; i < chain.count; ++i) {
    Step& step = chain.steps[i];
    step.given = given[i];
    step.gated = given[i].activation == kSwiglu;
    step.tiles = given[i].outputs / 16, step.second = step.gated ? given[i].outputs / 16 : 1;
    if (int status = check_step(step, i)) return status;
    step.stores = true;
    for (int j = i - 1; j >= 0; --j) {  // the last one before it that writes what it reads
      Step& earlier = chain.steps[j];
      if (given[i].x == given[j].out && !step.x_words) step.x_words = earlier.out_words;
      if (given[i].residual && given[i].residual == given[j].out && !step.residual_words)
        step.residual_words = earlier.out_words;
      if (given[i].out == given[j].out) earlier.stores = false;  // stores are not ordered
    }
    step.out_words = words;
    words += int64_t(task->tokens) * (given[i].outputs / (step.gated ? 4 : 2));
    if (given[i].inputs > most_inputs) most_inputs = given[i].inputs;
    const int tokens = task->tokens;
    const int held = kHeld * 256 * warps_of_token(tokens);
    if (given[i].norm_weight && given[i].inputs > held)
      return fail("%s: a norm of %d inputs, %d tokens; wanted at most %d", name, given[i].inputs,
                  tokens, held);
  }
  const int64_t needed = reinterpret_cast<char*>(words) - static_cast<char*>(task->exchange);
  if (needed > task->exchange_bytes)
    return fail("%s: %lld bytes of the exchange; wanted at least %lld", name,
                (long long)task->exchange_bytes, (long long)needed);
  chain.steps[chain.count - 1].out_words = nullptr;
  return for_16_bit_dtype(task->dtype, name, [&](auto x) {
    using X = decltype(x);
    return for_values(task->operand, [&](auto values) {
      constexpr Values kValues = decltype(values)::value;
      using F = Format<kValues>;
      chain.columns = F::kTwo ? 2 * chain.tokens : chain.tokens;
      const int most = chain.tokens < 1 ? 0 : stages_of<kValues>(most_inputs, chain.tokens);
      if (most < kLeastStages)
        return fail("%s: %d tokens of %d inputs leave no room for weights", name, chain.tokens,
                    most_inputs);
      chain.stages = task->stages ? task->stages : most;
      // a barrier tells the parity of a slot's round alone: no team may be a round ahead of a copy
      const int room = chain.stages - kTeams;
      chain.in_flight = task->in_flight ? task->in_flight : room < kInFlight ? room : kInFlight;
      chain.x_bytes = most_inputs * chain.columns;
      if (chain.stages > most || chain.in_flight > room)
        return fail("%s: %d stages, %d in flight; wanted at most %d and %d", name, chain.stages,
                    chain.in_flight, most, room);
      Maps maps = {};
      for (int i = 0; i < chain.count && !F::k4Bit; ++i)
        if (int status = encode_rows(maps.of + i, given[i], F::kUnits)) return status;
      const size_t shared = kAlignment + size_t(chain.stages) * F::kStageBytes + F::kSumBytes +
                            row_bytes<kValues>(most_inputs, chain.tokens);
      return launch(name, product_chain_sm90a<X, kValues>, device().multiprocessors, kThreads,
                    shared, stream, chain, maps);
    });
  });
}
