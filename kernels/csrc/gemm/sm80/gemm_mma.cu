// out = epilogue(norm(x) * weight^T) for 1 to 8 tokens, by mma.sync. Each weight is read once.
//
// The weights are the 16-row operand of the instruction and are loaded from memory directly to
// registers. The order of the inputs is free as long as both operands agree, so a lane loads 8
// consecutive weights of a row with one 16-byte load, and x is stored in shared memory in the same
// order. A warp always has kRing loads of every row in flight, also across tiles, and issues the
// first ones before it waits for the kernel that computes x.
//
// Persistent blocks, at most two per multiprocessor. A unit of work is a tile of 16 weight rows
// times one slice of the inputs (split-K): the part of x that fits in shared memory. The units,
// ordered by slice, are assigned in contiguous runs, so that a block loads x once or twice. The
// warps share the inputs of a slice; their sums are added up in shared memory. Sums of several
// slices are stored in scratch memory, and the last block to arrive adds them up in order.
//
// Bytes moved: outputs * inputs * sizeof(X), once.
// Bench: python -m tridecode.kernels.bench linear
#include "api/gemm.h"
#include "gemm/gemm_mma.cuh"

namespace tridecode {
namespace {

constexpr int kRing = 8;  // loads of a row in flight

struct Division {
  int slices, slice_inputs;
  int warp_chunks;  // chunks of 32 inputs of a slice that a warp takes, a multiple of kRing
  int tiles;
};

template <typename X, Mode MODE>
__global__ void __launch_bounds__(kThreads, 2)
    gemm_mma(const __grid_constant__ GemmTask task, const __grid_constant__ Division division) {
  extern __shared__ uint4 shared[];
  float* const sums = reinterpret_cast<float*>(shared);
  uint4* const xs = shared + kBuffers * kSums / 4;
  __shared__ bool is_last;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int tokens = task.tokens, warp_chunks = division.warp_chunks;
  const int64_t units = int64_t(division.slices) * division.tiles;
  const int begin = int(units * blockIdx.x / gridDim.x),
            end = int(units * (blockIdx.x + 1) / gridDim.x);

  // ---- the ring of weights
  const uint4* const weights = static_cast<const uint4*>(task.weight);
  uint4 ring[kRing][2];
  unsigned rows[2];  // offsets in units of 8 weights, so that 32 bits suffice
  int limit = 0;     // inputs of the slice from this lane's first one on
  auto aim = [&](int unit) {
    if (unit >= end) {
      limit = 0;
      return;
    }
    const int slice = unit / division.tiles, tile = unit % division.tiles;
    const int first_input = slice * division.slice_inputs, lane_input = warp * 64 + t * 8;
    limit = min(division.slice_inputs, task.inputs - first_input) - lane_input;
    const int pair = tile * 8 + g;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of<MODE>(task, pair, i);
      const int64_t offset =
          (is_row<MODE>(task, pair, row) ? row : 0) * task.weight_stride + first_input + lane_input;
      rows[i] = unsigned(offset / 8);
    }
  };
  // Blocks start at different inputs: rows are a power of two apart, so their first inputs share a
  // few memory channels.
  const int shift = blockIdx.x % (warp_chunks / kRing) * kRing;
  auto turned = [&](int chunk_base) { return (chunk_base + shift) % warp_chunks; };
  auto fetch = [&](int slot, int step_base) {
    const int chunk_base = turned(step_base);
    const int offset = chunk_base * 32 * kWarps + slot / 2 * 64 * kWarps + slot % 2 * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ring[slot][i] =
          offset < limit ? load_stream(weights + rows[i] + offset / 8) : make_uint4(0, 0, 0, 0);
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

  // ---- x in shared memory: piece ((chunk * tokens) + token) * 4 + t holds inputs
  // chunk * 32 + t * 8 ..
  const int pieces = warp_chunks * kWarps * 4;
  auto piece_of = [&](int p, int token) { return xs + (p / 4 * tokens + token) * 4 + p % 4; };
  auto load_x = [&](int slice) {
    const int first_input = slice * division.slice_inputs;
    const int inputs = min(division.slice_inputs, task.inputs - first_input);
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
      loaded = slice;
    }

    // ---- mainloop
    float c[4] = {};
    for (int chunk_base = 0; chunk_base < warp_chunks; chunk_base += kRing) {
#pragma unroll
      for (int slot = 0; slot < kRing; ++slot) {
        const int chunk = (turned(chunk_base) + slot / 2 * 2) * kWarps + warp * 2 + slot % 2;
        const uint4 b = g < tokens ? xs[(chunk * tokens + g) * 4 + t] : make_uint4(0, 0, 0, 0);
        const uint4 &a0 = ring[slot][0], &a1 = ring[slot][1];
        multiply_add<X>(c, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
        multiply_add<X>(c, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
        fetch(slot, ahead_chunk);
      }
      advance();
    }

    // ---- the warps' sums; a row's 8 tokens are rotated, so that neither writes nor reads have
    // bank conflicts
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
    if (finishes) finish<X, MODE>(task, pair, token, values, extra);
  }
}

// (epilogue); kQkv with or without rotation.
#define TRIDECODE_INSTANCES(_) _(kPlain) _(kGated) _(kQkv)

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_mma(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  if (int status = check_units("gemm_mma", task)) return status;
  Division division;
  division.slices = task.split;
  division.slice_inputs = ceil_div(ceil_div(task.inputs, 32), task.split) * 32;
  division.warp_chunks = ceil_div(division.slice_inputs / 32, kWarps * kRing) * kRing;
  division.tiles = ceil_div(task.outputs, kRows);
  const int shared = kBuffers * kSums * 4 + division.warp_chunks * kWarps * 64 * task.tokens;
  const int blocks = blocks_of(task.split * division.tiles, shared, 2);
  return for_16_bit_dtype(task.dtype, "gemm_mma", [&](auto zero) {
    using X = decltype(zero);
    const Mode mode = mode_of(task) == kQkvRotary ? kQkv : mode_of(task);
#define TRIDECODE_RUN(mode_) \
  if (mode == mode_)         \
    return launch("gemm_mma", gemm_mma<X, mode_>, blocks, kThreads, shared, stream, task, division);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return fail("gemm_mma: no instance for epilogue %d", int(mode));
  });
}
