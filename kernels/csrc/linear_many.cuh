// What linear_many_sm90a.cu and linear_split_sm90a.cu share: the task and the sizes of a tile; and
// of the first, who computes which.
#pragma once
#include "group_product.cuh"

namespace tridecode {

// What becomes of the product: out as it is, or SwiGLU; or queries, keys and values, keys and
// values also to the cache, queries and keys rotated first or not.
enum Mode { kPlain, kGated, kCached, kRotated };

using ProductTask = tridecode_gemm_task;

constexpr int kMostSplitTokens = 64;  // that linear_split_sm90a.cu takes

// The blocks that it shares each tile's inputs among: 1, 2 or 3, or 0 where linear_many_sm90a.cu is
// faster, or the only one.
int split_of(const ProductTask& task, Mode mode);
int run_linear_split(const ProductTask& task, Mode mode, int split, void* stream);

namespace {

constexpr int kGroups = 2;                     // warp groups that multiply
constexpr int kThreads = 128 * kGroups + 128;  // and one of which a thread copies
constexpr int kBlockRows = 64 * kGroups;
constexpr int kClusterRows = 2 * kBlockRows;
constexpr int kStageInputs = 64;  // 128 bytes: the width of the swizzle
constexpr int kBuffers = 2;       // of results, a warp group
constexpr int kLeastSteps = 4;    // of a cluster: each that shares a tile costs its time

template <int N>
struct Shape {
  static constexpr int kWeightBytes = kBlockRows * 128;
  static constexpr int kStageBytes = kWeightBytes + N * 128;
  static constexpr int kPart = N < 64 ? N : N % 64 == 0 ? 64 : 32;  // tokens stored at once
  static constexpr int kBufferBytes = kPart * 128;
  static constexpr int kStoreBytes = kGroups * kBuffers * kBufferBytes;
  // where tokens are few, registers are left for the small kernels that come next: they wait beside
  // this one, spread over the chip, and not where its first blocks end
  static constexpr bool kSlim = N <= 64;
  static constexpr int kRoom = 227 * 1024 - 1024 - 512 - kStoreBytes;
  static constexpr int kStages = kRoom / kStageBytes < 12 ? kRoom / kStageBytes : 12;
  // 1 KiB to begin at a multiple of it
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStoreBytes;
};

struct Division {
  int row_tiles, token_tiles;
  int steps;     // of 64 inputs
  int near;      // row tiles that are taken together, for all tokens
  int clusters;  // that work
  bool shared;   // a tile by several clusters, each the same number of steps

  // Of all tiles' steps, one after the other, the first of a cluster's.
  __host__ __device__ int first_step(int cluster) const {
    return int(int64_t(row_tiles) * token_tiles * steps * cluster / clusters);
  }
  // The cluster that computes the step before `step`.
  __device__ int owner_before(int step) const {
    const int64_t all = int64_t(row_tiles) * token_tiles * steps;
    int cluster = int(int64_t(step - 1) * clusters / all);
    while (first_step(cluster + 1) < step) ++cluster;
    return cluster;
  }
};

// A part of a tile that one cluster computes: steps begin to end of it.
struct Part {
  int tile, row_tile, token_tile, begin, end;
};

// The parts of a cluster, one after the other.
struct Walk {
  int next, last;

  __device__ Walk(const Division& division, int cluster) {
    const int tiles = division.row_tiles * division.token_tiles;
    if (division.shared) {
      next = division.first_step(cluster), last = division.first_step(cluster + 1);
    } else {
      next = cluster, last = tiles;
    }
  }

  __device__ bool take(const Division& division, Part& part) {
    if (next >= last) return false;
    if (division.shared) {
      part.tile = next / division.steps, part.begin = next % division.steps;
      part.end = min(division.steps, part.begin + last - next);
      next += part.end - part.begin;
    } else {
      part.tile = next, part.begin = 0, part.end = division.steps;
      next += division.clusters;
    }
    const int together = division.near * division.token_tiles, first = part.tile / together;
    const int rows = min(division.near, division.row_tiles - first * division.near);
    const int rest = part.tile - first * together;
    part.row_tile = first * division.near + rest % rows, part.token_tile = rest / rows;
    return true;
  }
};

}  // namespace
}  // namespace tridecode
