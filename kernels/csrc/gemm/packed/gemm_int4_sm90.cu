// out = epilogue(x * weight^T) with TMA and wgmma on int8 tensor cores, for weights in 4 bit with
// groups of 128 inputs or multiples of that, and x in two int8 parts (quantize_rows, operand
// 4): x = scale * (high + low / 254).
//
// A block computes 128 weight rows, 64 per consumer warp group, times a tile of tokens; both parts
// of a token are columns of the tile. A cluster of up to 8 blocks splits the inputs of a tile. A
// stage of the ring has 128 inputs: a granule of every 8 rows (packed_weight.cuh), its words of
// scale and zero, and x.
//
// A consumer loads 16 bytes of a row of the granule and expands them to int8 (value - zero) as
// wgmma's register operand: the inputs of x are in the order of a granule's half bytes, so that
// expanding takes a mask and a subtraction. The int32 sums of a group are exact; times the group's
// scale they are added to float32 accumulators.
//
// For a split tile, warp w of every block sends its sums to one block, whose warp w finishes these
// 16 rows for all tokens: 8 / split warps of a block finish rows.
//
// Two blocks fit on a multiprocessor. With few tokens all blocks of a GEMM are resident at once,
// and the next GEMM's blocks already fill their rings with weights.
//
// Bytes moved: outputs * inputs / 2 and 4 bytes of each group.
// Bench: python -m tridecode.kernels.bench packed_linear
#include "api/gemm.h"
#include "api/packed.h"
#include "cache/kv_cache.cuh"
#include "cache/rotary.cuh"
#include "gemm/packed/packed_maps_sm90.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 4 * kGroups;             // consumers
constexpr int kInt4Threads = 32 * kWarps + 32;  // plus the producer warp
constexpr int kChunkInputs = 128;
constexpr int kLargestSplit = kWarps;

// N: columns of a tile, two for a token.
template <int N>
struct Int4Shape {
  static constexpr int kTokens = N / 2;
  static constexpr int kEightTokens = N / 16;
  static constexpr int kXBytes = N * 128;
  static constexpr int kWeightBytes = kEights * kGranuleBytes;
  static constexpr int kGroupBytes = kBlockRows * 4;
  static constexpr int kStageBytes =
      kXBytes + kWeightBytes + 1024;  // x begins at multiples of 1024
  static constexpr int kLoadedBytes = kXBytes + kWeightBytes + kGroupBytes;
  static constexpr int kSent = 32 * (N / 4) * 4;  // by a warp
  // Sums of other blocks: kSent of each of split - 1 blocks for 8 / split warps.
  static constexpr int kReceivedBytes = (kLargestSplit - 1) * kSent;
  static constexpr int kRoom = 113 * 1024 - 2048 - kReceivedBytes;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kReceivedBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The producer: loads chunks `first` to `last` of a tile, in one thread.
template <int N, Mode MODE>
__device__ __forceinline__ void copy_chunks(const CUtensorMap* weight_map,
                                            const CUtensorMap* groups_map, const CUtensorMap* x_map,
                                            const GemmTask& task, int row, int token, int first,
                                            int last, char* base, uint64_t* full, uint64_t* empty) {
  using S = Int4Shape<N>;
  const uint64_t weight_policy = task.tokens <= S::kTokens ? evict_first() : evict_normally();
  const uint64_t x_policy = evict_last();
  auto copy_weights = [&](int chunk, int stage) {
    char* const to = base + stage * S::kStageBytes + S::kXBytes;
    barrier_expect(full + stage, S::kLoadedBytes);
    copy_packed<MODE>(to, weight_map, chunk, row, task.head_size, full + stage, weight_policy);
    copy_packed<MODE>(to + S::kWeightBytes, groups_map, chunk, row, task.head_size, full + stage,
                      weight_policy);
  };
  auto copy_x = [&](int chunk, int stage) {  // boxes of 64 16-bit numbers
    copy_box(base + stage * S::kStageBytes, x_map, chunk * kChunkInputs / 2, 2 * token,
             full + stage, x_policy);
  };
  prefetch_map(weight_map);
  prefetch_map(groups_map);
  prefetch_map(x_map);
  const int ahead = min(last, first + S::kStages);
  for (int chunk = first; chunk < ahead; ++chunk) copy_weights(chunk, chunk - first);
  wait_for_predecessor();
  for (int chunk = first; chunk < ahead; ++chunk) copy_x(chunk, chunk - first);
  int stage = 0, parity = 0;
  for (int chunk = ahead; chunk < last; ++chunk) {
    barrier_wait(empty + stage, parity);
    copy_weights(chunk, stage);
    copy_x(chunk, stage);
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

// A lane's share of a chunk: 16 bytes of rows g and g + 8, and their groups.
struct Loaded {
  uint4 words[2];
  uint32_t group[2];
};

__device__ __forceinline__ void load_chunk(Loaded& to, const char* weights) {
  const int lane = threadIdx.x % 32, eight = threadIdx.x / 32 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to.words[i] =
        *reinterpret_cast<const uint4*>(weights + (eight + i) * kGranuleBytes + lane * 16);
    to.group[i] = reinterpret_cast<const uint32_t*>(
        weights + kEights * kGranuleBytes)[(eight + i) * kGranuleRows + lane / 4];
  }
}

// sums = those of `chunks` chunks. sums[4 b + k]: tokens 8 b + 2 t + k % 2, row g or (k >= 2) g +
// 8.
template <typename X, int N, bool SYMMETRIC>
__device__ __forceinline__ void add_up_chunks(float (&sums)[N / 4], int chunks, const char* base,
                                              uint64_t* full, uint64_t* empty) {
  using S = Int4Shape<N>;
  const int lane = threadIdx.x % 32;
  int c[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) c[i] = 0;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) sums[i] = 0.0f;
  int stage = 0, parity = 0;
  Loaded next;
  barrier_wait(full, 0);
  load_chunk(next, base + S::kXBytes);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    uint32_t a[4][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t above = 0x80808080u - zero_of<X>(next.group[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        expand_word<SYMMETRIC>(get(next.words[i], k), above, a[k][i], a[k][i + 2]);
    }
    const float scales[2] = {scale_of<X>(next.group[0]), scale_of<X>(next.group[1])};
#pragma unroll
    for (int k = 0; k < 4; ++k)  // computed before the fence, or ptxas puts more fences in between
      asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])::"memory");
    const uint64_t b = descriptor(base + stage * S::kStageBytes, 1024);
    group_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) group_multiply_add_bytes<N>(c, a[k], later(b, 32 * k), k > 0);
    commit_group();
    const int held = stage;
    if (++stage == S::kStages) stage = 0, parity ^= 1;
    if (chunk + 1 < chunks) {
      barrier_wait(full + stage, parity);
      load_chunk(next, base + stage * S::kStageBytes + S::kXBytes);
    }
    wait_for_sums(c);
    if (lane == 0) barrier_arrive(empty + held);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int at = i / 4 * 8 + i % 4;  // 128 * 127 * 128 * 254 < 2^31
      sums[i] = fmaf(scales[i / 2 % 2], float(c[at] * 254 + c[at + 4]), sums[i]);
    }
  }
}

// Adds up the sums of a warp's rows over the blocks of a cluster. Returns false if another block
// finishes these rows.
template <int N>
__device__ __forceinline__ bool exchange_rows(float (&sums)[N / 4], char* received,
                                              uint64_t* all_received, int rank, int split) {
  using S = Int4Shape<N>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = kWarps / split;
  const int owner = warp / each;
  uint64_t* const barrier = all_received + warp;
  auto place = [&](int from) {  // address of the sums of block `from`
    const int sender = from < owner ? from : from - 1;
    return received + (sender * each + warp % each) * S::kSent + lane * 16;
  };
  if (owner != rank) {
    const uint32_t to = address_in(place(rank), owner), there = address_in(barrier, owner);
#pragma unroll
    for (int i = 0; i < N / 16; ++i)
      send(to + i * 512, sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3], there);
    return false;
  }
  barrier_wait_for_cluster(barrier, 0);
  for (int from = 0; from < split; ++from) {
    if (from == rank) continue;
    const char* const more = place(from);
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(more + i * 512);
      sums[4 * i] += four.x, sums[4 * i + 1] += four.y;
      sums[4 * i + 2] += four.z, sums[4 * i + 3] += four.w;
    }
  }
  return true;
}

// The epilogue of a warp's 16 rows. The lane holds rows g and g + 8 of tokens 2 t and 2 t + 1 of
// every 8; after transposing, outputs 2 t and 2 t + 1 of each 8 of token g.
template <typename X, Mode MODE>
struct FinishRows {
  const GemmTask& task;
  int column, second;  // the first output of rows g, and of rows g + 8 (without SwiGLU)
  bool has, has_second;
  bool rotates;
  float biases[2];

  // Epilogue operands of 8 tokens.
  struct Extra {
    uint32_t residual[2];
    int slot;
    float cosines[2], sines[2];
  };

  __device__ __forceinline__ FinishRows(const GemmTask& task, int row) : task(task) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    int up;  // the weight row that corresponds to `second`
    if (MODE == kGated) {
      column = row / 2 + warp * 8, up = task.outputs / 2 + column, second = column;
      has = column < task.outputs / 2;
    } else if (MODE == kQkvRotary) {
      const int half = task.head_size / 2, pair = row / 2 + warp * 8;
      column = pair / half * task.head_size + pair % half, up = second = column + half;
      has = column < task.outputs;
    } else {
      column = row + warp * 16, up = second = column + 8;
      has = column < task.outputs;
    }
    has_second = MODE == kPlain || MODE == kQkv ? second < task.outputs : has;
    rotates = MODE == kQkvRotary && column / task.head_size < task.heads + task.kv_heads;
    const X* const bias = static_cast<const X*>(task.bias);
    biases[0] = bias && has ? to_float(bias[column + g]) : 0.0f;
    biases[1] = bias && has_second ? to_float(bias[up + g]) : 0.0f;
  }

  // token: the first of the 8.
  __device__ __forceinline__ void load(Extra& extra, int token) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, mine = token + g;
    if (MODE == kPlain) {
      const X* const from =
          static_cast<const X*>(task.residual) + mine * task.residual_stride + 2 * t;
      const bool reads = task.residual && mine < task.tokens;
      extra.residual[0] = extra.residual[1] = 0;
      if (reads && has) extra.residual[0] = *reinterpret_cast<const uint32_t*>(from + column);
      if (reads && has_second)
        extra.residual[1] = *reinterpret_cast<const uint32_t*>(from + second);
    }
    if (MODE == kQkv || MODE == kQkvRotary)
      extra.slot = mine < task.tokens ? task.kv_slots[mine] : -1;
    if (rotates) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int position = task.positions[min(token + 2 * t + i, task.tokens - 1)];
        const int64_t at =
            angle_index(position, task.head_size, column % task.head_size + g, false);
        extra.cosines[i] = task.cos[at], extra.sines[i] = task.sin[at];
      }
    }
  }

  __device__ __forceinline__ void store_pair(uint32_t word, int at, int token,
                                             const Extra& extra) const {
    const int t = threadIdx.x % 4;
    *reinterpret_cast<uint32_t*>(static_cast<X*>(task.out) + token * task.out_stride + at + 2 * t) =
        word;
    if (MODE == kQkv || MODE == kQkvRotary) {
      const int head = at / task.head_size;
      if (X* const to = cache_place<X>(task, extra.slot, head))
        *reinterpret_cast<uint32_t*>(to + at % task.head_size + 2 * t) = word;
    }
  }

  // v: the sums of 8 tokens. scales: of these tokens.
  __device__ __forceinline__ void finish(const float* sums, const float* scales, int token,
                                         const Extra& extra) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, mine = token + g;
    const float2 scale = *reinterpret_cast<const float2*>(scales + 2 * t);
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = fmaf(sums[k], k % 2 ? scale.y : scale.x, biases[k / 2]);
    if (MODE == kGated) {
      v[0] = activate_gate(v[0], task.activation) * v[2];
      v[1] = activate_gate(v[1], task.activation) * v[3];
    } else if (MODE == kPlain) {
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = activate(v[k], task.activation);
    } else if (rotates) {
#pragma unroll
      for (int i = 0; i < 2; ++i) rotate(v[i], v[i + 2], extra.cosines[i], extra.sines[i]);
    }
    if (MODE == kPlain && task.out_float32) {
      float* const out = static_cast<float*>(task.out);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = token + 2 * t + k % 2;
        if (at < task.tokens && (k < 2 ? has : has_second))
          out[at * task.out_stride + (k < 2 ? column : second) + g] = v[k];
      }
      return;
    }
    if (MODE == kPlain && task.residual) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 more = unpack<X>(transpose8x8(extra.residual[i]));
        v[2 * i] += more.x, v[2 * i + 1] += more.y;
      }
    }
    const uint32_t first = transpose8x8(pack<X>(v[0], v[1]));
    const uint32_t other = MODE == kGated ? 0 : transpose8x8(pack<X>(v[2], v[3]));
    if (mine >= task.tokens) return;
    if (has) store_pair(first, column, mine, extra);
    if (MODE != kGated && has_second) store_pair(other, second, mine, extra);
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename X, int N, Mode MODE>
__global__ void __launch_bounds__(kInt4Threads, 2)
    gemm_int4_sm90(const __grid_constant__ CUtensorMap weight_map,
                   const __grid_constant__ CUtensorMap groups_map,
                   const __grid_constant__ CUtensorMap x_map, const __grid_constant__ GemmTask task,
                   int chunks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Int4Shape<N>;
  using F = FinishRows<X, MODE>;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  char* const received = base + S::kStages * S::kStageBytes;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], all_received[kWarps];
  __shared__ __align__(16) float scales[S::kTokens];
  const int warp = threadIdx.x / 32, split = task.split, rank = split > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, kWarps);
    }
    for (int i = 0; i < kWarps; ++i) {
      barrier_init(all_received + i, 1);
      barrier_expect(all_received + i, (split - 1) * S::kSent);
    }
    fence_barriers();
  }
  __syncthreads();
  if (split > 1) cluster_arrive();
  const int tile = blockIdx.x / split, token_tiles = ceil_div(task.tokens, S::kTokens);
  const int row = tile / token_tiles * kBlockRows, token = tile % token_tiles * S::kTokens;
  const int first = chunks * rank / split, last = chunks * (rank + 1) / split;

  if (warp == kWarps) {
    if (threadIdx.x % 32 == 0)
      copy_chunks<N, MODE>(&weight_map, &groups_map, &x_map, task, row, token, first, last, base,
                           full, empty);
    __syncwarp();
    if (split > 1) cluster_wait();
    return;
  }
  const F finish(task, row);  // constants, before the wait
  wait_for_predecessor();
  const bool symmetric = task.symmetric;
  const float unit = symmetric ? 1.0f / (254 * 16) : 1.0f / 254;
  for (int i = threadIdx.x; i < S::kTokens; i += 32 * kWarps)
    scales[i] = token + i < task.tokens ? task.x_scales[token + i] * unit : 0.0f;
  constexpr bool kEarly = S::kEightTokens <= 2;  // registers suffice for it during the mainloop
  typename F::Extra extras[S::kEightTokens];
  auto load_extras = [&] {
#pragma unroll
    for (int b = 0; b < S::kEightTokens; ++b) finish.load(extras[b], token + 8 * b);
  };
  if (kEarly && warp * split / kWarps == rank) load_extras();
  asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory");  // scales
  float sums[N / 4];
  if (symmetric) {
    add_up_chunks<X, N, true>(sums, last - first, base, full, empty);
  } else {
    add_up_chunks<X, N, false>(sums, last - first, base, full, empty);
  }
  if (!kEarly && warp * split / kWarps == rank) load_extras();
  if (split > 1) {
    cluster_wait();
    if (!exchange_rows<N>(sums, received, all_received, rank, split)) return;
  }
#pragma unroll
  for (int b = 0; b < S::kEightTokens; ++b)
    finish.finish(sums + 4 * b, scales + 8 * b, token + 8 * b, extras[b]);
#endif
}

template <typename X, int N, Mode MODE>
int run(const GemmTask& task, void* stream) {
  using S = Int4Shape<N>;
  const int chunks = ceil_div(task.inputs, kChunkInputs);
  Maps maps;
  int status = encode_packed(&maps.weight, task, MODE, task.weight, kGranuleBytes / 4, chunks, 1);
  if (!status)
    status = encode_packed(&maps.groups, task, MODE, task.weight_groups, kGranuleRows, chunks, 1);
  if (!status)  // two 8-bit inputs are a 16-bit number
    status = encode(&maps.x, task.x, int64_t(ceil_div(task.tokens, 8)) * 16, task.inputs / 2,
                    task.x_stride / 2, N, kChunkInputs / 2, task.dtype);
  if (status) return status;
  const int tiles = ceil_div(task.outputs, kBlockRows) * ceil_div(task.tokens, S::kTokens);
  return launch_in_clusters("gemm_int4_sm90", gemm_int4_sm90<X, N, MODE>,
                            task.split > 1 ? task.split : 0, task.split * tiles, kInt4Threads,
                            S::kSharedBytes, stream, maps.weight, maps.groups, maps.x, task,
                            chunks);
}

// (tokens of a tile, epilogue). packed_table.py chooses among them.
// clang-format off
#define TRIDECODE_INSTANCES(_)                                    \
  _(8, kPlain) _(8, kQkv) _(8, kQkvRotary) _(8, kGated)           \
  _(16, kPlain) _(16, kQkv) _(16, kQkvRotary) _(16, kGated)       \
  _(32, kPlain) _(32, kQkv) _(32, kQkvRotary) _(32, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_int4_sm90(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  if (int status = check_exact_cache("gemm_int4_sm90", task)) return status;
  const char* const name = "gemm_int4_sm90";
  const Mode mode = mode_of(task);
  if (int status = check_task(name, task, mode)) return status;
  if (task.weight_format != kInt4 || task.granule_groups != 1)
    return fail("%s: weight format %d, %d groups of 128 inputs; wanted 3 and 1", name,
                task.weight_format, task.granule_groups);
  if (task.inputs % 32 || task.outputs % 8 || task.x_stride % 32)
    return fail("%s: %d inputs, %d outputs, stride %lld; wanted multiples of 32, 8 and 32", name,
                task.inputs, task.outputs, (long long)task.x_stride);
  const int chunks = ceil_div(task.inputs, kChunkInputs), split = task.split;
  if (split < 1 || split > chunks || split > kLargestSplit || kLargestSplit % split)
    return fail("%s: split %d of %d stages; wanted 1, 2, 4 or 8", name, split, chunks);
  return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
    using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_) \
  if (task.tile_tokens == tokens_ && mode == mode_) return run<X, 2 * tokens_, mode_>(task, stream);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return fail("%s: no instance for a tile of %d tokens, epilogue %d", name, task.tile_tokens,
                int(mode));
  });
}
