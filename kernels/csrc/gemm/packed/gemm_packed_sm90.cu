// out = epilogue(x * weight^T) with TMA and wgmma, for weights in 8 or 4 bit and any number of
// tokens.
//
// Work is divided as in gemm_sm90_stream_k.cu: a cluster of two blocks computes a tile of 256
// weight rows times N tokens, by stream-K if tiles do not fill the device. A stage of the ring has
// 128 inputs: granules of the weight (packed_weight.cuh), the scales and zeros of their groups, and
// the tokens' inputs. Each block loads half of the inputs and multicasts it to both.
//
// The consumers load their share of the granules to registers, dequantise it there, and pass it to
// wgmma as the register operand A. While the wgmmas of 64 inputs run, the next 64 inputs are
// dequantised.
//
// Row scales multiply the finished sums, group scales the weights.
//
// Bytes moved: outputs * inputs, or half of it, and 4 bytes of each group, once, with few tokens.
// Bench: python -m tridecode.kernels.bench packed_linear
#include "api/gemm.h"
#include "api/packed.h"
#include "gemm/packed/packed_maps_sm90.cuh"
#include "gemm/sm90/gemm_sm90_walk.cuh"

namespace tridecode {
namespace {

constexpr int kPackedInputs = 128;  // of a stage: two boxes of x

template <WeightFormat F, int N>
struct PackedShape {
  static constexpr int kGranules = kPackedInputs / granule_inputs(F);  // of 8 rows in a stage
  static constexpr int kWeightBytes = kEights * kGranules * kGranuleBytes;
  static constexpr int kGroupBytes = F == kInt4 ? kBlockRows * 4 * 4 : 0;  // at most 4 of a granule
  static constexpr int kXBytes = 2 * N * 128;
  static constexpr int kStageBytes = kWeightBytes + kGroupBytes + kXBytes;
  static constexpr int kStoreBytes = Shape<N>::kStoreBytes;
  static constexpr int kRoom = 227 * 1024 - 1024 - 512 - kStoreBytes;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStoreBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The producer, in one thread.
template <WeightFormat F, int N, Mode MODE>
__device__ __forceinline__ void copy_packed_stages(const CUtensorMap* weight_map,
                                                   const CUtensorMap* groups_map,
                                                   const CUtensorMap* x_map, const GemmTask& task,
                                                   const Division& division, char* base,
                                                   uint64_t* full, uint64_t* empty) {
  using S = PackedShape<F, N>;
  const int rank = cluster_rank(), cluster = blockIdx.x / 2;
  const uint64_t weight_policy = division.token_tiles == 1 ? evict_first() : evict_normally();
  const uint64_t x_policy = division.token_tiles == 1 ? evict_last() : evict_normally();
  const int bytes =
      S::kWeightBytes + S::kXBytes + (F == kInt4 ? kBlockRows * 4 * task.granule_groups : 0);
  auto copy_weights = [&](const Stages& at, int stage) {
    char* const to = base + stage * S::kStageBytes;
    const int row = at.part.row_tile * kClusterRows + rank * kBlockRows;
    barrier_expect(full + stage, bytes - (has_second_half<N>(at.part, task) ? 0 : S::kXBytes / 2));
    copy_packed<MODE>(to, weight_map, at.step * S::kGranules, row, task.head_size, full + stage,
                      weight_policy);
    if (F == kInt4)
      copy_packed<MODE>(to + S::kWeightBytes, groups_map, at.step, row, task.head_size,
                        full + stage, weight_policy);
  };
  auto copy_x = [&](const Stages& at, int stage) {
    if (rank == 1 && !has_second_half<N>(at.part, task)) return;
    char* const to = base + stage * S::kStageBytes + S::kWeightBytes + S::kGroupBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      copy_box_to_both(to + i * N * 128 + rank * (N / 2) * 128, x_map,
                       at.step * kPackedInputs + i * kStageInputs,
                       at.part.token_tile * N + rank * (N / 2), full + stage, x_policy);
  };
  prefetch_map(weight_map);
  prefetch_map(x_map);
  if (F == kInt4) prefetch_map(groups_map);
  Stages weights(division, cluster), xs = weights;
  int ahead = 0;
  for (; ahead < S::kStages && weights.more; ++ahead, weights.advance(division))
    copy_weights(weights, ahead);
  wait_for_predecessor();
  for (int i = 0; i < ahead; ++i, xs.advance(division)) copy_x(xs, i);
  int stage = 0, parity = 0;
  for (; weights.more; weights.advance(division)) {
    barrier_wait(empty + stage, parity);
    copy_weights(weights, stage);
    copy_x(weights, stage);
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

// A consumer warp group's loop over pipeline stages.
template <typename X, WeightFormat F, int N>
struct PackedProducts : PackedRing<PackedShape<F, N>> {
  using S = PackedShape<F, N>;
  using Ring = PackedRing<S>;
  using Ring::base, Ring::full, Ring::stage, Ring::parity, Ring::load, Ring::release;
  int groups;  // of a granule, int4

  // Dequantises the operands of 64 inputs of a stage, 16 at a time. eight: the first of the warp's
  // two groups of eight rows.
  __device__ __forceinline__ void expand_half(uint32_t (&a)[4][4], const char* weights, int eight,
                                              int which) {
    const int lane = threadIdx.x % 32;
    const int granule = F == kInt4 ? 0 : which, first = F == kInt4 ? which * 4 : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 words = *reinterpret_cast<const uint4*>(
          weights + ((eight + i) * S::kGranules + granule) * kGranuleBytes + lane * 16);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t group = 0;
        if constexpr (F == kInt4) {
          const int index = (first + k) * groups / 8;
          group = reinterpret_cast<const uint32_t*>(
              weights + S::kWeightBytes)[((eight + i) * kGranuleRows + lane / 4) * groups + index];
        }
        uint32_t pairs[2];
        expand_step<X, F>(words, first + k, group, pairs);
        a[k][i] = pairs[0], a[k][i + 2] = pairs[1];
      }
    }
  }

  // add_up for int4 with one group per granule. The next stage's words are loaded while the wgmmas
  // of this one run.
  __device__ __forceinline__ void add_up_groups(float (&c)[N / 2], int steps, int group) {
    const int eight = group * (kEights / kGroups) + threadIdx.x / 32 % 4 * 2;
    uint32_t a[2][4][4];
    int held = -1;
    typename Ring::Loaded next;
    barrier_wait(full + stage, parity);
    load(next, eight);
    for (int step = 0; step < steps; ++step) {
      const char* const x = base + stage * S::kStageBytes + S::kWeightBytes + S::kGroupBytes;
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
        const uint64_t b = descriptor(x + which * N * 128, 1024);
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          group_multiply_add_registers<X, N>(c, a[which][k], later(b, 32 * k));
        commit_group();
        if (which == 1) {
          held = stage;
          if (++stage == S::kStages) stage = 0, parity ^= 1;
          if (step + 1 < steps) {
            barrier_wait(full + stage, parity);
            load(next, eight);
          }
        }
        // the operands of the other half are free and, if which = 0, so is `held`
        wait_groups<1>();
        if (which == 0 && held >= 0) release(held);
      }
    }
    wait_for_sums(c);
    release(held);
  }

  // c = the sums of `steps` stages.
  __device__ __forceinline__ void add_up(float (&c)[N / 2], int steps, int group) {
    const int eight = group * (kEights / kGroups) + threadIdx.x / 32 % 4 * 2;
    uint32_t a[2][4][4];
    int held = -1;  // the stage that wgmmas in flight still read
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = 0.0f;
    if constexpr (F == kInt4) {
      if (groups == 1) {
        add_up_groups(c, steps, group);
        return;
      }
    }
    for (int step = 0; step < steps; ++step) {
      barrier_wait(full + stage, parity);
      const char* const weights = base + stage * S::kStageBytes;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        expand_half(a[which], weights, eight, which);
        const uint64_t b =
            descriptor(weights + S::kWeightBytes + S::kGroupBytes + which * N * 128, 1024);
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          group_multiply_add_registers<X, N>(c, a[which][k], later(b, 32 * k));
        commit_group();
        // the operands of the other half are free and, if which = 0, so is `held`
        wait_groups<1>();
        if (which == 0 && held >= 0) release(held);
      }
      held = stage;
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
    wait_for_sums(c);
    release(held);
  }
};

// Loads the scales of the lane's rows, which are found as in Finish::load_biases.
template <Mode MODE>
__device__ __forceinline__ void load_scales(float (&scales)[2], const GemmTask& task, int column) {
  constexpr bool kPairs = MODE == kGated || MODE == kQkvRotary;
  const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
  const int row = column + (kPairs ? warp * 8 : warp * 16) + g;
  const int second = MODE == kGated       ? task.outputs / 2 + row
                     : MODE == kQkvRotary ? row + task.head_size / 2
                                          : row + 8;
  const int limit = MODE == kGated ? task.outputs / 2 : task.outputs;
  scales[0] = row < limit ? __ldg(task.weight_scales + row) : 0.0f;
  scales[1] = (kPairs ? row : second) < limit ? __ldg(task.weight_scales + second) : 0.0f;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename X, WeightFormat F, int N, Mode MODE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_packed_sm90(const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ CUtensorMap groups_map,
                     const __grid_constant__ CUtensorMap x_map,
                     const __grid_constant__ CUtensorMap out_map,
                     const __grid_constant__ CUtensorMap residual_map,
                     const __grid_constant__ GemmTask task,
                     const __grid_constant__ Division division) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = PackedShape<F, N>;
  extern __shared__ char raw[];
  char* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t full[S::kStages], empty[S::kStages], arrived[kGroups][kBuffers];
  const int group = threadIdx.x / 128, cluster = blockIdx.x / 2;
  if (threadIdx.x == 0) {
    initialize_ring<S::kStages>(full, empty, &arrived[0][0], 2);
    fence_barriers();
  }
  cluster_sync();

  if (group == kGroups) {
    if (threadIdx.x == kGroups * 128) {
      copy_packed_stages<F, N, MODE>(&weight_map, &groups_map, &x_map, task, division, base, full,
                                     empty);
    } else {
      wait_for_predecessor();
      const int index = threadIdx.x - kGroups * 128 - 32;  // except the producer thread's warp
      if (index >= 0)
        Finish<X, N, MODE>::prefetch_tables(task, blockIdx.x * 96 + index, gridDim.x * 96);
      const int helped = threadIdx.x / 32 % 4 - 1;
      if (helped >= 0 && helped < kGroups) signal_partial(task, division, cluster, helped);
    }
  } else {
    wait_for_predecessor();
    PackedProducts<X, F, N> products{{base, full, empty}, task.granule_groups};
    Finish<X, N, MODE> finish{
        task,
        &out_map,
        &residual_map,
        base + S::kStages * S::kStageBytes + group * kBuffers * Shape<N>::kBufferBytes,
        arrived[group],
        group};
    Walk walk(division, cluster);
    Part part;
    while (walk.take(division, part)) {
      const int column =
          finish.first_column(part.row_tile * kClusterRows + cluster_rank() * kBlockRows);
      const int token = part.token_tile * N;
      const bool finishes = part.begin == 0;
      if (MODE == kPlain && finishes && task.residual && threadIdx.x % 128 == 0)
        finish.load_first_residuals(column, token);
      float scales[2] = {1.0f, 1.0f};
      if (finishes) {
        finish.load_biases(column);
        finish.load_slots(column, token);
        if (F != kInt4) load_scales<MODE>(scales, task, column);
      }
      float c[N / 2];
      products.add_up(c, part.end - part.begin, group);
      if (!finishes) {
        write_partial<N>(c, task, cluster, group);
        continue;
      }
      if (part.end < division.steps)
        add_partials<N>(c, task, cluster,
                        division.owner_before((part.tile + 1) * division.steps) - cluster, group);
      if (F != kInt4) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) c[i] *= scales[i / 2 % 2];
      }
      finish.activate_all(c);
      if (MODE == kQkvRotary) finish.rotate_all(c, column, token);
      finish.store_all(c, column, token);
    }
    if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  }
  __syncwarp();
  cluster_sync();  // no load or arrival from the other block is in flight
#endif
}

template <typename X, WeightFormat F, int N, Mode MODE>
int run(const GemmTask& task, const Division& division, void* stream) {
  using S = PackedShape<F, N>;
  const int chunks = ceil_div(task.inputs, granule_inputs(F));
  Maps maps;
  int status =
      encode_packed(&maps.weight, task, MODE, task.weight, kGranuleBytes / 4, chunks, S::kGranules);
  if (!status && F == kInt4)
    status = encode_packed(&maps.groups, task, MODE, task.weight_groups,
                           kGranuleRows * task.granule_groups, chunks, 1);
  if (!status) status = encode_rows(maps, task, MODE, N / 2, Shape<N>::kPart);
  if (status) return status;
  return launch_resident("gemm_packed_sm90", gemm_packed_sm90<X, F, N, MODE>, 2 * division.clusters,
                         kThreads, S::kSharedBytes, stream, maps.weight, maps.groups, maps.x,
                         maps.out, maps.residual, task, division);
}

// (tokens of a tile, epilogue). packed_table.py chooses among them.
// clang-format off
#define TRIDECODE_INSTANCES(_)                          \
  _(16, kPlain) _(16, kQkv) _(16, kQkvRotary)           \
  _(32, kPlain) _(32, kQkv) _(32, kQkvRotary)           \
  _(64, kPlain) _(64, kQkv) _(64, kQkvRotary)           \
  _(96, kPlain) _(96, kQkv) _(96, kQkvRotary)           \
  _(128, kPlain) _(128, kQkv) _(128, kQkvRotary)        \
  _(32, kGated) _(64, kGated) _(96, kGated) _(128, kGated)
// clang-format on

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_gemm_packed_sm90(const tridecode_gemm_task* given, void* stream) {
  const GemmTask& task = *given;
  const char* const name = "gemm_packed_sm90";
  const int groups = task.granule_groups;
  if (task.weight_format == kInt4 && groups != 1 && groups != 2 && groups != 4)
    return fail("%s: %d groups of a granule; wanted 1, 2 or 4", name, groups);
  auto run_mode = [&](Mode mode, const Division& division) {
    return for_weight_format(task.weight_format, name, [&](auto format) {
      return for_16_bit_dtype(task.dtype, name, [&](auto zero) {
        using X = decltype(zero);
        constexpr WeightFormat F = decltype(format)::value;
#define TRIDECODE_RUN(tokens_, mode_)               \
  if (task.tile_tokens == tokens_ && mode == mode_) \
    return run<X, F, tokens_, mode_>(task, division, stream);
        TRIDECODE_INSTANCES(TRIDECODE_RUN)
        return fail("%s: no instance for a tile of %d tokens, epilogue %d", name, task.tile_tokens,
                    int(mode));
      });
    });
  };
  return divided(name, task, run_mode, kPackedInputs);
}
