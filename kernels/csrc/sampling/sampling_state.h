// The sampling state of one sequence in its batch slot, declared once: csrc/sampling
// reads this struct, kernels/sampling_state.py makes a numpy dtype of it. Fields with the name of a
// sampling parameter hold that parameter; kernels/ops.py (sample) defines their effects.
#pragma once
#include <stdint.h>

typedef struct {
  // parameters of the request
  uint64_t seed;
  int top_k;                 // 0: the whole vocabulary; 1: greedy
  float min_p;               // 0: off
  float typical_p;           // 1: off
  int no_repeat_ngram_size;  // 0: off
  float top_p, top_p_decay, top_p_min;
  int top_p_reset_id;
  float temperature;  // 0: greedy
  float repetition_penalty, presence_penalty, frequency_penalty;
  int min_tokens, return_log_probs;
  int top_log_probs;  // most likely tokens to be returned; -1: none
  // derived from them
  int end_ids[16];  // tokens that end the sequence; -1: none
  int num_bad_words, num_biases;
  int masked;  // not 0: only the ids whose bits are set in the slot's mask are possible
  // state of the sequence
  float top_p_now;     // top_p after decay
  int generated;       // tokens sampled so far: the counter of the random generator
  int history_length;  // ids in the slot's history
} tridecode_sampling_slot;
