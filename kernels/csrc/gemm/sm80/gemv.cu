// out = epilogue(norm(x) * weight^T) for 1 or 2 tokens, on the CUDA cores: each warp computes two
// weight rows.
//
// Many small independent blocks: when one ends, the next takes its place, also across kernels, so
// that memory stays busy. The first weights are loaded before the wait for the kernel that computes
// x. Each block normalises x itself, which costs less than a norm kernel.
//
// Bytes moved: outputs * inputs * sizeof(X), once.
// Bench: python -m tridecode.kernels.bench linear
#include "api/gemm.h"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_norm.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kAhead = 4;  // loads of a row in flight

template <typename X, Mode MODE, int TOKENS>
__global__ void __launch_bounds__(kThreads) gemv(const __grid_constant__ GemmTask task) {
  extern __shared__ uint4 xs[];  // [token][input / 8]
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
    rows[token] =
        reinterpret_cast<const uint4*>(static_cast<const X*>(task.x) + token * task.x_stride);
  for (int p = threadIdx.x; p < pieces; p += kThreads) {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
      copy16_async(xs + token * pieces + p, rows[token] + p, true);
  }
  Extra extra = load_extra<X, MODE>(task, pair, 0);
  commit_copies();
  wait_copies<0>();
  if (task.norm_weight)
    normalize_rows<X, TOKENS, kThreads>(task, TOKENS, [&](int p, int token) {
      return reinterpret_cast<X*>(xs + token * pieces + p);
    });
  __syncthreads();

  // ---- mainloop
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
  load_slots<MODE>(task, 0, extra);  // loaded earlier, the registers would cost a resident block
  constexpr int kSecond = TOKENS - 1;
  float values[2][2] = {{c[0][0], c[0][1]}, {c[kSecond][0], c[kSecond][1]}};
  finish<X, MODE>(task, pair, 0, values, extra);
}

template <typename X, Mode MODE, int TOKENS>
int run(const GemmTask& task, void* stream) {
  const int pairs = MODE == kPlain || (MODE == kQkv && task.rotary_size == 0)
                        ? ceil_div(task.outputs, 16) * 8
                        : task.outputs / 2;
  const size_t shared = size_t(TOKENS) * task.inputs * sizeof(X);
  return launch("gemv", gemv<X, MODE, TOKENS>, ceil_div(pairs, kWarps), kThreads, shared, stream,
                task);
}

// (tokens, epilogue); kQkv with or without rotation. gemm_table.py chooses among them.
// clang-format off
#define TRIDECODE_INSTANCES(_) _(1, kPlain) _(1, kGated) _(1, kQkv) _(2, kPlain) _(2, kGated) _(2, kQkv)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemv(const tridecode_gemm_task* task, void* stream) {
  if (int status = check_exact_cache("gemv", *task)) return status;
  const Mode mode = mode_of(*task) == kQkvRotary ? kQkv : mode_of(*task);
  return for_16_bit_dtype(task->dtype, "gemv", [&](auto zero) {
    using X = decltype(zero);
#define TRIDECODE_RUN(tokens_, mode_) \
  if (task->tokens == tokens_ && mode == mode_) return run<X, mode_, tokens_>(*task, stream);
    TRIDECODE_INSTANCES(TRIDECODE_RUN)
    return fail("gemv: no instance for %d tokens", task->tokens);
  });
}
