// Copies of cache blocks from host memory. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// Copies `width` bytes of rows of the host to rows of the device, in the copy engine. runs:
// (num_runs, 3) on the host: first row of the target, first row of the source, number of rows.
int tridecode_copy_columns(void* target, int64_t target_pitch, const void* source,
                           int64_t source_pitch, const int64_t* runs, int num_runs, int64_t width,
                           void* stream);

// Writes rows of a buffer to blocks of the caches, and adds the rows' checksums to sums
// (kernels/block_copies.py). Sizes, places and addresses are multiples of 16 bytes.
typedef struct {
  const void* staged;     // (num_blocks, row_bytes)
  const int64_t* blocks;  // (num_blocks), of the caches
  int64_t* sums;          // (num_blocks)
  const int64_t* parts;   // (num_parts, 3): address of a tensor, bytes of a block in it, and its
                          // first byte in a slot, ascending
  int64_t row_bytes;
  int64_t first;  // byte of the slot with which a row begins
  int num_blocks, num_parts;
} tridecode_place_blocks_task;
int tridecode_place_blocks(const tridecode_place_blocks_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
