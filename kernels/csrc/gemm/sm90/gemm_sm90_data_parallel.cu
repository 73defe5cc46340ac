// out = epilogue(x * weight^T) for 1 to 64 tokens with TMA and wgmma: each block computes whole
// tiles of 32 or 64 weight rows, over all inputs, so that blocks share no sums.
//
// A producer warp keeps a ring of TMA loads of weights and x in flight, which fills the shared
// memory of the multiprocessor; two consumer warp groups alternate in consuming pipeline stages.
// The weights are the columns of the instruction and the tokens its 64 rows. Up to 8 tokens are
// repeated in all eight groups of 8 rows; the sums of rows without a token are not read.
//
// The ring fills with weights before the wait for the kernel that computes x.
//
// Bytes moved: outputs * inputs * sizeof(X), once.
// Bench: python -m tridecode.kernels.bench linear
#include "api/gemm.h"
#include "common/wgmma.cuh"
#include "gemm/gemm_epilogue.cuh"

namespace tridecode {
namespace {

constexpr int kGroups = 2;  // consumer warp groups, each takes every other stage
constexpr int kConsumers = 128 * kGroups;
constexpr int kThreads = kConsumers + 32;  // and the producer warp
constexpr int kBlockInputs = 64;           // 128 bytes: the width of the swizzle
constexpr int kStageBytes = 16 * 1024;     // of weights
constexpr int kMaxStages = 16;

// Blocks of 64 inputs of a stage, for tiles of 32 or 64 rows.
template <int ROWS>
constexpr int kStageBlocks = kStageBytes / (ROWS * 128);

struct Division {
  int tiles;    // of ROWS rows
  int steps;    // stages of a tile
  int stages;   // of the ring
  int x_bytes;  // of 64 inputs of tile_tokens tokens
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}
#endif

template <typename X, Mode MODE, int ROWS>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_sm90_data_parallel(const __grid_constant__ CUtensorMap weight_map,
                            const __grid_constant__ CUtensorMap x_map,
                            const __grid_constant__ GemmTask task,
                            const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kBlockBytes = ROWS * 128;  // of weights
  constexpr int kBlocks = kStageBlocks<ROWS>;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  const int x_bytes = division.x_bytes, stages = division.stages;
  const int stage_bytes = kBlocks * (kBlockBytes + x_bytes);
  float* const sums = reinterpret_cast<float*>(base + stages * stage_bytes);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Blocks start at different inputs: rows are a power of two apart, so their first inputs share a
  // few memory channels.
  const int shift = int(int64_t(blockIdx.x) * division.steps / gridDim.x);
  auto turned = [&](int step) {
    return step + shift < division.steps ? step + shift : step + shift - division.steps;
  };
  if (threadIdx.x == kConsumers) {
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 4);  // the warps of a group
    }
    fence_barriers();
  }
  __syncthreads();

  if (warp == kConsumers / 32) {
    // ---- the producer warp
    if (lane != 0) {
      wait_for_predecessor();
      return;
    }
    const uint64_t once = evict_first(), often = evict_last();
    auto copy_weights = [&](int tile, int step, int stage) {
      char* const to = base + stage * stage_bytes;
      barrier_expect(full + stage, stage_bytes);
      for (int i = 0; i < kBlocks; ++i) {  // beyond the inputs TMA writes zeros
        const int input = (turned(step) * kBlocks + i) * kBlockInputs;
        if (MODE == kGated) {  // gate rows, then up rows
          copy_box(to + i * kBlockBytes, &weight_map, input, tile * (ROWS / 2), full + stage, once);
          copy_box(to + i * kBlockBytes + kBlockBytes / 2, &weight_map, input,
                   task.outputs / 2 + tile * (ROWS / 2), full + stage, once);
        } else {
          copy_box(to + i * kBlockBytes, &weight_map, input, tile * ROWS, full + stage, once);
        }
      }
    };
    auto copy_x = [&](int step, int stage) {
      char* const to = base + stage * stage_bytes + kBlocks * kBlockBytes;
      for (int i = 0; i < kBlocks; ++i)
        copy_box(to + i * x_bytes, &x_map, (turned(step) * kBlocks + i) * kBlockInputs, 0,
                 full + stage, often);
    };
    prefetch_map(&weight_map);
    prefetch_map(&x_map);
    const int ahead = min(stages, division.steps);  // of the first tile
    for (int step = 0; step < ahead; ++step) copy_weights(blockIdx.x, step, step);
    wait_for_predecessor();
    for (int step = 0; step < ahead; ++step) copy_x(step, step);
    int tile = blockIdx.x, step = ahead;
    for (int index = ahead;; ++index, ++step) {
      if (step == division.steps) step = 0, tile += gridDim.x;
      if (tile >= division.tiles) break;
      const int stage = index % stages;
      if (index >= stages) barrier_wait(empty + stage, (index / stages - 1) % 2);
      copy_weights(tile, step, stage);
      copy_x(step, stage);
    }
    return;
  }

  // ---- the consumer warp groups
  const int g = lane / 4, t = lane % 4;
  wait_for_predecessor();

  // an item is two rows and two tokens
  const int items = ROWS / 2 * ((task.tokens + 1) / 2);
  const int x_group_bytes = x_bytes == 8 * 128 ? 0 : 1024;  // 0: the same 8 tokens again
  const int group = warp / 4;
  int begun = 0;  // stages of earlier tiles
  for (int tile = blockIdx.x; tile < division.tiles; tile += gridDim.x, begun += division.steps) {
    auto pair_of = [&](int item) { return tile * (ROWS / 2) + item % (ROWS / 2); };
    auto token_of = [&](int item) { return item / (ROWS / 2) * 2; };
    Extra extra = {};
    if (threadIdx.x < items) {
      extra = load_extra<X, MODE>(task, pair_of(threadIdx.x), token_of(threadIdx.x));
      load_slots<MODE>(task, token_of(threadIdx.x), extra);
    }
    float c[ROWS / 32][16];
    int held = -1;  // the stage that wgmmas in flight still read
    const int first_step = (group + begun) % kGroups;
    for (int step = first_step; step < division.steps; step += kGroups) {
      const int index = begun + step, stage = index % stages;
      barrier_wait(full + stage, index / stages % 2);
      char* const weights = base + stage * stage_bytes;
      group_fence();
      for (int i = 0; i < kBlocks; ++i) {
        const uint64_t a = descriptor(weights + kBlocks * kBlockBytes + i * x_bytes, x_group_bytes),
                       b = descriptor(weights + i * kBlockBytes, 1024);
#pragma unroll
        for (int k = 0; k < kBlockInputs / 16; ++k) {  // 32 bytes on: 2 units of 16
#pragma unroll
          for (int n = 0; n < ROWS / 32; ++n)  // 32 rows on: 4096 bytes
            group_multiply_add<X, 32>(c[n], a + 2 * k, b + 2 * k + n * 256,
                                      step > first_step || i > 0 || k > 0);
        }
      }
      commit_group();
      wait_groups<1>();
      if (held >= 0 && lane == 0) barrier_arrive(empty + held);
      held = stage;
    }
    wait_groups<0>();
#pragma unroll
    for (int n = 0; n < ROWS / 32; ++n) {
#pragma unroll
      for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(c[n][i])::"memory");
    }
    if (held >= 0 && lane == 0) barrier_arrive(empty + held);
    const int mine = warp % 4 * 16 + g;  // a warp holds 16 rows: tokens
    if (warp % 4 * 16 < task.tokens) {
#pragma unroll
      for (int n = 0; n < ROWS / 32; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float* const to = sums + group * task.tokens * ROWS + n * 32 + j * 8 + 2 * t;
          float* const four = c[n] + 4 * j;
          if (held < 0) four[0] = four[1] = four[2] = four[3] = 0.0f;
          if (mine < task.tokens)
            *reinterpret_cast<float2*>(to + mine * ROWS) = make_float2(four[0], four[1]);
          if (mine + 8 < task.tokens)
            *reinterpret_cast<float2*>(to + (mine + 8) * ROWS) = make_float2(four[2], four[3]);
        }
      }
    }
    consumers_sync();
    for (int item = threadIdx.x; item < items; item += kConsumers) {
      const int pair = item % (ROWS / 2), token = token_of(item);
      if (item != threadIdx.x) {
        extra = load_extra<X, MODE>(task, pair_of(item), token);
        load_slots<MODE>(task, token, extra);
      }
      const float* const from =
          sums + token * ROWS + (MODE == kGated ? pair : pair / 8 * 16 + pair % 8);
      constexpr int kSecond = MODE == kGated ? ROWS / 2 : 8;  // from the first row of a pair
      const int next = token + 1 < task.tokens ? ROWS : 0;
      const float* const more = from + task.tokens * ROWS;  // of the other group
      float values[2][2] = {{from[0] + more[0], from[kSecond] + more[kSecond]},
                            {from[next] + more[next], from[next + kSecond] + more[next + kSecond]}};
      finish<X, MODE>(task, pair_of(item), token, values, extra);
    }
    consumers_sync();
  }
#endif
}

// Boxes of `box_rows` rows of 64 numbers.
int encode(CUtensorMap* map, const void* matrix, int64_t rows, int64_t columns, int64_t stride,
           int box_rows, int dtype) {
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)},
                   strides[] = {cuuint64_t(stride * 2)};
  const cuuint32_t box[] = {kBlockInputs, cuuint32_t(box_rows)};
  return encode_map(map, matrix, 2, sizes, strides, box, dtype);
}

template <typename X, Mode MODE, int ROWS>
int run(const GemmTask& task, void* stream) {
  Division division;
  division.tiles = ceil_div(task.outputs, ROWS);
  division.steps = ceil_div(task.inputs, kStageBlocks<ROWS> * kBlockInputs);
  division.x_bytes = task.tile_tokens * 128;
  const int stage_bytes = kStageBytes + kStageBlocks<ROWS> * division.x_bytes;
  // 1 KiB for alignment; 8 KiB after the last x, whose rows up to 63 are read and ignored
  const int rest = 1024 + kGroups * task.tokens * ROWS * 4 + 8 * 1024;
  const int room = (device().shared_bytes - 2048 - rest) / stage_bytes;
  division.stages = room < kMaxStages ? room : kMaxStages;
  const size_t shared = size_t(division.stages) * stage_bytes + rest;

  CUtensorMap weight_map, x_map;
  int status = encode(&weight_map, task.weight, task.outputs, task.inputs, task.weight_stride,
                      MODE == kGated ? ROWS / 2 : ROWS, task.dtype);
  if (!status)
    status = encode(&x_map, task.x, task.tokens, task.inputs, task.x_stride, task.tile_tokens,
                    task.dtype);
  if (status) return status;
  const int blocks =
      division.tiles < device().multiprocessors ? division.tiles : device().multiprocessors;
  return launch("gemm_sm90_data_parallel", gemm_sm90_data_parallel<X, MODE, ROWS>, blocks, kThreads,
                shared, stream, weight_map, x_map, task, division);
}

// (weight rows of a tile, epilogue). gemm_table.py chooses among them.
// clang-format off
#define TRIDECODE_INSTANCES(_) _(32, kPlain) _(32, kGated) _(32, kQkv) _(64, kPlain) _(64, kGated) _(64, kQkv)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_sm90_data_parallel(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  if (int status = check_exact_cache("gemm_sm90_data_parallel", task)) return status;
  const Mode mode =
      mode_of(task);  // no kQkvRotary: a rotation's pairs are too far apart for a tile
  if (device().capability != 90)
    return fail("gemm_sm90_data_parallel: needs compute capability 9.0");
  if (task.norm_weight || task.tokens > task.tile_tokens ||
      (task.tile_tokens != 8 && task.tile_tokens != 16 && task.tile_tokens != 32 &&
       task.tile_tokens != 64))
    return fail("gemm_sm90_data_parallel: a norm, or %d tokens in a tile of %d", task.tokens,
                task.tile_tokens);
  return for_16_bit_dtype(task.dtype, "gemm_sm90_data_parallel", [&](auto zero) {
    using X = decltype(zero);
#define TRIDECODE_RUN(rows_, mode_) \
  if (task.tile_outputs == rows_ && mode == mode_) return run<X, mode_, rows_>(task, stream);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return fail("gemm_sm90_data_parallel: no instance for a tile of %d rows, epilogue %d",
                task.tile_outputs, int(mode));
  });
}
