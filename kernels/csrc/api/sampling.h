// Sampling. Part of api.h.
#pragma once
#include <stdint.h>

#include "sampling/sampling_state.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct {
  float* logits;                   // (num_rows, vocab_size), overwritten, at a multiple of 16 bytes
  const int* slots;                // (num_rows), -1: this row is skipped
  tridecode_sampling_slot* state;  // (slots)
  int* last_tokens;                // (slots)
  int* history;                    // (slots, history_size)
  int16_t* counts;                 // (slots, vocab_size)
  const int* bad_ids;              // (slots, bad_size)
  const int* bad_ends;             // (slots, bad_size)
  const unsigned int* masks;       // (slots, mask_words), a bit for each id of the whole vocabulary
  const int* biases;               // (slots, bias_size, 2): an id, the bits of a float
  int* tokens;                     // (num_rows), written
  float* log_probs;                // (num_rows), written
  int num_rows, vocab_size, history_size, bad_size, mask_words, bias_size;
  int64_t logits_stride;
  void* scratch;           // tridecode_sample_scratch() bytes
  unsigned int* counters;  // (num_rows), zero before and after each launch
  // where the ranks share the vocabulary, else all 0: vocab_size is the number of this rank's ids,
  // which begin at first_id, a multiple of 4; the rows of logits have columns up to a multiple of 4
  int ranks, rank, first_id, whole_vocab_size, counts_stride;
  int exchange_rows;    // of tridecode_sample_exchange, at least num_rows
  int64_t exchange_at;  // in the memory of each rank
  void* memory;         // as in tridecode_all_reduce_task
  void* memory0;
  void* memory1;
  void* memory2;
  void* memory3;
  void* memory4;
  void* memory5;
  void* memory6;
  void* memory7;
  int64_t limit_ns;
  int* lost;
} tridecode_sample_task;

// The tokens behind num_rows tokens of num_decodes decode rows, and those that each row keeps. The
// fields up to `counters` are those of tridecode_sample_task; slots are those of the tokens, and a
// decode row has at most 16.
typedef struct {
  float* logits;
  const int* slots;
  tridecode_sampling_slot* state;
  int* last_tokens;
  int* history;
  int16_t* counts;
  const int* bad_ids;
  const int* bad_ends;
  const unsigned int* masks;
  const int* biases;
  int* tokens;
  float* log_probs;
  int num_rows, vocab_size, history_size, bad_size, mask_words, bias_size;
  int64_t logits_stride;
  void* scratch;
  unsigned int* counters;
  const int* token_ids;     // (num_rows)
  const int* query_starts;  // (num_decodes + 1)
  const int* context_lens;  // (num_decodes)
  int* lengths;             // (slots), written
  int* accepted;            // (num_decodes), written
  int num_decodes;
} tridecode_verify_task;

// The most likely tokens of rows whose slots have top_log_probs >= 0. Launch keep_raw_logits
// before `sample` (or `verify`) and top_log_probs after it, with the same task.
typedef struct {
  float* logits;  // (num_rows, vocab_size); top_log_probs restores the edits of `sample`
  const int* slots;
  const tridecode_sampling_slot* state;
  const int* bad_ids;
  const int* bad_ends;
  const int* biases;
  const int* tokens;  // (num_rows), written by `sample`
  float* kept;        // (num_rows, at least bias_size + end_ids + bad_size), scratch
  int* top;           // (num_rows, 2, 21), written: ids, then the bits of values
  int num_rows, vocab_size, bad_size, bias_size;
  int64_t logits_stride, kept_stride;
  void* scratch;           // tridecode_top_log_probs_scratch() bytes
  unsigned int* counters;  // (num_rows), zero before and after each launch
} tridecode_top_log_probs_task;

int64_t tridecode_sample_scratch(int max_rows, int vocab_size);
// Bytes of peer memory, zeros before the first launch, for rows whose vocabulary is shared.
int64_t tridecode_sample_exchange(int max_rows, int ranks);
int tridecode_sample(const tridecode_sample_task* task, void* stream);
int64_t tridecode_top_log_probs_scratch(int max_rows, int vocab_size);
int tridecode_keep_raw_logits(const tridecode_top_log_probs_task* task, void* stream);
int tridecode_top_log_probs(const tridecode_top_log_probs_task* task, void* stream);
int tridecode_verify(const tridecode_verify_task* task, void* stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
