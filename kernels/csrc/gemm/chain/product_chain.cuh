// Shared parts of product_chain_sm90a.cu: a chain's GEMMs, the layout of their weights, the shared
// memory of a block, and the exchange of results between blocks.
#pragma once
#include <cstddef>

#include "api/chain.h"
#include "api/operands.h"
#include "common/hopper.cuh"
#include "common/rounding.cuh"
#include "common/spin.cuh"
#include "gemm/packed/packed_weight.cuh"
#include "ranks/peer_memory.cuh"

namespace tridecode {
namespace {

constexpr int kTeams = 2;  // teams of consumer warps, which alternate in consuming stages
constexpr int kTeamWarps = 8;
constexpr int kWarps = kTeams * kTeamWarps;
constexpr int kConsumers = 32 * kWarps;
constexpr int kFinishers = 3;               // warps that finish tiles
constexpr int kThreads = kConsumers + 128;  // plus a producer warp and finisher warps
constexpr int kMaxSteps = 4;
constexpr int kMaxStages = 16;
constexpr int kLeastStages = 4;
constexpr int kInFlight = 3;  // stages: enough to saturate memory; loads of x queue behind them
constexpr int kMaxTokens = 4;
constexpr int kSharedLeft = 26 * 1024;  // left free for blocks of the next kernel
constexpr unsigned int kEarly = 30;     // start polling the exchange at this many unfinished tiles
constexpr int kHeld = 4;                // vectors of 8 numbers of x that a thread holds

// tiles: number of tiles of 16 weight rows. second: distance from the first eight rows of a tile to
// the second, in groups of eight rows: 1; with SwiGLU the number of tiles. x_words, residual_words:
// address in the exchange buffer of inputs that an earlier GEMM of the chain computes; null: they
// are in memory. out_words: address for results that later GEMMs read, or null. stores: the results
// are also stored to memory. keeps: the first GEMM with a stream, which keeps the sums in shared
// memory for the second, whose sums are stored to memory. first_block: the block that computes the
// first tile. their_words: if x is a part of a sum over two ranks, where the other rank's part
// arrives. sent_words: if the results are, their address in the other rank's memory.
struct Step {
  tridecode_chain_step given;
  int tiles, second, first_block;
  bool gated, stores, keeps;
  const uint64_t *x_words, *residual_words;
  uint64_t *out_words, *sent_words;
  const uint64_t* their_words;
};

struct Chain {
  Step steps[kMaxSteps];
  int count, tokens, columns, stages, in_flight, x_bytes, group_bytes;
  unsigned int* counters;  // counter of finished tiles, zero between launches; counter of launches
  // for waits for the other rank: see Patience
  PeerState* state;
  int64_t limit_ns;
  int* lost;
  int peer;
};

struct Maps {
  CUtensorMap of[kMaxSteps];  // maps of weights in 8 and 16 bit
};

// Barriers between consumers and finishers. `sent`: the sums of a tile are in their buffer; `read`:
// they have been read; `begun`: a GEMM has begun, so all earlier ones are finished or nearly so.
// Tiles are sent in order, so a finisher waits for a buffer's next round only when its last one is
// over.
struct Handover {
  static constexpr int kBuffers = 4;
  static_assert(kBuffers >= kFinishers);
  uint64_t sent[kBuffers], read[kBuffers], begun[kMaxSteps];
};

// Statically declared shared memory of a block.
struct Declared {
  uint64_t full[kMaxStages], empty[kMaxStages];
  Handover handover;
  unsigned int words[2 * kWarps];  // buffers of sums of the consumer warps
  unsigned int largest[kMaxSteps][kMaxTokens];
  float x_scales[kMaxSteps][kMaxTokens];
  uint4 zeros;
};

template <Values VALUES>
struct Format {
  static constexpr bool k4Bit = VALUES == kOperandTwoPartsInt4;
  static constexpr bool k16Bit = VALUES == kOperandDense;
  static constexpr bool kTwo = kInTwoParts<VALUES>;
  static constexpr int kXBytes = k16Bit ? 2 : 1;  // bytes of an input in shared memory
  static constexpr int kUnitInputs = 128 / kXBytes;
  static constexpr int kWarpUnits = k4Bit ? 2 : 1;        // chunks of granules, or boxes
  static constexpr int kUnits = kTeamWarps * kWarpUnits;  // of a stage
  static constexpr int kEightBytes = k4Bit ? kUnits * kGranuleBytes : kUnits * 1024;
  static constexpr int kGroupBytes = k4Bit ? kUnits * kGranuleRows * 4 : 0;
  static constexpr int kStageBytes = 2 * (kEightBytes + kGroupBytes);
  // Accumulator types of an instruction (Number) and of a tile (Sum): a lane's token, rows g and g
  // + 8; with x in two parts, 254 times the sum.
  using Number = typename std::conditional<VALUES == kOperandFp8 || k16Bit, float, int>::type;
  using Sum = typename std::conditional<VALUES == kOperandInt8, int, float>::type;
  static constexpr int kBufferBytes = kWarps * 32 * 8;  // sums of a tile, [warp][lane]
  static constexpr int kSumBytes = Handover::kBuffers * kBufferBytes;
};

// The division of the tokens among consumer warps.
__host__ __device__ constexpr int warps_of_token(int tokens) {
  return tokens == 1 ? kWarps : tokens == 2 ? kWarps / 2 : kWarps / 4;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The barrier of the consumer warps.
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// Keeps a number in its register. The compiler would recompute it at each use, from special
// registers and constants that take tens of cycles; it does not repeat a shuffle. All lanes must
// call it.
__device__ __forceinline__ void keep(int& number) {
  number = __shfl_sync(kAll, number, threadIdx.x % 32);
}
__device__ __forceinline__ void keep(uint32_t& number) {
  number = __shfl_sync(kAll, number, threadIdx.x % 32);
}

// Accesses shared memory by address: 16, 8 and 4 bytes.
__device__ __forceinline__ uint4 load_shared4(uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from));
  return words;
}
__device__ __forceinline__ uint2 load_shared2(uint32_t from) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from));
  return words;
}
__device__ __forceinline__ uint32_t load_shared1(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}
__device__ __forceinline__ void store_shared(uint32_t to, const uint4& words) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint2 words) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(words.x), "r"(words.y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// Initialise barriers and shared state; called by one thread.
__device__ __forceinline__ void initialize(Declared& all, int stages) {
  for (int i = 0; i < stages; ++i)
    barrier_init(all.full + i, 1), barrier_init(all.empty + i, kTeamWarps);
  Handover& handover = all.handover;
  for (int i = 0; i < Handover::kBuffers; ++i)
    barrier_init(handover.sent + i, kWarps), barrier_init(handover.read + i, 1);
  for (int i = 0; i < kMaxSteps; ++i) barrier_init(handover.begun + i, 1);
  all.zeros = make_uint4(0, 0, 0, 0);
  for (unsigned int* each = all.largest[0]; each < all.largest[kMaxSteps]; ++each) *each = 0;
  fence_barriers();
}

__device__ __forceinline__ void raise_shared(uint32_t at, uint32_t number) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(at), "r"(number) : "memory");
}

// 1 / x with an error of 2^-23 of it, from 2^-126 to 2^126.
__device__ __forceinline__ float near_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The shared memory of a block, as addresses.
struct Places {
  uint32_t declared;  // Declared
  uint32_t ring, sums, x, group_sums;
  uint32_t stream;  // rows of the stream

  template <Values VALUES>
  __device__ __forceinline__ static Places of(const Chain& chain, const Declared& all, char* ring) {
    using F = Format<VALUES>;
    Places made;
    made.declared = shared_address(&all), made.ring = shared_address(ring);
    keep(made.declared), keep(made.ring);
    made.sums = made.ring + chain.stages * F::kStageBytes;
    made.x = made.sums + F::kSumBytes, made.group_sums = made.x + chain.x_bytes;
    made.stream = made.group_sums + chain.group_bytes;
    keep(made.sums), keep(made.x), keep(made.group_sums), keep(made.stream);
    return made;
  }
  __device__ __forceinline__ uint32_t full(int slot) const {
    return declared + offsetof(Declared, full) + slot * 8;
  }
  __device__ __forceinline__ uint32_t empty(int slot) const {
    return declared + offsetof(Declared, empty) + slot * 8;
  }
  __device__ __forceinline__ uint32_t sent(int buffer) const {
    return declared + offsetof(Declared, handover) + offsetof(Handover, sent) + buffer * 8;
  }
  __device__ __forceinline__ uint32_t read(int buffer) const {
    return declared + offsetof(Declared, handover) + offsetof(Handover, read) + buffer * 8;
  }
  __device__ __forceinline__ uint32_t begun(int step) const {
    return declared + offsetof(Declared, handover) + offsetof(Handover, begun) + step * 8;
  }
  __device__ __forceinline__ uint32_t words(int index) const {
    return declared + offsetof(Declared, words) + index * 4;
  }
  __device__ __forceinline__ uint32_t largest(int step, int token) const {
    return declared + offsetof(Declared, largest) + (step * kMaxTokens + token) * 4;
  }
  __device__ __forceinline__ uint32_t x_scale(int step, int token) const {
    return declared + offsetof(Declared, x_scales) + (step * kMaxTokens + token) * 4;
  }
  __device__ __forceinline__ uint32_t zeros() const { return declared + offsetof(Declared, zeros); }
};

// Hides the words' values from the compiler, which would otherwise keep their unpacked numbers in
// registers.
__device__ __forceinline__ void forget(uint4& words) {
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// Two words of the exchange, holding four numbers.
__device__ __forceinline__ void load_words(const uint64_t* from, uint64_t& first,
                                           uint64_t& second) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(from));
}
__device__ __forceinline__ void load_their_words(const uint64_t* from, uint64_t& first,
                                                 uint64_t& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ void send_word(uint64_t* to, uint32_t pair, unsigned int launch) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(pair | uint64_t(launch) << 32)
               : "memory");
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

// Eight numbers read from the exchange.
struct Eight {
  uint64_t words[4];
  __device__ __forceinline__ void load(const uint64_t* from) {
    load_words(from, words[0], words[1]), load_words(from + 2, words[2], words[3]);
  }
  __device__ __forceinline__ void load_theirs(const uint64_t* from) {
    load_their_words(from, words[0], words[1]), load_their_words(from + 2, words[2], words[3]);
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

// The eight rows of a tile's first half; those of the second half follow `second` groups of eight
// later.
__device__ __forceinline__ int eight_of(const Step& step, int tile) {
  return step.gated ? tile : 2 * tile;
}

// A block computes the tiles of a GEMM for which (tile + turn) % blocks is its index.
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

#endif

}  // namespace
}  // namespace tridecode
