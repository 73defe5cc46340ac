// The consumer warps of product_chain_sm90a.cu: they multiply the ring's weights and the rows of x
// by mma.sync, and give the sums of a tile to a finisher.
#pragma once
#include <cuda_fp8.h>

#include "api/operands.h"
#include "gemm/chain/product_chain.cuh"
#include "gemm/chain/product_chain_rows.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// One warp: its team takes every kTeams-th stage.
template <typename X, Values VALUES>
struct Consumer {
  using F = Format<VALUES>;
  using Number = typename F::Number;
  using Sum = typename F::Sum;
  using Operand =
      std::conditional_t<F::k16Bit, X,
                         std::conditional_t<VALUES == kOperandFp8, __nv_fp8_e4m3, int8_t>>;
  const Chain& chain;
  const Places& places;
  Rows<X, VALUES> rows;
  int lane, warp;
  uint32_t weights, groups;          // address of the warp's first unit in the ring's first slot
  uint32_t x, all;                   // first unit: the lane's piece of x, sums of inputs
  int x_apart, all_apart;            // distance to the next piece; to the next unit
  uint32_t own_sums;                 // address in the first buffer
  int slot, parity = 0;              // slot of the warp's next stage
  unsigned int stage = 0, sent = 0;  // over all GEMMs: the next tile's first stage, tiles sent
  int turn = 0;
  unsigned int before = 0;  // tiles of earlier GEMMs

  __device__ __forceinline__ Consumer(const Chain& given, const Places& at, unsigned int launch,
                                      int own_lane, int own_warp)
      : chain(given),
        places(at),
        rows(given, at, launch, own_lane, own_warp),
        lane(own_lane),
        warp(own_warp),
        slot(own_warp / kTeamWarps) {
    const int g = lane / 4, t = lane % 4, own = warp % kTeamWarps * F::kWarpUnits;
    if constexpr (F::k4Bit) {
      weights = places.ring + own * kGranuleBytes + lane * 16;
      groups = places.ring + 2 * F::kEightBytes + (own * kGranuleRows + g) * 4;
    } else {
      weights = places.ring + own * 1024 + g * 128 + ((2 * t) ^ g) * 16, groups = 0;
    }
    // Lanes without a column or token read zeros.
    const int column = F::kTwo ? g : g / 2;
    const bool has = column < chain.columns && (F::kTwo || g % 2 == 0);
    x = has ? places.x + (column * 4 + t) * 16 : places.zeros();
    x_apart = has ? chain.columns * 64 : 0;
    all = t < chain.tokens ? places.group_sums + t * 4 : places.zeros();
    all_apart = t < chain.tokens ? chain.tokens * 4 : 0;
    own_sums = places.sums + (warp * 32 + lane) * 8;
    keep(weights), keep(groups), keep(x), keep(x_apart), keep(all), keep(all_apart), keep(own_sums);
  }

  // The warp's partial sums of a tile. of: the lane's token, rows g and g + 8. products:
  // accumulators in register order, for int8 and 16 bit; separate for even and odd pieces.
  struct Totals {
    float of[2];
    Number products[2][4];
  };

  // Multiplies the warp's unit of a stage of rows. The lanes of a row read its 16-byte pieces 0, 2,
  // 4, 6, then 1, 3, 5, 7. E4M3 instructions keep 14 bits of a sum, so each sums few inputs. Other
  // sums continue through the tile.
  __device__ __forceinline__ void multiply_box(Totals& totals, uint32_t at, int unit) const {
    const uint32_t piece = x + 2 * unit * x_apart;
    uint4 a0[2], a1[2], b[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      a0[odd] = load_shared4(at ^ odd * 16);
      a1[odd] = load_shared4((at ^ odd * 16) + F::kEightBytes);
      b[odd] = load_shared4(piece + odd * x_apart);
    }
    Number fresh[2][4] = {};
    Number(&c)[2][4] = VALUES == kOperandFp8 ? fresh : totals.products;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
      multiply_add<Operand>(c[odd], a0[odd].x, a1[odd].x, a0[odd].y, a1[odd].y, b[odd].x, b[odd].y);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
      multiply_add<Operand>(c[odd], a0[odd].z, a1[odd].z, a0[odd].w, a1[odd].w, b[odd].z, b[odd].w);
    if constexpr (VALUES == kOperandFp8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) totals.of[i] += c[0][2 * i] + c[1][2 * i];
    }
  }

  // Multiplies COUNT of the warp's chunks of a stage of 4-bit weights; the sums are scaled by 254.
  // The values, 0 to 15, are multiplied without subtracting the zero, which is multiplied by the
  // sum of the group's inputs instead.
  template <int COUNT>
  __device__ __forceinline__ void multiply_chunks(Totals& totals, uint32_t at, uint32_t of_groups,
                                                  int unit) const {
    const uint32_t piece = x + 2 * unit * x_apart;
    uint4 words[COUNT][2], b[COUNT][2];
    uint32_t group[COUNT][2];
    int inputs[COUNT];
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[n][i] = load_shared4(at + n * kGranuleBytes + i * F::kEightBytes);
        b[n][i] = load_shared4(piece + (2 * n + i) * x_apart);
      }
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        group[n][i] = load_shared1(of_groups + n * kGranuleRows * 4 + i * F::kGroupBytes);
      inputs[n] = load_shared1(all + (unit + n) * all_apart);
    }
    int c[COUNT][2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint32_t first = get(words[n][0], half * 2 + k),
                         second = get(words[n][1], half * 2 + k);
          constexpr uint32_t kLow = 0x0f0f0f0fu;
          multiply_add<int8_t>(c[n][k], first & kLow, second & kLow, first >> 4 & kLow,
                               second >> 4 & kLow, k ? b[n][half].z : b[n][half].x,
                               k ? b[n][half].w : b[n][half].y);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int zero = zero_number<X>(group[n][i]);
        const int high = c[n][0][2 * i] + c[n][1][2 * i],
                  low = c[n][0][2 * i + 1] + c[n][1][2 * i + 1];
        totals.of[i] = fmaf(scale_of<X>(group[n][i]), float(high * 254 + low - zero * inputs[n]),
                            totals.of[i]);
      }
    }
  }

  // unit: the warp's first; left: number of units from it on.
  __device__ __forceinline__ void multiply_stage(Totals& totals, int unit, int left) {
    const uint32_t at = slot * F::kStageBytes;
    barrier_wait(places.full(slot), parity);
    if constexpr (F::k4Bit) {
      if (left >= 2) {
        multiply_chunks<2>(totals, weights + at, groups + at, unit);
      } else if (left == 1) {
        multiply_chunks<1>(totals, weights + at, groups + at, unit);
      }
    } else {
      if (left > 0) multiply_box(totals, weights + at, unit);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(places.empty(slot));
  }

  // Passes the sums of a tile to a finisher.
  __device__ __forceinline__ void send_sums(const Totals& totals) {
    Sum sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Number first = totals.products[0][2 * i] + totals.products[1][2 * i],
                   second = totals.products[0][2 * i + 1] + totals.products[1][2 * i + 1];
      sums[i] = VALUES == kOperandInt8 || F::k16Bit ? Sum(first)
                : VALUES == kOperandTwoParts        ? Sum(fmaf(float(first), 254.0f, float(second)))
                                                    : Sum(totals.of[i]);
    }
    const unsigned int buffer = sent % Handover::kBuffers, round = sent / Handover::kBuffers;
    barrier_wait(places.read(buffer), round % 2 ^ 1);
    store_shared(own_sums + buffer * F::kBufferBytes, reinterpret_cast<const uint2&>(sums));
    __syncwarp();
    if (lane == 0) barrier_arrive(places.sent(buffer));
    ++sent;
  }

  __device__ __forceinline__ void multiply(int number) {
    const Step& step = chain.steps[number];
    int units = step.given.inputs / F::kUnitInputs, stages = ceil_div(units, F::kUnits);
    int tiles = step.tiles;
    int from = blockIdx.x % stages, ring_stages = chain.stages, blocks = gridDim.x;
    keep(units), keep(stages), keep(tiles), keep(from), keep(ring_stages), keep(blocks);
    int tile = first_tile(turn);
    turn = (turn + tiles) % blocks;
    if (tile < tiles) rows.load(step, number, before);
    before += tiles;
    const int own = warp % kTeamWarps * F::kWarpUnits;
#pragma unroll 1
    for (; tile < tiles; tile += blocks) {
      Totals totals = {};
#pragma unroll 1
      for (int i = (warp / kTeamWarps + stage) % kTeams; i < stages; i += kTeams) {
        const int unit = rotated(i, from, stages) * F::kUnits + own;
        multiply_stage(totals, unit, units - unit);
        if ((slot += kTeams) >= ring_stages) slot -= ring_stages, parity ^= 1;
      }
      stage += stages;
      send_sums(totals);
    }
  }
};

#endif

}  // namespace
}  // namespace tridecode
