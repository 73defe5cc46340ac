// TMA loads of packed weights (packed_weight.cuh), for gemm_packed_sm90.cu and gemm_int4_sm90.cu:
// boxes of 128 rows of granules or of the words of their groups, in order, or each 8 rows followed
// by the 8 of their pairs (SwiGLU's gate and up, the halves of a rotated head). And the consumers'
// side of a ring of such stages.
#pragma once
#include "gemm/packed/packed_weight.cuh"
#include "gemm/sm90/gemm_sm90_mainloop.cuh"

namespace tridecode {
namespace {

constexpr int kEights = kBlockRows / kGranuleRows;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Loads the granules of the 128 rows from `row` on, or the words of their groups, in the order of
// encode_packed.
template <Mode MODE>
__device__ __forceinline__ void copy_packed(void* to, const CUtensorMap* map, int chunk, int row,
                                            int head_size, uint64_t* barrier, uint64_t policy) {
  if constexpr (MODE == kGated) {
    copy_granules<4>(to, map, chunk, 0, row / 16, 0, barrier, policy);
  } else if constexpr (MODE == kQkvRotary) {
    const int half = head_size / 2, pair = row / 2;
    copy_granules<5>(to, map, chunk, 0, pair % half / 8, pair / half, barrier, policy);
  } else {
    copy_granules<3>(to, map, chunk, row / 8, 0, 0, barrier, policy);
  }
}

// A consumer warp's place in a ring of stages, each loaded by two blocks. A stage begins with
// granules of 128 rows and, S::kWeightBytes further on, the words of their groups.
template <typename S>
struct PackedRing {
  const char* base;
  uint64_t* full;
  uint64_t* empty;
  int stage = 0, parity = 0;

  // Release the stage in both blocks, since each loads half of it: this warp no longer reads it.
  // Called by every lane.
  __device__ __forceinline__ void release(int at) {
    const int lane = threadIdx.x % 32;
    if (lane < 2) barrier_arrive_at(empty + at, lane);
  }

  // A lane's share of 128 inputs of int4 with one group of a granule: 16 bytes of rows g and g + 8,
  // and their groups.
  struct Loaded {
    uint4 words[2];
    uint32_t group[2];
  };

  __device__ __forceinline__ void load(Loaded& to, int eight) const {
    const int lane = threadIdx.x % 32;
    const char* const weights = base + stage * S::kStageBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to.words[i] =
          *reinterpret_cast<const uint4*>(weights + (eight + i) * kGranuleBytes + lane * 16);
      to.group[i] = reinterpret_cast<const uint32_t*>(
          weights + S::kWeightBytes)[(eight + i) * kGranuleRows + lane / 4];
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// The map of granules of `words` words: boxes of 16 times 8 rows and `chunks` granules of each, in
// order, or each 8 rows followed by the 8 of their pairs.
int encode_packed(CUtensorMap* map, const GemmTask& task, Mode mode, const void* tensor, int words,
                  int row_chunks, int chunks) {
  const cuuint64_t granule = cuuint64_t(words) * 4, eight = granule * row_chunks, all = row_chunks,
                   width = words;
  const cuuint32_t box_width = words, box_chunks = chunks;
  if (mode == kGated) {  // (words, chunks, gate and up, eights)
    const cuuint64_t half = task.outputs / 16, sizes[] = {width, all, 2, half},
                     strides[] = {granule, half * eight, eight};
    const cuuint32_t box[] = {box_width, box_chunks, 2, kEights / 2};
    return encode_words(map, tensor, 4, sizes, strides, box);
  }
  if (mode == kQkvRotary) {  // (words, chunks, halves, eights, heads)
    const cuuint64_t size = task.head_size, groups = size / 16,
                     sizes[] = {width, all, 2, groups, task.outputs / size},
                     strides[] = {granule, size / 16 * eight, eight, size / 8 * eight};
    const cuuint32_t near = groups < 8 ? groups : 8,
                     box[] = {box_width, box_chunks, 2, near, 8 / near};
    return encode_words(map, tensor, 5, sizes, strides, box);
  }
  const cuuint64_t sizes[] = {width, all, cuuint64_t(ceil_div(task.outputs, kGranuleRows))},
                   strides[] = {granule, eight};
  const cuuint32_t box[] = {box_width, box_chunks, kEights};
  return encode_words(map, tensor, 3, sizes, strides, box);
}

}  // namespace
}  // namespace tridecode
