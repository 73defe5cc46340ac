// All pre-LayerNorm layers of a small decoder (GPT-2, BLOOM) for 1 to 4 decoding rows in one
// launch. ops.decoder_layers says what it computes; kernels/cuda.py decides when it is faster.
//
// One persistent block per multiprocessor: a producer warp and eight consumer warps. The producer
// copies weights through a ring of shared memory. It knows the order of all stages of all layers in
// advance, so memory stays busy while the consumers synchronise between the products. The consumers
// take turns at the stages and multiply them with the tokens by mma.sync: the weights are the 16
// rows of that instruction, the tokens its 8 columns. They reduce their partial sums in shared
// memory and apply the epilogue there. Attention runs between two products on the same warps; a
// context is split over blocks, and the last block to arrive combines the parts. Blocks synchronise
// between products through one counter in global memory: a block adds 1 when it has finished a
// product, and starts the next one when all have.
//
// A tile is 16 rows of a weight matrix, stored as twice 8 rows. Tiles are dealt round-robin,
// continuing from product to product, so all blocks read the same amount within one tile. A stage
// is a tile times 512 inputs: two copies of 8 boxes of 64 inputs x 8 rows. The 128-byte swizzle of
// a box keeps shared memory reads free of bank conflicts: the four lanes of a row read the pieces
// of 8 inputs 0, 2, 4, 6, then 1, 3, 5, 7.
//
// Bytes moved: all weights of the layers and the cached keys and values, once.
// Bench: python -m tridecode.kernels.bench step
#include "cache/kv_cache.cuh"
#include "common/epilogue.cuh"
#include "common/hopper.cuh"
#include "common/row_norm.cuh"

namespace tridecode {
namespace {

constexpr int kWarps = 8;  // consumers
constexpr int kConsumers = 32 * kWarps;
constexpr int kThreads = kConsumers + 32;  // and the producer
constexpr int kMaxTokens = 4;
constexpr int kBoxInputs = 64;  // 128 bytes: the width of the swizzle
constexpr int kBoxBytes = kBoxInputs * 8 * 2;
constexpr int kStageBoxes = 8;
constexpr int kStageInputs = kStageBoxes * kBoxInputs;
constexpr int kStageBytes = 2 * kStageBoxes * kBoxBytes;
constexpr int kMaxStages = 16;
// Stages in flight: enough to keep memory busy. The loads of x queue behind them.
constexpr int kInFlight = 3;
constexpr int kMaxInputBytes = 64 * 1024;  // of the tokens' inputs of a product
constexpr int kSumBytes = 2 * kWarps * 32 * 16;
constexpr int kMaxSplits = 32;  // of a context: one per lane when they are combined

enum Product { kQkv = 0, kDense = 1, kUp = 2, kDown = 3, kProducts = 4 };

// Tensors of a layer, in the order in which tridecode_decoder_table receives them.
struct Tensors {
  const void *attention_norm, *attention_norm_bias, *mlp_norm, *mlp_norm_bias;
  const void *weights[kProducts], *biases[kProducts];
  void* cache;
};

struct Layer {
  CUtensorMap maps[kProducts];  // of the weights
  Tensors tensors;
};

struct Task : tridecode_decoder_task {
  int splits;  // of a context among blocks
  int stages;  // of the ring

  __device__ __forceinline__ const Layer& layer(int i) const {
    return static_cast<const Layer*>(layers)[i];
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The barrier of the consumer warps.
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// How a product is divided.
struct Shape {
  int inputs, tiles;
};

__device__ __forceinline__ Shape shape_of(const Task& task, int product) {
  const int queries = task.heads * task.head_size;
  if (product == kQkv) return {task.hidden, 3 * queries / 16};
  if (product == kDense) return {queries, task.hidden / 16};
  if (product == kUp) return {task.hidden, task.inner / 16};
  return {task.inner, task.hidden / 16};
}

// A block's tiles of a product are those where (tile + turn) % blocks is its number.
__device__ __forceinline__ int first_tile(int turn) {
  const int first = int(blockIdx.x) - turn;
  return first < 0 ? first + int(gridDim.x) : first;
}

// Blocks start at different stages: rows are a power of two apart, and blocks that all started at
// the first input would contend for few memory channels.
__device__ __forceinline__ int rotated(int step, int steps) {
  return (step + int(blockIdx.x)) % steps;
}

// The producer's position.
struct Cursor {
  const Task& task;
  int layer = 0, product = kQkv, tile, step = 0, steps, turn = 0;
  Shape shape;

  __device__ __forceinline__ explicit Cursor(const Task& task) : task(task) {
    shape = shape_of(task, kQkv);
    enter();
  }
  __device__ __forceinline__ bool done() const { return layer == task.num_layers; }
  // The first product from this one on of which the block has a tile.
  __device__ __forceinline__ void enter() {
    tile = first_tile(turn);
    while (tile >= shape.tiles && !done()) next_product();
    steps = ceil_div(shape.inputs, kStageInputs);
  }
  __device__ __forceinline__ void next_product() {
    turn = (turn + shape.tiles) % int(gridDim.x);
    if (++product > kDown) product = kQkv, ++layer;
    shape = shape_of(task, product);
    tile = first_tile(turn);
  }
  __device__ __forceinline__ void advance() {
    if (++step < steps) return;
    step = 0;
    tile += gridDim.x;
    if (tile < shape.tiles) return;
    next_product();
    if (!done()) enter();
  }
  __device__ __forceinline__ const CUtensorMap* map() const {
    return task.layer(layer).maps + product;
  }
  __device__ __forceinline__ int box() const { return rotated(step, steps) * kStageBoxes; }
};

// Beyond the last input a copy writes zeros, which count as bytes of the barrier.
__device__ __forceinline__ void copy_weights(const Task& task, char* ring, uint64_t* full,
                                             uint64_t* empty) {
  const uint64_t policy = evict_first();
  Cursor now(task);
  int slot = 0, parity = 1, issued = 0;
  int oldest = 0, oldest_parity = 0;  // the slot of the oldest copy in flight
  while (!now.done()) {
    const CUtensorMap* const map = now.map();
    char* const to = ring + slot * kStageBytes;
    barrier_wait(empty + slot, parity);
    if (issued++ >= kInFlight) {
      barrier_wait(full + oldest, oldest_parity);
      if (++oldest == task.stages) oldest = 0, oldest_parity ^= 1;
    }
    barrier_expect(full + slot, kStageBytes);
    copy_blocks(to, map, now.tile * 16, now.box(), full + slot, policy);
    copy_blocks(to + kStageBytes / 2, map, now.tile * 16 + 8, now.box(), full + slot, policy);
    const int product = now.product;
    now.advance();
    if (now.product != product && !now.done()) {  // prefetch the tensor map after this product's
      const bool last = now.product == kDown;
      if (!last || now.layer + 1 < task.num_layers)
        prefetch_map(last ? task.layer(now.layer + 1).maps : now.map() + 1);
    }
    if (++slot == task.stages) slot = 0, parity ^= 1;
  }
}

// The consumer warps: their shared memory and position in the ring.
struct Consumer {
  const Task& task;
  char* ring;
  uint4* xs;      // x of a product, see piece()
  float4* sums;   // [2][warp][lane]
  float* totals;  // [2][warp]
  uint64_t *full, *empty;
  int lane, warp, stage = 0, slot = 0, parity = 0;  // stage: of all layers, the next one
  int unsynced = 0;                                 // stages since the last sync_consumers
  int num_sums = 0, turn = 0;
  unsigned target = 0;  // of the counter

  // ---- order between blocks
  __device__ __forceinline__ void begin() {
    if (target && threadIdx.x == 0)
      while (load_acquire(task.counters) < target) {
      }
    sync_consumers();
  }
  __device__ __forceinline__ void end(bool last = false) {
    sync_consumers();
    target += gridDim.x;
    if (threadIdx.x != 0) return;
    if (!last) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(task.counters) : "memory");
    } else if (atomicAdd(task.counters, 1u) + 1 == target) {
      *task.counters = 0;  // no block waits any more: zero for the next launch
    }
  }

  // All blocks read the norm at once: prefetch it before the wait for x.
  __device__ __forceinline__ void prefetch_norm(const void* weight, const void* bias) const {
    for (int i = threadIdx.x * 128; i < task.hidden * 2; i += kConsumers * 128) {
      prefetch_l2(static_cast<const char*>(weight) + i);
      prefetch_l2(static_cast<const char*>(bias) + i);
    }
  }

  // ---- x
  // 8 inputs of a token: the pieces that the lanes of multiply_stage read are adjacent.
  __device__ __forceinline__ uint4* piece(int p, int token) const {
    return xs + ((p / 8 * 2 + p % 2) * task.tokens + token) * 4 + p % 8 / 2;
  }

  // Loads the tokens' inputs; normalised where a norm's weight and bias are given.
  template <typename X>
  __device__ __forceinline__ void load_x(const void* from, int inputs, const void* weight,
                                         const void* bias) {
    const int tokens = task.tokens;
    const int team = tokens == 1 ? 8 : tokens == 2 ? 4 : 2;  // warps per token
    const int token = warp / team, part = warp % team;
    const auto row =
        reinterpret_cast<const uint4*>(static_cast<const X*>(from) + int64_t(token) * inputs);
    constexpr int kFlight = 8;  // loads of a thread in flight
    const int step = 32 * team, begin = part * 32 + lane, pieces = token < tokens ? inputs / 8 : 0;
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
          sum += both.x + both.y;
        }
      }
    }
    if (weight) normalize<X>(weight, bias, token, team, begin, step, pieces, sum);
    sync_consumers();
  }

  // The sum of `value` over the warps of a token.
  __device__ __forceinline__ float team_sum(float value, int team, int which) {
    value = warp_sum(value);
    if (lane == 0) totals[which * kWarps + warp] = value;
    sync_consumers();
    float total = 0.0f;
    for (int i = 0; i < team; ++i) total += totals[which * kWarps + warp / team * team + i];
    return total;
  }

  // Every thread normalises the pieces that it stored itself. sum: of their numbers.
  template <typename X>
  __device__ __forceinline__ void normalize(const void* weight, const void* bias, int token,
                                            int team, int begin, int step, int pieces, float sum) {
    constexpr int kFlight = 2;  // pieces of the norm in flight
    uint4 w[kFlight], b[kFlight];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int p = first + i * step;
        if (p >= pieces) break;
        w[i] = __ldg(static_cast<const uint4*>(weight) + p);
        b[i] = __ldg(static_cast<const uint4*>(bias) + p);
      }
    };
    fetch(begin);
    RowNorm norm[1];
    float sums[1] = {sum};
    row_statistics(
        norm, sums, true, task.hidden, task.norm_eps,
        [&](auto body) {
#pragma unroll 4
          for (int p = begin; p < pieces; p += step) {
            float values[8];
            load8(reinterpret_cast<const X*>(piece(p, token)), values);
#pragma unroll
            for (int i = 0; i < 8; ++i) body(0, values[i]);
          }
        },
        [&](float (&sums)[1], int which) { sums[0] = team_sum(sums[0], team, which); });
    for (int first = begin; first < pieces; first += kFlight * step) {
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (first + i * step >= pieces) break;
        uint4* const at = piece(first + i * step, token);
        uint4 words = *at;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 x = unpack<X>(get(words, k)), y = unpack<X>(get(w[i], k)),
                       z = unpack<X>(get(b[i], k));
          put(words, k, pack<X>(norm[0](x.x, y.x, z.x), norm[0](x.y, y.y, z.y)));
        }
        *at = words;
      }
      fetch(first + kFlight * step);
    }
  }

  // ---- products
  template <typename X>
  __device__ __forceinline__ void multiply_stage(float (&c)[4], float (&d)[4], int first,
                                                 int inputs) {
    const int g = lane / 4, t = lane % 4, tokens = task.tokens;
    const char* rows = ring + slot * kStageBytes + g * 128;
    const uint4* x = xs + (first / 32 * tokens + g) * 4 + t;
    barrier_wait(full + slot, parity);
    const int boxes = inputs / kBoxInputs;
#pragma unroll 2
    for (int i = 0; i < boxes; ++i) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const char* const weights = rows + i * kBoxBytes + ((2 * t + odd) ^ g) * 16;
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
    const Tensors& l = task.layer(layer).tensors;
    const Shape shape = shape_of(task, product);
    const int steps = ceil_div(shape.inputs, kStageInputs);
    load_x<X>(product == kDense  ? task.context
              : product == kDown ? task.mlp
                                 : task.x,
              shape.inputs,
              product == kQkv  ? l.attention_norm
              : product == kUp ? l.mlp_norm
                               : nullptr,
              product == kQkv ? l.attention_norm_bias : l.mlp_norm_bias);
    for (int tile = first_tile(turn); tile < shape.tiles; tile += gridDim.x) {
      float c[4] = {}, d[4] = {};
      const Extra extra = load_extra(l, product, tile);
      for (int step = 0; step < steps; ++step) {
        // A barrier tells a warp only the parity of a slot's round: no warp may be a full round
        // ahead of another. The ring has at least kWarps stages.
        if (unsynced++ == kWarps) sync_consumers(), unsynced = 1;
        if (stage % kWarps == warp) {
          const int first = rotated(step, steps) * kStageInputs;
          multiply_stage<X>(c, d, first, min(kStageInputs, shape.inputs - first));
        }
        ++stage;
        if (++slot == task.stages) slot = 0, parity ^= 1;
      }
      finish_tile<X>(l, product, tile,
                     make_float4(c[0] + d[0], c[1] + d[1], c[2] + d[2], c[3] + d[3]), extra);
    }
    turn = (turn + shape.tiles) % int(gridDim.x);
  }

  // What the warp that finishes a tile adds to it: loaded while the tile is multiplied.
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
    const int token = lane % 4 * 2;
    const auto bias = static_cast<const unsigned short*>(l.biases[product]);
    const auto x = static_cast<const unsigned short*>(task.x);
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int row = tile * 16 + second * 8 + lane / 4;
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
    const int activation = product == kUp ? task.activation : kNone;
    const int columns = product == kUp ? task.inner : task.hidden;
    X* const out = static_cast<X*>(product == kUp ? task.mlp : task.x);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = lane % 4 * 2 + j;
      if (token >= task.tokens) continue;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int row = tile * 16 + second * 8 + lane / 4;
        const float value = finish_sum(values[j][second], to_number<X>(extra.bias[second]),
                                       activation, to_number<X>(extra.residual[j][second]));
        if (product == kQkv) {
          store_qkv<X>(l, token, row, value);
        } else {
          out[int64_t(token) * columns + row] = from_float<X>(value);
        }
      }
    }
  }

  template <typename X>
  __device__ __forceinline__ void store_qkv(const Tensors& l, int token, int row, float value) {
    const int size = task.head_size, head = row / size;
    if (head < task.heads) {
      static_cast<X*>(task.queries)[int64_t(token) * task.heads * size + row] =
          from_float<X>(value);
      return;
    }
    const struct {
      void* cache;
      int heads, kv_heads, head_size, block_tokens;
    } place = {l.cache, task.heads, task.heads, size, task.block_tokens};
    write_cache<X>(place, task.kv_slots[token], head, row % size, {value});
  }

  // ---- attention: a unit is one part of one row's context for one head
  template <typename X, int D>
  __device__ __forceinline__ void attend(int layer) {
    const int units = task.tokens * task.heads * task.splits;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      attend_unit<X, D>(static_cast<const X*>(task.layer(layer).tensors.cache), unit);
      sync_consumers();  // shared memory is reused
    }
  }

  template <typename X, int D>
  __device__ __forceinline__ void attend_unit(const X* cache, int unit) {
    constexpr int kLanes = D / 8;        // per token
    constexpr int kTeams = 32 / kLanes;  // tokens that a warp reads at once
    constexpr int kUnroll = 4;
    const int split = unit % task.splits, pair = unit / task.splits;
    const int head = pair % task.heads, row = pair / task.heads;
    const int length = task.context_lens[row];
    const int share = ceil_div(ceil_div(length, task.splits), 16) * 16;
    const int begin = min(split * share, length), end = min(begin + share, length);
    const int team = lane / kLanes, d = lane % kLanes * 8;
    const int* table = task.block_tables + row * task.table_stride;

    float q[8];
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(static_cast<const X*>(task.queries) +
                                                              int64_t(pair) * D + d));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = unpack<X>(get(words, i));
      q[2 * i] = both.x * task.scale * kLog2e, q[2 * i + 1] = both.y * task.scale * kLog2e;
    }
    const float slope = task.slopes ? task.slopes[head] * kLog2e : 0.0f;
    float most = -CUDART_INF_F, total = 0.0f, acc[8] = {};
    for (int base = begin + warp * kTeams * kUnroll; base < end;
         base += kWarps * kTeams * kUnroll) {
      uint4 keys[kUnroll], values[kUnroll];
      int position[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        position[u] = base + u * kTeams + team;
        const int at = min(position[u], end - 1);
        const X* key = cache +
                       cache_row(table[at / task.block_tokens], 0, head, at % task.block_tokens,
                                 task.heads, task.block_tokens) *
                           D +
                       d;
        keys[u] = __ldcg(reinterpret_cast<const uint4*>(key));
        values[u] = __ldcg(
            reinterpret_cast<const uint4*>(key + value_offset(task.heads, task.block_tokens, D)));
      }
      float score[kUnroll], top = most;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 both = unpack<X>(get(keys[u], i));
          dot += q[2 * i] * both.x + q[2 * i + 1] * both.y;
        }
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2)
          dot += __shfl_xor_sync(kAll, dot, offset);
        score[u] = position[u] < end ? dot + slope * (position[u] - (length - 1)) : -CUDART_INF_F;
        top = fmaxf(top, score[u]);
      }
      if (top > -CUDART_INF_F) {  // else the team has no token in this round
        const float shrink = exp2f(most - top);
        total *= shrink;
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] *= shrink;
        most = top;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const float p = exp2f(score[u] - top);
          total += p;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 both = unpack<X>(get(values[u], i));
            acc[2 * i] += p * both.x, acc[2 * i + 1] += p * both.y;
          }
        }
      }
      __syncwarp();
    }
    // the teams of a warp, then the warps, then the parts
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
      const float other = __shfl_xor_sync(kAll, most, offset), top = fmaxf(most, other);
      const float mine = most == -CUDART_INF_F ? 0.0f : exp2f(most - top);
      const float theirs = other == -CUDART_INF_F ? 0.0f : exp2f(other - top);
      total = total * mine + __shfl_xor_sync(kAll, total, offset) * theirs;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        acc[i] = acc[i] * mine + __shfl_xor_sync(kAll, acc[i], offset) * theirs;
      most = top;
    }
    float* const shared = reinterpret_cast<float*>(xs);  // [warp][D + 2]
    if (lane < kLanes) {
      float* to = shared + warp * (D + 2);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[d + i] = acc[i];
      if (lane == 0) to[D] = most, to[D + 1] = total;
    }
    sync_consumers();
    float* const parts = static_cast<float*>(task.partials) + int64_t(pair) * task.splits * (D + 2);
    for (int i = threadIdx.x; i < D; i += kConsumers) {
      float top = -CUDART_INF_F, sum = 0.0f, weight = 0.0f;
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared[w * (D + 2) + D]);
      for (int w = 0; w < kWarps && top > -CUDART_INF_F; ++w) {
        const float* of = shared + w * (D + 2);
        const float factor = of[D] == -CUDART_INF_F ? 0.0f : exp2f(of[D] - top);
        sum += of[i] * factor, weight += of[D + 1] * factor;
      }
      if (task.splits == 1) {
        store_context<X, D>(pair, i, weight > 0.0f ? sum / weight : 0.0f);
      } else {
        float* to = parts + split * (D + 2);
        __stcg(to + i, sum);
        if (i == 0) __stcg(to + D, top), __stcg(to + D + 1, weight);
      }
    }
    if (task.splits > 1) combine<X, D>(parts, pair);
  }

  // pair: row * heads + head.
  template <typename X, int D>
  __device__ __forceinline__ void store_context(int pair, int i, float value) {
    static_cast<X*>(task.context)[int64_t(pair) * D + i] = from_float<X>(value);
  }

  // The last block to arrive adds up the parts of a context, in order.
  template <typename X, int D>
  __device__ __forceinline__ void combine(const float* parts, int pair) {
    bool* const is_last = reinterpret_cast<bool*>(totals);
    unsigned int* const arrived = task.counters + 1 + pair;
    device_fence();
    sync_consumers();
    if (threadIdx.x == 0) {
      *is_last = atomicAdd(arrived, 1u) == unsigned(task.splits - 1);
      if (*is_last) *arrived = 0;
      device_fence();
    }
    sync_consumers();
    if (!*is_last) return;
    float* const factors = reinterpret_cast<float*>(xs);  // [split]
    if (warp == 0) {                                      // a lane weighs one part
      const float* of = parts + lane * (D + 2) + D;
      const bool valid = lane < task.splits;
      const float high = valid ? __ldcg(of) : -CUDART_INF_F, weight = valid ? __ldcg(of + 1) : 0.0f;
      const float top = warp_max(high), factor = high == -CUDART_INF_F ? 0.0f : exp2f(high - top);
      const float total = warp_sum(weight * factor);
      factors[lane] = total > 0.0f ? factor / total : 0.0f;
    }
    sync_consumers();
    for (int i = threadIdx.x; i < D; i += kConsumers) {
      float sum = 0.0f;
#pragma unroll 8
      for (int s = 0; s < task.splits; ++s) sum += __ldcg(parts + s * (D + 2) + i) * factors[s];
      store_context<X, D>(pair, i, sum);
    }
  }
};

#endif

template <typename X, int D>
__global__ void __launch_bounds__(kThreads, 1) decoder_layers(const __grid_constant__ Task task) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  char* const ring = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ float totals[2 * kWarps];
  if (threadIdx.x == 0) {
    for (int i = 0; i < task.stages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, 1);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) copy_weights(task, ring, full, empty);
    return;
  }
  char* const sums = ring + task.stages * kStageBytes;
  Consumer consumer = {task,
                       ring,
                       reinterpret_cast<uint4*>(sums + kSumBytes),
                       reinterpret_cast<float4*>(sums),
                       totals,
                       full,
                       empty,
                       int(threadIdx.x % 32),
                       int(threadIdx.x / 32)};
  wait_for_predecessor_alone();
  for (int layer = 0; layer < task.num_layers; ++layer) {
    const Tensors& tensors = task.layer(layer).tensors;
    consumer.prefetch_norm(tensors.attention_norm, tensors.attention_norm_bias);
    consumer.begin();
    consumer.template multiply<X>(layer, kQkv);
    consumer.end();
    consumer.begin();
    consumer.template attend<X, D>(layer);
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

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int64_t tridecode_decoder_table_bytes(int num_layers) {
  return int64_t(num_layers) * sizeof(Layer);
}

int tridecode_decoder_table(void* table, const void* tensors, int num_layers, int hidden,
                            int queries, int inner, int dtype) {
  const auto from = static_cast<const Tensors*>(tensors);
  const auto to = static_cast<Layer*>(table);
  const int rows[] = {3 * queries, hidden, inner, hidden},
            inputs[] = {hidden, queries, hidden, inner};
  for (int i = 0; i < num_layers; ++i) {
    to[i].tensors = from[i];
    for (int product = 0; product < kProducts; ++product) {
      const cuuint64_t sizes[] = {kBoxInputs, cuuint64_t(rows[product]),
                                  cuuint64_t(inputs[product] / kBoxInputs)};
      const cuuint64_t strides[] = {cuuint64_t(inputs[product]) * 2, kBoxInputs * 2};
      const cuuint32_t box[] = {kBoxInputs, 8, kStageBoxes};
      const int status =
          encode_map(to[i].maps + product, from[i].weights[product], 3, sizes, strides, box, dtype);
      if (status) return status;
    }
  }
  return 0;
}

int tridecode_decoder_layers(const tridecode_decoder_task* given, void* stream) {
  Task task = {*given};
  const int queries = task.heads * task.head_size;
  const int most_inputs = task.inner > queries ? task.inner : queries;
  const bool fits = device().capability == 90 && task.tokens >= 1 && task.tokens <= kMaxTokens &&
                    (task.hidden | queries | task.inner) % kBoxInputs == 0 &&
                    (task.head_size == 64 || task.head_size == 128) &&
                    int64_t(most_inputs) * task.tokens * 2 <= kMaxInputBytes &&
                    int64_t(task.hidden) * task.tokens * 2 <= kMaxInputBytes;
  if (!fits)
    return fail(
        "decoder_layers: %d tokens, hidden %d, %d heads of %d, inner %d on sm_%d: no kernel",
        task.tokens, task.hidden, task.heads, task.head_size, task.inner, device().capability);
  const int blocks = device().multiprocessors, pairs = task.tokens * task.heads;
  task.splits = pairs >= blocks ? 1 : blocks / pairs;
  if (task.splits > kMaxSplits) task.splits = kMaxSplits;
  const int64_t needed = int64_t(pairs) * task.splits * (task.head_size + 2) * 4;
  if (needed > task.partial_bytes || pairs + 1 > task.num_counters)
    return fail("decoder_layers: %lld bytes of scratch and %d counters are too few",
                (long long)task.partial_bytes, task.num_counters);
  // attention uses the shared memory of x
  const int attention_inputs = kWarps * (task.head_size + 2) * 4 / (2 * task.tokens);
  int x_inputs = most_inputs > task.hidden ? most_inputs : task.hidden;
  if (x_inputs < attention_inputs) x_inputs = attention_inputs;
  x_inputs = ceil_div(x_inputs, kStageInputs) * kStageInputs;
  // 1 KiB of alignment, and 1 KiB for what is declared in the kernel
  const int rest = device().shared_bytes - 2048 - kSumBytes - x_inputs * task.tokens * 2;
  task.stages = rest / kStageBytes < kMaxStages ? rest / kStageBytes : kMaxStages;
  if (task.stages < kWarps)
    return fail("decoder_layers: %d tokens of %d inputs leave no room for weights", task.tokens,
                x_inputs);
  const size_t shared =
      size_t(device().shared_bytes - 1024 - rest) + size_t(task.stages) * kStageBytes;
  return for_16_bit_dtype(task.dtype, "decoder_layers", [&](auto x) {
    using X = decltype(x);
    return launch("decoder_layers",
                  task.head_size == 64 ? decoder_layers<X, 64> : decoder_layers<X, 128>, blocks,
                  kThreads, shared, stream, task);
  });
}
