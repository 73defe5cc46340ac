"""TensorRT-LLM's model `tensorrt_llm`: token ids in, token ids out, streamed or whole.

Source: config.pbtxt of TensorRT-LLM's inflight_batcher_llm, what its client programs send and read, and its
sampling kernels (an end id is not part of the answer). Decisions where the contract leaves room:

  A whole answer is prompt + new tokens, without the prompt if exclude_input_in_output is true. A response of
  a stream has the row's new tokens only. sequence_length is the number of the row's ids in this response.
  A decoupled model sends a response for each row, any other model one for all rows. The beams of a row form
  the second axis of its response, best first, which is sent when the search is over, even with `streaming`.
  From a decoupled model each sample (num_return_sequences) has responses of its own, named by sequence_index.
  The end id is not shown; the words of stop_words_list are. Both have log-probs and count as output tokens.
  If the model has several end ids, a request that sends none, or one of these, ends at any of them. A
  request that a stop request ends is a success, with the tokens so far; the stop request gets no tensors.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import msgspec
import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.answers.event_answer import EventAnswer
from tridecode.backend.doors.answers.logit_tensors import WantedLogits
from tridecode.backend.doors.answers.stream import Stream
from tridecode.backend.doors.answers.token_answer import EmptyAnswer, Layout, TokenAnswer, TokenSequence
from tridecode.backend.doors.contracts.field import SAMPLING_PARAMS
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import TENSORRT_LLM_TOKENS
from tridecode.backend.doors.door import EngineDoor, Received, Submission
from tridecode.backend.doors.fastertransformer import Prompts, read_prompts
from tridecode.backend.doors.requests import fields
from tridecode.backend.doors.requests.embedding_bias import tensor_biases
from tridecode.backend.doors.requests.exact_params import exact_sequences
from tridecode.backend.doors.requests.stop_requests import stop_rows, stop_running
from tridecode.backend.doors.requests.word_lists import read_words
from tridecode.backend.service import limits as request_limits
from tridecode.backend.service import sampling_rules
from tridecode.backend.service.structured_fields import GUIDE, check_output, renamed
from tridecode.backend.wire.messages import Event, Limits, SamplingParams, SequenceRequest


class TritonPythonModel(EngineDoor):
    """A request of B rows becomes B requests of the engine, so that each can be stopped independently."""

    contract = TENSORRT_LLM_TOKENS

    def at_once(self, received: Received, stream: Stream) -> bool:
        if not received.inputs.flag("stop"):
            return False
        stop_running(self.senders, stream)
        stream.answer = EmptyAnswer()
        stream.put(Event(0, 0, finish="length"))
        return True

    def accept(self, received: Received, stream: Stream) -> None:
        inputs, limits = received.inputs, self.limits()
        streaming = inputs.flag("streaming")
        if streaming and not self.settings.decoupled:
            raise self.cannot_stream("streaming")
        if "input_ids" not in inputs:
            raise RequestError("input input_ids is missing; this model needs it")
        if self.settings.wrap_token_ids:
            inputs.arrays["input_ids"] = np.mod(inputs.arrays["input_ids"], limits.vocab_size)
        prompts = read_prompts(inputs, limits, received.envelope)
        if SAMPLING_PARAMS.name in inputs:
            self._accept_exact(received, stream, prompts, limits)
            return
        params = self._read_params(inputs, prompts, limits)
        request_limits.check_sequences(sum(one.num_slots for one in params), limits)
        counts = [one.max_tokens for one in params]
        most = max(one.num_sequences for one in params)
        received.envelope.check_response(prompts.batch * most, prompts.ids.shape[1], max(counts), 0, 1)
        lengths = [length or 1 for length in prompts.lengths]
        WantedLogits.of(inputs).check(lengths, [one.num_sequences * one.max_tokens for one in params], limits)
        lora_names = fields.lora_names(inputs, prompts.batch)
        outputs = fields.guides(inputs, prompts.batch)
        for output in outputs:
            if output is not None:
                check_output(output, limits, GUIDE)
        priorities = fields.priorities(inputs, received.parameters, prompts.batch)
        exclude = inputs.flag("exclude_input_in_output", self.settings.exclude_input_in_output)
        sequences: list[TokenSequence] = []
        submissions = []
        for row, one in enumerate(params):
            sink = partial(_put, stream, len(sequences))
            length = prompts.lengths[row]
            echo = prompts.ids[row, : 0 if streaming or exclude else length].tolist()
            sequences += [TokenSequence(echo, length, (row, index)) for index in range(one.num_sequences)]
            asked = SequenceRequest(
                prompts.tokens(row).astype("<i4").tobytes(),
                one,
                lora_names[row],
                structured_output=outputs[row],
            )
            submissions.append(Submission([asked], sink, priorities[row]))
        fill = _fill(inputs, prompts)
        layout = Layout.of(inputs, received.outputs, self.settings, fill, limits.vocab_size)
        beams = [one.beam_width > 1 for one in params]
        stream.answer = TokenAnswer(sequences, beams, layout, streaming)
        self.submit(stream, submissions, received)
        if stream.stop_wanted:
            stop_rows(stream)

    def _accept_exact(self, received: Received, stream: Stream, prompts: Prompts, limits: Limits) -> None:
        """Serve a request whose sampling parameters are one JSON object a row."""
        inputs, batch = received.inputs, prompts.batch
        tokens = [prompts.tokens(row) for row in range(batch)]
        sequences = exact_sequences(inputs, tokens, _counts(inputs, prompts, limits), limits)
        priorities = fields.priorities(inputs, received.parameters, batch)
        firsts = [0, *accumulate(sequence.params.num_sequences for sequence in sequences)]
        stream.answer = EventAnswer(received.outputs, sequences, self.settings.decoupled)
        submissions = [
            Submission([sequence], partial(_put, stream, first), priority)
            for sequence, first, priority in zip(sequences, firsts, priorities)
        ]
        self.submit(stream, submissions, received)

    def _read_params(self, inputs: Inputs, prompts: Prompts, limits: Limits) -> list[SamplingParams]:
        """Return the sampling parameters of each row."""
        batch = prompts.batch
        counts = _counts(inputs, prompts, limits)
        ends = sampling_rules.model_ends(limits, self.settings.stop_ids)
        end_ids = inputs.rows("end_id", batch, ends[0] if ends else -1)
        stop_words = read_words(inputs, "stop_words_list", batch, limits, limits.max_stop_word_tokens)
        bad_words = read_words(inputs, "bad_words_list", batch, limits, limits.max_bad_word_tokens)
        biases = tensor_biases(inputs, batch, limits)
        flags = ("log_probs", "context_logits", "generation_logits", "perf_metrics")
        wanted = {f"return_{flag}": inputs.flag(f"return_{flag}") for flag in flags}
        names = inputs.client_names()
        drafts = _drafts(inputs, batch, limits)
        params = []
        for row, named in enumerate(inputs.params(batch)):
            named.update(
                max_tokens=counts[row],
                stop_words=stop_words[row],
                bad_words=bad_words[row],
                draft_tokens=drafts[row],
                logit_bias=biases[row],
                **sampling_rules.chosen_ends(end_ids[row], ends, limits),
                **wanted,
            )
            if "early_stopping" in named:
                named["early_stopping"] = int(named["early_stopping"])
            if named.get("beam_width", 1) > 1:
                named["beam_pool"] = True
            params.append(sampling_rules.sampling_params(named, limits, names))
        return params


def _put(stream: Stream, first: int, event: Event) -> None:
    """Add an event of a row whose sequences are those of the answer from `first` on."""
    if event.error:
        event = msgspec.structs.replace(event, error=renamed(event.error, GUIDE))
    stream.put_row(first + event.sequence, event)


def _counts(inputs: Inputs, prompts: Prompts, limits: Limits) -> list[int]:
    """New tokens of each row, which fit into a sequence with its prompt."""
    counts = inputs.rows("request_output_len", prompts.batch)
    for row, (count, length) in enumerate(zip(counts, prompts.lengths)):
        request_limits.check_length(
            length or 1, count, limits, f"row {row} of input_ids", "request_output_len"
        )
    return counts


def _drafts(inputs: Inputs, batch: int, limits: Limits) -> list[list[int]]:
    """Return the ids of draft_input_ids for each row, without the -1 that pad it."""
    array = inputs.arrays.get("draft_input_ids")
    if array is None or array.size == 0:
        return [[]] * batch
    rows = array[None] if array.ndim == 1 else array
    if rows.ndim != 2 or len(rows) != batch:
        raise RequestError(f"draft_input_ids has shape {list(array.shape)}; wanted [{batch}, n]")
    found = []
    for row, ids in enumerate(rows):
        ids = ids[: int(np.flatnonzero(ids != -1)[-1]) + 1] if (ids != -1).any() else ids[:0]
        wrong = ids[(ids < 0) | (ids >= limits.vocab_size)]
        if wrong.size:
            wanted = f"wanted ids below {limits.vocab_size:,}, the size of the vocabulary"
            raise RequestError(f"row {row} of draft_input_ids has the token id {wrong[0]}; {wanted}")
        if len(ids) > limits.max_sequence_tokens:
            raise RequestError(
                f"row {row} of draft_input_ids has {len(ids):,} ids; this model accepts "
                f"{limits.max_sequence_tokens:,} (max_sequence_tokens in config.pbtxt)"
            )
        found.append(ids.tolist())
    return found


def _fill(inputs: Inputs, prompts: Prompts) -> list[int]:
    """Return the id that pads each row in a response with several rows."""
    return [
        pad if pad >= 0 else fill for pad, fill in zip(inputs.rows("pad_id", prompts.batch, -1), prompts.fill)
    ]
