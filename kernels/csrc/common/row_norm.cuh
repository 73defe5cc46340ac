// LayerNorm and RMSNorm of rows: their statistics and the normalisation of a number.
#pragma once
#include "common/common.cuh"

namespace tridecode {

struct RowNorm {
  float mean;   // 0 for RMSNorm
  float scale;  // 1 / sqrt(variance + eps)

  __device__ __forceinline__ float operator()(float x, float weight, float bias) const {
    return (x - mean) * scale * weight + bias;
  }
};

// The statistics of ROWS rows of `columns` numbers that several threads share. The variance is
// computed from the centred row.
//
// centred: LayerNorm, else RMSNorm. sums: sums of this thread's numbers of each row, used if
// centred. each(body): calls body(row, x) for this thread's numbers. add_up(sums, which): adds up
// each sum over the threads of the row, in all of them; `which` is 0, then 1, so that the second
// call may use other shared memory.
template <int ROWS, typename Each, typename AddUp>
__device__ __forceinline__ void row_statistics(RowNorm (&rows)[ROWS], float (&sums)[ROWS],
                                               bool centred, int columns, float eps, Each each,
                                               AddUp add_up) {
  const float inverse = 1.0f / columns;  // computed before the sums, which a division would delay
  if (centred) add_up(sums, 0);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    rows[row].mean = centred ? sums[row] * inverse : 0.0f;
    sums[row] = 0.0f;
  }
  each([&](int row, float x) { sums[row] += (x - rows[row].mean) * (x - rows[row].mean); });
  add_up(sums, 1);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) rows[row].scale = rsqrtf(sums[row] * inverse + eps);
}

// add_up of row_statistics for a row shared by a block.
struct BlockSums {
  float (*shared)[32];
  __device__ __forceinline__ void operator()(float (&sums)[1], int which) const {
    sums[0] = block_sum(sums[0], shared[which]);
  }
};

// The statistics of a row that a block shares. v: this thread's items of 8 numbers;
// each_item(body): calls body(i, column) for those that the row has. The sum is a pass of its own,
// so that all loads are issued before the first is used.
template <int ITEMS, typename EachItem>
__device__ __forceinline__ RowNorm block_row_norm(const float (&v)[ITEMS][8], EachItem each_item,
                                                  bool centred, int columns, float eps,
                                                  float (*shared)[32]) {
  float sums[1] = {};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[0] += v[i][j];
  }
  RowNorm norm[1];
  row_statistics(
      norm, sums, centred, columns, eps,
      [&](auto body) {
        each_item([&](int i, int) {
#pragma unroll
          for (int j = 0; j < 8; ++j) body(0, v[i][j]);
        });
      },
      BlockSums{shared});
  return norm[0];
}

}  // namespace tridecode
