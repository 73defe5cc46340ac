// The mainloop of gemm_sm90_stream_k.cu and gemm_sm90_split_k.cu: TMA loads of the pipeline stages
// and the wgmma instructions of a consumer warp group.
#pragma once
#include "api/operands.h"
#include "gemm/sm90/gemm_sm90_epilogue.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Loads the weights of a stage of a block whose rows start at `row`, in the order of encode_weight.
template <Mode MODE>
__device__ __forceinline__ void copy_weight(void* to, const CUtensorMap* map, int input, int row,
                                            int head_size, uint64_t* barrier, uint64_t policy) {
  if (MODE == kGated) {
    copy_paired(to, map, input, row / 16, barrier, policy);
  } else if (MODE == kQkvRotary) {
    const int half = head_size / 2, pair = row / 2;
    copy_heads(to, map, input, pair % half / 8, pair / half, barrier, policy);
  } else {
    copy_box(to, map, input, row, barrier, policy);
  }
}

// Initialises, in one thread, the barriers of a ring of pipeline stages, which the consumer warps
// of `sharers` blocks release, and of the warp groups' buffers. Call fence_barriers() after it.
template <int STAGES, int BUFFERS = kBuffers>
__device__ __forceinline__ void initialize_ring(uint64_t* full, uint64_t* empty, uint64_t* arrived,
                                                int sharers) {
  for (int i = 0; i < STAGES; ++i) {
    barrier_init(full + i, 1);
    barrier_init(empty + i, sharers * 4 * kGroups);
  }
  for (int i = 0; i < kGroups * BUFFERS; ++i) barrier_init(arrived + i, 1);
}

// Return whether the mainloop scales the accumulators: E4M3 with block scales.
template <typename Operand>
__device__ __forceinline__ bool in_blocks(const GemmTask& task) {
  return std::is_same<Operand, E4m3>::value && task.block_scales;
}

// A consumer warp group's loop over pipeline stages. Operand: of x and weight. N: tokens. SHARERS:
// blocks that a stage's x is multicast to. ONE_TILE: add_up is called once.
template <typename Operand, int N, typename S, int SHARERS, bool ONE_TILE = SHARERS == 1>
struct Products {
  const char* base;
  uint64_t* full;
  uint64_t* empty;
  int stage = 0, parity = 0;

  // Releases a stage that this warp no longer reads. Called by every lane.
  __device__ __forceinline__ void release(int at) {
    const int lane = threadIdx.x % 32;
    if (SHARERS > 1) {
      if (lane < SHARERS) barrier_arrive_at(empty + at, lane);
    } else if (lane == 0) {
      barrier_arrive(empty + at);
    }
  }

  static __device__ __forceinline__ void to_floats(float (&c)[N / 2], const int (&sums)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = float(sums[i]);
  }
  // 8 columns hold the high parts of 8 tokens, the next 8 their low parts.
  static __device__ __forceinline__ void to_floats(float (&c)[N / 2], const int (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int high = i / 4 * 8 + i % 4;
      c[i] = fmaf(float(sums[high + 4]), 1.0f / 254.0f, float(sums[high]));
    }
  }

  // c = the sums of `steps` stages. scales: for block-scaled E4M3, those of these stages.
  __device__ __forceinline__ void add_up(float (&c)[N / 2], int steps, int group,
                                         const StageScales& scales) {
    constexpr bool kTwo = std::is_same<Operand, TwoParts>::value;
    if constexpr ((kTwo || std::is_same<Operand, int8_t>::value) && !ONE_TILE) {
      // Zeroed: otherwise the registers of the last tile's sums would count as read by the first
      // instruction, and be kept alive until then.
      int sums[kTwo ? N : N / 2] = {};
      add_up_all(sums, steps, group);
      to_floats(c, sums);
    } else if constexpr (kTwo || std::is_same<Operand, int8_t>::value) {
      // No zeros for the only tile: ptxas would move them into the loop and serialise it.
      int sums[kTwo ? N : N / 2];
      add_up_all(sums, steps, group);
      to_floats(c, sums);
    } else if constexpr (std::is_same<Operand, E4m3>::value) {
      if (in_blocks<Operand>(scales.task)) {
        add_up_in_blocks(c, steps, group, scales);
      } else {
        add_up_in_parts(c, steps, group);
      }
    } else {
      add_up_all(c, steps, group);
    }
  }

  // E4M3: the tensor cores keep about 14 bits of their sums, so the sums of kPartStages stages are
  // added up here. A group waits for its wgmmas while those of the other one run.
  __device__ __forceinline__ void add_up_in_parts(float (&c)[N / 2], int steps, int group) {
    float part[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = part[i] = 0.0f;
    for (int step = 0; step < steps; step += kPartStages) {
      add_up_all(part, min(steps - step, kPartStages), group);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) c[i] += part[i];
    }
  }

  // Block-scaled E4M3: the sum of each stage, 128 inputs, has a scale of the weight and of x. For
  // tokens beyond the last one the scales are arbitrary, and nothing is stored.
  __device__ __forceinline__ void add_up_in_blocks(float (&c)[N / 2], int steps, int group,
                                                   const StageScales& scales) {
    constexpr bool kAhead = N <= 16;  // registers suffice to load x's scales ahead
    float part[N / 2], x[N / 4];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = part[i] = 0.0f;
    for (int step = 0; step < steps; ++step) {
      auto load = [&] {
        const int at = scales.x + step * scales.task.tokens;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) x[i] = scales.task.x_scales[at + i / 2 * 8 + i % 2];
      };
      const float first = scales.task.block_scales[scales.first + step];
      const float second = scales.task.block_scales[scales.second + step];
      if (kAhead) load();
      add_up_all(part, 1, group);
      if (!kAhead) load();
#pragma unroll
      for (int i = 0; i < N / 2; ++i)
        c[i] = fmaf(part[i], (i % 4 < 2 ? first : second) * x[i / 4 * 2 + i % 2], c[i]);
    }
  }

  // Each stage is released, to the producers of all sharers, when the wgmmas of the next one are in
  // flight.
  template <typename Sum, int COUNT>
  __device__ __forceinline__ void add_up_all(Sum (&c)[COUNT], int steps, int group) {
    int held = -1;  // the stage that wgmmas in flight still read
    for (int step = 0; step < steps; ++step) {
      barrier_wait(full + stage, parity);
      const char* const weights = base + stage * S::kStageBytes;
      const uint64_t a = descriptor(weights + group * 64 * 128, 1024),
                     b = descriptor(weights + S::kWeightBytes, 1024);
      group_fence();
#pragma unroll
      for (int k = 0; k < kStageInputs / 16; ++k)  // 32 bytes on: 2 units of 16
        group_multiply_add<Operand, 2 * COUNT>(c, a + 2 * k, b + 2 * k, step > 0 || k > 0);
      commit_group();
      wait_groups<1>();
      if (held >= 0) release(held);
      held = stage;
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
    wait_for_sums(c);
    release(held);
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// A tensor map with boxes of `box_rows` rows of `width` numbers.
int encode(CUtensorMap* map, const void* matrix, int64_t rows, int64_t columns, int64_t stride,
           int box_rows, int width, int dtype) {
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)},
                   strides[] = {cuuint64_t(stride * 2)};
  const cuuint32_t box[] = {cuuint32_t(width), cuuint32_t(box_rows)};
  return encode_map(map, matrix, 2, sizes, strides, box, dtype);
}

// The tensor map of the weight, boxes of 128 rows: in order, or each 8 followed by the 8 of their
// pairs.
int encode_weight(CUtensorMap* map, const GemmTask& task, Mode mode, int dtype) {
  const cuuint64_t row = cuuint64_t(task.weight_stride) * 2, inputs = task.inputs;
  if (mode == kGated) {  // (inputs, 8, gate and up, groups of 8)
    const cuuint64_t half = task.outputs / 2, sizes[] = {inputs, 8, 2, half / 8},
                     strides[] = {row, half * row, 8 * row};
    const cuuint32_t box[] = {kStageInputs, 8, 2, kBlockRows / 16};
    return encode_map(map, task.weight, 4, sizes, strides, box, dtype);
  }
  if (mode == kQkvRotary) {  // (inputs, 8, halves, groups of 8, heads)
    const cuuint64_t size = task.head_size, groups = size / 16,
                     sizes[] = {inputs, 8, 2, groups, task.outputs / size},
                     strides[] = {row, size / 2 * row, 8 * row, size * row};
    const cuuint32_t near = groups < 8 ? groups : 8, box[] = {kStageInputs, 8, 2, near, 8 / near};
    return encode_map(map, task.weight, 5, sizes, strides, box, dtype);
  }
  return encode(map, task.weight, task.outputs, task.inputs, task.weight_stride, kBlockRows,
                kStageInputs, dtype);
}

struct Maps {
  CUtensorMap weight, x, out = {}, residual = {}, groups = {};
};

// Encodes all maps except the weight's. x_rows: rows of a TMA load of x; part: tokens of a store of
// out and a load of the residual.
int encode_rows(Maps& maps, const GemmTask& task, Mode mode, int x_rows, int part) {
  const int width = mode == kGated || mode == kQkvRotary ? 32 : 64;
  const int columns = mode == kGated ? task.outputs / 2 : task.outputs;
  const int rows = task.operand == kOperandTwoParts ? ceil_div(task.tokens, 8) * 16 : task.tokens;
  int status =
      encode(&maps.x, task.x, rows, task.inputs, task.x_stride, x_rows, kStageInputs, task.dtype);
  if (!status && !task.out_float32)
    status =
        encode(&maps.out, task.out, task.tokens, columns, task.out_stride, part, width, task.dtype);
  if (!status && task.residual)
    status = encode(&maps.residual, task.residual, task.tokens, columns, task.residual_stride, part,
                    width, task.dtype);
  return status;
}

int encode_maps(Maps& maps, const GemmTask& task, Mode mode, int x_rows, int part) {
  const int status = encode_weight(&maps.weight, task, mode, task.dtype);
  return status ? status : encode_rows(maps, task, mode, x_rows, part);
}

int check_task(const char* what, const GemmTask& task, Mode mode) {
  if (device().capability != 90) return fail("%s: needs compute capability 9.0", what);
  if (task.norm_weight) return fail("%s: has no fused norm", what);
  if (mode != kPlain && (task.residual || task.out_float32))
    return fail("%s: a residual or a float32 result of SwiGLU or of heads", what);
  if (task.residual && task.out_float32) return fail("%s: a residual and a float32 result", what);
  if (mode == kGated && task.outputs % 16)
    return fail("%s: SwiGLU of %d rows; wanted a multiple of 16", what, task.outputs);
  if (mode == kQkv && task.head_size % 8)
    return fail("%s: head size %d; wanted a multiple of 8", what, task.head_size);
  if (mode == kQkvRotary &&
      (task.head_size != task.rotary_size || task.interleaved ||
       (task.head_size != 64 && task.head_size != 128 && task.head_size != 256)))
    return fail("%s: rotation of %d dims of heads of %d; wanted whole heads of 64, 128 or 256",
                what, task.rotary_size, task.head_size);
  if ((mode == kQkv || mode == kQkvRotary) && task.cache_format != kCacheOfDtype &&
      ((task.head_size != 64 && task.head_size != 128) || task.tile_tokens > 64))
    return fail("%s: heads of %d for an 8-bit cache, tiles of %d; wanted 64 or 128, and up to 64",
                what, task.head_size, task.tile_tokens);
  return 0;
}

}  // namespace
}  // namespace tridecode
