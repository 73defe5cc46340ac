// The product of linear.cu with Hopper's own instructions: one warp keeps a ring of bulk copies of
// the weights in flight, which fills the multiprocessor's shared memory, and two warp groups take
// turns to multiply them with wgmma. The tokens, 16 at most, are the 64 rows of that instruction:
// up to 8 stand in all eights of them at once, for what the other rows hold is never looked at. The
// weights are its columns, so that a block takes 32 to 256 rows of the matrix, as many as give
// every multiprocessor the same, over all inputs: no sum is shared between blocks.
//
// The ring fills before the wait for the kernel that computes x, in the shared memory that the
// kernel before has just left. With a norm, x is normalised into shared memory first, else its
// blocks travel with the weights.
//
// Bytes moved: outputs * inputs * sizeof(X), once.   Bench: python -m tridecode.kernels.bench
// linear
#include "group_product.cuh"
#include "linear.cuh"

namespace tridecode {
namespace {

using Task = LinearTask;

constexpr int kGroups = 2;  // warp groups that multiply, each every other stage
constexpr int kConsumers = 128 * kGroups;
constexpr int kThreads = kConsumers + 32;  // and a warp that copies
constexpr int kMaxTokens = 16;
constexpr int kBlockInputs = 64;        // 128 bytes: the width of the swizzle
constexpr int kStageBytes = 16 * 1024;  // of weights, at least
constexpr int kMaxStages = 16;

struct Division {
  int blocks;        // of 64 inputs
  int tiles;         // of 32 * N32 rows
  int stage_blocks;  // blocks of a stage of the ring
  int steps;         // stages of a tile
  int stages;        // of the ring
  int x_rows;        // 8 or 16: tokens in a block of x
  bool resident;     // x is normalised and stays
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}
// x, normalised, as 64 inputs after 64 inputs of all tokens, each in the swizzle that wgmma reads.
template <typename X>
__device__ __forceinline__ void normalize(const Task& task, char* xs, int x_rows,
                                          float (*partial)[kConsumers / 32],
                                          float (*totals)[kMaxTokens]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tokens = task.tokens;
  const int pieces = (task.inputs + kBlockInputs - 1) / kBlockInputs * 8;
  auto piece_of = [&](int p, int token) {
    return reinterpret_cast<X*>(xs + p / 8 * (x_rows * 128) + token * 128 + ((p ^ token) % 8) * 16);
  };
  auto add_up = [&](int which) {
    consumers_sync();
    for (int token = warp; token < tokens; token += kConsumers / 32) {
      const float total = warp_sum(lane < kConsumers / 32 ? partial[token][lane] : 0.0f);
      if (lane == 0) totals[which][token] = total;
    }
    consumers_sync();
  };
  const bool centred = task.norm_bias != nullptr;
  const float each = 1.0f / task.inputs;
#pragma unroll 4
  for (int token = 0; token < tokens; ++token) {
    const X* row = static_cast<const X*>(task.x) + token * task.x_stride;
    float sum = 0.0f;
    for (int p = threadIdx.x; p < pieces; p += kConsumers) {
      float values[8] = {};
      if (p * 8 < task.inputs) load8(row + p * 8, values);
      store8(piece_of(p, token), values);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += centred ? values[i] : values[i] * values[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) partial[token][warp] = sum;
  }
  add_up(centred ? 0 : 1);
  if (centred) {
#pragma unroll 4
    for (int token = 0; token < tokens; ++token) {
      const float mean = totals[0][token] * each;
      float sum = 0.0f;
      for (int p = threadIdx.x; p * 8 < task.inputs; p += kConsumers) {
        float values[8];
        load8(piece_of(p, token), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += (values[i] - mean) * (values[i] - mean);
      }
      sum = warp_sum(sum);
      if (lane == 0) partial[token][warp] = sum;
    }
    add_up(1);
  }
  for (int p = threadIdx.x; p * 8 < task.inputs; p += kConsumers) {
    float w[8], b[8] = {};
    load8(static_cast<const X*>(task.norm_weight) + p * 8, w);
    if (centred) load8(static_cast<const X*>(task.norm_bias) + p * 8, b);
#pragma unroll 2
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
  fence_copies();
  consumers_sync();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename X, int MODE, int N32>
__global__ void __launch_bounds__(kThreads, 1)
    linear_sm90a(const __grid_constant__ CUtensorMap weight_map,
                 const __grid_constant__ CUtensorMap x_map, const __grid_constant__ Task task,
                 const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = 32 * N32;
  constexpr int kBlockBytes = kRows * 128;  // of weights
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ float partial[kMaxTokens][kConsumers / 32], totals[2][kMaxTokens];
  const int x_bytes = division.x_rows * 128, stages = division.stages,
            stage_blocks = division.stage_blocks;
  const int stage_bytes = stage_blocks * (kBlockBytes + (division.resident ? 0 : x_bytes));
  char* const xs = base + stages * stage_bytes;  // where x is resident
  float* const sums =
      reinterpret_cast<float*>(xs + (division.resident ? division.blocks * x_bytes : 0));

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Blocks begin at different inputs: rows lie a power of two apart, and their beginnings on few
  // memory channels.
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
    // ---- the warp that copies
    if (lane != 0) {
      wait_for_predecessor();
      return;
    }
    const uint64_t once = evict_first(), often = evict_last();
    auto copy_weights = [&](int tile, int step, int stage) {
      char* const to = base + stage * stage_bytes;
      barrier_expect(full + stage, stage_bytes);
      for (int i = 0; i < stage_blocks; ++i) {  // beyond the inputs a copy writes zeros
        const int input = (turned(step) * stage_blocks + i) * kBlockInputs;
        if (MODE == kGated) {  // gate rows, then up rows
          copy_box(to + i * kBlockBytes, &weight_map, input, tile * (kRows / 2), full + stage,
                   once);
          copy_box(to + i * kBlockBytes + kBlockBytes / 2, &weight_map, input,
                   task.outputs / 2 + tile * (kRows / 2), full + stage, once);
        } else {
          copy_box(to + i * kBlockBytes, &weight_map, input, tile * kRows, full + stage, once);
        }
      }
    };
    auto copy_x = [&](int step, int stage) {
      if (division.resident) return;
      char* const to = base + stage * stage_bytes + stage_blocks * kBlockBytes;
      for (int i = 0; i < stage_blocks; ++i)
        copy_box(to + i * x_bytes, &x_map, (turned(step) * stage_blocks + i) * kBlockInputs, 0,
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

  // ---- the warp groups that multiply
  const int g = lane / 4, t = lane % 4;
  if (division.resident) {
    for (int k = threadIdx.x * 64; k < task.inputs; k += kConsumers * 64) {
      prefetch_l2(static_cast<const X*>(task.norm_weight) + k);
      if (task.norm_bias) prefetch_l2(static_cast<const X*>(task.norm_bias) + k);
    }
  }
  wait_for_predecessor();
  if (division.resident) normalize<X>(task, xs, division.x_rows, partial, totals);

  // an item: two rows and two tokens
  const int items = kRows / 2 * ((task.tokens + 1) / 2);
  const int x_group_bytes = division.x_rows == 8 ? 0 : 1024;  // 0: the same 8 tokens again
  const int group = warp / 4;
  int begun = 0;  // stages of the tiles before
  for (int tile = blockIdx.x; tile < division.tiles; tile += gridDim.x, begun += division.steps) {
    auto pair_of = [&](int item) { return tile * (kRows / 2) + item % (kRows / 2); };
    auto token_of = [&](int item) { return item / (kRows / 2) * 2; };
    Extra extra = {};
    if (threadIdx.x < items)
      extra = load_extra<X, MODE>(task, pair_of(threadIdx.x), token_of(threadIdx.x));
    float c[N32][16];
    int held = -1;  // the stage that the running products still read
    const int first_step = (group + begun) % kGroups;
    for (int step = first_step; step < division.steps; step += kGroups) {
      const int index = begun + step, stage = index % stages;
      barrier_wait(full + stage, index / stages % 2);
      char* const weights = base + stage * stage_bytes;
      group_fence();
      for (int i = 0; i < stage_blocks; ++i) {
        const int block = min(turned(step) * stage_blocks + i, division.blocks - 1);
        char* const x = division.resident ? xs + block * x_bytes
                                          : weights + stage_blocks * kBlockBytes + i * x_bytes;
        const uint64_t a = descriptor(x, x_group_bytes),
                       b = descriptor(weights + i * kBlockBytes, 1024);
#pragma unroll
        for (int k = 0; k < kBlockInputs / 16; ++k) {  // 32 bytes on: 2 units of 16
#pragma unroll
          for (int n = 0; n < N32; ++n)  // 32 rows on: 4096 bytes
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
    for (int n = 0; n < N32; ++n) {
#pragma unroll
      for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(c[n][i])::"memory");
    }
    if (held >= 0 && lane == 0) barrier_arrive(empty + held);
    if (warp % 4 == 0) {  // it holds the first 16 rows: the tokens
#pragma unroll
      for (int n = 0; n < N32; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float* const to = sums + group * task.tokens * kRows + n * 32 + j * 8 + 2 * t;
          float* const four = c[n] + 4 * j;
          if (held < 0) four[0] = four[1] = four[2] = four[3] = 0.0f;
          if (g < task.tokens)
            *reinterpret_cast<float2*>(to + g * kRows) = make_float2(four[0], four[1]);
          if (g + 8 < task.tokens)
            *reinterpret_cast<float2*>(to + (g + 8) * kRows) = make_float2(four[2], four[3]);
        }
      }
    }
    consumers_sync();
    for (int item = threadIdx.x; item < items; item += kConsumers) {
      const int pair = item % (kRows / 2), token = token_of(item);
      if (item != threadIdx.x) extra = load_extra<X, MODE>(task, pair_of(item), token);
      const float* const from =
          sums + token * kRows + (MODE == kGated ? pair : pair / 8 * 16 + pair % 8);
      constexpr int kSecond = MODE == kGated ? kRows / 2 : 8;  // from the first row of a pair
      const int next = token + 1 < task.tokens ? kRows : 0;
      const float* const more = from + task.tokens * kRows;  // of the other group
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

template <typename X, int N32>
int run(const Task& task, int mode, const Division& division, size_t shared,
        const CUtensorMap& weight_map, const CUtensorMap& x_map, void* stream) {
  const auto kernel = mode == kGated ? linear_sm90a<X, kGated, N32>
                      : mode == kQkv ? linear_sm90a<X, kQkv, N32>
                                     : linear_sm90a<X, kPlain, N32>;
  const int blocks =
      division.tiles < device().multiprocessors ? division.tiles : device().multiprocessors;
  return launch("linear", kernel, blocks, kThreads, shared, stream, weight_map, x_map, task,
                division);
}

// The tile, in units of 32 rows, that gives the fullest multiprocessor the least; of equals the
// largest.
int choose_rows(int outputs) {
  int best = 8, least = 1 << 30;
  for (int n = 8; n >= 1; --n) {
    const int most = ceil_div(ceil_div(outputs, 32 * n), device().multiprocessors) * n;
    if (most < least) best = n, least = most;
  }
  return best;
}

}  // namespace

bool hopper_linear_takes(const LinearTask& task) {
  if (device().capability != 90 || task.tokens > kMaxTokens) return false;
  if (task.rotary_size > 0) return false;  // its pairs lie in too small pieces
  const int x_rows = task.tokens <= 8 ? 8 : 16;
  return !task.norm_weight || ceil_div(task.inputs, kBlockInputs) * x_rows * 128 <= 128 * 1024;
}

int hopper_linear(const LinearTask& task, void* stream) {
  const LinearMode mode = mode_of(task);
  const int dtype = task.dtype;
  const int n32 = choose_rows(task.outputs), rows = 32 * n32;
  Division division;
  division.blocks = ceil_div(task.inputs, kBlockInputs);
  division.tiles = ceil_div(task.outputs, rows);
  division.stage_blocks = rows * 128 >= kStageBytes ? 1 : kStageBytes / (rows * 128);
  division.steps = ceil_div(division.blocks, division.stage_blocks);
  division.x_rows = task.tokens <= 8 ? 8 : 16;
  division.resident = task.norm_weight != nullptr;
  const int x_bytes = division.x_rows * 128;
  const int stage_bytes = division.stage_blocks * (rows * 128 + (division.resident ? 0 : x_bytes));
  // 1 KiB to begin at a multiple of it; 8 KiB behind the last x, whose rows 16 to 63 are read and
  // ignored
  const int rest = 1024 + (division.resident ? division.blocks * x_bytes : 0) +
                   kGroups * task.tokens * rows * 4 + 8 * 1024;
  division.stages = (device().shared_bytes - 2048 - rest) / stage_bytes;
  if (division.stages > kMaxStages) division.stages = kMaxStages;
  const size_t shared = size_t(division.stages) * stage_bytes + rest;

  CUtensorMap weight_map, x_map;
  int status = encode(&weight_map, task.weight, task.outputs, task.inputs, task.weight_stride,
                      mode == kGated ? rows / 2 : rows, dtype);
  if (!status)
    status =
        encode(&x_map, task.x, task.tokens, task.inputs, task.x_stride, division.x_rows, dtype);
  if (status) return status;
  return for_16_bit_dtype(dtype, "linear", [&](auto zero) {
    using X = decltype(zero);
    const auto call = [&](auto kernel) {
      return kernel(task, mode, division, shared, weight_map, x_map, stream);
    };
    switch (n32) {
      case 1:
        return call(run<X, 1>);
      case 2:
        return call(run<X, 2>);
      case 3:
        return call(run<X, 3>);
      case 4:
        return call(run<X, 4>);
      case 5:
        return call(run<X, 5>);
      case 6:
        return call(run<X, 6>);
      case 7:
        return call(run<X, 7>);
      default:
        return call(run<X, 8>);
    }
  });
}

}  // namespace tridecode
