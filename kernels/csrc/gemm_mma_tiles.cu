// out = epilogue(x * weight^T) for up to 64 tokens, by mma.sync and cp.async: compute capability
// 7.5 on (there with plain loads, float16). Each weight is read once.
//
// The weights are the 16-row operand of the instruction, the tokens its columns. A block takes 64
// weight rows, 16 a warp, and one slice of the inputs (split-K). Weights and x of 64 inputs a stage
// go to shared memory in kStages stages; the first weights are issued before the wait for the
// kernel that computes x. The order of the inputs is free as long as both operands agree, so a
// lane reads 8 consecutive inputs of a row at once.
//
// A lane holds two rows of a pair and two tokens, as the epilogue takes them. Sums of several
// slices meet in scratch memory, where the last block to arrive adds them up in order.
//
// Bytes moved: outputs * inputs * sizeof(X), once. Bench: python -m tridecode.kernels.bench linear
#include "gemm_epilogue.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;  // of a tile
constexpr int kStageInputs = 64;
constexpr int kPieces = kStageInputs / 8;        // of 16 bytes, of a row of a stage
constexpr int kRowsAtOnce = kThreads / kPieces;  // that the block copies at once
constexpr int kCopies = kRows / kRowsAtOnce;     // of weights, of a thread and stage

// Two blocks of 64 tokens fit in the 100 KiB of compute capability 8.6 and 8.9.
__host__ __device__ constexpr int stages_of(int tile_tokens) { return tile_tokens > 32 ? 3 : 4; }
__host__ __device__ constexpr int stage_pieces(int tile_tokens) {
  return (kRows + tile_tokens) * kPieces;
}

// Where piece `piece` of a row lies. Eight lanes read four pieces of two neighbouring rows.
__device__ __forceinline__ int place(int row, int piece) {
  return row * kPieces + (piece ^ row % 2 * 4);
}

template <typename X, int TOKENS, Mode MODE>
__global__ void __launch_bounds__(kThreads) gemm_mma_tiles(const __grid_constant__ GemmTask task) {
  constexpr int kStages = stages_of(TOKENS), kColumns = TOKENS / 8;
  extern __shared__ uint4 shared[];
  __shared__ bool is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x, slice = blockIdx.y, slices = gridDim.y;
  const int all_steps = ceil_div(task.inputs, kStageInputs);
  const int first_step = int(int64_t(all_steps) * slice / slices);
  const int steps = int(int64_t(all_steps) * (slice + 1) / slices) - first_step;

  // ---- copies
  const int copy_row = threadIdx.x / kPieces, copy_piece = threadIdx.x % kPieces;
  const X* rows[kCopies];
  bool valid[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int r = copy_row + i * kRowsAtOnce;
    const int pair = tile * (kRows / 2) + r / 16 * 8 + r % 8;
    const int row = row_of<MODE>(task, pair, r % 16 / 8);
    valid[i] = is_row<MODE>(task, pair, row);
    rows[i] = static_cast<const X*>(task.weight) + (valid[i] ? row : 0) * task.weight_stride;
  }
  auto copy_weights = [&](int step) {
    if (step >= steps) return;
    uint4* const to = shared + step % kStages * stage_pieces(TOKENS);
    const int input = (first_step + step) * kStageInputs + copy_piece * 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool inside = valid[i] && input < task.inputs;
      copy16_async(to + place(copy_row + i * kRowsAtOnce, copy_piece),
                   inside ? rows[i] + input : rows[i], inside);
    }
  };
  auto copy_x = [&](int step) {
    if (step >= steps) return;
    uint4* const to = shared + step % kStages * stage_pieces(TOKENS) + kRows * kPieces;
    const X* const x = static_cast<const X*>(task.x);
    const int input = (first_step + step) * kStageInputs + copy_piece * 8;
#pragma unroll
    for (int i = 0; i < TOKENS / kRowsAtOnce; ++i) {
      const int token = copy_row + i * kRowsAtOnce;
      const bool inside = token < task.tokens && input < task.inputs;
      copy16_async(to + place(token, copy_piece), inside ? x + token * task.x_stride + input : x,
                   inside);
    }
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) copy_weights(step);
  wait_for_predecessor();
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    copy_x(step);
    commit_copies();
  }

  // ---- mainloop
  float c[kColumns][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // also: all have read the stage that the next copies overwrite
    copy_weights(step + kStages - 1);
    copy_x(step + kStages - 1);
    commit_copies();
    const uint4* const weights = shared + step % kStages * stage_pieces(TOKENS);
    const uint4* const xs = weights + kRows * kPieces;
#pragma unroll
    for (int piece = t; piece < kPieces; piece += 4) {
      const uint4 a0 = weights[place(warp * 16 + g, piece)];
      const uint4 a1 = weights[place(warp * 16 + g + 8, piece)];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const uint4 b = xs[place(n * 8 + g, piece)];
        multiply_add<X>(c[n], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
        multiply_add<X>(c[n], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
      }
    }
  }

  // ---- the slices' sums
  if (slices > 1) {
    float4* const partials =
        static_cast<float4*>(task.partials) + int64_t(tile) * slices * kColumns * kThreads;
    auto partial = [&](int s, int n) {
      return partials + (s * kColumns + n) * kThreads + threadIdx.x;
    };
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
      __stcg(partial(slice, n), make_float4(c[n][0], c[n][1], c[n][2], c[n][3]));
    device_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(task.counters + tile, 1u) == unsigned(slices - 1);
      if (is_last) task.counters[tile] = 0;  // for the next launch
    }
    __syncthreads();
    if (!is_last) return;
    device_fence();
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
      for (int s = 0; s < slices; ++s) {
        const float4 part = __ldcg(partial(s, n));
        c[n][0] += part.x, c[n][1] += part.y, c[n][2] += part.z, c[n][3] += part.w;
      }
    }
  }
  const int pair = tile * (kRows / 2) + warp * 8 + g;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int token = n * 8 + 2 * t;
    if (token >= task.tokens) continue;
    Extra extra = load_extra<X, MODE>(task, pair, token);
    load_slots<MODE>(task, token, extra);
    float values[2][2] = {{c[n][0], c[n][2]}, {c[n][1], c[n][3]}};
    finish<X, MODE>(task, pair, token, values, extra);
  }
}

// (tokens of a tile, epilogue); kQkv with or without rotation.
#define TRIDECODE_INSTANCES(_) \
  _(16, kPlain)                \
  _(32, kPlain)                \
  _(64, kPlain) _(16, kGated) _(32, kGated) _(64, kGated) _(16, kQkv) _(32, kQkv) _(64, kQkv)

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_mma_tiles(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  if (int status = check_exact_cache("gemm_mma_tiles", task)) return status;
  const int steps = ceil_div(task.inputs, kStageInputs);
  if (task.tokens > task.tile_tokens || task.split < 1 || task.split > steps || task.norm_weight ||
      task.inputs % 8)
    return fail(
        "gemm_mma_tiles: no instance for %d tokens, tiles of %d, %d inputs, split %d, %s norm",
        task.tokens, task.tile_tokens, task.inputs, task.split,
        task.norm_weight ? "with" : "without");
  const int tiles = ceil_div(task.outputs, kRows);
  const int64_t needed = int64_t(tiles) * task.split * kRows * task.tile_tokens * 4;
  if (task.split > 1 && (needed > task.partial_bytes || tiles > task.num_counters))
    return fail("gemm_mma_tiles: %lld bytes of partial sums and %d counters; there are %lld and %d",
                (long long)needed, tiles, (long long)task.partial_bytes, task.num_counters);
  return for_16_bit_dtype(task.dtype, "gemm_mma_tiles", [&](auto zero) {
    using X = decltype(zero);
    const Mode mode = mode_of(task) == kQkvRotary ? kQkv : mode_of(task);
    const int shared = stages_of(task.tile_tokens) * stage_pieces(task.tile_tokens) * 16;
#define TRIDECODE_RUN(tokens_, mode_)                                                           \
  if (task.tile_tokens == tokens_ && mode == mode_)                                             \
    return launch("gemm_mma_tiles", gemm_mma_tiles<X, tokens_, mode_>, dim3(tiles, task.split), \
                  kThreads, shared, stream, task);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return fail("gemm_mma_tiles: no instance for tiles of %d tokens, epilogue %d", task.tile_tokens,
                int(mode));
  });
}
