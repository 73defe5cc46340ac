// The mainloop of gemm_packed_wide_sm90.cu and gemm_packed_even_split_sm90.cu: int4 with one group
// per granule, and tiles of 160 to 256 tokens. A weight is dequantised once, where the tiles of
// gemm_packed_sm90.cu, of up to 128 tokens, dequantise it twice.
//
// A step has 128 inputs in two stages of the ring, each with 64 inputs of x. Each block loads half
// the tokens and multicasts them to both. The first stage also has the step's granules
// (packed_weight.cuh), and the scales and zeros of their groups. Two stages of 128 inputs would
// leave only two in flight.
//
// Consumers dequantise as in gemm_packed_sm90.cu: the next 64 inputs while the wgmmas of 64 inputs
// run.
#pragma once
#include "gemm/packed/packed_maps_sm90.cuh"
#include "gemm/sm90/gemm_sm90_walk.cuh"

namespace tridecode {
namespace {

constexpr int kStepInputs = 128;

template <int N>
struct WideShape {
  static constexpr int kWeightBytes = kEights * kGranuleBytes;
  static constexpr int kGroupBytes = kBlockRows * 4;
  // padded, because x is aligned to 1 KiB
  static constexpr int kX = kWeightBytes + 2048;
  static constexpr int kXBytes = N * 128;
  static constexpr int kStageBytes = kX + kXBytes;
  static constexpr int kStoreBytes = Shape<N>::kStoreBytes;
  static constexpr int kRoom = 227 * 1024 - 1024 - 512 - kStoreBytes;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStoreBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Iterates over the ring's stages of a cluster, two for each step of the walk.
struct WideStages {
  Stages steps;
  int second = 0;  // stage of the step

  __device__ WideStages(const Division& division, int cluster) : steps(division, cluster) {}
  __device__ void advance(const Division& division) {
    second ^= 1;
    if (!second) steps.advance(division);
  }
};

// The producer, in one thread.
template <int N, Mode MODE>
__device__ __forceinline__ void copy_wide_stages(const CUtensorMap* weight_map,
                                                 const CUtensorMap* groups_map,
                                                 const CUtensorMap* x_map, const GemmTask& task,
                                                 const Division& division, char* base,
                                                 uint64_t* full, uint64_t* empty) {
  using S = WideShape<N>;
  const int rank = cluster_rank(), cluster = blockIdx.x / 2;
  const uint64_t weight_policy = division.token_tiles == 1 ? evict_first() : evict_normally();
  const uint64_t x_policy = division.token_tiles == 1 ? evict_last() : evict_normally();
  auto copy_weights = [&](const WideStages& stages, int stage) {
    const Stages& at = stages.steps;
    char* const to = base + stage * S::kStageBytes;
    const int row = at.part.row_tile * kClusterRows + rank * kBlockRows;
    const int x_bytes = has_second_half<N>(at.part, task) ? S::kXBytes : S::kXBytes / 2;
    barrier_expect(full + stage, x_bytes + (stages.second ? 0 : S::kWeightBytes + S::kGroupBytes));
    if (stages.second) return;
    copy_packed<MODE>(to, weight_map, at.step, row, task.head_size, full + stage, weight_policy);
    copy_packed<MODE>(to + S::kWeightBytes, groups_map, at.step, row, task.head_size, full + stage,
                      weight_policy);
  };
  auto copy_x = [&](const WideStages& stages, int stage) {
    const Stages& at = stages.steps;
    if (rank == 1 && !has_second_half<N>(at.part, task)) return;
    copy_box_to_both(base + stage * S::kStageBytes + S::kX + rank * (N / 2) * 128, x_map,
                     at.step * kStepInputs + stages.second * kStageInputs,
                     at.part.token_tile * N + rank * (N / 2), full + stage, x_policy);
  };
  prefetch_map(weight_map);
  prefetch_map(x_map);
  prefetch_map(groups_map);
  WideStages weights(division, cluster), xs = weights;
  int ahead = 0;
  for (; ahead < S::kStages && weights.steps.more; ++ahead, weights.advance(division))
    copy_weights(weights, ahead);
  wait_for_predecessor();
  for (int i = 0; i < ahead; ++i, xs.advance(division)) copy_x(xs, i);
  int stage = 0, parity = 0;
  for (; weights.steps.more; weights.advance(division)) {
    barrier_wait(empty + stage, parity);
    copy_weights(weights, stage);
    copy_x(weights, stage);
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

// A consumer warp group's loop over pipeline stages.
template <typename X, int N>
struct WideProducts : PackedRing<WideShape<N>> {
  using S = WideShape<N>;
  using Ring = PackedRing<S>;
  using Ring::base, Ring::full, Ring::stage, Ring::parity, Ring::load, Ring::release;

  // c = the sums of `steps` steps. The next step's words are loaded while the wgmmas of this one
  // run.
  __device__ __forceinline__ void add_up(float (&c)[N / 2], int steps, int group) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = 0.0f;
    const int eight = group * (kEights / kGroups) + threadIdx.x / 32 % 4 * 2;
    uint32_t a[2][4][4];
    int held = -1;
    typename Ring::Loaded next;
    barrier_wait(full + stage, parity);
    load(next, eight);
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            uint32_t pairs[2];
            expand_step<X, kInt4>(next.words[i], which * 4 + k, next.group[i], pairs);
            a[which][k][i] = pairs[0], a[which][k][i + 2] = pairs[1];
          }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)  // computed before the fence
          asm volatile(""
                       : "+r"(a[which][k][0]), "+r"(a[which][k][1]), "+r"(a[which][k][2]),
                         "+r"(a[which][k][3])::"memory");
        if (which == 1) barrier_wait(full + stage, parity);
        const uint64_t b = descriptor(base + stage * S::kStageBytes + S::kX, 1024);
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          group_multiply_add_registers<X, N>(c, a[which][k], later(b, 32 * k));
        commit_group();
        const int before = held;  // the last stage, which the last group of wgmmas read
        held = stage;
        if (++stage == S::kStages) stage = 0, parity ^= 1;
        if (which == 1 && step + 1 < steps) {
          barrier_wait(full + stage, parity);
          load(next, eight);
        }
        // the operands of the other half and the last stage are free
        wait_groups<1>();
        if (before >= 0) release(before);
      }
    }
    wait_for_sums(c);
    release(held);
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Encodes the maps of the granules and of the words of their groups.
int encode_granules(Maps& maps, const GemmTask& task, Mode mode) {
  const int chunks = ceil_div(task.inputs, granule_inputs(kInt4));
  const int status =
      encode_packed(&maps.weight, task, mode, task.weight, kGranuleBytes / 4, chunks, 1);
  if (status) return status;
  return encode_packed(&maps.groups, task, mode, task.weight_groups, kGranuleRows, chunks, 1);
}

// Checks the weight of a task.
int check_wide(const char* what, const GemmTask& task) {
  if (task.weight_format == kInt4 && task.granule_groups == 1) return 0;
  return fail("%s: weight format %d, %d groups of 128 inputs; wanted 3 and 1", what,
              task.weight_format, task.granule_groups);
}

}  // namespace
}  // namespace tridecode
