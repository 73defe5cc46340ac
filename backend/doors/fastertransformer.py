"""The FasterTransformer contract: token ids in, token ids out.

Source: config.pbtxt and run-time behaviour of the FasterTransformer backend for GPT. As in the original,
prompt padding is removed from output_ids, and rows are filled with their end_id to the full width.
Differences: log-prob tensors are always sent (zeros if not requested, and after a row's end), a row gets
exactly its request_output_len tokens, sequence_length is the row's own length plus its new tokens, every
empty row starts from its start_id, and every invalid value is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.answers.event_answer import EventAnswer
from tridecode.backend.doors.answers.logit_tensors import LogitsArrays, WantedLogits
from tridecode.backend.doors.answers.stream import Stream
from tridecode.backend.doors.contracts.fastertransformer import FASTERTRANSFORMER
from tridecode.backend.doors.contracts.field import SAMPLING_PARAMS
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.door import EngineDoor, Outputs, Received, Submission
from tridecode.backend.doors.requests import fields, prompt_inputs
from tridecode.backend.doors.requests.envelope import MAX_ROWS, Envelope
from tridecode.backend.doors.requests.exact_params import exact_sequences
from tridecode.backend.doors.requests.word_lists import read_words
from tridecode.backend.service import limits as request_limits
from tridecode.backend.service import sampling_rules
from tridecode.backend.service.learned_prompts import RowPrompt
from tridecode.backend.wire.beam_tree import BeamTree
from tridecode.backend.wire.messages import BeamStep, Event, Limits, SamplingParams, SequenceRequest


class TritonPythonModel(EngineDoor):
    """Model `fastertransformer`. One request of B rows becomes one engine request of B sequences."""

    contract = FASTERTRANSFORMER

    def accept(self, received: Received, stream: Stream) -> None:
        inputs, limits, streams = received.inputs, self.limits(), self.settings.decoupled
        prompts = read_prompts(inputs, limits, received.envelope)
        batch, width = prompts.ids.shape
        counts = read_counts(inputs, prompts, limits)
        priority = fields.one_priority(inputs, received.parameters, batch)
        if SAMPLING_PARAMS.name in inputs:
            sequences = exact_sequences(inputs, [prompts.tokens(row) for row in range(batch)], counts, limits)
            stream.answer = EventAnswer(received.outputs, sequences, streams)
            self.submit(stream, [Submission(sequences, stream.put, priority)], received)
            return
        hidden_size = limits.hidden_size if inputs.flag("is_return_context_embeddings") else 0
        responses = max(1, *counts) if streams else 1
        wanted = WantedLogits.of(inputs)
        wanted.check(prompts.prompt_lengths, counts, limits)
        sequences = read_sequences(inputs, prompts, counts, limits)
        beams = [sequence.params.beam_width for sequence in sequences]
        received.envelope.check_response(batch * max(beams), width, max(counts), hidden_size, responses)
        stream.answer = Answer(
            prompts,
            counts,
            received.outputs,
            any(s.params.return_log_probs or s.params.return_context_log_prob for s in sequences),
            hidden_size,
            stream.behind if streams else None,
            LogitsArrays(wanted, prompts.prompt_lengths, counts, limits.vocab_size),
            beams,
        )
        self.submit(stream, [Submission(sequences, stream.put, priority)], received)


@dataclass
class Prompts:
    """The prompts of a request.

    ids: (B, W) int64 as sent, without virtual tokens. lengths: real tokens of each row. fill: the id after a
    row's end.
    """

    ids: np.ndarray
    lengths: list[int]
    start_ids: list[int]
    fill: list[int]
    learned: list[RowPrompt | None] = field(default_factory=list)  # one per row; empty: no row has one
    # the engine's ids of the rows that have a learned prompt
    placed: list[np.ndarray | None] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def prompt_lengths(self) -> list[int]:
        """Return the number of tokens of each of the engine's prompts."""
        return [length or 1 for length in self.lengths]

    def tokens(self, row: int) -> np.ndarray:
        """Return the engine's prompt. An empty row starts from its start_id, which is not answered."""
        if self.placed and (placed := self.placed[row]) is not None:
            return placed
        length = self.lengths[row]
        return self.ids[row, :length] if length else np.array([self.start_ids[row]], np.int64)


def read_prompts(inputs: Inputs, limits: Limits, envelope: Envelope) -> Prompts:
    ids = inputs.arrays["input_ids"]
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.shape[0] == 0:
        raise RequestError(f"input_ids has shape {list(ids.shape)}; wanted [B, W] with B of 1 or more")
    batch, width = ids.shape
    if batch > MAX_ROWS:
        raise RequestError(f"input_ids has {batch:,} rows; this model accepts {MAX_ROWS:,}")
    request_limits.check_sequences(batch, limits)
    envelope.check_width("input_ids", width)
    lengths = inputs.rows("input_lengths", batch)
    for row, length in enumerate(lengths):
        if not 0 <= length <= width:
            raise RequestError(
                f"input_lengths of row {row} is {length}; wanted 0 to {width}, the width of input_ids"
            )
    end_ids = inputs.rows("end_id", batch, limits.end_id)
    prompts = Prompts(
        ids.astype(np.int64),
        lengths,
        inputs.rows("start_id", batch, limits.start_id),
        [max(0, end_id) for end_id in end_ids],
    )
    learned = prompt_inputs.read_row_prompts(inputs, batch, limits)
    if any(learned):
        prompts.learned = learned
        prompts.ids, prompts.lengths, prompts.placed = prompt_inputs.place_rows(
            prompts.ids, lengths, prompts.start_ids, learned, limits
        )
    for row in range(batch):
        _check_ids(prompts, row, limits.vocab_size)
    return prompts


def _check_ids(prompts: Prompts, row: int, vocab_size: int) -> None:
    wanted = f"wanted ids below {vocab_size:,}, the size of the vocabulary"
    ids = prompts.ids[row, : prompts.lengths[row]]
    if not ids.size and not 0 <= prompts.start_ids[row] < vocab_size:
        raise RequestError(f"start_id of row {row} is the token id {prompts.start_ids[row]}; {wanted}")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise RequestError(f"row {row} of input_ids has the token id {wrong[0]}; {wanted}")


def read_counts(inputs: Inputs, prompts: Prompts, limits: Limits) -> list[int]:
    """Return the number of new tokens of each row; with its prompt they fit into a sequence."""
    counts = inputs.rows("request_output_len", prompts.batch)
    for row, count in enumerate(counts):
        length = len(prompts.tokens(row))
        request_limits.check_length(length, count, limits, f"row {row} of input_ids", "request_output_len")
        if count < 0:
            raise RequestError(f"request_output_len of row {row} is {count}; wanted 0 or more")
    return counts


def read_sequences(
    inputs: Inputs, prompts: Prompts, counts: list[int], limits: Limits
) -> list[SequenceRequest]:
    batch = prompts.batch
    stop_words = read_words(inputs, "stop_words_list", batch, limits, limits.max_stop_word_tokens)
    bad_words = read_words(inputs, "bad_words_list", batch, limits, limits.max_bad_word_tokens)
    ends = sampling_rules.model_ends(limits)
    end_ids = inputs.rows("end_id", batch, limits.end_id)
    log_probs = inputs.rows("is_return_log_probs", batch, False)
    context_log_prob = inputs.rows("is_return_context_cum_log_probs", batch, False)
    flags = {
        "return_context_embedding": inputs.flag("is_return_context_embeddings"),
        **WantedLogits.of(inputs).params(),
    }
    lora_names = fields.lora_names(inputs, batch)
    names = inputs.client_names()
    sequences = []
    for row, named in enumerate(inputs.params(batch)):
        tokens = prompts.tokens(row)
        sampling_rules.check_one_penalty(named)
        named.update(
            max_tokens=counts[row],
            **sampling_rules.chosen_ends(end_ids[row], ends, limits),
            stop_words=stop_words[row],
            bad_words=bad_words[row],
            return_log_probs=bool(log_probs[row]),
            return_context_log_prob=bool(context_log_prob[row]),
            **flags,
        )
        params: SamplingParams = sampling_rules.sampling_params(named, limits, names, clip_top_p=True)
        prompt = prompts.learned[row] if prompts.learned else None
        learned = None if prompt is None else prompt.learned
        sequences.append(SequenceRequest(tokens.astype("<i4").tobytes(), params, lora_names[row], learned))
    request_limits.check_sequences(sum(sequence.params.num_slots for sequence in sequences), limits)
    return sequences


@dataclass
class _Row:
    """The engine's output for a row; for a row with beams, the steps of the search instead of tokens."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    steps: list[BeamStep] = field(default_factory=list)
    ended: bool = False

    @property
    def positions(self) -> int:
        return len(self.tokens) or len(self.steps)


class Answer:
    """Builds responses in FasterTransformer's shapes; even the first one has the full width.

    K is the widest row's beam_width. A row with fewer beams has sequence_length 0 and only its end_id in the
    others. A response holds the beams as they stand after its position, best first.

    Not decoupled: one response, when every row has ended. Decoupled: one per generated position of the
    longest row, in order, because clients count them; if the sender is behind, one for all pending positions.
    Each response repeats the tokens of the earlier ones, so none are lost. The first position always has a
    response of its own.
    """

    def __init__(
        self,
        prompts: Prompts,
        counts: list[int],
        outputs: Outputs,
        log_probs: bool,
        hidden_size: int,
        behind: Callable[[int], bool] | None,
        logits: LogitsArrays | None = None,
        beams: Sequence[int] = (),
    ):
        """log_probs: whether any row has them. hidden_size 0: no embeddings. behind(responses): whether this
        number of responses would be sent too late (Stream.behind); None: not decoupled. logits: sent with the
        last response. beams: number for each row, default 1.
        """
        batch, width, most = prompts.batch, prompts.ids.shape[1], max(counts)
        beams = beams or [1] * batch
        widest = max(beams)
        self.finished = False
        self.num_output_tokens = 0
        self._outputs, self._behind, self._logits = outputs, behind, logits
        self._rows = [_Row() for _ in range(batch)]
        self._position = 0  # generated positions in the arrays
        self._sent = 0  # responses made
        self._lengths = prompts.lengths
        self._fill = prompts.fill
        self._trees = [BeamTree() for _ in range(batch)]
        self._ids = np.empty((batch, widest, width + most), np.int64)
        self._ids[:] = np.array(prompts.fill)[:, None, None]
        self._sequence_length = np.zeros((batch, widest), np.int64)
        for row, length in enumerate(prompts.lengths):
            self._ids[row, : beams[row], :length] = prompts.ids[row, :length]
            self._sequence_length[row, : beams[row]] = length
        self._log_probs = np.zeros((batch, widest, most), np.float32)
        self._cum_log_probs = np.zeros((batch, widest), np.float64)
        self._context_log_probs = [0.0] * batch
        self._embeddings = np.zeros((batch, widest, hidden_size), np.float32)
        self._changing: dict[str, np.ndarray] = {
            "output_ids": self._ids,
            "sequence_length": self._sequence_length,
        }
        input_lengths = np.repeat(np.array(prompts.lengths)[:, None], widest, axis=1)
        fixed: dict[str, np.ndarray] = {"response_input_lengths": input_lengths}
        holder = self._changing if log_probs else fixed
        self._has_log_probs = log_probs
        holder.update(cum_log_probs=self._cum_log_probs, output_log_probs=self._log_probs)
        if hidden_size:
            self._changing["context_embeddings"] = self._embeddings
        #: created once: a tensor is copied into shared memory when it is first sent, and later sends reuse
        #: the copy
        self._fixed = outputs.tensors(fixed)

    def take(self, events: list[tuple[int, Event]]) -> Iterator[list]:
        for row, event in events:
            self._take(self._rows[row], row, event)
        all_ended = all(row.ended for row in self._rows)
        longest = max(row.positions for row in self._rows)
        if self._behind is not None:
            ready = longest if all_ended else min(row.positions for row in self._rows if not row.ended)
            while self._position < ready:
                self._advance(self._next(ready, self._behind))
                yield self._response(all_ended and self._position == ready)
        elif all_ended:
            self._advance(longest)
        self.finished = all_ended
        if all_ended and self._sent == 0:
            yield self._response(True)

    def _next(self, ready: int, behind: Callable[[int], bool]) -> int:
        """Return the last position of the next response; positions up to `ready` have been generated."""
        waiting = ready - self._position
        merged = self._position > 0 and waiting > 1 and behind(waiting)
        return ready if merged else self._position + 1

    def _take(self, state: _Row, row: int, event: Event) -> None:
        state.tokens += event.tokens
        state.log_probs += event.log_probs
        state.ended = state.ended or bool(event.finish)
        self.num_output_tokens += len(event.tokens)
        if event.beams is not None:
            state.steps.append(event.beams)
            self.num_output_tokens += sum(token >= 0 for token in event.beams.tokens)
        if event.context_embedding and self._embeddings.size:
            self._embeddings[row] = np.frombuffer(event.context_embedding, np.float32)
        if event.extra is not None:
            self._context_log_probs[row] += event.extra.context_log_prob
            self._cum_log_probs[row] += event.extra.context_log_prob
            if self._logits is not None:
                self._logits.take(row, event.extra)

    def _advance(self, position: int) -> None:
        """Copy the tokens up to `position` into the arrays."""
        for row, state in enumerate(self._rows):
            if state.steps:
                self._advance_beams(row, state.steps[self._position : position])
                continue
            tokens = state.tokens[self._position : position]
            log_probs = state.log_probs[self._position : position]
            start = self._lengths[row] + self._position
            self._ids[row, 0, start : start + len(tokens)] = tokens
            self._log_probs[row, 0, self._position : self._position + len(log_probs)] = log_probs
            self._cum_log_probs[row, 0] += sum(log_probs)
            self._sequence_length[row, 0] += len(tokens)
        self._position = position

    def _advance_beams(self, row: int, steps: list[BeamStep]) -> None:
        """Add these search steps to a row, and write all of its beams."""
        if not steps:
            return
        for step in steps:
            beams = self._trees[row].take(step)
        length = self._lengths[row]
        self._ids[row, : len(beams), length:] = self._fill[row]
        for k, beam in enumerate(beams):
            end = len(beam.tokens)
            self._ids[row, k, length : length + end] = beam.tokens
            self._sequence_length[row, k] = length + end
            if self._has_log_probs:
                self._log_probs[row, k, :end], self._log_probs[row, k, end:] = beam.log_probs, 0.0
                self._cum_log_probs[row, k] = self._context_log_probs[row] + beam.cum_log_prob

    def _response(self, last: bool) -> list:
        self._sent += 1
        tensors = self._outputs.tensors(self._changing) + self._fixed
        if last and self._logits is not None:
            tensors += self._outputs.tensors(self._logits.arrays())
        return tensors
