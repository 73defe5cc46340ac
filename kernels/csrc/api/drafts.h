// Drafts from earlier tokens. Part of api.h.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// Appends a step's tokens to the histories of slots and drafts the tokens that followed the longest
// earlier occurrence of their newest tokens: kernels/ops.py (look_up).
typedef struct {
  int* tokens;             // (slots, width)
  int* lengths;            // (slots)
  const int* scopes;       // (slots, 2)
  const int* ring;         // (ring_size)
  const int* ring_scopes;  // (ring_size)
  const int* used;         // (1): tokens of the ring that are searched, its first ones
  int64_t* best;           // (num_rows, 2), scratch: 0 before and after a launch
  const int* rows;         // (num_rows, 3): slot or -1, first sample, index in accepted or -1
  const int* sampled;
  const int* accepted;
  int* drafts;  // (slots, num_drafts)
  int* found;   // (num_rows, 3): matched tokens, their place, whether the draft before was right
  int64_t width, ring_size;
  int num_rows, num_drafts;
  int searches;  // 0: the tokens are appended, and nothing is found
} tridecode_look_up_task;
int tridecode_look_up(const tridecode_look_up_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
