// Draws the tokens after several tokens of a slot and determines those that it keeps:
// sampling_kernel.cuh without updates of slots, then one thread per decode row, which updates its
// slot token by token.
#include "api/sampling.h"
#include "sampling/sampling_kernel.cuh"

namespace tridecode {
namespace {

struct AcceptTask : tridecode_verify_task {};

__global__ void __launch_bounds__(kThreads) accept(const __grid_constant__ AcceptTask task) {
  wait_for_predecessor();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= task.num_decodes) return;
  const int first = task.query_starts[row], end = task.query_starts[row + 1];
  const int slot = end > first ? task.slots[first] : -1;
  if (slot < 0) {
    task.accepted[row] = 0;
    return;
  }
  Slot& s = task.state[slot];
  int* const history = task.history + int64_t(slot) * task.history_size;
  int16_t* const counts = task.counts + int64_t(slot) * task.vocab_size;
  const bool neutral =
      s.repetition_penalty == 1.0f && s.presence_penalty == 0.0f && s.frequency_penalty == 0.0f;
  const bool remembers = s.num_bad_words > 0 || s.no_repeat_ngram_size > 0;
  int at = first, token = 0;
  bool goes_on = true;
  while (goes_on) {
    const int found = task.tokens[at];
    token = found < 0 ? 0 : found;
    if (remembers && s.history_length < task.history_size) history[s.history_length++] = token;
    if (!neutral && counts[token] < INT16_MAX) counts[token] += 1;
    if (s.top_p_decay < 1.0f) s.top_p_now = decayed(s, s.top_p_now, token);
    ++at;
    goes_on = at < end && found == task.token_ids[at];
  }
  task.last_tokens[slot] = token;
  s.generated += at - first;
  if (s.masked > 1) s.masked = 1;  // the masks of its tokens are those of this step
  task.accepted[row] = at - first;
  task.lengths[slot] = task.context_lens[row] - (end - first) + (at - first);
}

}  // namespace
}  // namespace tridecode

using namespace tridecode;

int tridecode_verify(const tridecode_verify_task* given, void* stream) {
  if (given->num_decodes <= 0) return 0;
  if (given->num_rows > 0) {
    if (!aligned16(given->logits))
      return fail("verify: the logits are not at a multiple of 16 bytes");
    VerifyTask task = {};
    task.logits = given->logits, task.slots = given->slots, task.state = given->state;
    task.last_tokens = given->last_tokens, task.history = given->history;
    task.counts = given->counts, task.bad_ids = given->bad_ids, task.bad_ends = given->bad_ends;
    task.masks = given->masks, task.mask_words = given->mask_words;
    task.biases = given->biases, task.bias_size = given->bias_size;
    task.tokens = given->tokens, task.log_probs = given->log_probs;
    task.num_rows = given->num_rows, task.vocab_size = given->vocab_size;
    task.history_size = given->history_size, task.bad_size = given->bad_size;
    task.logits_stride = given->logits_stride;
    task.scratch = given->scratch, task.counters = given->counters;
    task.token_ids = given->token_ids;
    const dim3 grid = grid_of_rows(task);
    if (int status = launch("verify", sample<VerifyTask>, grid, kThreads, 0, stream, task))
      return status;
  }
  return launch("verify", accept, ceil_div(given->num_decodes, kThreads), kThreads, 0, stream,
                AcceptTask{*given});
}
