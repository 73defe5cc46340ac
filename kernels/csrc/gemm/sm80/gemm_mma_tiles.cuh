// out = epilogue(x * weight^T) for up to 64 tokens, by mma.sync and cp.async, from compute
// capability 7.5 on (there with plain loads, float16); 8-bit operands from 8.0 (int8) or 8.9 (E4M3)
// on. Each weight is read once.
//
// Copies and shared memory treat a row of 8-bit inputs as half as many 16-bit words; the sums are
// multiplied by the scales of weight and x.
//
// The weights are the 16-row operand of the instruction, the tokens its columns. A block takes 64
// weight rows, 16 a warp, and one slice of the inputs (split-K). Weights and x, 128 bytes per row
// and stage, are copied to shared memory in kStages stages; the first weights are issued before the
// wait for the kernel that computes x. The order of the inputs is free as long as both operands
// agree, so a lane reads 16 bytes of a row at once.
//
// A lane holds two rows of a pair and two tokens, as required by the epilogue. Sums of several
// slices are stored in scratch memory, and the last block to arrive adds them up in order.
//
// Bytes moved: outputs * inputs * sizeof(Operand), once.
// Bench: python -m tridecode.kernels.bench linear
#pragma once
#include <cuda_fp8.h>

#include "gemm/gemm_epilogue.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;               // of a tile
constexpr int kStageInputs = 64;                 // words
constexpr int kPieces = kStageInputs / 8;        // of 16 bytes, of a row of a stage
constexpr int kRowsAtOnce = kThreads / kPieces;  // that the block copies at once
constexpr int kCopies = kRows / kRowsAtOnce;     // of weights, of a thread and stage

// Two blocks of 64 tokens fit in the 100 KiB of compute capability 8.6 and 8.9.
__host__ __device__ constexpr int stages_of(int tile_tokens) { return tile_tokens > 32 ? 3 : 4; }
__host__ __device__ constexpr int stage_pieces(int tile_tokens) {
  return (kRows + tile_tokens) * kPieces;
}

// Swizzled place of piece `piece` of a row. Eight lanes read four pieces of two neighbouring rows.
__device__ __forceinline__ int place(int row, int piece) {
  return row * kPieces + (piece ^ row % 2 * 4);
}

// Operand: X, int8_t or __nv_fp8_e4m3, of weights and x.
template <typename Operand>
using SumOf = std::conditional_t<std::is_same<Operand, int8_t>::value, int, float>;

// Multiplies 16 bytes of each row. E4M3 instructions keep 14 bits of a sum, so each sums few
// inputs.
template <typename Operand>
__device__ __forceinline__ void multiply_words(SumOf<Operand> (&c)[4], const uint4& a0,
                                               const uint4& a1, const uint4& b) {
  constexpr bool kFew = std::is_same<Operand, __nv_fp8_e4m3>::value;
  SumOf<Operand> few[4] = {};
  SumOf<Operand>(&to)[4] = kFew ? few : c;
  multiply_add<Operand>(to, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
  multiply_add<Operand>(to, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
  if constexpr (kFew) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += few[i];
  }
}

template <typename X, typename Operand, int TOKENS, Mode MODE>
__global__ void __launch_bounds__(kThreads) gemm_mma_tiles(const __grid_constant__ GemmTask task) {
  constexpr bool kBytes = sizeof(Operand) == 1;
  constexpr int kWord = 2 / sizeof(Operand);  // inputs
  using Word = uint16_t;
  using Sum = SumOf<Operand>;
  constexpr int kStages = stages_of(TOKENS), kColumns = TOKENS / 8;
  extern __shared__ uint4 shared[];
  __shared__ bool is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x, slice = blockIdx.y, slices = gridDim.y;
  const int inputs = task.inputs / kWord, all_steps = ceil_div(inputs, kStageInputs);
  const int first_step = int(int64_t(all_steps) * slice / slices);
  const int steps = int(int64_t(all_steps) * (slice + 1) / slices) - first_step;

  // ---- copies
  const int copy_row = threadIdx.x / kPieces, copy_piece = threadIdx.x % kPieces;
  const Word* rows[kCopies];
  bool valid[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int r = copy_row + i * kRowsAtOnce;
    const int pair = tile * (kRows / 2) + r / 16 * 8 + r % 8;
    const int row = row_of<MODE>(task, pair, r % 16 / 8);
    valid[i] = is_row<MODE>(task, pair, row);
    rows[i] =
        static_cast<const Word*>(task.weight) + (valid[i] ? row : 0) * (task.weight_stride / kWord);
  }
  auto copy_weights = [&](int step) {
    if (step >= steps) return;
    uint4* const to = shared + step % kStages * stage_pieces(TOKENS);
    const int input = (first_step + step) * kStageInputs + copy_piece * 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool inside = valid[i] && input < inputs;
      copy16_async(to + place(copy_row + i * kRowsAtOnce, copy_piece),
                   inside ? rows[i] + input : rows[i], inside);
    }
  };
  auto copy_x = [&](int step) {
    if (step >= steps) return;
    uint4* const to = shared + step % kStages * stage_pieces(TOKENS) + kRows * kPieces;
    const Word* const x = static_cast<const Word*>(task.x);
    const int input = (first_step + step) * kStageInputs + copy_piece * 8;
#pragma unroll
    for (int i = 0; i < TOKENS / kRowsAtOnce; ++i) {
      const int token = copy_row + i * kRowsAtOnce;
      const bool inside = token < task.tokens && input < inputs;
      copy16_async(to + place(token, copy_piece),
                   inside ? x + token * (task.x_stride / kWord) + input : x, inside);
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
  Sum c[kColumns][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    // also ensures that all threads have read the stage that the next copies overwrite
    __syncthreads();
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
        multiply_words<Operand>(c[n], a0, a1, b);
      }
    }
  }

  // ---- the slices' sums
  if (slices > 1) {
    uint4* const partials =
        static_cast<uint4*>(task.partials) + int64_t(tile) * slices * kColumns * kThreads;
    auto partial = [&](int s, int n) {
      return partials + (s * kColumns + n) * kThreads + threadIdx.x;
    };
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
      __stcg(partial(slice, n), reinterpret_cast<const uint4&>(c[n]));
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
      c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
      for (int s = 0; s < slices; ++s) {
        const uint4 words = __ldcg(partial(s, n));
        const auto& part = reinterpret_cast<const Sum(&)[4]>(words);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[n][i] += part[i];
      }
    }
  }
  const int pair = tile * (kRows / 2) + warp * 8 + g;
  float scales[2] = {1.0f, 1.0f};
  if constexpr (kBytes) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of<MODE>(task, pair, i);
      scales[i] = is_row<MODE>(task, pair, row) ? task.weight_scales[row] : 0.0f;
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int token = n * 8 + 2 * t;
    if (token >= task.tokens) continue;
    Extra extra = load_extra<X, MODE>(task, pair, token);
    load_slots<MODE>(task, token, extra);
    float values[2][2] = {{float(c[n][0]), float(c[n][2])}, {float(c[n][1]), float(c[n][3])}};
    if constexpr (kBytes) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float of_x = token + j < task.tokens ? task.x_scales[token + j] : 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) values[j][i] = values[j][i] * scales[i] * of_x;
      }
    }
    finish<X, MODE>(task, pair, token, values, extra);
  }
}

template <typename X, typename Operand, int TOKENS, Mode MODE>
int launch_tiles(const char* name, const GemmTask& task, void* stream) {
  return launch(name, gemm_mma_tiles<X, Operand, TOKENS, MODE>,
                dim3(ceil_div(task.outputs, kRows), task.split), kThreads,
                stages_of(TOKENS) * stage_pieces(TOKENS) * 16, stream, task);
}

inline int no_tile(const char* name, const GemmTask& task, Mode mode) {
  return fail("%s: no instance for tiles of %d tokens, epilogue %d", name, task.tile_tokens,
              int(mode));
}

// words: 16-bit words of a row.
int check_tiles(const char* name, const GemmTask& task, int words) {
  const int steps = ceil_div(words, kStageInputs);
  if (task.tokens > task.tile_tokens || task.split < 1 || task.split > steps || task.norm_weight ||
      words % 8)
    return fail("%s: no instance for %d tokens, tiles of %d, %d inputs, split %d, %s norm", name,
                task.tokens, task.tile_tokens, task.inputs, task.split,
                task.norm_weight ? "with" : "without");
  const int tiles = ceil_div(task.outputs, kRows);
  const int64_t needed = int64_t(tiles) * task.split * kRows * task.tile_tokens * 4;
  if (task.split > 1 && (needed > task.partial_bytes || tiles > task.num_counters))
    return fail("%s: %lld bytes of partial sums and %d counters; there are %lld and %d", name,
                (long long)needed, tiles, (long long)task.partial_bytes, task.num_counters);
  return 0;
}

}  // namespace
}  // namespace tridecode
