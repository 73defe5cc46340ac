// All layers of a decoder for 1 to 8 tokens in one launch, near the speed at which the weights can
// be read.
//
// One block a multiprocessor. A warp of it copies weights, and nothing else, through a ring of
// shared memory: it knows the order of all stages of all layers ahead, so the memory stays busy
// while the other eight warps wait for each other between the products. These are the eight: they
// take turns at the stages, multiply them with the tokens by mma.sync (the weights are the 16 rows
// of that instruction, the tokens its 8 columns), add up their sums in shared memory, and finish
// bias, rotation, activation and residual there. Attention runs between two products on the same
// warps, split over blocks, the last to arrive combining. What one product needs of another crosses
// in global memory behind one counter: a block adds 1 when it has finished a product, and begins
// the next when all have.
//
// A tile is 16 rows of a matrix: twice 8, so that the rows of a rotation, or gate and up, meet in
// one thread. Tiles are dealt out in turn, going on from product to product, so that every block
// reads the same within one tile. A stage is a tile times 512 inputs: two copies of 8 blocks of 64
// inputs times 8 rows. The 128-byte swizzle of such a block is what keeps the reads of shared
// memory free of conflicts: the four lanes of a row read the pieces of 8 inputs 0, 2, 4, 6, then 1,
// 3, 5, 7.
//
// Bytes moved: all weights of the layers and the cached keys and values, once.
// Bench: python -m tridecode.kernels.bench step
#include "epilogue.cuh"
#include "hopper.cuh"
#include "kv_cache.cuh"
#include "row_norm.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 8;  // that multiply
constexpr int kConsumers = 32 * kWarps;
constexpr int kThreads = kConsumers + 32;  // and one that copies
constexpr int kMaxTokens = 8;
constexpr int kBlockInputs = 64;   // 128 bytes: the width of the swizzle
constexpr int kBlockBytes = 1024;  // of 8 rows
constexpr int kStageBlocks = 8;
constexpr int kStageInputs = kStageBlocks * kBlockInputs;
constexpr int kStageBytes = 2 * kStageBlocks * kBlockBytes;
constexpr int kMaxStages = 16;
constexpr int kGroup = 4;  // query heads of a kv head that are attended to at once
constexpr int kSumBytes = 2 * kWarps * 32 * 16;

enum Product { kQkv = 0, kDense = 1, kUp = 2, kDown = 3, kProducts = 4 };

// Tensors of a layer, in the order in which tridecode_decoder_table gets them.
struct Tensors {
  const void *attention_norm, *attention_norm_bias, *mlp_norm, *mlp_norm_bias;
  const void *weights[kProducts], *biases[kProducts];
  void* cache;
};

struct Layer {
  CUtensorMap maps[kProducts];  // of the weights
  Tensors tensors;
};

struct Task {
  const Layer* layers;
  void *x, *qkv, *context, *mlp;  // (tokens, columns), rows contiguous; x is changed in place
  const int *positions, *kv_slots, *block_tables, *context_lens;
  int64_t table_stride;
  const float *cos, *sin, *slopes;
  float scale, eps;
  int num_layers, tokens, hidden, heads, kv_heads, head_size, inner, rotary, activation,
      block_tokens;
  int shares;     // of a kv head's query heads among units
  int splits;     // of a context among units
  int x_inputs;   // inputs of a product that fit in shared memory at once
  int stages;     // of the ring
  int in_flight;  // stages that are on their way at once
  float* partials;
  unsigned int *counter, *unit_counters;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The barrier of the eight warps.
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// How a product is cut.
struct Shape {
  int inputs, tiles;
};

__device__ __forceinline__ Shape shape_of(const Task& task, int product) {
  const int queries = task.heads * task.head_size;
  if (product == kQkv) return {task.hidden, (task.heads + 2 * task.kv_heads) * task.head_size / 16};
  if (product == kDense) return {queries, task.hidden / 16};
  if (product == kUp) return {task.hidden, task.inner / (task.activation == kSwiglu ? 8 : 16)};
  return {task.inner, task.hidden / 16};
}

// The first row of a tile's first or second eight.
__device__ __forceinline__ int row_of(const Task& task, int product, int tile, int second) {
  if (product == kQkv && task.rotary) {
    const int tiles_of_head = task.head_size / 16;
    return tile / tiles_of_head * task.head_size + tile % tiles_of_head * 8 +
           second * task.head_size / 2;
  }
  if (product == kUp && task.activation == kSwiglu) return tile * 8 + second * task.inner;
  return tile * 16 + second * 8;
}

// A block's tiles of a product: those where (tile + turn) % blocks is its number.
__device__ __forceinline__ int first_tile(int turn) {
  const int first = int(blockIdx.x) - turn;
  return first < 0 ? first + int(gridDim.x) : first;
}

// Inputs of a slice, and the stage that the block begins with: rows lie a power of two apart, and
// blocks that all begin at the first input would meet in few channels of the memory.
__device__ __forceinline__ int slice_size(const Task& task, int inputs, int slice) {
  return min(task.x_inputs, inputs - slice * task.x_inputs);
}
__device__ __forceinline__ int turned(int step, int steps) {
  return (step + int(blockIdx.x)) % steps;
}

// Where the copying warp is.
struct Cursor {
  const Task& task;
  int layer = 0, product = kQkv, slice = 0, tile, step = 0, steps, turn = 0;
  Shape shape;

  __device__ __forceinline__ explicit Cursor(const Task& task) : task(task) {
    shape = shape_of(task, kQkv);
    enter();
  }
  __device__ __forceinline__ bool done() const { return layer == task.num_layers; }
  __device__ __forceinline__ void enter() {
    tile = first_tile(turn);
    while (tile >= shape.tiles && !done()) next_product();
    steps = ceil_div(slice_size(task, shape.inputs, slice), kStageInputs);
  }
  __device__ __forceinline__ void next_product() {
    turn = (turn + shape.tiles) % int(gridDim.x);
    slice = 0;
    if (++product > kDown) product = kQkv, ++layer;
    shape = shape_of(task, product);
    tile = first_tile(turn);
  }
  __device__ __forceinline__ void advance() {
    if (++step < steps) return;
    step = 0;
    tile += gridDim.x;
    if (tile < shape.tiles) return;
    if (++slice * task.x_inputs < shape.inputs) {
      tile = first_tile(turn);
      steps = ceil_div(slice_size(task, shape.inputs, slice), kStageInputs);
      return;
    }
    next_product();
    if (!done()) enter();
  }
  __device__ __forceinline__ const CUtensorMap* map() const {
    return task.layers[layer].maps + product;
  }
  __device__ __forceinline__ int row(int second) const {
    return row_of(task, product, tile, second);
  }
  __device__ __forceinline__ int block() const {
    return slice * (task.x_inputs / kBlockInputs) + turned(step, steps) * kStageBlocks;
  }
};

// Beyond the last input a copy writes zeros, and counts as many bytes. No more stages are on their
// way at once than keep the memory busy: whatever else a block asks for, x first of all, would
// stand in line behind them.
__device__ __forceinline__ void copy_weights(const Task& task, char* ring, uint64_t* full,
                                             uint64_t* empty) {
  const uint64_t policy = evict_first();
  Cursor now(task);
  int slot = 0, parity = 1, issued = 0, oldest = 0,
      oldest_parity = 0;  // oldest: slot of those on their way
  while (!now.done()) {
    const CUtensorMap* const map = now.map();
    char* const to = ring + slot * kStageBytes;
    barrier_wait(empty + slot, parity);
    if (issued++ >= task.in_flight) {
      barrier_wait(full + oldest, oldest_parity);
      if (++oldest == task.stages) oldest = 0, oldest_parity ^= 1;
    }
    barrier_expect(full + slot, kStageBytes);
    copy_blocks(to, map, now.row(0), now.block(), full + slot, policy);
    copy_blocks(to + kStageBytes / 2, map, now.row(1), now.block(), full + slot, policy);
    const int product = now.product;
    now.advance();
    if (now.product != product && !now.done()) {  // the next one's map comes ahead
      const CUtensorMap* const next =
          now.product == kDown ? task.layers[now.layer + 1].maps : now.map() + 1;
      if (now.product != kDown || now.layer + 1 < task.num_layers) prefetch_map(next);
    }
    if (++slot == task.stages) slot = 0, parity ^= 1;
  }
}

// The eight warps' shared memory and place in the ring.
struct Consumer {
  const Task& task;
  char* ring;
  uint4* xs;      // x of a product, see piece()
  float4* sums;   // [2][warp][lane]
  float4* saved;  // [tile][warp][lane], across slices
  float* totals;  // [2][warp]
  uint64_t *full, *empty;
  int lane, warp, stage = 0, slot = 0, parity = 0;  // stage: of all, the next one
  int unsynced = 0;  // stages since the last sync_consumers of a product
  int num_sums = 0, turn = 0;
  unsigned target = 0;  // of the counter

  // ---- order between blocks
  __device__ __forceinline__ void begin() {
    if (target && threadIdx.x == 0)
      while (load_acquire(task.counter) < target) {
      }
    sync_consumers();
  }
  __device__ __forceinline__ void end(bool last = false) {
    sync_consumers();
    target += gridDim.x;
    if (threadIdx.x != 0) return;
    if (!last) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(task.counter) : "memory");
    } else if (atomicAdd(task.counter, 1u) + 1 == target) {
      *task.counter = 0;  // nobody waits any more: for the next launch
    }
  }

  // Norms come from memory for all blocks at once: ahead of the wait for x.
  __device__ __forceinline__ void prefetch_norm(const void* weight, const void* bias) const {
    for (int i = threadIdx.x * 128; i < task.hidden * 2; i += kConsumers * 128) {
      prefetch_l2(static_cast<const char*>(weight) + i);
      if (bias) prefetch_l2(static_cast<const char*>(bias) + i);
    }
  }

  // ---- x
  // Where 8 inputs of a token lie: as the lanes of multiply_stage want them, next to each other.
  __device__ __forceinline__ uint4* piece(int p, int token) const {
    return xs + ((p / 8 * 2 + p % 2) * task.tokens + token) * 4 + p % 8 / 2;
  }

  template <typename X>
  __device__ __forceinline__ void load_x(const void* from, int columns, int first, int count,
                                         const void* weight, const void* bias) {
    const int tokens = task.tokens;
    const int team = tokens == 1 ? 8 : tokens == 2 ? 4 : tokens <= 4 ? 2 : 1;  // warps of a token
    const int token = warp / team, part = warp % team;
    const auto row = reinterpret_cast<const uint4*>(static_cast<const X*>(from) +
                                                    int64_t(token) * columns + first);
    constexpr int kFlight = 8;  // pieces of a thread that are on their way at once
    const int step = 32 * team, begin = part * 32 + lane, pieces = token < tokens ? count / 8 : 0;
    float sum = 0.0f;
    for (int p = begin; p < pieces; p += kFlight * step) {
      uint4 words[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i)
        if (p + i * step < pieces) words[i] = __ldcg(row + p + i * step);
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (p + i * step >= pieces) break;
        *piece(p + i * step, token) = words[i];
#pragma unroll
        for (int j = 0; j < 4 && weight; ++j) {
          const float2 both = unpack<X>(get(words[i], j));
          sum += bias ? both.x + both.y : both.x * both.x + both.y * both.y;
        }
      }
    }
    if (weight) normalize<X>(weight, bias, token, team, begin, step, count / 8, sum);
    sync_consumers();
  }

  // The sum of `value` over the warps of a token.
  __device__ __forceinline__ float team_sum(float value, int team, int which) {
    value = warp_sum(value);
    if (team == 1) return value;
    if (lane == 0) totals[which * kWarps + warp] = value;
    sync_consumers();
    float total = 0.0f;
    for (int i = 0; i < team; ++i) total += totals[which * kWarps + warp / team * team + i];
    return total;
  }

  // Every thread works on the pieces that it stored itself.
  template <typename X>
  __device__ __forceinline__ void normalize(const void* weight, const void* bias, int token,
                                            int team, int begin, int step, int pieces, float sum) {
    constexpr int kFlight = 2;  // pieces of the norm that are on their way at once
    const int inputs = pieces * 8;
    const bool valid = token < task.tokens;
    uint4 w[kFlight], b[kFlight] = {};
    const auto fetch = [&](int first) {
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int p = first + i * step;
        if (!valid || p >= pieces) break;
        w[i] = __ldg(static_cast<const uint4*>(weight) + p);
        if (bias) b[i] = __ldg(static_cast<const uint4*>(bias) + p);
      }
    };
    fetch(begin);
    float mean = 0.0f;
    if (bias) {
      mean = team_sum(sum, team, 0) / inputs;
      sum = 0.0f;
#pragma unroll 4
      for (int p = begin; p < pieces && valid; p += step) {
        float values[8];
        load8(reinterpret_cast<const X*>(piece(p, token)), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += (values[i] - mean) * (values[i] - mean);
      }
    }
    const float scale = rsqrtf(team_sum(sum, team, 1) / inputs + task.eps);
    for (int first = begin; first < pieces && valid; first += kFlight * step) {
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (first + i * step >= pieces) break;
        uint4* const at = piece(first + i * step, token);
        uint4 words = *at;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 x = unpack<X>(get(words, k)), y = unpack<X>(get(w[i], k)),
                       z = unpack<X>(get(b[i], k));
          put(words, k,
              pack<X>((x.x - mean) * scale * y.x + z.x, (x.y - mean) * scale * y.y + z.y));
        }
        *at = words;
      }
      fetch(first + kFlight * step);
    }
  }

  // ---- products
  template <typename X>
  __device__ __forceinline__ void multiply_stage(float (&c)[4], float (&d)[4], int first,
                                                 int count) {
    const int g = lane / 4, t = lane % 4, tokens = task.tokens;
    const char* rows = ring + slot * kStageBytes + g * 128;
    const uint4* x = xs + (first / 32 * tokens + g) * 4 + t;
    barrier_wait(full + slot, parity);
    const int blocks = count / kBlockInputs;
#pragma unroll 2
    for (int i = 0; i < blocks; ++i) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const char* const weights = rows + i * kBlockBytes + ((2 * t + odd) ^ g) * 16;
        const uint4 a0 = *reinterpret_cast<const uint4*>(weights);
        const uint4 a1 = *reinterpret_cast<const uint4*>(weights + kStageBytes / 2);
        const uint4 b = g < tokens ? x[(2 * i + odd) * tokens * 4] : make_uint4(0, 0, 0, 0);
        multiply_add<X>(c, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
        multiply_add<X>(d, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + slot);
  }

  template <typename X>
  __device__ __forceinline__ void multiply(int layer, int product) {
    const Tensors& l = task.layers[layer].tensors;
    const Shape shape = shape_of(task, product);
    const bool normed = product == kQkv || product == kUp;
    const void* from = product == kDense ? task.context : product == kDown ? task.mlp : task.x;
    const void* weight = product == kQkv ? l.attention_norm : l.mlp_norm;
    const void* bias = product == kQkv ? l.attention_norm_bias : l.mlp_norm_bias;
    const int start = first_tile(turn);
    // A warp sees of a slot only whether its round is even or odd. It must not be a round early:
    // what the slot held before has been waited for, by the warp whose it was, before all met.
    const int most_unsynced = min(kWarps, task.stages);
    for (int slice = 0; slice * task.x_inputs < shape.inputs; ++slice) {
      const int size = slice_size(task, shape.inputs, slice), steps = ceil_div(size, kStageInputs);
      const bool last = (slice + 1) * task.x_inputs >= shape.inputs;
      load_x<X>(from, shape.inputs, slice * task.x_inputs, size, normed ? weight : nullptr,
                normed ? bias : nullptr);
      int mine = 0;
      for (int tile = start; tile < shape.tiles; tile += gridDim.x, ++mine) {
        float c[4] = {}, d[4] = {};
        const Extra extra = last ? load_extra(l, product, tile) : Extra();
        float4* const kept = saved + (mine * kWarps + warp) * 32 + lane;
        if (slice) {
          const float4 before = *kept;
          c[0] = before.x, c[1] = before.y, c[2] = before.z, c[3] = before.w;
        }
        for (int step = 0; step < steps; ++step) {
          if (unsynced++ == most_unsynced) sync_consumers(), unsynced = 1;
          if (stage % kWarps == warp) {
            const int first = turned(step, steps) * kStageInputs;
            multiply_stage<X>(c, d, first, min(kStageInputs, size - first));
          }
          ++stage;
          if (++slot == task.stages) slot = 0, parity ^= 1;
        }
        const float4 sum = make_float4(c[0] + d[0], c[1] + d[1], c[2] + d[2], c[3] + d[3]);
        if (!last) {
          *kept = sum;
        } else {
          finish_tile<X>(l, product, tile, sum, extra);
        }
      }
      if (!last) sync_consumers();  // x is overwritten
    }
    turn = (turn + shape.tiles) % int(gridDim.x);
  }

  // What the warp that finishes the next tile adds to it: on its way while the tile is multiplied.
  struct Extra {
    unsigned short bias[2] = {}, residual[2][2] = {};  // of two rows; of two tokens
  };

  template <typename X>
  static __device__ __forceinline__ float to_number(unsigned short word) {
    return to_float(*reinterpret_cast<const X*>(&word));
  }

  __device__ __forceinline__ Extra load_extra(const Tensors& l, int product, int tile) const {
    Extra extra;
    if (num_sums % kWarps != warp) return extra;
    const int g = lane / 4, token = lane % 4 * 2;
    const auto bias = static_cast<const unsigned short*>(l.biases[product]);
    const auto x = static_cast<const unsigned short*>(task.x);
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int row = row_of(task, product, tile, second) + g;
      if (bias) extra.bias[second] = __ldg(bias + row);
      if (product != kDense && product != kDown) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (token + j < task.tokens)
          extra.residual[j][second] = __ldcg(x + int64_t(token + j) * task.hidden + row);
    }
    return extra;
  }

  template <typename X>
  __device__ __forceinline__ void finish_tile(const Tensors& l, int product, int tile, float4 sum,
                                              const Extra& extra) {
    float4* const buffer = sums + num_sums % 2 * kWarps * 32;
    buffer[warp * 32 + lane] = sum;
    const bool my_turn = num_sums++ % kWarps == warp;
    const int g = lane / 4, token = lane % 4 * 2;
    const int row0 = row_of(task, product, tile, 0) + g, row1 = row_of(task, product, tile, 1) + g;
    sync_consumers();
    unsynced = 0;
    if (!my_turn) return;
    float values[2][2] = {};  // [token][row]
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float4 part = buffer[i * 32 + lane];
      values[0][0] += part.x, values[1][0] += part.y, values[0][1] += part.z,
          values[1][1] += part.w;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (token + j >= task.tokens) continue;
      const float a = values[j][0] + to_number<X>(extra.bias[0]),
                  b = values[j][1] + to_number<X>(extra.bias[1]);
      if (product == kQkv) {
        store_qkv<X>(l, token + j, row0, row1, a, b);
      } else if (product == kUp) {
        X* out = static_cast<X*>(task.mlp) + int64_t(token + j) * task.inner;
        if (task.activation == kSwiglu) {
          out[row0] = from_float<X>(silu(a) * b);
        } else {
          out[row0] = from_float<X>(activate(a, task.activation));
          out[row1] = from_float<X>(activate(b, task.activation));
        }
      } else {
        X* out = static_cast<X*>(task.x) + int64_t(token + j) * task.hidden;
        out[row0] = from_float<X>(a + to_number<X>(extra.residual[j][0]));
        out[row1] = from_float<X>(b + to_number<X>(extra.residual[j][1]));
      }
    }
  }

  template <typename X>
  __device__ __forceinline__ void store_qkv(const Tensors& l, int token, int row0, int row1,
                                            float a, float b) {
    const int size = task.head_size, head = row0 / size;
    if (task.rotary && head < task.heads + task.kv_heads) {
      const int64_t angle = int64_t(task.positions[token]) * (size / 2) + row0 % size;
      const float cosine = task.cos[angle], sine = task.sin[angle];
      const float turned = a * cosine - b * sine;
      b = b * cosine + a * sine;
      a = turned;
    }
    if (head < task.heads) {
      X* out = static_cast<X*>(task.qkv) + int64_t(token) * task.heads * size;
      out[row0] = from_float<X>(a);
      out[row1] = from_float<X>(b);
      return;
    }
    const int cache_slot = task.kv_slots[token];
    if (cache_slot < 0) return;
    const int is_value = head >= task.heads + task.kv_heads;
    const int kv_head = head - task.heads - is_value * task.kv_heads;
    const int64_t block = cache_slot / task.block_tokens, offset = cache_slot % task.block_tokens;
    X* out =
        static_cast<X*>(l.cache) +
        (((block * 2 + is_value) * task.kv_heads + kv_head) * task.block_tokens + offset) * size;
    out[row0 % size] = from_float<X>(a);
    out[row1 % size] = from_float<X>(b);
  }

  // ---- attention: a unit is one part of one row's context for one kv head and up to GROUP of its
  // query heads
  template <typename X, int D, int GROUP>
  __device__ __forceinline__ void attend(int layer) {
    const int units = task.tokens * task.kv_heads * task.shares * task.splits;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      attend_unit<X, D, GROUP>(static_cast<const X*>(task.layers[layer].tensors.cache), unit);
      sync_consumers();  // shared memory is used again
    }
  }

  template <typename X, int D, int GROUP>
  __device__ __forceinline__ void attend_unit(const X* cache, int unit) {
    constexpr int kLanes = D / 8;        // of a token
    constexpr int kTeams = 32 / kLanes;  // tokens that a warp reads at once
    constexpr int kUnroll = 4;
    const int split = unit % task.splits, pair = unit / task.splits;
    const int share_of_group = pair % task.shares, kv_pair = pair / task.shares;
    const int kv_head = kv_pair % task.kv_heads, row = kv_pair / task.kv_heads;
    const int heads_of_kv = task.heads / task.kv_heads;
    const int first_head = kv_head * heads_of_kv + share_of_group * GROUP;
    const int group = min(GROUP, heads_of_kv - share_of_group * GROUP);
    const int length = task.context_lens[row];
    const int share = ceil_div(ceil_div(length, task.splits), 16) * 16;
    const int begin = min(split * share, length), end = min(begin + share, length);
    const int team = lane / kLanes, d = lane % kLanes * 8;
    const int* table = task.block_tables + row * task.table_stride;
    const int64_t plane = int64_t(task.kv_heads) * task.block_tokens * D;  // from keys to values

    float q[GROUP][8], slope[GROUP];
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      const int head = first_head + min(h, group - 1);
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(
          static_cast<const X*>(task.qkv) + (int64_t(row) * task.heads + head) * D + d));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 both = unpack<X>(get(words, i));
        q[h][2 * i] = both.x * task.scale * kLog2e, q[h][2 * i + 1] = both.y * task.scale * kLog2e;
      }
      slope[h] = task.slopes ? task.slopes[head] * kLog2e : 0.0f;
    }
    float most[GROUP], total[GROUP], acc[GROUP][8];
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      most[h] = -CUDART_INF_F, total[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[h][i] = 0.0f;
    }
    for (int base = begin + warp * kTeams * kUnroll; base < end;
         base += kWarps * kTeams * kUnroll) {
      uint4 keys[kUnroll], values[kUnroll];
      int position[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        position[u] = base + u * kTeams + team;
        const int at = min(position[u], end - 1);
        const int64_t block = table[at / task.block_tokens];
        const X* key = cache +
                       (block * 2 * task.kv_heads + kv_head) * int64_t(task.block_tokens) * D +
                       int64_t(at % task.block_tokens) * D + d;
        keys[u] = __ldcg(reinterpret_cast<const uint4*>(key));
        values[u] = __ldcg(reinterpret_cast<const uint4*>(key + plane));
      }
#pragma unroll
      for (int h = 0; h < GROUP; ++h) {
        float score[kUnroll], top = most[h];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          float dot = 0.0f;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 both = unpack<X>(get(keys[u], i));
            dot += q[h][2 * i] * both.x + q[h][2 * i + 1] * both.y;
          }
#pragma unroll
          for (int offset = kLanes / 2; offset > 0; offset /= 2)
            dot += __shfl_xor_sync(kAll, dot, offset);
          score[u] =
              position[u] < end ? dot + slope[h] * (position[u] - (length - 1)) : -CUDART_INF_F;
          top = fmaxf(top, score[u]);
        }
        if (top == -CUDART_INF_F)
          continue;  // the whole team, and its lanes meet no shuffle before the next round
        const float shrink = exp2f(most[h] - top);
        total[h] *= shrink;
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[h][i] *= shrink;
        most[h] = top;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const float p = exp2f(score[u] - top);
          total[h] += p;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 both = unpack<X>(get(values[u], i));
            acc[h][2 * i] += p * both.x, acc[h][2 * i + 1] += p * both.y;
          }
        }
      }
      __syncwarp();
    }
    // the teams of a warp, then the warps, then the parts
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
#pragma unroll
      for (int h = 0; h < GROUP; ++h) {
        const float other = __shfl_xor_sync(kAll, most[h], offset), top = fmaxf(most[h], other);
        const float mine = most[h] == -CUDART_INF_F ? 0.0f : exp2f(most[h] - top);
        const float theirs = other == -CUDART_INF_F ? 0.0f : exp2f(other - top);
        total[h] = total[h] * mine + __shfl_xor_sync(kAll, total[h], offset) * theirs;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          acc[h][i] = acc[h][i] * mine + __shfl_xor_sync(kAll, acc[h][i], offset) * theirs;
        most[h] = top;
      }
    }
    float* const shared = reinterpret_cast<float*>(xs);  // [warp][head][D + 2]
    if (lane < kLanes) {
#pragma unroll
      for (int h = 0; h < GROUP; ++h) {
        if (h >= group) continue;
        float* to = shared + (warp * group + h) * (D + 2);
#pragma unroll
        for (int i = 0; i < 8; ++i) to[d + i] = acc[h][i];
        if (lane == 0) to[D] = most[h], to[D + 1] = total[h];
      }
    }
    sync_consumers();
    float* const partial = task.partials + int64_t(pair) * task.splits * GROUP * (D + 2);
    for (int item = threadIdx.x; item < group * D; item += kConsumers) {
      const int h = item / D, i = item % D;
      float top = -CUDART_INF_F, sum = 0.0f, weight = 0.0f;
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared[(w * group + h) * (D + 2) + D]);
      for (int w = 0; w < kWarps && top > -CUDART_INF_F; ++w) {
        const float* of = shared + (w * group + h) * (D + 2);
        const float factor = of[D] == -CUDART_INF_F ? 0.0f : exp2f(of[D] - top);
        sum += of[i] * factor, weight += of[D + 1] * factor;
      }
      if (task.splits == 1) {
        store_context<X, D>(row, first_head + h, i, weight > 0.0f ? sum / weight : 0.0f);
      } else {
        float* to = partial + (split * group + h) * (D + 2);
        __stcg(to + i, sum);
        if (i == 0) __stcg(to + D, top), __stcg(to + D + 1, weight);
      }
    }
    if (task.splits > 1) combine<X, D>(partial, pair, row, first_head, group);
  }

  template <typename X, int D>
  __device__ __forceinline__ void store_context(int row, int head, int i, float value) {
    static_cast<X*>(task.context)[(int64_t(row) * task.heads + head) * D + i] =
        from_float<X>(value);
  }

  // The last block to arrive adds up the parts of a context, in order.
  template <typename X, int D>
  __device__ __forceinline__ void combine(const float* partial, int pair, int row, int first_head,
                                          int group) {
    bool* const is_last = reinterpret_cast<bool*>(totals);
    device_fence();
    sync_consumers();
    if (threadIdx.x == 0) {
      *is_last = atomicAdd(task.unit_counters + pair, 1u) == unsigned(task.splits - 1);
      if (*is_last) task.unit_counters[pair] = 0;
      device_fence();
    }
    sync_consumers();
    if (!*is_last) return;
    // a lane has the part of its number: of at most 32
    float* const factors = reinterpret_cast<float*>(xs);  // [head][split]
    for (int h = warp; h < group; h += kWarps) {
      const float* of = partial + (lane * group + h) * (D + 2) + D;
      const bool valid = lane < task.splits;
      const float high = valid ? __ldcg(of) : -CUDART_INF_F, weight = valid ? __ldcg(of + 1) : 0.0f;
      const float top = warp_max(high), factor = high == -CUDART_INF_F ? 0.0f : exp2f(high - top);
      const float total = warp_sum(weight * factor);
      factors[h * 32 + lane] = total > 0.0f ? factor / total : 0.0f;
    }
    sync_consumers();
    for (int item = threadIdx.x; item < group * D; item += kConsumers) {
      const int h = item / D, i = item % D;
      float sum = 0.0f;
#pragma unroll 8
      for (int s = 0; s < task.splits; ++s)
        sum += __ldcg(partial + (s * group + h) * (D + 2) + i) * factors[h * 32 + s];
      store_context<X, D>(row, first_head + h, i, sum);
    }
  }
};

#endif

template <typename X, int D, int GROUP>
__global__ void __launch_bounds__(kThreads, 1) decoder_layers(const __grid_constant__ Task task) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  char* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ float totals[2 * kWarps];
  const int ring_bytes = task.stages * kStageBytes, x_bytes = task.x_inputs * task.tokens * 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < task.stages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, 1);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) copy_weights(task, shared, full, empty);
    return;
  }
  char* const behind = shared + ring_bytes;
  Consumer consumer = {task,
                       shared,
                       reinterpret_cast<uint4*>(behind + kSumBytes),
                       reinterpret_cast<float4*>(behind),
                       reinterpret_cast<float4*>(behind + kSumBytes + x_bytes),
                       totals,
                       full,
                       empty,
                       int(threadIdx.x % 32),
                       int(threadIdx.x / 32)};
  wait_for_predecessor_alone();
  for (int layer = 0; layer < task.num_layers; ++layer) {
    const Tensors& tensors = task.layers[layer].tensors;
    consumer.prefetch_norm(tensors.attention_norm, tensors.attention_norm_bias);
    consumer.begin();
    consumer.template multiply<X>(layer, kQkv);
    consumer.end();
    consumer.begin();
    consumer.template attend<X, D, GROUP>(layer);
    consumer.end();
    consumer.begin();
    consumer.template multiply<X>(layer, kDense);
    consumer.end();
    consumer.prefetch_norm(tensors.mlp_norm, tensors.mlp_norm_bias);
    consumer.begin();
    consumer.template multiply<X>(layer, kUp);
    consumer.end();
    if (layer == task.num_layers - 1) let_successor_start();
    consumer.begin();
    consumer.template multiply<X>(layer, kDown);
    consumer.end(layer == task.num_layers - 1);
  }
#endif
}

template <typename X, int D, int GROUP>
int run(const Task& task, size_t shared, void* stream) {
  return launch("decoder_layers", decoder_layers<X, D, GROUP>, device().multiprocessors, kThreads,
                shared, stream, task);
}

template <typename X>
int run_for_heads(const Task& task, size_t shared, void* stream) {
  const int group = task.heads / task.kv_heads;
  if (task.head_size == 128) {
    if (group == 1) return run<X, 128, 1>(task, shared, stream);
    return run<X, 128, kGroup>(task, shared, stream);
  }
  return group == 1 ? run<X, 64, 1>(task, shared, stream)
                    : run<X, 64, kGroup>(task, shared, stream);
}

int round_up(int value, int unit) { return ceil_div(value, unit) * unit; }

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int64_t tridecode_decoder_table_bytes(int num_layers) {
  return int64_t(num_layers) * sizeof(Layer);
}

int tridecode_decoder_table(void* table, const void* tensors, int num_layers, int hidden,
                            int queries, int qkv_rows, int inner, int up_rows, int dtype) {
  const auto from = static_cast<const Tensors*>(tensors);
  const auto to = static_cast<Layer*>(table);
  const int rows[] = {qkv_rows, hidden, up_rows, hidden},
            inputs[] = {hidden, queries, hidden, inner};
  for (int i = 0; i < num_layers; ++i) {
    to[i].tensors = from[i];
    for (int product = 0; product < kProducts; ++product) {
      const cuuint64_t sizes[] = {kBlockInputs, cuuint64_t(rows[product]),
                                  cuuint64_t(inputs[product] / kBlockInputs)};
      const cuuint64_t strides[] = {cuuint64_t(inputs[product]) * 2, kBlockInputs * 2};
      const cuuint32_t box[] = {kBlockInputs, 8, kStageBlocks};
      const int status =
          encode_map(to[i].maps + product, from[i].weights[product], 3, sizes, strides, box, dtype);
      if (status) return status;
    }
  }
  return 0;
}

int tridecode_decoder_layers(const void* layers, int num_layers, void* x, void* qkv, void* context,
                             void* mlp, const int* positions, const int* kv_slots,
                             const int* block_tables, const int* context_lens, int64_t table_stride,
                             const float* cos, const float* sin, const float* slopes, float scale,
                             float eps, int tokens, int hidden, int heads, int kv_heads,
                             int head_size, int inner, int rotary, int activation, int block_tokens,
                             void* partials, int64_t partial_bytes, unsigned int* counters,
                             int num_counters, int in_flight, int dtype, void* stream) {
  const int group = kv_heads ? heads / kv_heads : 0;
  const bool fits = device().capability == 90 && tokens >= 1 && tokens <= kMaxTokens &&
                    hidden % kBlockInputs == 0 && (heads * head_size) % kBlockInputs == 0 &&
                    inner % kBlockInputs == 0 && (head_size == 64 || head_size == 128) &&
                    group >= 1 && heads % kv_heads == 0 && (rotary == 0 || rotary == head_size);
  if (!fits)
    return fail(
        "decoder_layers: %d tokens, hidden %d, %d heads of %d over %d, inner %d, rotary %d on "
        "sm_%d: no kernel",
        tokens, hidden, heads, head_size, kv_heads, inner, rotary, device().capability);
  Task task = {};
  task.layers = static_cast<const Layer*>(layers), task.num_layers = num_layers;
  task.x = x, task.qkv = qkv, task.context = context, task.mlp = mlp;
  task.positions = positions, task.kv_slots = kv_slots, task.block_tables = block_tables;
  task.context_lens = context_lens, task.table_stride = table_stride;
  task.cos = cos, task.sin = sin, task.slopes = slopes, task.scale = scale, task.eps = eps;
  task.tokens = tokens, task.hidden = hidden, task.heads = heads, task.kv_heads = kv_heads;
  task.head_size = head_size, task.inner = inner, task.rotary = rotary,
  task.activation = activation;
  task.block_tokens = block_tokens;
  task.shares = ceil_div(group, kGroup);
  const int heads_at_once = group == 1 ? 1 : kGroup;
  const int blocks = device().multiprocessors, pairs = tokens * kv_heads * task.shares;
  task.splits = pairs >= blocks ? 1 : blocks / pairs;
  if (task.splits > 32) task.splits = 32;
  const int64_t needed = int64_t(pairs) * task.splits * heads_at_once * (head_size + 2) * 4;
  if (needed > partial_bytes || pairs + 1 > num_counters)
    return fail("decoder_layers: %lld bytes of scratch and %d counters are too few",
                (long long)partial_bytes, num_counters);
  task.partials = static_cast<float*>(partials), task.counter = counters,
  task.unit_counters = counters + 1;
  // x of a product that is normalised is there whole; attention uses the same memory
  const int attention_bytes = kWarps * heads_at_once * (head_size + 2) * 4;
  const int wanted = inner * tokens * 2 < 64 * 1024 ? inner * tokens * 2 : 64 * 1024;
  const int least = wanted > attention_bytes ? wanted : attention_bytes;
  const int x_inputs = hidden * tokens * 2 > least ? hidden : least / (2 * tokens);
  task.x_inputs = round_up(x_inputs, kStageInputs);
  const int slices = ceil_div(inner > heads * head_size ? inner : heads * head_size, task.x_inputs);
  const int saved = slices > 1 ? ceil_div(hidden / 16, blocks) * kWarps * 32 * 16 : 0;
  // 1 KiB to begin at a multiple of it, and 1 KiB for what is declared in the kernel
  const int rest = device().shared_bytes - 2048 - kSumBytes - task.x_inputs * tokens * 2 - saved;
  task.stages = rest / kStageBytes < kMaxStages ? rest / kStageBytes : kMaxStages;
  task.in_flight = in_flight < task.stages ? in_flight : task.stages;
  if (task.stages < 4)
    return fail("decoder_layers: %d tokens of %d inputs leave no room for weights", tokens, hidden);
  const size_t shared =
      size_t(device().shared_bytes - 1024 - rest) + size_t(task.stages) * kStageBytes;
  return for_16_bit_dtype(dtype, "decoder_layers",
                          [&](auto x) { return run_for_heads<decltype(x)>(task, shared, stream); });
}
