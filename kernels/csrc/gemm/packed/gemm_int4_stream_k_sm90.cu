// gemm_int4_sm90 for more tokens, and for tiles that do not fill the device: out = epilogue(x *
// weight^T) on int8 tensor cores, for weights in 4 bit with groups of 128 inputs or multiples of
// that, and x in two int8 parts.
//
// Work is divided as in gemm_packed_sm90.cu: a cluster of two blocks computes a tile of 256 weight
// rows times N tokens, and clusters share tiles (stream-K). A stage of the ring has two chunks of
// 128 inputs: granules, the words of their groups, and x. Each block loads half of x and multicasts
// it to both.
//
// A consumer warp group dequantises 64 rows of a chunk to int8 in registers, multiplies them with
// both parts of N tokens, and adds the exact int32 sums of the chunk, times the group's scale, to
// float32 accumulators, while wgmmas of the other chunk or of the other warp group run.
//
// Bytes moved: outputs * inputs / 2 and 4 bytes of each group.
// Bench: python -m tridecode.kernels.bench packed_linear
#include "api/gemm.h"
#include "api/operands.h"
#include "api/packed.h"
#include "gemm/packed/packed_maps_sm90.cuh"
#include "gemm/sm90/gemm_sm90_walk.cuh"

namespace tridecode {
namespace {

constexpr int kChunkInputs = 128;

// N: tokens of a tile, with two columns each.
template <int N>
struct Int4Shape {
  static constexpr int kColumns = 2 * N;
  static constexpr int kChunks = 2;                        // of a stage
  static constexpr int kXBytes = kColumns * kChunkInputs;  // of a chunk
  static constexpr int kWeightBytes = kEights * kChunks * kGranuleBytes;
  static constexpr int kGroupBytes = kEights * kChunks * kGranuleRows * 4;
  static constexpr int kLoadedBytes = kChunks * kXBytes + kWeightBytes + kGroupBytes;
  static constexpr int kStageBytes = (kLoadedBytes + 1023) / 1024 * 1024;
  static constexpr int kStoreBytes = Shape<N>::kStoreBytes;
  static constexpr int kRoom = 227 * 1024 - 1024 - 1024 - kStoreBytes - kGroups * N * 4;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStoreBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The producer, in one thread.
template <int N, Mode MODE>
__device__ __forceinline__ void copy_int4_stages(const CUtensorMap* weight_map,
                                                 const CUtensorMap* groups_map,
                                                 const CUtensorMap* x_map, const GemmTask& task,
                                                 const Division& division, char* base,
                                                 uint64_t* full, uint64_t* empty) {
  using S = Int4Shape<N>;
  const int rank = cluster_rank(), cluster = blockIdx.x / 2;
  const uint64_t weight_policy = division.token_tiles == 1 ? evict_first() : evict_normally();
  const uint64_t x_policy = division.token_tiles == 1 ? evict_last() : evict_normally();
  auto copy_weights = [&](const Stages& at, int stage) {
    char* const to = base + stage * S::kStageBytes + S::kChunks * S::kXBytes;
    const int row = at.part.row_tile * kClusterRows + rank * kBlockRows;
    const int half = S::kChunks * S::kXBytes / 2;
    barrier_expect(full + stage, S::kLoadedBytes - (has_second_half<N>(at.part, task) ? 0 : half));
    copy_packed<MODE>(to, weight_map, at.step * S::kChunks, row, task.head_size, full + stage,
                      weight_policy);
    copy_packed<MODE>(to + S::kWeightBytes, groups_map, at.step * S::kChunks, row, task.head_size,
                      full + stage, weight_policy);
  };
  auto copy_x = [&](const Stages& at, int stage) {  // boxes of 64 16-bit numbers
    if (rank == 1 && !has_second_half<N>(at.part, task)) return;
#pragma unroll
    for (int i = 0; i < S::kChunks; ++i)
      copy_box_to_both(base + stage * S::kStageBytes + i * S::kXBytes + rank * N * 128, x_map,
                       (at.step * S::kChunks + i) * kChunkInputs / 2,
                       (2 * at.part.token_tile + rank) * N, full + stage, x_policy);
  };
  prefetch_map(weight_map);
  prefetch_map(groups_map);
  prefetch_map(x_map);
  Stages weights(division, cluster), xs = weights;
  int ahead = 0;
  for (; ahead < S::kStages && weights.more; ++ahead, weights.advance(division))
    copy_weights(weights, ahead);
  wait_for_predecessor();
  for (int i = 0; i < ahead; ++i, xs.advance(division)) copy_x(xs, i);
  int stage = 0, parity = 0;
  for (; weights.more; weights.advance(division)) {
    barrier_wait(empty + stage, parity);
    copy_weights(weights, stage);
    copy_x(weights, stage);
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

// group_multiply_add_bytes for 128 columns.
template <int N>
__device__ __forceinline__ void multiply_add_columns(int (&c)[N / 2], const uint32_t (&a)[4],
                                                     uint64_t b, int add) {
  // clang-format off
  if constexpr (N == 128) TRIDECODE_WGMMA_BYTES("128", TRIDECODE_N128, "%64", "%65", "%66", "%67", "%68", "%69", TRIDECODE_I8(0));
  // clang-format on
  if constexpr (N < 128) group_multiply_add_bytes<N>(c, a, b, add);
}

// A consumer warp group's loop over pipeline stages.
template <typename X, int N, bool SYMMETRIC>
struct Int4Products {
  using S = Int4Shape<N>;
  const char* base;
  uint64_t* full;
  uint64_t* empty;
  int stage = 0, parity = 0;

  // A lane's share of a chunk: 16 bytes of rows g and g + 8, and their groups.
  struct Loaded {
    uint4 words[2];
    uint32_t group[2];
  };

  // Release the stage in both blocks, since each loads half of it: this warp no longer reads it.
  // Called by every lane.
  __device__ __forceinline__ void release(int at) {
    const int lane = threadIdx.x % 32;
    if (lane < 2) barrier_arrive_at(empty + at, lane);
  }

  // eight: the first of the warp's two.
  __device__ __forceinline__ void load(Loaded& to, int eight, int chunk) {
    const int lane = threadIdx.x % 32;
    const char* const weights = base + stage * S::kStageBytes + S::kChunks * S::kXBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int granule = (eight + i) * S::kChunks + chunk;
      to.words[i] = *reinterpret_cast<const uint4*>(weights + granule * kGranuleBytes + lane * 16);
      to.group[i] = reinterpret_cast<const uint32_t*>(
          weights + S::kWeightBytes)[granule * kGranuleRows + lane / 4];
    }
  }

  // The compiler must not compute operands after group_fence(): ptxas would serialise instructions.
  static __device__ __forceinline__ void expand(uint32_t (&a)[4][4], const Loaded& from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t above = 0x80808080u - zero_of<X>(from.group[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        expand_word<SYMMETRIC>(get(from.words[i], k), above, a[k][i], a[k][i + 2]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])::"memory");
  }

  // Issues c = the products of a chunk; valid once its group has waited for them.
  __device__ __forceinline__ void multiply(int (&c)[N], const uint32_t (&a)[4][4], int chunk) {
    const uint64_t b = descriptor(base + stage * S::kStageBytes + chunk * S::kXBytes, 1024);
    group_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_add_columns<2 * N>(c, a[k], later(b, 32 * k), k > 0);
    commit_group();
  }

  static __device__ __forceinline__ void add_chunk(float (&sums)[N / 2], const int (&c)[N],
                                                   const float (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int at = i / 4 * 8 + i % 4;  // 128 * 127 * 128 * 254 < 2^31
      sums[i] = fmaf(scales[i / 2 % 2], float(c[at] * 254 + c[at + 4]), sums[i]);
    }
  }

  // sums = those of `steps` stages. While the wgmmas of a chunk run, the next chunk is expanded and
  // the previous one is added to the sums.
  __device__ __forceinline__ void add_up(float (&sums)[N / 2], int steps, int group) {
    static_assert(S::kChunks == 2, "the two sets of registers are those of a stage's two chunks");
    const int eight = group * (kEights / kGroups) + threadIdx.x / 32 % 4 * 2;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0.0f;
    barrier_wait(full + stage, parity);
    uint32_t a[2][4][4];
    int c[2][N];
#pragma unroll
    for (int i = 0; i < N; ++i) c[0][i] = c[1][i] = 0;
    Loaded loaded;
    load(loaded, eight, 0);
    expand(a[0], loaded);
    for (int step = 0; step < steps; ++step) {
      float scales[2][2];
      scales_of(scales[0], loaded);
      multiply(c[0], a[0], 0);
      load(loaded, eight, 1);
      expand(a[1], loaded);
      scales_of(scales[1], loaded);
      multiply(c[1], a[1], 1);
      const int held = stage;
      if (++stage == S::kStages) stage = 0, parity ^= 1;
      wait_for_older(c[0]);
      add_chunk(sums, c[0], scales[0]);
      if (step + 1 < steps) {
        barrier_wait(full + stage, parity);
        load(loaded, eight, 0);
        expand(a[0], loaded);
      }
      wait_for_sums(c[1]);
      release(held);
      add_chunk(sums, c[1], scales[1]);
    }
  }

  static __device__ __forceinline__ void scales_of(float (&scales)[2], const Loaded& loaded) {
    scales[0] = scale_of<X>(loaded.group[0]), scales[1] = scale_of<X>(loaded.group[1]);
  }

  // Waits for all wgmmas except those of the last group, after which these sums may be read.
  static __device__ __forceinline__ void wait_for_older(int (&c)[N]) {
    wait_groups<1>();
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(c[i])::"memory");
  }
};

// Loads the scales of a tile's tokens to shared memory; `to` belongs to the warp group.
template <int N>
__device__ __forceinline__ void load_token_scales(float* to, const GemmTask& task, int token,
                                                  int group) {
  const float unit = task.symmetric ? 1.0f / (254 * 16) : 1.0f / 254;
  group_sync(group);  // the last tile's have been read
  for (int i = threadIdx.x % 128; i < N; i += 128)
    to[i] = token + i < task.tokens ? task.x_scales[token + i] * unit : 0.0f;
}

template <int N>
__device__ __forceinline__ void scale_tokens(float (&c)[N / 2], const float* scales, int group) {
  group_sync(group);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 scale = reinterpret_cast<const float2*>(scales)[4 * j + threadIdx.x % 4];
    c[4 * j] *= scale.x, c[4 * j + 1] *= scale.y;
    c[4 * j + 2] *= scale.x, c[4 * j + 3] *= scale.y;
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename X, int N, Mode MODE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_int4_stream_k_sm90(const __grid_constant__ CUtensorMap weight_map,
                            const __grid_constant__ CUtensorMap groups_map,
                            const __grid_constant__ CUtensorMap x_map,
                            const __grid_constant__ CUtensorMap out_map,
                            const __grid_constant__ CUtensorMap residual_map,
                            const __grid_constant__ GemmTask task,
                            const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Int4Shape<N>;
  using F = Finish<X, N, MODE, false, false>;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], arrived[kGroups][kBuffers];
  __shared__ __align__(16) float token_scales[kGroups][N];
  const int group = threadIdx.x / 128, cluster = blockIdx.x / 2;
  if (threadIdx.x == 0) {
    initialize_ring<S::kStages>(full, empty, &arrived[0][0], 2);
    fence_barriers();
  }
  cluster_sync();

  if (group == kGroups) {
    if (N >= 64) give_registers<40>();
    if (threadIdx.x == kGroups * 128) {
      copy_int4_stages<N, MODE>(&weight_map, &groups_map, &x_map, task, division, base, full,
                                empty);
    } else {
      wait_for_predecessor();
      const int index = threadIdx.x - kGroups * 128 - 32;  // except the producer thread's warp
      if (index >= 0) F::prefetch_tables(task, blockIdx.x * 96 + index, gridDim.x * 96);
      const int helped = threadIdx.x / 32 % 4 - 1;
      if (helped >= 0 && helped < kGroups) signal_partial(task, division, cluster, helped);
    }
  } else {
    if (N >= 64) take_registers<232>();
    wait_for_predecessor();
    Int4Products<X, N, false> products{base, full, empty};
    Int4Products<X, N, true> symmetric{base, full, empty};
    F finish{task,
             &out_map,
             &residual_map,
             base + S::kStages * S::kStageBytes + group * kBuffers * Shape<N>::kBufferBytes,
             arrived[group],
             group};
    Walk walk(division, cluster);
    Part part;
    while (walk.take(division, part)) {
      const int column =
          finish.first_column(part.row_tile * kClusterRows + cluster_rank() * kBlockRows);
      const int token = part.token_tile * N;
      const bool finishes = part.begin == 0;
      if (MODE == kPlain && finishes && task.residual && threadIdx.x % 128 == 0)
        finish.load_first_residuals(column, token);
      if (finishes) {
        finish.load_biases(column);
        finish.load_slots(column, token);
        load_token_scales<N>(token_scales[group], task, token, group);
      }
      float c[N / 2];
      if (task.symmetric) {
        symmetric.add_up(c, part.end - part.begin, group);
      } else {
        products.add_up(c, part.end - part.begin, group);
      }
      if (!finishes) {
        write_partial<N>(c, task, cluster, group);
        continue;
      }
      if (part.end < division.steps)
        add_partials<N>(c, task, cluster,
                        division.owner_before((part.tile + 1) * division.steps) - cluster, group);
      scale_tokens<N>(c, token_scales[group], group);
      finish.activate_all(c);
      if (MODE == kQkvRotary) finish.rotate_all(c, column, token);
      finish.store_all(c, column, token);
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  }
  __syncwarp();
  cluster_sync();  // no load or arrival from the other block is in flight
#endif
}

template <typename X, int N, Mode MODE>
int run(const GemmTask& task, void* stream) {
  using S = Int4Shape<N>;
  const Division division = divide(task, S::kChunks * kChunkInputs);
  const int chunks = ceil_div(task.inputs, kChunkInputs);
  Maps maps;
  int status =
      encode_packed(&maps.weight, task, MODE, task.weight, kGranuleBytes / 4, chunks, S::kChunks);
  if (!status)
    status = encode_packed(&maps.groups, task, MODE, task.weight_groups, kGranuleRows, chunks,
                           S::kChunks);
  GemmTask rows = task;  // of x: two 8-bit inputs are a 16-bit number, a token has two rows
  rows.inputs /= 2, rows.x_stride /= 2, rows.operand = kOperandTwoParts;
  if (!status) status = encode_rows(maps, rows, MODE, N, Shape<N>::kPart);
  if (status) return status;
  return launch_resident("gemm_int4_stream_k_sm90", gemm_int4_stream_k_sm90<X, N, MODE>,
                         2 * division.clusters, kThreads, S::kSharedBytes, stream, maps.weight,
                         maps.groups, maps.x, maps.out, maps.residual, task, division);
}

// (tokens of a tile, epilogue). packed_table.py chooses among them.
// clang-format off
#define TRIDECODE_INSTANCES(_)                          \
  _(32, kPlain) _(32, kQkv) _(32, kQkvRotary)           \
  _(64, kPlain) _(64, kQkv) _(64, kQkvRotary)           \
  _(32, kGated) _(64, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_int4_stream_k_sm90(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const char* const name = "gemm_int4_stream_k_sm90";
  if (int status = check_exact_cache(name, task)) return status;
  const Mode mode = mode_of(task);
  if (int status = check_task(name, task, mode)) return status;
  if (task.weight_format != kInt4 || task.granule_groups != 1)
    return fail("%s: weight format %d, %d groups of 128 inputs; wanted 3 and 1", name,
                task.weight_format, task.granule_groups);
  if (task.inputs % 32 || task.outputs % 8 || task.x_stride % 32)
    return fail("%s: %d inputs, %d outputs, stride %lld; wanted multiples of 32, 8 and 32", name,
                task.inputs, task.outputs, (long long)task.x_stride);
  if (task.clusters < 1 || task.tile_tokens < 1)
    return fail("%s: %d clusters, a tile of %d tokens", name, task.clusters, task.tile_tokens);
  if (int status = check_sums(name, task)) return status;
  return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
    using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_) \
  if (task.tile_tokens == tokens_ && mode == mode_) return run<X, tokens_, mode_>(task, stream);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return fail("%s: no instance for a tile of %d tokens, epilogue %d", name, task.tile_tokens,
                int(mode));
  });
}
