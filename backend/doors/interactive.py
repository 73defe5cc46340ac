"""FasterTransformer's interactive generation: conversations over Triton's sequence batcher.

Source: the repository gpt-interactive-text-generation of the FasterTransformer backend. As in the original:
START=1 with session_len begins a conversation, START=0 continues it, an answer has the whole history, and the
new prompt replaces the end token of the round before. Differences: END frees the session; history, new tokens
and output are counted once against session_len; padding between rounds is removed; rows and rounds are
checked; a round that arrives before the answer of the one before waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.answers.stream import FINAL, Stream
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.interactive import CONTROLS, INTERACTIVE
from tridecode.backend.doors.door import EngineDoor, Outputs, Received, Submission
from tridecode.backend.doors.fastertransformer import (
    Answer,
    Prompts,
    read_counts,
    read_prompts,
    read_sequences,
)
from tridecode.backend.doors.requests import fields
from tridecode.backend.doors.requests.conversations import Conversation, Conversations, Turn, Turns, gone
from tridecode.backend.doors.requests.interactive_axis import with_axis, without_axis
from tridecode.backend.wire.messages import Event, SessionRound


class TritonPythonModel(EngineDoor):
    """Model `fastertransformer` of the interactive contract. One round of B rows is one engine request."""

    contract = INTERACTIVE

    def prepare(self, settings: Any) -> None:
        self.turns = Turns()
        self.idle_s = settings.session_idle_s or settings.sequence_idle_s
        self.conversations = Conversations(self.turns, self.idle_s)

    # ------------------------------------------------------------ turns

    def execute(self, requests: Sequence[Any]) -> None:
        """Like EngineDoor's; empty places of Triton's batch get no answer."""
        for request in requests:
            if _control(request, "READY", True):
                super().execute([request])
            else:
                request.get_response_sender().send(pb_utils.InferenceResponse([]), flags=FINAL)

    def _take(self, request: Any, stream: Stream) -> None:
        for idle in self.conversations.drop_idle():
            self.link.end_session(idle.number)
        key = request.correlation_id()
        if not key:
            raise RequestError(
                "the request has no sequence_id; wanted one, and sequence_start with the first round"
            )
        turn = Turn(key, _control(request, "START", False), _control(request, "END", False), stream)
        self.turns.enter(turn)
        stream.on_end = partial(self._ended, turn)
        turn.received = self._receive(request, stream)
        if self.turns.prepare(turn):
            self._begin(turn)

    def _begin(self, turn: Turn) -> None:
        job = partial(self._or_fail, turn.stream, self._accept_turn, turn)
        self._or_fail(turn.stream, self.preparation.put, turn.received.size, job)

    def _ended(self, turn: Turn, outcome: str) -> None:
        """Handle the end of a turn's stream. Any thread."""
        conversation, reason = turn.conversation, ""
        if outcome == "ok" and conversation is not None:
            turn.close()
        elif turn.start:
            reason = f"its first round failed ({outcome})"
        elif outcome == "not_found":
            reason = "the engine does not have it"
        if turn.end:
            reason = "it has ended (sequence_end)"
        if reason:
            self._drop(turn.key, reason)
        following = self.turns.leave(turn)
        if following is not None:
            self._begin(following)

    def _drop(self, key: Any, reason: str) -> None:
        dropped = self.conversations.drop(key, reason)
        if dropped is not None:
            self.link.end_session(dropped.number)

    # ------------------------------------------------------------ a round

    def _receive(self, request: Any, stream: Stream) -> Received:
        """Return the request without its first axis."""
        received = super()._receive(request, stream)
        for name in CONTROLS:
            received.inputs.arrays.pop(name, None)
        without_axis(received.inputs)
        return received

    def _accept_turn(self, turn: Turn) -> None:
        if not turn.stream.ended:
            self.accept_turn(turn)

    def accept_turn(self, turn: Turn) -> None:
        received, stream, limits = turn.received, turn.stream, self.limits()
        inputs, streams = received.inputs, self.settings.decoupled
        new = read_prompts(inputs, limits, received.envelope)
        if any(new.learned):
            found = "prompt_learning_task_name_ids or request_prompt_embedding was sent"
            raise RequestError(
                f"{found}; a session, whose tokens outlive its requests, takes no prompt table"
            )
        conversation = turn.conversation = self._conversation(turn, inputs, new)
        counts = read_counts(inputs, new, limits)
        prompts = _continued(conversation, new)
        width, most = prompts.ids.shape[1], max(counts)
        _check_session(conversation, new, most)
        responses = max(1, *counts) if streams else 1
        received.envelope.check_response(new.batch, width, most, 0, responses)
        sequences = read_sequences(inputs, _for_engine(new, turn.start), counts, limits)
        round_ = self._round(turn, conversation, new)
        history = [] if turn.start else conversation.history
        stream.answer = Answer(
            prompts,
            counts,
            _Deeper(received.outputs),
            any(sequence.params.return_log_probs for sequence in sequences),
            0,
            stream.behind if streams else None,
        )
        priorities = fields.priorities(inputs, received.parameters, new.batch)
        if min(priorities) != max(priorities):
            raise RequestError("priority differs between the rows of one request; send them apart")
        turn.set_prompts([row[:length].tolist() for row, length in zip(prompts.ids, prompts.lengths)])
        sink = partial(_pass_on, turn)
        self.submit(stream, [Submission(sequences, sink, priorities[0], round_, history)], received)

    def _conversation(self, turn: Turn, inputs: Inputs, new: Prompts) -> Conversation:
        """Return the turn's conversation, or a new one that replaces another of the same sequence id."""
        session_len, memory_len = _one(inputs, "session_len", new), _one(inputs, "memory_len", new)
        if not turn.start:
            conversation = self.conversations.get(turn.key)
            for name, sent, held in (
                ("session_len", session_len, conversation.session_len),
                ("memory_len", memory_len, conversation.memory_len),
            ):
                if sent not in (None, held):
                    raise RequestError(f"{name} is {sent}; the session began with {held}")
            if new.batch != len(conversation.rows):
                found = f"input_ids has {new.batch} rows; the session has {len(conversation.rows)}"
                raise RequestError(f"{found}, and every round of it as many")
            return conversation
        if session_len is None:
            raise RequestError("input session_len is missing; the first round of a session needs it")
        limit = self.limits().max_sequence_tokens
        if not 0 < session_len <= limit:
            wanted = f"1 to {limit:,} (max_sequence_tokens in config.pbtxt)"
            raise RequestError(f"session_len is {session_len}; this model accepts {wanted}")
        if memory_len == 0:
            raise RequestError("memory_len is 0; wanted 1 or more, or no memory_len")
        self._drop(turn.key, "it was started again")
        return self.conversations.begin(turn.key, session_len, memory_len or session_len, new.batch)

    def _round(self, turn: Turn, conversation: Conversation, new: Prompts) -> SessionRound:
        retained = [] if turn.start else conversation.stored
        if turn.start:
            conversation.leads = [
                [] if length else [start_id] for length, start_id in zip(new.lengths, new.start_ids)
            ]
            self.conversations.add(turn.key, conversation)
        return SessionRound(
            conversation.number,
            conversation.session_len,
            retained,
            conversation.memory_len,
            self.idle_s,
        )


def _control(request: Any, name: str, default: bool) -> bool:
    """Return a control input of Triton's sequence batcher."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else bool(tensor.as_numpy().any())


def _one(inputs: Inputs, name: str, new: Prompts) -> int | None:
    values = set(inputs.rows(name, new.batch))
    if len(values) > 1:
        raise RequestError(f"{name} differs between the rows of one session; wanted one value")
    return values.pop()


def _continued(conversation: Conversation, new: Prompts) -> Prompts:
    """Return history and prompt of each row, without padding between: the answer begins with them."""
    history = max(map(len, conversation.rows))
    ids = np.zeros((new.batch, history + new.ids.shape[1]), np.int64)
    lengths = []
    for row, (tokens, length) in enumerate(zip(conversation.rows, new.lengths)):
        ids[row, : len(tokens)] = tokens
        ids[row, len(tokens) : len(tokens) + length] = new.ids[row, :length]
        lengths.append(len(tokens) + length)
    return replace(new, ids=ids, lengths=lengths)


class _NewTokens(Prompts):
    """Prompts of a later round, in which an empty row adds no token."""

    def tokens(self, row: int) -> np.ndarray:
        return self.ids[row, : self.lengths[row]]


def _for_engine(new: Prompts, start: bool) -> Prompts:
    return new if start else _NewTokens(**vars(new))


def _check_session(conversation: Conversation, new: Prompts, most: int) -> None:
    """Raise RequestError if history, new tokens and output, each counted once, do not fit."""
    width = max(1, new.ids.shape[1])
    total = conversation.longest + width + most
    if total > conversation.session_len:
        found = f"the session has {conversation.longest:,} tokens, input_ids has a width of {width:,} and "
        found += f"request_output_len asks for {most:,} more, {total:,} in all"
        raise RequestError(f"{found}; wanted at most session_len, {conversation.session_len:,}")
    if width > conversation.memory_len:
        found = f"memory_len is {conversation.memory_len:,} and input_ids has a width of {width:,}"
        raise RequestError(f"{found}; wanted a memory_len of the width or more")


def _pass_on(turn: Turn, event: Event) -> None:
    """Pass on an event of a round. Runs on the link's thread."""
    if event.code == "NOT_FOUND":
        event = Event(event.request, 0, finish="error", error=gone(turn.key, event.error), code=event.code)
    turn.take(event)
    turn.stream.put(event)


class _Deeper(Outputs):
    """Makes output tensors with one more leading axis."""

    def __init__(self, outputs: Outputs):
        self._types = outputs._types

    def tensors(self, arrays: Mapping[str, Any]) -> list:
        return super().tensors(with_axis(arrays))
