// The LoRA adapters of a GEMM's rows, added by the epilogue of the wgmma kernels.
//
// A warp's sums are laid out like those of mma.sync, 16 outputs times 8 tokens at a time, so it
// multiplies 16 ranks of b by 16 sums of 8 tokens in one instruction. In the products of other
// adapters a token's sums are replaced by 0.
//
// The epilogue waits for no load: in a full GPU each would queue for microseconds behind the
// weights of the ring. Idle warps of the producer copy 16 ranks of b of kTileAdapters adapters, and
// the sums x * a^T, to shared memory during the mainloop. Further adapters take further rounds, for
// which b has been prefetched to L2; further ranks are loaded in the epilogue.
#pragma once
#include "api/adapted_gemm.h"
#include "gemm/adapted/adapted_task.cuh"

namespace tridecode {
namespace {

constexpr int kAdapterSpan = 64;  // outputs per span of tridecode_adapter_pair
constexpr int kFillers = 96;      // threads of the producer that fill shared memory
constexpr int kFillBarrier = 6;   // theirs; the others belong to the consumers
constexpr int kSumsAtOnce = 4;    // parts

// A task in whose epilogue the adapters of rows are added.
struct AdaptedTask : GemmTask {
  tridecode_adapted_gemm_task adapters;
};

inline AdaptedTask adapted(const tridecode_adapted_gemm_task& given) {
  AdaptedTask task;
  static_cast<GemmTask&>(task) = *static_cast<const GemmTask*>(given.gemm);
  task.adapters = given;
  return task;
}

// Check that the epilogue can add the adapters of a task.
inline int check_adapters(const char* what, const AdaptedTask& task) {
  const tridecode_adapted_gemm_task& adapters = task.adapters;
  if (task.tokens > 64 || task.outputs % 8 || adapters.sum_ranks % 4 || !aligned16(adapters.sums))
    return fail(
        "%s: adapters of %d tokens and %d outputs, sums of %d ranks; wanted up to 64, and "
        "multiples of 8 and 4",
        what, task.tokens, task.outputs, adapters.sum_ranks);
  return 0;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The sums of four ranks from `rank` on of a token, over all parts; zeros from `ranks` on.
__device__ __forceinline__ float4 four_sums(const tridecode_adapted_gemm_task& adapters, int token,
                                            int rank, int ranks) {
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (rank >= ranks) return sums;
  const float* const from =
      adapters.sums + int64_t(token) * adapters.sum_parts * adapters.sum_ranks + rank;
  for (int first = 0; first < adapters.sum_parts; first += kSumsAtOnce) {
    float4 parts[kSumsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i)
      if (first + i < adapters.sum_parts)
        parts[i] = __ldcg(reinterpret_cast<const float4*>(from + (first + i) * adapters.sum_ranks));
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i)
      sums.x += parts[i].x, sums.y += parts[i].y, sums.z += parts[i].z, sums.w += parts[i].w;
  }
  if (rank + 1 >= ranks) sums.y = 0.0f;
  if (rank + 2 >= ranks) sums.z = 0.0f;
  if (rank + 3 >= ranks) sums.w = 0.0f;
  return sums;
}

// An asynchronous arrival, when all earlier copy16_async of this thread are complete.
__device__ __forceinline__ void barrier_arrive_behind_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// The ranks of an adapter with nonzero b, for 8 outputs: the first in the low half, a multiple of
// kChunkRanks, and one past the last in the high half; 0: none.
__device__ __forceinline__ uint32_t window_of(const tridecode_adapter_pair& pair, int output) {
  if (pair.rank == 0) return 0;
  const uint32_t span = __ldg(pair.spans + output / kAdapterSpan);
  return span >> 16 ? span & ~uint32_t(kChunkRanks - 1) & 0xffffu | (span & 0xffff0000u) : 0u;
}

template <typename X, int N, Mode MODE>
struct BlockAdapters<X, N, MODE, AdaptedTask> {
  static constexpr bool kPairs = MODE == kGated || MODE == kQkvRotary;
  static constexpr int kEights = N / 8;

  // b of a round: [adapter][rank][piece], 8 outputs at piece ^ (rank % 8) against bank conflicts
  alignas(128) X b[kTileAdapters][kChunkRanks][kPieces][8];
  alignas(16) X sums[N][kTableRanks];
  uint32_t windows[kTileAdapters][kPieces];
  int found[kTileAdapters];  // slots of a round; -1: none
  int count;                 // adapters of the step
  int ranks[N];              // of a token's adapter; 0: none
  int slots[N];              // of the tokens
  alignas(8) uint64_t filled, read, tokens_filled;

  // Called by one thread, before fence_barriers().
  __device__ __forceinline__ void initialize() {
    static_assert(sizeof(BlockAdapters) <= kAdapterBytes<N, AdaptedTask>);
    barrier_init(&filled, 2 * kFillers);
    barrier_init(&read, 4 * kGroups);
    barrier_init(&tokens_filled, kFillers);
  }

  static __device__ __forceinline__ int slot_of(const AdaptedTask& task, int number) {
    return number < task.adapters.num_groups ? __ldg(task.adapters.groups + 2 * number) : -1;
  }

  static __device__ __forceinline__ const tridecode_adapter_pair& pair_of(const AdaptedTask& task,
                                                                          int slot) {
    return task.adapters.pairs[slot * task.adapters.pair_stride];
  }

  static __device__ __forceinline__ void fillers_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(kFillBarrier), "n"(kFillers) : "memory");
  }

  // The first of the 8 outputs of a piece, or -1 if the matrix has none; column: the first of the
  // piece's warp group.
  static __device__ __forceinline__ int output_of(const AdaptedTask& task, int piece, int column) {
    const int warp = piece / 2 % 4, second = piece % 2;
    const int limit = MODE == kGated ? task.outputs / 2 : task.outputs;
    const int other = MODE == kGated ? limit : MODE == kQkvRotary ? task.head_size / 2 : 8;
    const int first = column + (kPairs ? 8 : 16) * warp;
    return (kPairs ? first : first + second * other) < limit ? first + second * other : -1;
  }

  // Counts the adapters. Called once by the fillers; index: the thread's number.
  __device__ __forceinline__ void find(const AdaptedTask& task, int index) {
    if (index == 0 && slot_of(task, 0) < 0) count = 0;
    for (int at = index; at < task.adapters.num_groups; at += kFillers)
      if (slot_of(task, at) >= 0 && slot_of(task, at + 1) < 0) count = at + 1;
    fillers_sync();
  }

  // Fills b for the rounds from `first` to `last` of a tile. columns(group): the first column of a
  // group. rounds: those of the block so far.
  template <typename Columns>
  __device__ __forceinline__ void fill_tile(const AdaptedTask& task, int first, int last,
                                            int& rounds, Columns columns) {
    const int index = threadIdx.x - kGroups * 128 - 32;
    for (int round = first; round < last && (round == 0 || round * kTileAdapters < count);
         ++round, ++rounds) {
      if (rounds > 0) barrier_wait(&read, (rounds - 1) % 2);
      for (int at = index; at < kTileAdapters * kPieces; at += kFillers) {
        const int number = at / kPieces, piece = at % kPieces;
        const int slot = slot_of(task, round * kTileAdapters + number);
        const int output = output_of(task, piece, columns(piece / 8));
        if (piece == 0) found[number] = slot;
        windows[number][piece] =
            slot < 0 || output < 0
                ? 0u
                : copy_piece(pair_of(task, slot), task.outputs, output, number, piece);
      }
      barrier_arrive(&filled);
      barrier_arrive_behind_copies(&filled);
      if (round == 0) prefetch(task, index, columns);
    }
  }

  // Starts copying kChunkRanks ranks of 8 outputs. Returns their window.
  __device__ __forceinline__ uint32_t copy_piece(const tridecode_adapter_pair& pair, int outputs,
                                                 int output, int number, int piece) {
    const uint32_t window = window_of(pair, output);
    const int start = int(window & 0xffff), last = int(window >> 16);
    const X* const from = static_cast<const X*>(pair.b) + output;
    if (window) {
#pragma unroll 4
      for (int k = 0; k < kChunkRanks; ++k)
        copy16_async(b[number][k][piece ^ (k % 8)],
                     from + int64_t(min(start + k, last - 1)) * outputs, start + k < last);
    }
    return window;
  }

  // Prefetches b of the further rounds to L2.
  template <typename Columns>
  __device__ __forceinline__ void prefetch(const AdaptedTask& task, int index, Columns columns) {
    constexpr int kFew = kPieces / 4;  // pieces of each group's first warp: in all 128-byte lines
    for (int at = index; at < (count - kTileAdapters) * kFew; at += kFillers) {
      const int piece = at % kFew / 2 * 8 + at % 2, slot = slot_of(task, kTileAdapters + at / kFew);
      const int output = output_of(task, piece, columns(piece / 8));
      if (slot < 0 || output < 0) continue;
      const tridecode_adapter_pair& pair = pair_of(task, slot);
      const uint32_t window = window_of(pair, output);
      const int start = int(window & 0xffff), last = int(window >> 16);
      for (int r = start; r < min(start + kChunkRanks, last); ++r)
        prefetch_l2(static_cast<const X*>(pair.b) + int64_t(r) * task.outputs + output);
    }
  }

  // Called after the wait: collects the sums of the tokens from `token` on.
  __device__ __forceinline__ void fill_tokens(const AdaptedTask& task, int token, int index) {
    if (index < N) {
      const int slot =
          token + index < task.tokens ? __ldg(task.adapters.slots + token + index) : -1;
      slots[index] = slot;
      ranks[index] = slot < 0 ? 0 : int(pair_of(task, slot).rank);
    }
    fillers_sync();
    constexpr int kFours = kTableRanks / 4;
    for (int at = index; at < N * kFours; at += kFillers) {
      const int mine = at / kFours, rank = at % kFours * 4;
      const float4 four = four_sums(task.adapters, token + mine, rank, ranks[mine]);
      *reinterpret_cast<uint2*>(&sums[mine][rank]) =
          make_uint2(pack<X>(four.x, four.y), pack<X>(four.z, four.w));
    }
    barrier_arrive(&tokens_filled);
  }

  // The tokens of a tile that have an adapter, a bit for each.
  struct Owned {
    static constexpr int kWords = N <= 32 ? 1 : N / 32;
    uint32_t words[kWords];
    __device__ __forceinline__ uint32_t eight(int j) const {
      return words[j / 4] >> j % 4 * 8 & 0xff;
    }
  };
  __device__ __forceinline__ Owned tokens_with(int slot) const {
    const int lane = threadIdx.x % 32;
    Owned found;
#pragma unroll
    for (int i = 0; i < Owned::kWords; ++i)
      found.words[i] = __ballot_sync(kAll, lane < N && slots[(32 * i + lane) % N] == slot);
    return found;
  }

  // Two sums of the tile's token number `mine`, from global memory.
  __device__ __forceinline__ uint32_t load_two(const AdaptedTask& task, int token, int mine,
                                               int rank) const {
    const float4 four = four_sums(task.adapters, token + mine, rank & ~3, ranks[mine]);
    return rank % 4 ? pack<X>(four.z, four.w) : pack<X>(four.x, four.y);
  }

  static __device__ __forceinline__ bool in_table(int rank) {
    return rank + kChunkRanks <= kTableRanks;
  }

  // c += a * sums for kChunkRanks ranks from `rank` on of an adapter. owned: the tokens that have
  // it; groups of 8 tokens without it are skipped. load(token, rank): two sums.
  template <typename Load>
  __device__ __forceinline__ void multiply(float (&c)[N / 2], const uint32_t (&a)[4],
                                           const Owned& owned, int rank, Load load) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const uint32_t eight = owned.eight(j);
      if (!eight) continue;
      const bool mine = eight >> g & 1;
      const uint32_t low = mine ? load(8 * j + g, rank + 2 * t) : 0u;
      const uint32_t high = mine ? load(8 * j + g, rank + 8 + 2 * t) : 0u;
      __syncwarp();
      multiply_add<X>(*reinterpret_cast<float (*)[4]>(c + 4 * j), a[0], a[1], a[2], a[3], low,
                      high);
    }
  }

  // Adds the adapters to the sums of a tile. rounds: those of the block so far; column, token: the
  // first of the warp group and of the tile.
  __device__ __forceinline__ void add(float (&c)[N / 2], const AdaptedTask& task, int& rounds,
                                      int column, int token) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // of all consumers
    const int rank = lane / 16 * 8 + lane % 8, side = lane / 8 % 2;
    bool more = false;  // whether an adapter has more ranks
    barrier_wait(&tokens_filled, 0);
    for (int round = 0; round == 0 || round * kTileAdapters < count; ++round, ++rounds) {
      barrier_wait(&filled, rounds % 2);
      for (int number = 0; number < kTileAdapters && found[number] >= 0; ++number) {
        const Owned owned = tokens_with(found[number]);
        const uint32_t first = windows[number][2 * warp], second = windows[number][2 * warp + 1];
        const int begin[2] = {int(first & 0xffff), int(second & 0xffff)};
        more |= int(first >> 16) > from_table(begin[0]) || int(second >> 16) > from_table(begin[1]);
        uint32_t b_words[4];
        load_transposed(b[number][rank][(2 * warp + side) ^ (rank % 8)], b_words);
        const bool joint = begin[0] == begin[1];
#pragma unroll 1
        for (int part = 0; part < (joint ? 1 : 2); ++part) {  // sides have ranks of their own
          const bool left = first && part == 0, right = second && (joint || part == 1);
          const int from = part ? begin[1] : begin[0];
          if (!(left || right) || !in_table(from)) continue;
          const uint32_t a[4] = {left ? b_words[0] : 0, right ? b_words[1] : 0,
                                 left ? b_words[2] : 0, right ? b_words[3] : 0};
          multiply(c, a, owned, from, [&](int mine, int r) {
            return *reinterpret_cast<const uint32_t*>(&sums[mine][r]);
          });
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&read);
    }
    if (more) {  // rare: the function gets the sums in memory, so that they keep their registers
      float copy[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) copy[i] = c[i];
      add_more_ranks(copy, task, column, token);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) c[i] = copy[i];
    }
  }

  // The first rank of a window that `add` does not multiply.
  static __device__ __forceinline__ int from_table(int begin) {
    return in_table(begin) ? begin + kChunkRanks : begin;
  }

  // The ranks of adapters that `add` leaves.
  __device__ __noinline__ void add_more_ranks(float (&c)[N / 2], const AdaptedTask& task,
                                              int column, int token) const {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int number = 0; number < count; ++number) {
      const int slot = slot_of(task, number);
      const Owned owned = tokens_with(slot);
      const tridecode_adapter_pair& pair = pair_of(task, slot);
      int begin[2], last[2], outputs[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        outputs[side] = output_of(task, 2 * warp + side, column);
        const uint32_t window = outputs[side] < 0 ? 0u : window_of(pair, outputs[side]);
        begin[side] = from_table(int(window & 0xffff));
        last[side] = int(window >> 16);
      }
      const bool has[2] = {begin[0] < last[0], begin[1] < last[1]};
      int rank = min(has[0] ? begin[0] : INT_MAX, has[1] ? begin[1] : INT_MAX);
      for (; rank < max(has[0] ? last[0] : 0, has[1] ? last[1] : 0); rank += kChunkRanks) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int side = i % 2, r = rank + i / 2 * 8 + 2 * t;
          const uint16_t* const from =
              static_cast<const uint16_t*>(pair.b) + int64_t(r) * task.outputs + outputs[side] + g;
          const bool valid = has[side] && r >= begin[side];
          const uint32_t low = valid && r < last[side] ? __ldg(from) : 0u;
          const uint32_t high = valid && r + 1 < last[side] ? __ldg(from + task.outputs) : 0u;
          a[i] = low | high << 16;
        }
        multiply(c, a, owned, rank,
                 [&](int mine, int r) { return load_two(task, token, mine, r); });
      }
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace
}  // namespace tridecode
