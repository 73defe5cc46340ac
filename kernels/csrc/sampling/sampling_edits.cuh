// Changes of single logits before the sweep of a row: biases, then the ids that bad words, repeated
// n-grams and minimum length make impossible. Each block changes the columns that it sweeps.
#pragma once
#include "sampling/sampling_row.cuh"

namespace tridecode {
namespace {

template <bool SHARED>
struct Edits {
  const Task& task;
  const Slot& s;
  int index, slot, first, end;  // columns first .. end - 1
  const int* drafts;            // tokens that count as sampled before this row
  int num_drafts;

  __device__ __forceinline__ float* logit_of(int id) const {
    const int column = id - (SHARED ? task.first_id : 0);
    const bool is_here = column >= first && column < end && column < task.vocab_size;
    return is_here ? task.logits + index * task.logits_stride + column : nullptr;
  }
  __device__ __forceinline__ void ban(int id) const {
    if (float* const logit = logit_of(id)) *logit = -CUDART_INF_F;
  }
  // Number of ids of the slot's history, then of the drafts before this row.
  __device__ __forceinline__ int length() const {
    const int known = s.history_length;
    return min(known + num_drafts, max(known, task.history_size));
  }
  __device__ __forceinline__ int id_before(int place) const {
    if (place >= s.history_length) return drafts[place - s.history_length];
    return task.history[int64_t(slot) * task.history_size + place];
  }

  __device__ __forceinline__ void add_biases() const {
    const int2* const biases =
        reinterpret_cast<const int2*>(task.biases) + int64_t(slot) * task.bias_size;
    for (int i = threadIdx.x; i < s.num_biases; i += kThreads)
      if (float* const logit = logit_of(biases[i].x))
        *logit = __fadd_rn(*logit, __int_as_float(biases[i].y));
  }
  // Bans the last id of each bad word whose other ids end the history.
  __device__ __forceinline__ void ban_words() const {
    const int* const ids = task.bad_ids + int64_t(slot) * task.bad_size;
    const int* const ends = task.bad_ends + int64_t(slot) * task.bad_size;
    const int known = length();
    for (int word = threadIdx.x; word < s.num_bad_words; word += kThreads) {
      const int begin = word ? ends[word - 1] : 0, before = ends[word] - begin - 1;
      if (before < 0 || before > known) continue;
      bool matches = true;
      for (int i = 0; i < before && matches; ++i)
        matches = id_before(known - before + i) == ids[begin + i];
      if (matches) ban(ids[begin + before]);
    }
  }
  // Bans the last id of each n-gram of the history whose other ids end the history.
  __device__ __forceinline__ void ban_repeats() const {
    const int size = s.no_repeat_ngram_size, known = length(), last = known - size + 1;
    if (size <= 0) return;
    for (int at = threadIdx.x; at <= known - size; at += kThreads) {
      bool matches = true;
      for (int i = size - 2; i >= 0 && matches; --i)
        matches = id_before(at + i) == id_before(last + i);
      if (matches) ban(id_before(at + size - 1));
    }
  }
  __device__ __forceinline__ void hold_back_ends() const {
    constexpr int kEndIds = sizeof(s.end_ids) / sizeof(int);
    if (threadIdx.x < kEndIds && s.end_ids[threadIdx.x] >= 0) ban(s.end_ids[threadIdx.x]);
  }
};

// Applies the edits to columns first .. end - 1: temperature and penalties leave minus infinity
// unchanged.
template <bool SHARED>
__device__ __forceinline__ void edit_logits(const Task& task, int index, int slot, int first,
                                            int end, const int* drafts, int num_drafts) {
  const Slot& s = task.state[slot];
  const Edits<SHARED> edits = {task, s, index, slot, first, end, drafts, num_drafts};
  if (s.num_biases > 0) {
    edits.add_biases();
    __syncthreads();
  }
  edits.ban_words();
  edits.ban_repeats();
  if (s.generated + num_drafts < s.min_tokens) edits.hold_back_ends();
  __syncthreads();
}

}  // namespace
}  // namespace tridecode
