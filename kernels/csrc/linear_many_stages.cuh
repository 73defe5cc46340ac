// The stages of linear_many_sm90a.cu and linear_split_sm90a.cu: how they are copied, and what a
// warp group does with them.
#pragma once
#include "linear_many_results.cuh"

namespace tridecode {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The weights of a stage of a block whose rows begin at `row`, as encode_weight has laid them out.
template <Mode MODE>
__device__ __forceinline__ void copy_weight(void* to, const CUtensorMap* map, int input, int row,
                                            int head_size, uint64_t* barrier, uint64_t policy) {
  if (MODE == kGated) {
    copy_paired(to, map, input, row / 16, barrier, policy);
  } else if (MODE == kRotated) {
    const int half = head_size / 2, pair = row / 2;
    copy_heads(to, map, input, pair % half / 8, pair / half, barrier, policy);
  } else {
    copy_box(to, map, input, row, barrier, policy);
  }
}

// The products of a warp group with the stages of a part; SHARERS: blocks that a stage's inputs are
// copied to at once.
template <typename X, int N, typename S, int SHARERS>
struct Products {
  const char* base;
  uint64_t* full;
  uint64_t* empty;
  int stage = 0, parity = 0;

  // In every lane: nobody reads the stage any more.
  __device__ __forceinline__ void give_back(int at) {
    const int lane = threadIdx.x % 32;
    if (SHARERS > 1) {
      if (lane < SHARERS) barrier_arrive_at(empty + at, lane);
    } else if (lane == 0) {
      barrier_arrive(empty + at);
    }
  }

  // c = the sums of `steps` stages. Each is given back, to the copying threads of all sharers, when
  // the next one's products are under way.
  __device__ __forceinline__ void add_up(float (&c)[N / 2], int steps, int group) {
    int held = -1;  // the stage that running products still read
    for (int step = 0; step < steps; ++step) {
      barrier_wait(full + stage, parity);
      const char* const weights = base + stage * S::kStageBytes;
      const uint64_t a = descriptor(weights + group * 64 * 128, 1024),
                     b = descriptor(weights + S::kWeightBytes, 1024);
      group_fence();
#pragma unroll
      for (int k = 0; k < kStageInputs / 16; ++k)  // 32 bytes on: 2 units of 16
        group_multiply_add<X, N>(c, a + 2 * k, b + 2 * k, step > 0 || k > 0);
      commit_group();
      wait_groups<1>();
      if (held >= 0) give_back(held);
      held = stage;
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
    wait_for_sums(c);
    give_back(held);
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Boxes of `box_rows` rows of `width` numbers.
int encode(CUtensorMap* map, const void* matrix, int64_t rows, int64_t columns, int64_t stride,
           int box_rows, int width, int dtype) {
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)},
                   strides[] = {cuuint64_t(stride * 2)};
  const cuuint32_t box[] = {cuuint32_t(width), cuuint32_t(box_rows)};
  return encode_map(map, matrix, 2, sizes, strides, box, dtype);
}

// Of the weight, 128 rows: in order, or each 8 followed by the 8 of their pairs.
int encode_weight(CUtensorMap* map, const ProductTask& task, Mode mode, int dtype) {
  const cuuint64_t row = cuuint64_t(task.weight_stride) * 2, inputs = task.inputs;
  if (mode == kGated) {  // (inputs, 8, gate and up, groups of 8)
    const cuuint64_t half = task.outputs / 2, sizes[] = {inputs, 8, 2, half / 8},
                     strides[] = {row, half * row, 8 * row};
    const cuuint32_t box[] = {kStageInputs, 8, 2, kBlockRows / 16};
    return encode_map(map, task.weight, 4, sizes, strides, box, dtype);
  }
  if (mode == kRotated) {  // (inputs, 8, halves, groups of 8, heads)
    const cuuint64_t size = task.head_size, groups = size / 16,
                     sizes[] = {inputs, 8, 2, groups, task.outputs / size},
                     strides[] = {row, size / 2 * row, 8 * row, size * row};
    const cuuint32_t near = groups < 8 ? groups : 8, box[] = {kStageInputs, 8, 2, near, 8 / near};
    return encode_map(map, task.weight, 5, sizes, strides, box, dtype);
  }
  return encode(map, task.weight, task.outputs, task.inputs, task.weight_stride, kBlockRows,
                kStageInputs, dtype);
}

}  // namespace
}  // namespace tridecode
