// out = activation(norm(x) @ weight.T + bias) + residual for 1 to 16 tokens, each weight read once.
//
// The weights are the 16-row operand of the matrix instruction and go straight from memory to its
// registers: the order of the inner axis is free as long as both operands agree, so a lane takes 8
// consecutive weights of a row with one 16-byte load, and x lies in shared memory in the matching
// order. A warp always has RING loads of every row in flight, also across tiles, and fills that
// ring before it waits for the kernel that computes x.
//
// One block a multiprocessor. A unit of work is a tile of 16 * MT * WM rows times one slice of the
// inputs: the part of x that fits in shared memory. WK warps share the inputs of a slice, WM * MT
// tiles of 16 rows stand side by side. The units, ordered by slice, are dealt out in contiguous
// runs, so that a block loads x once or twice. Sums of the WK warps meet in shared memory; those of
// several slices in scratch memory, where the last block to arrive adds them up in order.
//
// Bytes moved: outputs * inputs * sizeof(X), once.
// Bench: python -m tridecode.kernels.bench linear
#include "linear.cuh"

namespace tridecode {
namespace {

using Task = LinearTask;

// How a product is cut: tiles of rows times slices of the inputs.
struct Division {
  int slices, slice_inputs, warp_chunks, tiles;
};

template <int NT, int WK, int WM, int MT, int RING>
struct Shape {
  static constexpr int kWarps = WK * WM;
  static constexpr int kThreads = 32 * WK * WM;
  static constexpr int kRows = 16 * MT * WM;         // of a tile
  static constexpr int kBuffers = NT <= 4 ? 2 : 1;   // of the warps' sums
  static constexpr int kSums = WK * NT * kRows * 8;  // floats of a buffer
  static constexpr int kChunkStep = WK * RING;  // chunks of 32 inputs that the block takes at once
};

template <typename X, int MODE, int NT, int WK, int WM, int MT, int RING, int BLOCKS>
__global__ void __launch_bounds__(32 * WK * WM, BLOCKS)
    linear(const __grid_constant__ Task task, const __grid_constant__ Division division) {
  using S = Shape<NT, WK, WM, MT, RING>;
  extern __shared__ uint4 shared[];
  float* const sums = reinterpret_cast<float*>(shared);
  uint4* const xs = shared + S::kBuffers * S::kSums / 4;
  __shared__ float partial[8 * NT][S::kWarps];
  __shared__ float totals[2][8 * NT];
  __shared__ bool is_last;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int wk = warp % WK, wm = warp / WK;
  const int tokens = task.tokens, warp_chunks = division.warp_chunks;
  const int64_t units = int64_t(division.slices) * division.tiles;
  const int begin = int(units * blockIdx.x / gridDim.x),
            end = int(units * (blockIdx.x + 1) / gridDim.x);

  // ---- the ring of weights
  const uint4* const weights = static_cast<const uint4*>(task.weight);
  uint4 ring[RING][MT][2];
  unsigned rows[MT][2];  // offsets in units of 8 weights, so that 32 bits suffice
  int limit = 0;         // inputs of the slice that lie after this lane's first
  auto aim = [&](int unit) {
    if (unit >= end) {
      limit = 0;
      return;
    }
    const int slice = unit / division.tiles, tile = unit % division.tiles;
    const int first_input = slice * division.slice_inputs, lane_input = wk * 64 + t * 8;
    limit = min(division.slice_inputs, task.inputs - first_input) - lane_input;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const int pair = ((tile * WM + wm) * MT + m) * 8 + g;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row_of<MODE>(task, pair, i);
        const int64_t offset = (is_row<MODE>(task, pair, row) ? row : 0) * task.weight_stride +
                               first_input + lane_input;
        rows[m][i] = unsigned(offset / 8);
      }
    }
  };
  // Blocks begin at different inputs: rows lie a power of two apart, and their beginnings on few
  // memory channels.
  const int shift = blockIdx.x % (warp_chunks / RING) * RING;
  auto turned = [&](int chunk_base) { return (chunk_base + shift) % warp_chunks; };
  auto fetch = [&](int slot, int step_base) {
    const int chunk_base = turned(step_base);
    const int offset = chunk_base * 32 * WK + slot / 2 * 64 * WK + slot % 2 * 32;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ring[slot][m][i] = offset < limit ? load_stream(weights + rows[m][i] + offset / 8)
                                          : make_uint4(0, 0, 0, 0);
    }
  };
  int ahead = begin, ahead_chunk = 0;  // what the ring takes next
  auto advance = [&]() {
    ahead_chunk += RING;
    if (ahead_chunk == warp_chunks) {
      ahead_chunk = 0;
      aim(++ahead);
    }
  };
  aim(begin);
#pragma unroll
  for (int slot = 0; slot < RING; ++slot) fetch(slot, 0);
  advance();
  if (task.norm_weight) {
    for (int k = threadIdx.x * 64; k < task.inputs; k += S::kThreads * 64) {
      prefetch_l2(static_cast<const X*>(task.norm_weight) + k);
      if (task.norm_bias) prefetch_l2(static_cast<const X*>(task.norm_bias) + k);
    }
  }
  wait_for_predecessor();

  // ---- x in shared memory: piece ((chunk * tokens) + token) * 4 + t holds inputs
  // chunk * 32 + t * 8 ..
  const int pieces = warp_chunks * WK * 4;
  auto load_x = [&](int slice) {
    const int first_input = slice * division.slice_inputs;
    const int inputs = min(division.slice_inputs, task.inputs - first_input);
    const X* x = static_cast<const X*>(task.x) + first_input;
    for (int token = 0; token < tokens; ++token) {
      for (int p = threadIdx.x; p < pieces; p += S::kThreads) {
        const bool valid = p * 8 < inputs;
        copy16_async(xs + (p / 4 * tokens + token) * 4 + p % 4,
                     valid ? x + token * task.x_stride + p * 8 : x, valid);
      }
    }
    commit_copies();
    wait_copies<0>();
  };
  auto normalize = [&]() {
    // every thread works on the pieces that it copied itself
    auto piece_of = [&](int p, int token) {
      return reinterpret_cast<X*>(xs + (p / 4 * tokens + token) * 4 + p % 4);
    };
    // totals[which][token] = the sum of f over the token's inputs
    auto sum_over_inputs = [&](int which, auto f) {
#pragma unroll 4
      for (int token = 0; token < tokens; ++token) {
        float sum = 0.0f;
        for (int p = threadIdx.x; p * 8 < task.inputs; p += S::kThreads) {
          float values[8];
          load8(piece_of(p, token), values);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += f(values[i], token);
        }
        sum = warp_sum(sum);
        if (lane == 0) partial[token][warp] = sum;
      }
      __syncthreads();
      for (int token = warp; token < tokens; token += S::kWarps) {
        const float total = warp_sum(lane < S::kWarps ? partial[token][lane] : 0.0f);
        if (lane == 0) totals[which][token] = total;
      }
      __syncthreads();
    };
    const bool centred = task.norm_bias != nullptr;
    const float each = 1.0f / task.inputs;
    if (centred) sum_over_inputs(0, [](float x, int) { return x; });
    sum_over_inputs(1, [&](float x, int token) {
      const float difference = x - (centred ? totals[0][token] * each : 0.0f);
      return difference * difference;
    });
    for (int p = threadIdx.x; p * 8 < task.inputs; p += S::kThreads) {
      float w[8], b[8] = {};
      load8(static_cast<const X*>(task.norm_weight) + p * 8, w);
      if (centred) load8(static_cast<const X*>(task.norm_bias) + p * 8, b);
#pragma unroll 1
      for (int token = 0; token < tokens; ++token) {
        const float mean = centred ? totals[0][token] * each : 0.0f;
        const float scale = rsqrtf(totals[1][token] * each + task.norm_eps);
        float values[8];
        load8(piece_of(p, token), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = (values[i] - mean) * scale * w[i] + b[i];
        store8(piece_of(p, token), values);
      }
    }
  };

  int loaded = -1;
  int slice = begin / division.tiles, tile = begin % division.tiles - 1;
  for (int unit = begin; unit < end; ++unit) {
    if (++tile == division.tiles) tile = 0, ++slice;
    if (slice != loaded) {
      load_x(slice);
      if (task.norm_weight) normalize();
      __syncthreads();
      loaded = slice;
    }

    // ---- products
    float c[MT][NT][4] = {};
    for (int chunk_base = 0; chunk_base < warp_chunks; chunk_base += RING) {
#pragma unroll
      for (int slot = 0; slot < RING; ++slot) {
        const int chunk = (turned(chunk_base) + slot / 2 * 2) * WK + wk * 2 + slot % 2;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int token = n * 8 + g;
          const uint4 b =
              token < tokens ? xs[(chunk * tokens + token) * 4 + t] : make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            const uint4& a0 = ring[slot][m][0];
            const uint4& a1 = ring[slot][m][1];
            multiply_add<X>(c[m][n], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
            multiply_add<X>(c[m][n], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
          }
        }
        fetch(slot, ahead_chunk);
      }
      advance();
    }

    // ---- the WK warps' sums; a row's 8 tokens are rotated so that neither side meets a bank
    // conflict
    float* const mine = sums + unit % S::kBuffers * S::kSums;
    if (S::kBuffers == 1) __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = (wm * MT + m) * 16 + g + 8 * i;
          const int at = ((wk * NT + n) * S::kRows + row) * 8 + (t ^ (row / 4 % 4)) * 2;
          *reinterpret_cast<float2*>(mine + at) = make_float2(c[m][n][2 * i], c[m][n][2 * i + 1]);
        }
      }
    }
    // an item: two rows and two tokens
    const int items = S::kRows / 2 * ((tokens + 1) / 2);
    auto pair_of = [&](int item) { return tile * (S::kRows / 2) + item % (S::kRows / 2); };
    auto token_of = [&](int item) { return item / (S::kRows / 2) * 2; };
    auto sum_of = [&](int item, float (&values)[2][2]) {
      const int pair = item % (S::kRows / 2), token = token_of(item);
      const int row = pair / 8 * 16 + pair % 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = (token / 8 * S::kRows + row + 8 * i) * 8 +
                       (token / 2 % 4 ^ ((row + 8 * i) / 4 % 4)) * 2;
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 4
        for (int k = 0; k < WK; ++k) {
          const float2 part = *reinterpret_cast<const float2*>(mine + k * NT * S::kRows * 8 + at);
          total.x += part.x, total.y += part.y;
        }
        values[0][i] = total.x, values[1][i] = total.y;
      }
    };
    float4* const tile_partials =
        static_cast<float4*>(task.partials) + int64_t(tile) * division.slices * items;
    const bool whole = division.slices == 1;
    Extra extra = {};
    if (whole && threadIdx.x < items)
      extra = load_extra<X, MODE>(task, pair_of(threadIdx.x), token_of(threadIdx.x));
    __syncthreads();
    if (!whole) {
      for (int item = threadIdx.x; item < items; item += S::kThreads) {
        float values[2][2];
        sum_of(item, values);
        const float4 part = make_float4(values[0][0], values[0][1], values[1][0], values[1][1]);
        __stcg(tile_partials + slice * items + item, part);
      }
      device_fence();
      __syncthreads();
      if (threadIdx.x == 0) {
        is_last = atomicAdd(task.counters + tile, 1u) == unsigned(division.slices - 1);
        if (is_last) task.counters[tile] = 0;  // for the next launch
      }
      __syncthreads();
      if (!is_last) continue;
      device_fence();
    }
    for (int item = threadIdx.x; item < items; item += S::kThreads) {
      if (!whole || item != threadIdx.x)
        extra = load_extra<X, MODE>(task, pair_of(item), token_of(item));
      float values[2][2] = {};
      if (whole) {
        sum_of(item, values);
      } else {
        for (int s = 0; s < division.slices; ++s) {
          const float4 part = __ldcg(tile_partials + s * items + item);
          values[0][0] += part.x, values[0][1] += part.y, values[1][0] += part.z,
              values[1][1] += part.w;
        }
      }
      finish<X, MODE>(task, pair_of(item), token_of(item), values, extra);
    }
  }
}

// ---------------------------------------------------------------- host

// How a product is cut: the fewest slices whose x fits in shared memory.
template <typename S>
bool divide(const Task& task, Division& division, int ring, int warps_k, size_t* shared) {
  // two blocks a multiprocessor at least, so that one streams while the other adds up
  const int64_t budget = device().shared_bytes / 2 - 2 * 1024 - int64_t(S::kBuffers) * S::kSums * 4;
  for (division.slices = 1; division.slices <= 64; ++division.slices) {
    division.slice_inputs = ceil_div(ceil_div(task.inputs, 32), division.slices) * 32;
    division.warp_chunks = ceil_div(division.slice_inputs / 32, S::kChunkStep) * ring;
    const int64_t x_bytes = int64_t(division.warp_chunks) * warps_k * 64 * task.tokens;
    const bool last_try = task.norm_weight != nullptr;  // a norm wants the whole row
    if (x_bytes >
        (last_try ? device().shared_bytes - 3 * 1024 - S::kBuffers * S::kSums * 4 : budget))
      continue;
    *shared = S::kBuffers * S::kSums * 4 + x_bytes;
    division.tiles = ceil_div(task.outputs, S::kRows);
    if (division.slices == 1) return true;
    const int64_t needed =
        int64_t(division.tiles) * division.slices * (S::kRows / 2) * ((task.tokens + 1) / 2) * 16;
    return needed <= task.partial_bytes && division.tiles <= task.num_counters;
  }
  return false;
}

template <typename X, int NT, int WK, int WM, int MT, int RING, int BLOCKS>
int run(const Task& task, void* stream) {
  using S = Shape<NT, WK, WM, MT, RING>;
  const LinearMode mode = mode_of(task);
  Division division;
  size_t shared = 0;
  if (!divide<S>(task, division, RING, WK, &shared))
    return fail(
        "linear: %d tokens, %d inputs, %d outputs do not fit in %lld bytes of scratch and %d "
        "counters",
        task.tokens, task.inputs, task.outputs, (long long)task.partial_bytes, task.num_counters);
  if (task.norm_weight && division.slices > 1)
    return fail("linear: the norm of %d tokens of %d inputs cannot be fused", task.tokens,
                task.inputs);
  const int units = division.slices * division.tiles;
  const int fit = int(device().shared_bytes / (shared + 2048));
  const int room = device().multiprocessors * (fit < 1 ? 1 : fit < BLOCKS ? fit : BLOCKS);
  const auto kernel = mode == kGated ? linear<X, kGated, NT, WK, WM, MT, RING, BLOCKS>
                      : mode == kQkv ? linear<X, kQkv, NT, WK, WM, MT, RING, BLOCKS>
                                     : linear<X, kPlain, NT, WK, WM, MT, RING, BLOCKS>;
  return launch("linear", kernel, units < room ? units : room, S::kThreads, shared, stream, task,
                division);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_linear(const tridecode_gemm_task* given, void* stream) {
  const Task& task = *given;
  return for_16_bit_dtype(task.dtype, "linear", [&](auto zero) {
    using X = decltype(zero);
    // what measured fastest on an H200, by shape; bench: python -m tridecode.kernels.bench linear
    const bool wide = task.outputs > 20480;
    if ((task.tokens > 2 || wide) && hopper_linear_takes(task)) return hopper_linear(task, stream);
    if (task.outputs > 5120 && few_linear_takes(task)) return few_linear(task, stream);
    if (task.tokens <= 8) return run<X, 1, 8, 1, 1, 8, 2>(task, stream);
    if (task.tokens <= 16) return run<X, 2, 8, 1, 1, 8, 2>(task, stream);
    return fail("linear: %d tokens; this kernel takes 1 to 16", task.tokens);
  });
}
