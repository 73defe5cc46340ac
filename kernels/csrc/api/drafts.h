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
  int64_t* best;           // (num_rows), scratch
  const int* rows;         // (num_rows, 3): slot, first sample, index in accepted or -1
  const int* sampled;
  const int* accepted;
  int* drafts;  // (slots, num_drafts)
  int* found;   // (num_rows, 3): matched tokens, their place, whether the draft before was right
  int64_t width;
  int num_rows, num_drafts, ring_size;
  int longest;  // tokens of a history, at most; 0: nothing is searched
} tridecode_look_up_task;
int tridecode_look_up(const tridecode_look_up_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
