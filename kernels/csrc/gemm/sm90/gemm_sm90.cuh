// Tile sizes and places of scales, shared by gemm_sm90_stream_k.cu and gemm_sm90_split_k.cu.
#pragma once
#include "common/wgmma.cuh"
#include "gemm/gemm.cuh"

namespace tridecode {
namespace {

constexpr int kGroups = 2;                     // consumer warp groups
constexpr int kThreads = 128 * kGroups + 128;  // and the producer warp group
constexpr int kBlockRows = 64 * kGroups;
// 128 bytes, the width of the swizzle. Rows of 8-bit operands are loaded as half as many 16-bit
// numbers.
constexpr int kStageInputs = 64;
constexpr int kBuffers = 2;       // of results, per warp group
constexpr int kPartStages = 2;    // stages of a partial E4M3 sum: 256 inputs
constexpr int kScaleBlock = 128;  // rows of a block of E4M3 with one scale; its columns are a stage

// N: tokens of a tile, of PARTS rows of x each. BUFFERS: of results, per warp group.
template <int N, int PARTS = 1, int BUFFERS = kBuffers>
struct Shape {
  static constexpr int kColumns = N * PARTS;  // of a wgmma instruction
  static constexpr int kWeightBytes = kBlockRows * 128;
  static constexpr int kStageBytes = kWeightBytes + kColumns * 128;
  static constexpr int kPart = N < 64 ? N : N % 64 == 0 ? 64 : 32;  // tokens of a store
  static constexpr int kBufferBytes = kPart * 128;
  static constexpr int kStoreBytes = kGroups * BUFFERS * kBufferBytes;
  // Few tokens: leave registers free so that the next, small kernels become resident early on every
  // multiprocessor.
  static constexpr bool kSlim = kColumns <= 64;
  static constexpr int kRoom = 227 * 1024 - 1024 - 512 - kStoreBytes;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  // 1 KiB for alignment
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStoreBytes;
};

// Blocks per multiprocessor, which bounds a kernel's registers. E4M3 has two sets of accumulators.
template <typename Operand, int N>
constexpr int kResident =
    !Shape<N, kPartsOf<Operand>>::kSlim || (N == 64 && std::is_same<Operand, E4m3>::value) ? 1 : 2;

// Block-scaled E4M3: where the scales of a run of stages begin.
struct StageScales {
  const GemmTask& task;
  int first = 0, second = 0;  // in block_scales, for the columns of c[4 j] and c[4 j + 2]
  int x = 0;                  // in x_scales, for the lane's first token
};

}  // namespace
}  // namespace tridecode
