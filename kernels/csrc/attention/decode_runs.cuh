// Divides the tiles of a batch of decode attention among teams: warps or, if rows are few, blocks.
//
// An item is a row and a pass over it, for a kv head and at most kGroup of its query heads. If
// there are enough teams, items are cut into chunks of equal length, one per team, not much longer
// than an equal share of all tiles: no team then begins a second item, and an uncut item needs no
// other team's sums. Otherwise all tiles, in the order of their items, are cut into runs of equal
// length. Each item then counts as a few extra tiles (begin_tiles), after its last: otherwise a
// team with many short items would take much longer than one that streams the same bytes of a long
// item. Many items of equal length are cut only between items.
//
// The device computes this from context_lens, so that the grid does not depend on them.
#pragma once
#include "attention/decode_tiles.cuh"

namespace tridecode {
namespace {

constexpr int kLeastTiles = 2;   // of a warp
constexpr int kMostChunks = 16;  // minimum tiles of an item if teams are warps

// Fixed cost of starting another work item, in tile equivalents: search, block table, first tiles.
__host__ __device__ constexpr int begin_tiles(int team_warps) { return team_warps == 1 ? 2 : 8; }

// Number of tiles of a row that are not hidden; 0 for padding.
template <Mode MODE>
__device__ __forceinline__ int tiles_of(const Task& task, int row, int span) {
  const int all = max(0, (task.context_lens[row] + kTile - 1) / kTile);
  if constexpr (MODE == kLimited) return all - hidden_tiles<MODE>(task, row, span);
  return all;
}

// The share of a work item that one team processes.
struct Part {
  int row, pass, tiles;  // the item, and its tiles
  int hidden;            // tiles of the row before these
  int first_tile, last_tile;
  int item, next;  // places where the item begins, and where the part after this one begins

  __device__ __forceinline__ bool whole() const { return first_tile == 0 && last_tile == tiles; }
};

// A place is the index of a tile in the order of all items or, with chunks, of a chunk. Team w
// processes places start_of(w) .. start_of(w + 1).
struct Runs {
  const int* prefix;  // for each row: the places of one pass over all rows before it
  int rows, passes;   // of the batch; of a row
  int span;           // tiles: chunks are whole spans
  bool chunks;
  int teams, quota, extra;

  __device__ __forceinline__ int start_of(int w) const {
    return w < teams ? w * quota + min(w, extra) : teams * quota + extra;
  }
  __device__ __forceinline__ int owner_of(int place) const {
    return place < extra * (quota + 1) ? place / (quota + 1)
                                       : extra + (place - extra * (quota + 1)) / quota;
  }
  __device__ __forceinline__ int places_of(int row) const { return prefix[row + 1] - prefix[row]; }

  // Returns the part that begins at `at`, of a run that ends at `end`. Without tiles if the run
  // begins after the item's last tile.
  template <Mode MODE>
  __device__ __forceinline__ Part find(const Task& task, int at, int end) const {
    const int target = at / passes;
    int low = 0, high = rows;  // prefix[low] <= target < prefix[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (prefix[middle] <= target ? low : high) = middle;
    }
    Part part;
    part.row = low;
    part.tiles = tiles_of<MODE>(task, low, span);
    part.hidden = hidden_tiles<MODE>(task, low, span);
    const int places = places_of(low), within = at - prefix[low] * passes;
    part.pass = within / places;
    const int place = within - part.pass * places;
    part.item = at - place;
    if (chunks) {
      const int spans = (part.tiles + span - 1) / span;
      part.first_tile = place * spans / places * span;
      part.last_tile = min(part.tiles, (place + 1) * spans / places * span);
      part.next = at + 1;
    } else {
      part.first_tile = place;
      part.last_tile = min(part.tiles, place + (end - at));
      part.next = part.last_tile == part.tiles ? part.item + places : at + part.last_tile - place;
    }
    return part;
  }

  // The first and the last team that have tiles of the part's item.
  __device__ __forceinline__ int first_team(const Part& part) const { return owner_of(part.item); }
  __device__ __forceinline__ int last_team(const Part& part) const {
    return owner_of(part.item + (chunks ? places_of(part.row) : part.tiles) - 1);
  }
};

// Up to this many rows, each warp scans all rows itself; a block-wide scan costs more in barriers.
constexpr int kRowsOfWarp = 32;

// Sums four numbers at once, over the block or, if `alone`, over the warp. shared: four numbers per
// warp.
__device__ __forceinline__ int4 sum_four(int4 own, int4* shared, bool alone) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    own.x += __shfl_xor_sync(kAll, own.x, offset), own.y += __shfl_xor_sync(kAll, own.y, offset);
    own.z += __shfl_xor_sync(kAll, own.z, offset), own.w += __shfl_xor_sync(kAll, own.w, offset);
  }
  if (alone) return own;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
  __syncthreads();
  int4 all = shared[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    all.x += shared[warp].x, all.y += shared[warp].y;
    all.z += shared[warp].z, all.w += shared[warp].w;
  }
  return all;
}

// prefix[row]: the sum of places(tiles of a row) over the rows before it; prefix[rows]: over all.
// alone: every warp writes all of them.
template <Mode MODE, typename Places>
__device__ __forceinline__ void scan_rows(const Task& task, int span, int* prefix, int* warp_totals,
                                          bool alone, Places places) {
  const int threads = alone ? 32 : blockDim.x, thread = threadIdx.x % threads;
  const int each = (task.num_rows + threads - 1) / threads;
  const int first = thread * each, last = min(first + each, task.num_rows);
  int sum = 0;
  for (int row = first; row < last; ++row) {
    const int tiles = tiles_of<MODE>(task, row, span);
    if (!alone) prefix[row] = sum;
    if (tiles > 0) sum += places(tiles);
  }
  int inclusive = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAll, inclusive, offset);
    if (threadIdx.x % 32 >= offset) inclusive += other;
  }
  if (alone) {
    prefix[thread + 1] = inclusive;
    if (thread == 0) prefix[0] = 0;
    __syncwarp();
    return;
  }
  if (threadIdx.x % 32 == 31) warp_totals[threadIdx.x / 32] = inclusive;
  __syncthreads();
  int before = inclusive - sum;
  for (int warp = 0; warp < int(threadIdx.x) / 32; ++warp) before += warp_totals[warp];
  for (int row = first; row < last; ++row) prefix[row] += before;
  if (thread == threads - 1) prefix[task.num_rows] = before + sum;
  __syncthreads();
}

// Plans for `available` teams of TEAM warps, which alternate over spans of `span` tiles.
// LONG_CHUNKS: whether chunks may be up to four times as long as an equal share, or 1.75 times.
// prefix: num_rows + 1 numbers of shared memory, at least kRowsOfWarp + 1.
template <int TEAM, bool LONG_CHUNKS, Mode MODE>
__device__ __forceinline__ Runs divide(const Task& task, int available, int span, int* prefix) {
  __shared__ int4 sums[2][kWarps];
  __shared__ int warp_totals[kWarps];
  constexpr int kLeast = kLeastTiles * TEAM;
  const int passes = task.kv_heads * task.groups;
  const bool alone = task.num_rows <= kRowsOfWarp;
  const int first = alone ? threadIdx.x % 32 : threadIdx.x, stride = alone ? 32 : blockDim.x;
  int4 own = {};  // tiles, rows
  for (int row = first; row < task.num_rows; row += stride) {
    const int tiles = tiles_of<MODE>(task, row, span);
    own.x += tiles, own.y += tiles > 0;
  }
  const int4 all = sum_four(own, sums[0], alone);
  const int items = all.y * passes;

  // Chunks of at most `longest` tiles: the first of four lengths for which there are enough teams.
  const int share = max(kLeast, (all.x * passes + available - 1) / available);
  auto length = [&](int i) {
    constexpr int kShort[] = {20, 25, 30, 35}, kLong[] = {20, 28, 48, 80};  // twentieths of a share
    return (share * (LONG_CHUNKS ? kLong[i] : kShort[i]) + 19) / 20;
  };
  // More chunks than teams, for an item whose last team would have too many partial results to add.
  auto chunks_of = [&](int tiles, int longest) {
    const int chunks = (tiles + longest - 1) / longest;
    return TEAM == 1 && chunks > kMostChunks ? available + 1 : chunks;
  };
  int longest = 0;
  if (items <= available) {
    int4 chunks = {};
    for (int row = first; row < task.num_rows; row += stride) {
      const int tiles = tiles_of<MODE>(task, row, span);
      chunks.x += chunks_of(tiles, length(0)), chunks.y += chunks_of(tiles, length(1));
      chunks.z += chunks_of(tiles, length(2)), chunks.w += chunks_of(tiles, length(3));
    }
    chunks = sum_four(chunks, sums[1], alone);
    longest = chunks.x * passes <= available   ? length(0)
              : chunks.y * passes <= available ? length(1)
              : chunks.z * passes <= available ? length(2)
              : chunks.w * passes <= available ? length(3)
                                               : 0;
  }
  scan_rows<MODE>(task, span, prefix, warp_totals, alone, [&](int tiles) {
    return longest ? chunks_of(tiles, longest) : tiles + begin_tiles(TEAM);
  });
  Runs runs;
  runs.prefix = prefix, runs.rows = task.num_rows, runs.passes = passes, runs.span = span;
  runs.chunks = longest > 0;
  const int total = prefix[task.num_rows] * passes;
  if (runs.chunks) {
    runs.teams = max(1, total);
  } else {
    runs.teams = max(1, min(available, (total + kLeast - 1) / kLeast));
    // each team takes the same number of items, if that leaves few teams idle
    if (items > available) {
      const int each = (items + available - 1) / available, even = (items + each - 1) / each;
      if (even * 16 >= available * 15) runs.teams = even;
    }
  }
  runs.quota = total / runs.teams, runs.extra = total % runs.teams;
  return runs;
}

}  // namespace
}  // namespace tridecode
