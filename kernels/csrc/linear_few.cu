// out = activation(norm(x) @ weight.T + bias) + residual for 1 or 2 tokens: every warp takes two
// rows of the matrix.
//
// Many small blocks that share nothing: as one ends the next takes its place, also across kernels,
// so that memory never waits for a slow one. The first weights are in registers before the wait for
// the kernel that computes x; each block then normalises x for itself, which costs less than a
// kernel more.
//
// Bytes moved: outputs * inputs * sizeof(X), once.
// Bench: python -m tridecode.kernels.bench linear
#include "linear.cuh"

namespace tridecode {
namespace {

using Task = LinearTask;

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kAhead = 4;  // loads of a row in flight

template <typename X, int MODE, int TOKENS>
__global__ void __launch_bounds__(kThreads) linear_few(const __grid_constant__ Task task) {
  extern __shared__ uint4 xs[];  // [token][input / 8]
  __shared__ float sums[2][TOKENS][kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pieces = task.inputs / 8;
  const int pair = blockIdx.x * kWarps + warp;
  const int row0 = row_of<MODE>(task, pair, 0), row1 = row_of<MODE>(task, pair, 1);
  const X* const weight = static_cast<const X*>(task.weight);
  const uint4* const w0 = reinterpret_cast<const uint4*>(
      weight + (is_row<MODE>(task, pair, row0) ? row0 : 0) * task.weight_stride);
  const uint4* const w1 = reinterpret_cast<const uint4*>(
      weight + (is_row<MODE>(task, pair, row1) ? row1 : 0) * task.weight_stride);
  uint4 ring[kAhead][2];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int p = lane + 32 * i;
    ring[i][0] = p < pieces ? load_stream(w0 + p) : make_uint4(0, 0, 0, 0);
    ring[i][1] = p < pieces ? load_stream(w1 + p) : make_uint4(0, 0, 0, 0);
  }
  wait_for_predecessor();

  // ---- x
  const uint4* rows[TOKENS];
#pragma unroll
  for (int token = 0; token < TOKENS; ++token)
    rows[token] = reinterpret_cast<const uint4*>(static_cast<const X*>(task.x) +
                                                 min(token, task.tokens - 1) * task.x_stride);
  for (int p = threadIdx.x; p < pieces; p += kThreads) {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
      copy16_async(xs + token * pieces + p, rows[token] + p, true);
  }
  Extra extra[(TOKENS + 1) / 2];
#pragma unroll
  for (int i = 0; i < (TOKENS + 1) / 2; ++i) extra[i] = load_extra<X, MODE>(task, pair, 2 * i);
  commit_copies();
  wait_copies<0>();
  if (task.norm_weight) {
    const bool centred = task.norm_bias != nullptr;
    const float each = 1.0f / task.inputs;
    float mean[TOKENS] = {}, scale[TOKENS];
    // every thread works on the pieces that it copied itself
    auto sum_over_inputs = [&](int which, float (&totals)[TOKENS], auto f) {
      float mine[TOKENS] = {};
      for (int p = threadIdx.x; p < pieces; p += kThreads) {
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
          float values[8];
          load8(reinterpret_cast<const X*>(xs + token * pieces + p), values);
#pragma unroll
          for (int i = 0; i < 8; ++i) mine[token] += f(values[i], token);
        }
      }
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        mine[token] = warp_sum(mine[token]);
        if (lane == 0) sums[which][token][warp] = mine[token];
      }
      __syncthreads();
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        totals[token] = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) totals[token] += sums[which][token][w];
      }
    };
    if (centred) {
      sum_over_inputs(0, mean, [](float x, int) { return x; });
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) mean[token] *= each;
    }
    sum_over_inputs(1, scale,
                    [&](float x, int token) { return (x - mean[token]) * (x - mean[token]); });
    for (int p = threadIdx.x; p < pieces; p += kThreads) {
      float w[8], b[8] = {};
      load8(static_cast<const X*>(task.norm_weight) + p * 8, w);
      if (centred) load8(static_cast<const X*>(task.norm_bias) + p * 8, b);
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        X* const piece = reinterpret_cast<X*>(xs + token * pieces + p);
        const float factor = rsqrtf(scale[token] * each + task.norm_eps);
        float values[8];
        load8(piece, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = (values[i] - mean[token]) * factor * w[i] + b[i];
        store8(piece, values);
      }
    }
  }
  __syncthreads();

  // ---- products
  float c[TOKENS][2] = {};
  for (int first = lane; first < pieces; first += 32 * kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int p = first + 32 * i;
      float a0[8], a1[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two0 = unpack<X>(get(ring[i][0], j)), two1 = unpack<X>(get(ring[i][1], j));
        a0[2 * j] = two0.x, a0[2 * j + 1] = two0.y, a1[2 * j] = two1.x, a1[2 * j + 1] = two1.y;
      }
      const int next = p + 32 * kAhead;
      ring[i][0] = next < pieces ? load_stream(w0 + next) : make_uint4(0, 0, 0, 0);
      ring[i][1] = next < pieces ? load_stream(w1 + next) : make_uint4(0, 0, 0, 0);
      if (p >= pieces) continue;
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        float x[8];
        load8(reinterpret_cast<const X*>(xs + token * pieces + p), x);
#pragma unroll
        for (int j = 0; j < 8; ++j) c[token][0] += a0[j] * x[j], c[token][1] += a1[j] * x[j];
      }
    }
  }
#pragma unroll
  for (int token = 0; token < TOKENS; ++token)
    c[token][0] = warp_sum(c[token][0]), c[token][1] = warp_sum(c[token][1]);
  if (lane != 0) return;
#pragma unroll
  for (int i = 0; i < (TOKENS + 1) / 2; ++i) {
    constexpr int kLast = TOKENS - 1;
    const int second = 2 * i + 1 < TOKENS ? 2 * i + 1 : kLast;
    float values[2][2] = {{c[2 * i][0], c[2 * i][1]}, {c[second][0], c[second][1]}};
    finish<X, MODE>(task, pair, 2 * i, values, extra[i]);
  }
}

template <typename X, int TOKENS>
int run(const Task& task, void* stream) {
  const LinearMode mode = mode_of(task);
  const auto kernel = mode == kGated ? linear_few<X, kGated, TOKENS>
                      : mode == kQkv ? linear_few<X, kQkv, TOKENS>
                                     : linear_few<X, kPlain, TOKENS>;
  const int pairs = mode == kPlain || (mode == kQkv && task.rotary_size == 0)
                        ? ceil_div(task.outputs, 16) * 8
                        : task.outputs / 2;
  const size_t shared = size_t(TOKENS) * task.inputs * sizeof(X);
  return launch("linear", kernel, ceil_div(pairs, kWarps), kThreads, shared, stream, task);
}

}  // namespace

bool few_linear_takes(const LinearTask& task) {
  return task.tokens <= 2 && int64_t(task.tokens) * task.inputs * 2 <= device().shared_bytes - 1024;
}

int few_linear(const LinearTask& task, void* stream) {
  return for_16_bit_dtype(task.dtype, "linear", [&](auto zero) {
    using X = decltype(zero);
    if (task.tokens == 1) return run<X, 1>(task, stream);
    return run<X, 2>(task, stream);
  });
}

}  // namespace tridecode
