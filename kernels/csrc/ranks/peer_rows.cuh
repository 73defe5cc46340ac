// Shared parts of the all-reduces over peer memory: units of a row, waits with a time limit, and a
// block's work before and after the exchange.
#pragma once
#include "api/ranks.h"
#include "common/row_norm.cuh"
#include "ranks/peer_memory.cuh"

namespace tridecode {
namespace peers {

constexpr int kThreads = 512;
constexpr int kItems = 4;  // units per thread, at most
// increment of the counter per launch, more than its number of blocks. The counter wraps around
// after an even number of launches.
constexpr unsigned int kTickets = 1u << 20;

struct State : PeerState {
  // the number of the next sum's buffer, for GEMMs that send their part of it (sent_task.cuh). Only
  // sums of two ranks write it; valid once they have ended
  unsigned int next;
};
constexpr int kHeader = kPeerHeader;

template <typename X>
__host__ __device__ constexpr uint32_t empty_word() {
  return sizeof(X) == 4 ? 0x80000000u : 0x80008000u;
}

struct Rows {
  tridecode_all_reduce_task task;
  char* memory[kMostRanks];  // of each rank
};

// 16 bytes of a row, as in memory.
template <typename X>
struct Unit {
  static constexpr int kNumbers = 16 / sizeof(X);
  uint4 words;

  __device__ __forceinline__ void load(const void* row, int64_t number) {
    words = *reinterpret_cast<const uint4*>(static_cast<const X*>(row) + number);
  }
  __device__ __forceinline__ void store(void* row, int64_t number) const {
    *reinterpret_cast<uint4*>(static_cast<X*>(row) + number) = words;
  }
  // Replaces -0.0, since sent numbers must not look like empty memory.
  __device__ __forceinline__ void fill_empty() {
    constexpr uint32_t kEmpty = empty_word<X>();
    words.x = words.x == kEmpty ? 0 : words.x, words.y = words.y == kEmpty ? 0 : words.y;
    words.z = words.z == kEmpty ? 0 : words.z, words.w = words.w == kEmpty ? 0 : words.w;
  }
  __device__ __forceinline__ bool is_missing() const {
    constexpr uint32_t kEmpty = empty_word<X>();
    return words.x == kEmpty || words.y == kEmpty || words.z == kEmpty || words.w == kEmpty;
  }
  __device__ __forceinline__ void add_to(float (&sums)[kNumbers]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(X) == 4) {
        sums[i] += __uint_as_float(get(words, i));
      } else {
        const float2 both = unpack<X>(get(words, i));
        sums[2 * i] += both.x, sums[2 * i + 1] += both.y;
      }
    }
  }
  __device__ __forceinline__ void round(const float (&values)[kNumbers]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(X) == 4) {
        put(words, i, __float_as_uint(values[i]));
      } else {
        put(words, i, pack<X>(values[2 * i], values[2 * i + 1]));
      }
    }
  }
};

template <typename X>
__device__ __forceinline__ void empty_unit(char* at) {
  constexpr uint32_t kEmpty = empty_word<X>();
  store_system(at, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
}

// The time limit of a wait of two ranks.
struct RowPatience : Patience {
  __device__ __forceinline__ explicit RowPatience(const Rows& rows)
      : Patience{static_cast<State*>(rows.task.memory), rows.task.limit_ns, rows.task.lost} {}
};

// The time limit of a wait among more ranks: limit_ns, or none left if a wait of any rank has
// already timed out. The rank that gives up tells its peers which rank is missing, so that all of
// them name it rather than each other.
struct SharedPatience {
  const Rows& rows;
  uint64_t limit_ns;
  uint64_t started = 0;
  int tries = 0;

  // times: multiple of the task's limit.
  __device__ __forceinline__ explicit SharedPatience(const Rows& of, int times = 1)
      : rows(of), limit_ns(times * uint64_t(of.task.limit_ns)) {}

  __device__ __forceinline__ bool is_over(int missing) {
    if (++tries % 1024 != 0) return false;
    State* state = static_cast<State*>(rows.task.memory);
    unsigned int found = load_system(&state->broken);
    if (!found) {
      const uint64_t now = nanoseconds();
      if (!started) started = now;
      if (now - started < limit_ns) return false;
      found = atomicCAS_system(&state->broken, 0u, 1u + missing);
      if (!found) tell(found = 1 + missing);
    }
    if (atomicExch(&state->named, 1u) == 0) {
      *reinterpret_cast<volatile int*>(rows.task.lost) = found;
      __threadfence_system();
    }
    return true;
  }

  __device__ void tell(unsigned int found) const {
    for (int peer = 0; peer < rows.task.ranks; ++peer)
      if (peer != rows.task.rank)
        *reinterpret_cast<volatile unsigned int*>(
            &reinterpret_cast<State*>(rows.memory[peer])->broken) = found;
    __threadfence_system();
  }
};

// Selects the buffer of this launch; called by one thread of each block.
__device__ __forceinline__ unsigned int take_turn(const tridecode_all_reduce_task& task) {
  const unsigned int tickets = blockIdx.x == 0 ? kTickets - gridDim.x + 1 : 1;
  unsigned int* const counter = &static_cast<State*>(task.memory)->tickets;
  return atomicAdd(counter, tickets) / kTickets % 2;
}

// Loads the addends of the sum into v, if this rank `adds` up the row, and the norm's constants if
// they are loaded ahead. each_item(body) calls body(item, column) for a thread's units.
template <bool AHEAD, typename X, int ITEMS, typename EachItem>
__device__ __forceinline__ void load_constants(const tridecode_all_reduce_task& task, int64_t row,
                                               bool adds, EachItem each_item,
                                               float (&v)[ITEMS][Unit<X>::kNumbers],
                                               Unit<X> (&weight)[ITEMS], Unit<X> (&shift)[ITEMS]) {
  each_item([&](int i, int c) {
    Unit<X> bias, second, residual;
    if (adds && task.bias) bias.load(task.bias, c);
    if (adds && task.second_bias) second.load(task.second_bias, c);
    if (adds && task.residual) residual.load(task.residual, row * task.residual_stride + c);
    if (AHEAD && task.norm_weight) weight[i].load(task.norm_weight, c);
    if (AHEAD && task.norm_bias) shift[i].load(task.norm_bias, c);
    if (adds && task.bias) bias.add_to(v[i]);
    if (adds && task.second_bias) second.add_to(v[i]);
    if (adds && task.residual) residual.add_to(v[i]);
  });
}

// Stores the norm of the row v, which a block holds in registers.
template <bool AHEAD, typename X, int ITEMS, typename EachItem>
__device__ __forceinline__ void store_norm(const tridecode_all_reduce_task& task, int64_t row,
                                           EachItem each_item, float (&v)[ITEMS][Unit<X>::kNumbers],
                                           Unit<X> (&weight)[ITEMS], Unit<X> (&shift)[ITEMS],
                                           float (*shared)[32]) {
  constexpr int N = Unit<X>::kNumbers;
  float sums[1] = {};
  each_item([&](int i, int) {
#pragma unroll
    for (int j = 0; j < N; ++j) sums[0] += v[i][j];
  });
  RowNorm norm[1];
  row_statistics(
      norm, sums, task.norm_bias != nullptr, task.columns, task.norm_eps,
      [&](auto body) {
        each_item([&](int i, int) {
#pragma unroll
          for (int j = 0; j < N; ++j) body(0, v[i][j]);
        });
      },
      BlockSums{shared});
  each_item([&](int i, int c) {
    float w[N] = {}, b[N] = {};
    if (!AHEAD) weight[i].load(task.norm_weight, c);
    if (!AHEAD && task.norm_bias) shift[i].load(task.norm_bias, c);
    weight[i].add_to(w);
    if (task.norm_bias) shift[i].add_to(b);
#pragma unroll
    for (int j = 0; j < N; ++j) v[i][j] = norm[0](v[i][j], w[j], b[j]);
    Unit<X> rounded;
    rounded.round(v[i]);
    rounded.store(task.normed, row * task.normed_stride + c);
  });
}

// Rounds the sums plus their addends (v), avoiding the bits of empty memory; v becomes the rounded
// numbers.
template <typename X>
__device__ __forceinline__ Unit<X> finish(const float (&sums)[Unit<X>::kNumbers],
                                          float (&v)[Unit<X>::kNumbers]) {
  Unit<X> rounded;
#pragma unroll
  for (int j = 0; j < Unit<X>::kNumbers; ++j) v[j] += sums[j];
  rounded.round(v);
  rounded.fill_empty();
#pragma unroll
  for (int j = 0; j < Unit<X>::kNumbers; ++j) v[j] = 0.0f;
  rounded.add_to(v);
  return rounded;
}

// The name of a launch; an early one also reads results before its wait (debug.cu).
inline const char* launch_name(const tridecode_all_reduce_task& task) {
  return task.early ? "early all_reduce" : "all_reduce";
}

// all_reduce_two_shots.cu. A row is `items` units of each of `threads` threads.
int launch_two_shots(const Rows& rows, int items, int threads, void* stream);

}  // namespace peers
}  // namespace tridecode
