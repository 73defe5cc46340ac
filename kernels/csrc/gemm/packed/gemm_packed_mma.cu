// out = epilogue(norm(x) * weight^T) for 1 to 8 tokens and weights in 8 or 4 bit, by mma.sync. Each
// weight is read once, in its packed form.
//
// As in gemm_mma.cu, the weights are the 16-row operand of the instruction and are loaded from
// memory directly to registers, where a lane expands them; a warp keeps kRing granules of two times
// 8 rows in flight, also across tiles, and issues the first ones before it waits for the kernel
// that computes x. x is stored in shared memory in the lanes' order.
//
// Persistent blocks, at most two per multiprocessor, process units of 16 weight rows (a tile) times
// one slice of the inputs; the warps share the inputs of a slice. Sums of several slices are stored
// in scratch memory, and the last block to arrive adds them up in order.
//
// Row scales multiply the finished sums. Within a group, the biased values are summed first; bias
// and zero, times the sum of the group's inputs, are then subtracted, and the group's scale
// multiplies the difference.
//
// Bytes moved: outputs * inputs, or half of it, and 4 bytes of each group, once.
// Bench: python -m tridecode.kernels.bench packed_linear
#include "api/gemm.h"
#include "api/packed.h"
#include "gemm/gemm_mma.cuh"
#include "gemm/packed/packed_weight.cuh"

namespace tridecode {
namespace {

constexpr int kStepInputs = 2048;  // inputs that the warps take at once

struct Division {
  int chunks;  // granules of a row
  int slices, slice_chunks;
  int warp_chunks;  // granules of a slice that a warp takes, a multiple of ring_of
  int tiles;
  int group_sums;  // floats, a multiple of 4
};

// Granules of 8 rows that a warp has in flight.
__host__ __device__ constexpr int ring_of(WeightFormat format) {
  return kStepInputs / kWarps / granule_inputs(format);
}

// Blocks per multiprocessor, which bounds the registers.
__host__ __device__ constexpr int resident_blocks(int groups, Mode mode) {
  return groups == 4 || mode == kQkv ? 1 : 2;
}

template <typename X, WeightFormat F, int GROUPS, Mode MODE>
__global__ void __launch_bounds__(kThreads, resident_blocks(GROUPS, MODE))
    gemm_packed_mma(const __grid_constant__ GemmTask task,
                    const __grid_constant__ Division division) {
  constexpr int kInputs = granule_inputs(F), kSteps = kInputs / 16, kRing = ring_of(F);
  extern __shared__ uint4 shared[];
  float* const sums = reinterpret_cast<float*>(shared);
  float* const group_sums = sums + kBuffers * kSums;  // of x: (group, token)
  __shared__ bool is_last;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int tokens = task.tokens, warp_chunks = division.warp_chunks;
  uint4* const xs = shared + (kBuffers * kSums + division.group_sums) / 4;
  const int64_t units = int64_t(division.slices) * division.tiles;
  const int begin = int(units * blockIdx.x / gridDim.x),
            end = int(units * (blockIdx.x + 1) / gridDim.x);

  // ---- the ring of weights
  const uint4* const weights = static_cast<const uint4*>(task.weight) + lane;
  uint4 ring[kRing][2];
  uint32_t groups[kRing][2][GROUPS ? GROUPS : 1] = {};
  unsigned rows[2];  // the granule of the slice's first inputs
  int limit = 0;     // granules of the slice
  auto aim = [&](int unit) {
    if (unit >= end) {
      limit = 0;
      return;
    }
    const int slice = unit / division.tiles, tile = unit % division.tiles;
    const int first = slice * division.slice_chunks;
    limit = min(division.slice_chunks, division.chunks - first);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of<MODE>(task, tile * 8, i);  // and the 7 after it
      const int eight = is_row<MODE>(task, tile * 8, row) ? row / kGranuleRows : 0;
      rows[i] = unsigned(eight) * division.chunks + first;
    }
  };
  // Blocks begin at different inputs: see gemm_mma.cu.
  const int shift = blockIdx.x % (warp_chunks / kRing) * kRing;
  auto turned = [&](int base) { return (base + shift) % warp_chunks; };
  auto fetch = [&](int slot, int base) {
    const int chunk = (turned(base) + slot) * kWarps + warp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned granule = rows[i] + chunk;
      ring[slot][i] =
          chunk < limit ? load_stream(weights + uint64_t(granule) * 32) : make_uint4(0, 0, 0, 0);
      if constexpr (GROUPS > 0) {
        const uint32_t* const from =
            task.weight_groups + (uint64_t(granule) * kGranuleRows + g) * GROUPS;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) groups[slot][i][j] = chunk < limit ? __ldg(from + j) : 0;
      }
    }
  };
  int ahead = begin, ahead_chunk = 0;  // next load of the ring
  auto advance = [&]() {
    ahead_chunk += kRing;
    if (ahead_chunk == warp_chunks) {
      ahead_chunk = 0;
      aim(++ahead);
    }
  };
  aim(begin);
#pragma unroll
  for (int slot = 0; slot < kRing; ++slot) fetch(slot, 0);
  advance();
  if (task.norm_weight) {
    for (int k = threadIdx.x * 64; k < task.inputs; k += kThreads * 64) {
      prefetch_l2(static_cast<const X*>(task.norm_weight) + k);
      if (task.norm_bias) prefetch_l2(static_cast<const X*>(task.norm_bias) + k);
    }
  }
  wait_for_predecessor();

  // ---- x in shared memory: 32 inputs of a token are four pieces of 16 bytes. At first each piece
  // holds 8 inputs in order; then word j of piece t holds inputs 8 j + 2 t and the next.
  const int pieces = warp_chunks * kWarps * (kInputs / 8);
  auto piece_of = [&](int p, int token) { return xs + (p / 4 * tokens + token) * 4 + p % 4; };
  auto load_x = [&](int slice) {
    const int first_input = slice * division.slice_chunks * kInputs;
    const int inputs = min(division.slice_chunks * kInputs, task.inputs - first_input);
    const X* x = static_cast<const X*>(task.x) + first_input;
    for (int token = 0; token < tokens; ++token) {
      for (int p = threadIdx.x; p < pieces; p += kThreads) {
        const bool valid = p * 8 < inputs;
        copy16_async(piece_of(p, token), valid ? x + token * task.x_stride + p * 8 : x, valid);
      }
    }
    commit_copies();
    wait_copies<0>();
  };
  auto turn_x = [&]() {
    for (int i = threadIdx.x; i < pieces / 4 * tokens; i += kThreads) {
      uint4 from[4], to[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) from[j] = xs[4 * i + j];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) put(to[k], j, get(from[j], k));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) xs[4 * i + j] = to[j];
    }
  };
  auto add_groups = [&]() {
    constexpr int kPieces = kInputs / 32 / (GROUPS ? GROUPS : 1) * 4;  // of a group of a token
    for (int i = threadIdx.x; i < pieces / kPieces * tokens; i += kThreads) {
      const int group = i / tokens, token = i % tokens;
      float sum = 0.0f;
      for (int p = 0; p < kPieces; ++p) {
        float values[8];
        load8(reinterpret_cast<const X*>(piece_of(group * kPieces + p, token)), values);
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += values[k];
      }
      group_sums[i] = sum;
    }
  };

  int loaded = -1;
  int slice = begin / division.tiles, tile = begin % division.tiles - 1;
  for (int unit = begin; unit < end; ++unit) {
    if (++tile == division.tiles) tile = 0, ++slice;
    if (slice != loaded) {
      load_x(slice);
      if (task.norm_weight)
        normalize_rows<X, kMaxNormTokens, kThreads>(task, tokens, [&](int p, int token) {
          return reinterpret_cast<X*>(piece_of(p, token));
        });
      __syncthreads();
      turn_x();
      __syncthreads();
      if (GROUPS) {
        add_groups();
        __syncthreads();
      }
      loaded = slice;
    }

    // ---- mainloop
    float c[4] = {};
    for (int chunk_base = 0; chunk_base < warp_chunks; chunk_base += kRing) {
#pragma unroll
      for (int slot = 0; slot < kRing; ++slot) {
        const int chunk = (turned(chunk_base) + slot) * kWarps + warp;
        const uint4* const x_of = xs + (int64_t(chunk) * (kInputs / 32) * tokens + g) * 4 + t;
        float part[4] = {};  // of a group
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
          const uint4 b = g < tokens ? x_of[step / 2 * tokens * 4] : make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t upper[2], lower[2];
            if constexpr (GROUPS > 0) {
#pragma unroll
              for (int k = 0; k < 2; ++k) {
                upper[k] = biased_pair<X>(ring[slot][0], step + i, k);
                lower[k] = biased_pair<X>(ring[slot][1], step + i, k);
              }
            } else {
              expand_step<X, F>(ring[slot][0], step + i, 0, upper);
              expand_step<X, F>(ring[slot][1], step + i, 0, lower);
            }
            multiply_add<X>(GROUPS ? part : c, upper[0], lower[0], upper[1], lower[1],
                            get(b, 2 * i), get(b, 2 * i + 1));
          }
          if constexpr (GROUPS > 0) {
            constexpr int kGroupSteps = kSteps / GROUPS;
            if ((step + 2) % kGroupSteps) continue;
            const int group = step / kGroupSteps;
            const float* const x_sums = group_sums + (chunk * GROUPS + group) * tokens;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float2 of = unpack<X>(groups[slot][i / 2][group]);  // scale, zero
              const int token = 2 * t + i % 2;
              c[i] += of.x * (part[i] - of.y * x_sums[token < tokens ? token : 0]);
              part[i] = 0.0f;
            }
          }
        }
        fetch(slot, ahead_chunk);
      }
      advance();
    }

    // ---- the warps' sums, as in gemm_mma.cu
    float* const buffer = sums + unit % kBuffers * kSums;
    auto place = [&](int row, int token_pair) { return row * 8 + (token_pair ^ row / 4 % 4) * 2; };
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(buffer + warp * kRows * 8 + place(g + 8 * i, t)) =
          make_float2(c[2 * i], c[2 * i + 1]);
    // a thread finishes two rows and two tokens
    const int item = threadIdx.x, items = kRows / 2 * ((tokens + 1) / 2);
    const int pair = tile * (kRows / 2) + item % 8, token = item / 8 * 2;
    const bool finishes = item < items, whole = division.slices == 1;
    Extra extra = {};
    float scales[2] = {1.0f, 1.0f};
    if (finishes && GROUPS == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row_of<MODE>(task, pair, i);
        if (is_row<MODE>(task, pair, row)) scales[i] = __ldg(task.weight_scales + row);
      }
    }
    if (whole && finishes) {
      extra = load_extra<X, MODE>(task, pair, token);
      load_slots<MODE>(task, token, extra);
    }
    __syncthreads();
    float values[2][2] = {};
    if (finishes) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll 4
        for (int w = 0; w < kWarps; ++w) {
          const float2 part = *reinterpret_cast<const float2*>(buffer + w * kRows * 8 +
                                                               place(item % 8 + 8 * i, item / 8));
          values[0][i] += part.x, values[1][i] += part.y;
        }
      }
    }
    if (!whole) {
      float4* const partials =
          static_cast<float4*>(task.partials) + int64_t(tile) * division.slices * items + item;
      if (finishes)
        __stcg(partials + slice * items,
               make_float4(values[0][0], values[0][1], values[1][0], values[1][1]));
      device_fence();
      __syncthreads();
      if (threadIdx.x == 0) {
        is_last = atomicAdd(task.counters + tile, 1u) == unsigned(division.slices - 1);
        if (is_last) task.counters[tile] = 0;  // for the next launch
      }
      __syncthreads();
      if (!is_last) continue;
      device_fence();
      if (finishes) {
        extra = load_extra<X, MODE>(task, pair, token);
        load_slots<MODE>(task, token, extra);
        values[0][0] = values[0][1] = values[1][0] = values[1][1] = 0.0f;
        for (int s = 0; s < division.slices; ++s) {
          const float4 part = __ldcg(partials + s * items);
          values[0][0] += part.x, values[0][1] += part.y;
          values[1][0] += part.z, values[1][1] += part.w;
        }
      }
    }
    if (finishes) {
#pragma unroll
      for (int i = 0; i < 2; ++i) values[0][i] *= scales[i], values[1][i] *= scales[i];
      finish<X, MODE>(task, pair, token, values, extra);
    }
  }
}

// (groups of a granule); kQkv with or without rotation.
#define TRIDECODE_MODES(_) _(kPlain) _(kGated) _(kQkv)

template <typename X, WeightFormat F, int GROUPS>
int run(const GemmTask& task, const Division& division, int shared, void* stream) {
  const Mode mode = mode_of(task) == kQkvRotary ? kQkv : mode_of(task);
  const int units = division.slices * division.tiles;
  const int blocks = blocks_of(units, shared, resident_blocks(GROUPS, mode));
#define TRIDECODE_RUN(mode_)                                                                 \
  if (mode == mode_)                                                                         \
    return launch("gemm_packed_mma", gemm_packed_mma<X, F, GROUPS, mode_>, blocks, kThreads, \
                  shared, stream, task, division);
  TRIDECODE_MODES(TRIDECODE_RUN)
  return fail("gemm_packed_mma: no instance for epilogue %d", int(mode));
}

// Return whether each group of 8 rows of a tile is consecutive.
bool takes_eights(const GemmTask& task) {
  const Mode mode = mode_of(task);
  if (mode == kGated) return task.outputs % 16 == 0;
  if (mode == kQkvRotary)
    return !task.interleaved && task.head_size % 16 == 0 && task.rotary_size % 16 == 0;
  return mode != kQkv || task.head_size % 8 == 0;
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_packed_mma(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  if (int status = check_units("gemm_packed_mma", task)) return status;
  if (task.inputs % 8 || !takes_eights(task))
    return fail("gemm_packed_mma: %d inputs, heads of %d, %d rotated, %s", task.inputs,
                task.head_size, task.rotary_size, task.interleaved ? "interleaved" : "by halves");
  return for_weight_format(task.weight_format, "gemm_packed_mma", [&](auto format) {
    constexpr WeightFormat F = decltype(format)::value;
    constexpr int kInputs = granule_inputs(F);
    Division division;
    division.chunks = ceil_div(task.inputs, kInputs);
    division.slices = task.split;
    division.slice_chunks = ceil_div(division.chunks, task.split);
    division.warp_chunks = ceil_div(division.slice_chunks, kWarps * ring_of(F)) * ring_of(F);
    division.tiles = ceil_div(task.outputs, kRows);
    division.group_sums = 0;
    if (F == kInt4)
      division.group_sums = division.warp_chunks * kWarps * task.granule_groups * task.tokens;
    division.group_sums = ceil_div(division.group_sums, 4) * 4;
    const int shared = (kBuffers * kSums + division.group_sums) * 4 +
                       division.warp_chunks * kWarps * kInputs * 2 * task.tokens;
    return for_16_bit_dtype(task.dtype, "gemm_packed_mma", [&](auto zero) {
      using X = decltype(zero);
      if constexpr (F == kInt4) {
        if (task.granule_groups == 1) return run<X, F, 1>(task, division, shared, stream);
        if (task.granule_groups == 2) return run<X, F, 2>(task, division, shared, stream);
        if (task.granule_groups == 4) return run<X, F, 4>(task, division, shared, stream);
        return fail("gemm_packed_mma: %d groups of a granule", task.granule_groups);
      } else {
        return run<X, F, 0>(task, division, shared, stream);
      }
    });
  });
}
