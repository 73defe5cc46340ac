// Finishes multiplied tiles of product_chain_sm90a.cu: adds up the warps' sums and stores results
// to memory and to the exchange.
#pragma once
#include "common/epilogue.cuh"
#include "gemm/chain/product_chain.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Prefetched epilogue operands of a lane's rows of a tile: scales and bias.
struct Constants {
  float scales[2];
  unsigned short bias[2];
};

template <typename X>
__device__ __forceinline__ float to_number(unsigned short word) {
  return to_float(*reinterpret_cast<const X*>(&word));
}

// The finisher warps, which take tiles in turn.
template <typename X, Values VALUES>
struct Finisher {
  using F = Format<VALUES>;
  using Sum = typename F::Sum;
  const Chain& chain;
  const Places& places;
  unsigned int launch;
  int lane, which;

  __device__ __forceinline__ int token() const { return lane % 4; }

  // eight: index of the tile's first group of eight rows.
  __device__ __forceinline__ void load_constants(Constants& to, const Step& step, int eight) const {
    const auto bias = static_cast<const unsigned short*>(step.given.bias);
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int row = (eight + second * step.second) * 8 + lane / 4;
      to.scales[second] = F::k4Bit || F::k16Bit ? 1.0f : __ldg(step.given.weight_scales + row);
      if (F::kTwo) to.scales[second] *= 1.0f / 254;
      to.bias[second] = bias ? __ldg(bias + row) : 0;
    }
  }

  __device__ __forceinline__ void load_residual(unsigned short (&residual)[2], const Step& step,
                                                int eight) const {
    const auto from = static_cast<const unsigned short*>(step.given.residual);
    residual[0] = residual[1] = 0;
    if (!from || token() >= chain.tokens) return;
    const int columns = step.gated ? step.given.outputs / 2 : step.given.outputs;
    const int64_t row = int64_t(token()) * columns + eight * 8 + lane / 4;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      if (step.gated && second) break;
      const int64_t at = row + second * 8;
      if (!step.residual_words) {
        residual[second] = __ldcg(from + at);
        continue;
      }
      uint64_t word = load_word(step.residual_words + at / 2);
      Spin spin(kWordsOfResidual);
      while (unsigned(word >> 32) != launch) {
        spin.again();
        word = load_word(step.residual_words + at / 2);
      }
      residual[second] = at % 2 ? uint32_t(word) >> 16 : uint32_t(word) & 0xffffu;
    }
  }

  // Adds up the sums of all warps for the lane's token and rows.
  __device__ __forceinline__ void add_up(uint32_t buffer, float (&values)[2]) const {
    Sum total[2] = {};
    uint2 parts[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) parts[i] = load_shared2(buffer + (i * 32 + lane) * 8);
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      total[0] += reinterpret_cast<const Sum&>(parts[i].x);
      total[1] += reinterpret_cast<const Sum&>(parts[i].y);
    }
    values[0] = float(total[0]), values[1] = float(total[1]);
  }

  __device__ __forceinline__ void store(const Step& step, int number, int eight,
                                        const Constants& constants,
                                        const unsigned short (&residual)[2],
                                        const float (&values)[2]) const {
    const auto& given = step.given;
    const int g = lane / 4;
    const float scale =
        F::k16Bit ? 1.0f : __uint_as_float(load_shared1(places.x_scale(number, token())));
    float v[2];
#pragma unroll
    for (int second = 0; second < 2; ++second)
      v[second] = fmaf(values[second] * constants.scales[second], scale,
                       to_number<X>(constants.bias[second]));
    if (step.gated) {
      v[0] = activate_gate(v[0], given.activation) * v[1] + to_number<X>(residual[0]);
    } else {
#pragma unroll
      for (int second = 0; second < 2; ++second)
        v[second] = activate(v[second], given.activation) + to_number<X>(residual[second]);
    }
    // Exchanges rows g and g + 1: a lane with even g gets those of the first half of the tile, its
    // neighbour those of the second.
    const float other = __shfl_xor_sync(kAll, g % 2 ? v[0] : v[1], 4);
    const uint32_t pair = g % 2 ? pack<X>(other, v[1]) : pack<X>(v[0], other);
    if (token() >= chain.tokens || (step.gated && g % 2)) return;
    const int columns = step.gated ? given.outputs / 2 : given.outputs;
    const int64_t at = int64_t(token()) * columns + (eight + g % 2) * 8 + g / 2 * 2;
    if (step.sent_words) send_word(step.sent_words + at / 2, pair, launch);
    if (step.out_words) store_word(step.out_words + at / 2, pair, launch);
    if (step.stores) *reinterpret_cast<uint32_t*>(static_cast<X*>(given.out) + at) = pair;
  }

  // Counts finished tiles of this warp. all: the number of all tiles for the last GEMM, else 0.
  __device__ __forceinline__ void count(unsigned int tiles, unsigned int all) const {
    if (lane != 0 || tiles == 0) return;
    if (!all) {
      asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(chain.counters), "r"(tiles)
                   : "memory");
    } else if (atomicAdd(chain.counters, tiles) + tiles == all) {
      chain.counters[0] = 0;  // only blocks that still have tiles to finish read it
      chain.counters[1] = launch;
    }
  }

  __device__ __forceinline__ void run() {
    unsigned int all = 0;
    int number = 0, turn = 0;  // index of the block's tiles, as counted by the consumers
    for (int i = 0; i < chain.count; ++i) {
      const Step& step = chain.steps[i];
      int tile = first_tile(turn);
      turn = (turn + step.tiles) % int(gridDim.x);
      const int others =
          (which + kFinishers - number % kFinishers) % kFinishers;  // tiles before this warp's
      const int of_block = tile < step.tiles ? ceil_div(step.tiles - tile, gridDim.x) : 0;
      tile += others * gridDim.x;
      const int apart = kFinishers * gridDim.x;
      int eight = eight_of(step, tile);
      Constants next;
      if (tile < step.tiles) load_constants(next, step, eight);
      if (of_block) barrier_wait(places.begun(i), 0);
      unsigned int finished = 0;
#pragma unroll 1
      for (int at = others; at < of_block; at += kFinishers, tile += apart) {
        const Constants constants = next;
        const int of_next = eight_of(step, tile + apart);
        if (at + kFinishers < of_block) load_constants(next, step, of_next);
        unsigned short residual[2];
        load_residual(residual, step, eight);
        const int buffer = (number + at) % Handover::kBuffers;
        barrier_wait(places.sent(buffer), (number + at) / Handover::kBuffers % 2);
        float values[2];
        add_up(places.sums + buffer * F::kBufferBytes, values);
        __syncwarp();
        if (lane == 0) barrier_arrive(places.read(buffer));
        store(step, i, eight, constants, residual, values);
        eight = of_next;
        ++finished;
      }
      number += of_block;
      all += step.tiles;
      count(finished, i == chain.count - 1 ? all : 0);
    }
  }
};

#endif

}  // namespace
}  // namespace tridecode
