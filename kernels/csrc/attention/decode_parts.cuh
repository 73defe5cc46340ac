// Partial results of a work item that several teams share (split-K over the context). Each team
// stores its running maximum, sum and output in scratch memory; the last one to arrive combines
// them in team order.
#pragma once
#include "attention/decode_runs.cuh"

namespace tridecode {
namespace {

// A team stores at most two partial results: for the item of its first tile, and for that of its
// last.
__device__ __forceinline__ float* slot_of(const Task& task, const Runs& runs, int team, int item,
                                          int floats) {
  return static_cast<float*>(task.scratch) +
         int64_t(2 * team + (runs.start_of(team) >= item ? 0 : 1)) * floats;
}

// The output of the item's first head.
template <typename X>
__device__ __forceinline__ X* out_of(const Task& task, const Part& part, int head_size) {
  const int head = part.pass / task.groups * task.group + part.pass % task.groups * kGroup;
  return static_cast<X*>(task.out) + part.row * task.out_stride + head * head_size;
}

// Partial result of one warp, stored in register order: each lane writes its fragment.
template <typename X, int D, typename S>
struct WarpParts {
  static constexpr int VC = S::VC;
  const Task& task;
  const Runs& runs;
  S& sums;
  const Part& part;
  const int team, heads;         // of the pass
  const Columns* const columns;  // of several queries; `heads` is their number
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  __device__ __forceinline__ float* slot(int of) const {
    return slot_of(task, runs, of, part.item, slot_floats(D));
  }
  // Address of dims 4 half .. 4 half + 3 of the lane's eight in chunk c, head 2 t + i.
  __device__ __forceinline__ float* four(int of, int c, int i, int half) const {
    return slot(of) + (((c * 2 + i) * 2 + half) * 32 + lane) * 4;
  }
  __device__ __forceinline__ float4* totals(int of) const {
    return reinterpret_cast<float4*>(slot(of) + VC * 512) + t;
  }
  __device__ __forceinline__ bool has(int i, int c) const {
    return 2 * t + i < heads && (D % 64 == 0 || c * 64 + g * 8 < D);
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int c = 0; c < VC; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!has(i, c)) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto& two = sums.output[c][2 * half];
          const auto& more = sums.output[c][2 * half + 1];
          __stcg(reinterpret_cast<float4*>(four(team, c, i, half)),
                 make_float4(two[i], two[2 + i], more[i], more[2 + i]));
        }
      }
    }
    if (g == 0)
      __stcg(totals(team), make_float4(sums.most[0], sums.most[1], sums.sum[0], sums.sum[1]));
  }

  // Adds to the sums of this team.
  __device__ __forceinline__ void combine() {
    const int from = runs.first_team(part), count = runs.last_team(part) - from + 1;
    // Lane (g, t) holds the totals of part g of eight, and its weight.
    auto totals_of = [&](int which) {
      if (from + which == team)
        return make_float4(sums.most[0], sums.most[1], sums.sum[0], sums.sum[1]);
      return which < count ? __ldcg(totals(from + which))
                           : make_float4(-CUDART_INF_F, -CUDART_INF_F, 0.0f, 0.0f);
    };
    float4 eight = totals_of(g);
    float peak[2] = {eight.x, eight.y}, all[2] = {};
    for (int which = g + 8; which < count; which += 8) {
      const float4 more = totals_of(which);
      peak[0] = fmaxf(peak[0], more.x), peak[1] = fmaxf(peak[1], more.y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2)
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(kAll, peak[i], offset));
    }
    // Registers cannot hold the combined sums in addition to this team's own for heads of 256.
    constexpr int kChunks = VC <= 2 ? VC : 1;
#pragma unroll
    for (int chunk = 0; chunk < VC; chunk += kChunks) {
      float together[kChunks][4][4] = {};
      for (int first = 0; first < count; first += 8) {
        if (count > 8) eight = totals_of(first + g);
        const float share[2] = {exp2f(eight.x - peak[0]), exp2f(eight.y - peak[1])};
        if (chunk == 0) all[0] += share[0] * eight.z, all[1] += share[1] * eight.w;
        for (int w = 0; w < min(8, count - first); ++w) {
          const float both[2] = {__shfl_sync(kAll, share[0], w * 4 + t),
                                 __shfl_sync(kAll, share[1], w * 4 + t)};
#pragma unroll
          for (int c = 0; c < kChunks; ++c) add(together[c], chunk + c, from + first + w, both);
        }
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums.output[chunk + c][j][i] = together[c][j][i];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2)
        all[i] += __shfl_xor_sync(kAll, all[i], offset);
      sums.sum[i] = all[i];
    }
  }

  // Chunk c of the output of team w, times `share` of either head.
  __device__ __forceinline__ void add(float (&together)[4][4], int c, int w,
                                      const float (&share)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto& two = sums.output[c][2 * half];
        const auto& more = sums.output[c][2 * half + 1];
        float4 dims = make_float4(two[i], two[2 + i], more[i], more[2 + i]);
        if (w != team && has(i, c))
          dims = __ldcg(reinterpret_cast<const float4*>(four(w, c, i, half)));
        together[2 * half][i] += share[i] * dims.x;
        together[2 * half][2 + i] += share[i] * dims.y;
        together[2 * half + 1][i] += share[i] * dims.z;
        together[2 * half + 1][2 + i] += share[i] * dims.w;
      }
    }
  }

  // Return whether this team is the last to arrive; its accumulators then hold the whole item.
  __device__ __forceinline__ bool meet() {
    if (part.whole()) return true;
    const unsigned int own = part.last_tile - part.first_tile, every = part.tiles;
    unsigned int* const counter = task.counters + part.row * runs.passes + part.pass;
    unsigned int arrived = lane == 0 ? load_acquire(counter) + own : 0;
    arrived = __shfl_sync(kAll, arrived, 0);
    if (arrived != every) {
      store();
      device_fence();
      __syncwarp();
      if (lane == 0) arrived = atomicAdd(counter, own) + own;
      arrived = __shfl_sync(kAll, arrived, 0);
      if (arrived != every) return false;
      device_fence();
    }
    __syncwarp();                 // broadcasts lane 0's result
    if (lane == 0) *counter = 0;  // for the next launch
    combine();
    return true;
  }

  __device__ __forceinline__ void write() const {
    X* const out = out_of<X>(task, part, D);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = 1.0f / sums.sum[i];
#pragma unroll
      for (int c = 0; c < VC; ++c) {
        if (!has(i, c)) continue;
        float eight[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) eight[j] = sums.output[c][j / 2][j % 2 * 2 + i] * scale;
        if constexpr (S::kSeveral)
          store8(columns->out<X>(task, 2 * t + i, D) + c * 64 + g * 8, eight);
        else
          store8(out + (2 * t + i) * D + c * 64 + g * 8, eight);
      }
    }
  }
};

// Floats of shared memory for a warp's sums: kGroup heads, each with D dims, its maximum and its
// sum.
template <int D>
__host__ __device__ constexpr int team_floats() {
  return kGroup * (D + 2);
}

// Partial result of a block whose warps alternate over the spans of a part. All threads of the
// block call every function together.
template <typename X, int D, int TEAM, typename S>
struct TeamParts {
  static constexpr int VC = S::VC;
  const Task& task;
  const Runs& runs;
  const Part& part;
  const int team, heads;  // of the pass
  const Columns* const columns;
  char* const shared;           // shared memory of the block; a warp's sums replace its tiles
  const int warp_stride;        // bytes
  unsigned int* const arrival;  // of shared memory
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, member = threadIdx.x / 32;

  __device__ __forceinline__ float* sums_of(int warp, int head) const {
    return reinterpret_cast<float*>(shared + warp * warp_stride) + head * (D + 2);
  }
  __device__ __forceinline__ float* slot(int of, int head) const {
    return slot_of(task, runs, of, part.item, slot_floats(D)) + head * (D + 2);
  }
  __device__ __forceinline__ X* out() const { return out_of<X>(task, part, D); }

  // Stores this warp's sums to shared memory; a barrier follows.
  __device__ __forceinline__ void store(const S& sums) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * t + i >= heads) continue;
      float* const mine = sums_of(member, 2 * t + i);
      if (g == 0) *reinterpret_cast<float2*>(mine + D) = make_float2(sums.most[i], sums.sum[i]);
#pragma unroll
      for (int c = 0; c < VC; ++c) {
        const int d = c * 64 + g * 8;
        if (D % 64 != 0 && d >= D) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          *reinterpret_cast<float2*>(mine + d + 2 * j) =
              make_float2(sums.output[c][j][i], sums.output[c][j][2 + i]);
      }
    }
  }

  // Stores the warps' sums: to the output if the part is the whole item, else to scratch memory.
  __device__ __forceinline__ void combine_warps() const {
    for (int i = threadIdx.x; i < heads * D; i += 32 * TEAM) {
      const int h = i / D, d = i % D;
      float peak = -CUDART_INF_F, all = 0.0f, together = 0.0f;
#pragma unroll
      for (int w = 0; w < TEAM; ++w) peak = fmaxf(peak, sums_of(w, h)[D]);
#pragma unroll
      for (int w = 0; w < TEAM; ++w) {
        const float* const theirs = sums_of(w, h);
        const float share = exp2f(theirs[D] - peak);
        all += share * theirs[D + 1], together += share * theirs[d];
      }
      if (part.whole()) {
        if constexpr (S::kSeveral)
          columns->out<X>(task, h, D)[d] = from_float<X>(together / all);
        else
          out()[i] = from_float<X>(together / all);
      } else {
        __stcg(slot(team, h) + d, together);
        if (d == 0) __stcg(reinterpret_cast<float2*>(slot(team, h) + D), make_float2(peak, all));
      }
    }
  }

  // Return whether this team is the last to arrive with a part of the item.
  __device__ __forceinline__ bool is_last() const {
    unsigned int* const counter = task.counters + part.row * runs.passes + part.pass;
    const unsigned int own = part.last_tile - part.first_tile;
    device_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *arrival = atomicAdd(counter, own) + own;
      if (*arrival == unsigned(part.tiles)) *counter = 0;  // for the next launch
    }
    __syncthreads();
    const bool last = *arrival == unsigned(part.tiles);
    if (last) device_fence();
    return last;
  }

  // Stores the teams' sums to the output.
  __device__ __forceinline__ void combine_teams() const {
    const int from = runs.first_team(part), to = runs.last_team(part);
    for (int h = member; h < heads; h += TEAM) {
      // lane w holds the maximum and the sum of part w; more than 32 parts are processed in rounds
      float peak = -CUDART_INF_F;
      for (int w = from + lane; w <= to; w += 32) peak = fmaxf(peak, __ldcg(slot(w, h) + D));
      peak = warp_max(peak);
      float all = 0.0f;
      float together[VC][2] = {};
      for (int first = from; first <= to; first += 32) {
        const int count = min(32, to - first + 1);
        float weight = 0.0f;
        if (lane < count) {
          const float2 totals = __ldcg(reinterpret_cast<const float2*>(slot(first + lane, h) + D));
          weight = exp2f(totals.x - peak);
          all += weight * totals.y;
        }
#pragma unroll 8
        for (int w = 0; w < count; ++w) {
          const float share = __shfl_sync(kAll, weight, w);
          const float* const theirs = slot(first + w, h);
#pragma unroll
          for (int c = 0; c < VC; ++c) {
            const int d = c * 64 + lane * 2;
            if (D % 64 != 0 && d >= D) continue;
            const float2 two = __ldcg(reinterpret_cast<const float2*>(theirs + d));
            together[c][0] += share * two.x, together[c][1] += share * two.y;
          }
        }
      }
      const float scale = 1.0f / warp_sum(all);
#pragma unroll
      for (int c = 0; c < VC; ++c) {
        const int d = c * 64 + lane * 2;
        if (D % 64 != 0 && d >= D) continue;
        X* const to = S::kSeveral ? columns->out<X>(task, h, D) : out() + h * D;
        *reinterpret_cast<uint32_t*>(to + d) =
            pack<X>(together[c][0] * scale, together[c][1] * scale);
      }
    }
  }
};

}  // namespace
}  // namespace tridecode
