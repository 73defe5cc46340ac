"""Turns the engine's events into responses of TensorRT-LLM's token model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tridecode.backend.doors.answers.logit_tensors import WantedLogits, metrics, piece_logits
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.door import Outputs
from tridecode.backend.doors.door_settings import DoorSettings
from tridecode.backend.text.completion import FINISH_REASONS
from tridecode.backend.wire.messages import Event, EventExtra


class _Piece(NamedTuple):
    """The part of one response that belongs to one sequence; see TokenSequence."""

    ids: list[int]
    log_probs: list[float]
    cum_log_prob: float
    num_tokens: int
    num_prompt_tokens: int
    finish_reason: str
    extras: list[tuple[int, EventExtra]]


_NO_SEQUENCE = _Piece([], [], 0.0, 0, 0, "", [])


class TokenSequence:
    """The answer of one sequence. Buffers the tokens that have not been reported yet.

    log_probs: natural logarithms, one per generated token, including an end id, which is not among the ids.
    """

    def __init__(self, prompt: list[int], num_prompt_tokens: int, place: tuple[int, int] = (0, 0)):
        """prompt: ids reported ahead of the new ones. place: (row of the request, index of the sequence in
        the row).
        """
        self.finish_reason = ""  # "": it has not ended
        self.num_tokens = 0  # not reported yet
        self.place = place
        self._ids = list(prompt)
        self._num_prompt_tokens = num_prompt_tokens
        self._log_probs: list[float] = []
        self._cum_log_prob = 0.0
        self._extras: list[tuple[int, EventExtra]] = []

    def take(self, event: Event) -> None:
        """Add an event; events after the end are ignored. The caller handles failures (Event.error)."""
        if self.finish_reason:
            return
        self._ids += event.tokens[:-1] if event.finish == "end_id" else event.tokens
        self.num_tokens += len(event.tokens)
        self._log_probs += event.log_probs
        self._cum_log_prob += sum(event.log_probs)
        if event.extra is not None:
            self._extras.append((len(event.tokens), event.extra))
        if event.finish:
            self.finish_reason = FINISH_REASONS.get(event.finish, event.finish)

    def report(self) -> _Piece:
        """Return everything since the last report."""
        piece = _Piece(
            self._ids,
            self._log_probs,
            self._cum_log_prob,
            self.num_tokens,
            self._num_prompt_tokens,
            self.finish_reason,
            self._extras,
        )
        self._ids, self._log_probs, self.num_tokens, self._extras = [], [], 0, []
        return piece


#: output -> the input that requests it, and its default
_OPTIONAL = {
    "cum_log_probs": ("return_log_probs", False),
    "output_log_probs": ("return_log_probs", False),
    "num_input_tokens": ("return_num_input_tokens", True),
    "num_output_tokens": ("return_num_output_tokens", True),
}


@dataclass(frozen=True)
class Layout:
    """The layout of a request's response tensors.

    apart: each row has responses of its own. fill: for each row the id that pads it to the longest one.
    logits: the requested ones, vocab_size values each.
    """

    outputs: Outputs
    unwanted: frozenset[str]
    apart: bool
    fill: list[int]
    logits: WantedLogits
    vocab_size: int

    @classmethod
    def of(
        cls, inputs: Inputs, outputs: Outputs, settings: DoorSettings, fill: list[int], vocab_size: int
    ) -> Layout:
        unwanted = {name for name, (flag, default) in _OPTIONAL.items() if not inputs.flag(flag, default)}
        logits = WantedLogits.of(inputs)
        return cls(outputs, frozenset(unwanted), settings.decoupled, fill, logits, vocab_size)

    def tensors(self, pieces: dict[int, list[_Piece]], first: int) -> list:
        """Return one response: for each row its sequences, at most K.

        output_ids [rows, K, n]; a row with fewer sequences has a sequence_length of 0 for the others. first:
        index of the first sequence.
        """
        rows = list(pieces.values())
        most = max(map(len, rows))
        table = [row + [_NO_SEQUENCE] * (most - len(row)) for row in rows]
        flat = [piece for row in table for piece in row]
        ids = np.empty((len(rows), most, max(len(piece.ids) for piece in flat)), np.int64)
        ids[:] = np.array([self.fill[row] for row in pieces])[:, None, None]
        for at, row in enumerate(table):
            for index, piece in enumerate(row):
                ids[at, index, : len(piece.ids)] = piece.ids
        counts = {
            "sequence_length": tuple(tuple(len(piece.ids) for piece in row) for row in table),
            "batch_index": tuple((row,) for row in pieces),
            "sequence_index": ((first,),) * len(rows),
            "num_input_tokens": tuple((row[0].num_prompt_tokens,) for row in rows),
            "num_output_tokens": tuple((sum(piece.num_tokens for piece in row),) for row in rows),
        }
        arrays: dict[str, Any] = {}
        if "output_log_probs" not in self.unwanted:
            longest = max(len(piece.log_probs) for piece in flat)
            arrays["cum_log_probs"] = [[piece.cum_log_prob for piece in row] for row in table]
            arrays["output_log_probs"] = [
                [piece.log_probs + [0.0] * (longest - len(piece.log_probs)) for piece in row] for row in table
            ]
        if all(piece.finish_reason for row in rows for piece in row):
            arrays["finish_reason"] = [[row[0].finish_reason.encode()] for row in rows]
        arrays.update(self._event_extras(table))
        return [
            *self.outputs.tensors({"output_ids": ids}),
            *self.outputs.repeated({k: v for k, v in counts.items() if k not in self.unwanted}),
            *self.outputs.tensors({k: v for k, v in arrays.items() if k not in self.unwanted}),
        ]

    def _event_extras(self, table: list[list[_Piece]]) -> dict[str, Any]:
        """Logits, [rows, L, V] and [rows, K, n, V], and metrics, [rows, 1]."""
        flat = [piece.extras for row in table for piece in row]
        if not any(flat):
            return {}
        arrays: dict[str, Any] = piece_logits(self.logits, flat, self.vocab_size)
        most = len(table[0])
        if "context_logits" in arrays:
            arrays["context_logits"] = arrays["context_logits"][::most]
        if "generation_logits" in arrays:
            shape = (len(table), most, *arrays["generation_logits"].shape[2:])
            arrays["generation_logits"] = arrays["generation_logits"].reshape(shape)
        columns = metrics([[extra for piece in row for extra in piece.extras] for row in table])
        return {**arrays, **{name: [[value] for value in column] for name, column in columns.items()}}


class TokenAnswer:
    """Answers in token ids.

    Streamed: a response for each sequence that has new tokens or has ended. Otherwise one response for all
    rows when the last has ended, or (Layout.apart) one for each sequence as soon as it has ended. The beams
    of a row always share one response, sent when their search is over.
    """

    def __init__(self, sequences: list[TokenSequence], beams: list[bool], layout: Layout, streamed: bool):
        """sequences: those of the first row, then those of the next. beams: for each row whether it is a beam
        search.
        """
        self.finished = False  # every sequence has ended
        self.num_output_tokens = 0  # of all sequences, so far
        self.num_rows = len(sequences)
        self._sequences, self._layout, self._streamed = sequences, layout, streamed
        self._open = set(range(len(sequences)))
        self._apart = streamed or layout.apart
        #: sequences that share a response
        self._units: dict[Any, list[int]] = {}
        for index, one in enumerate(sequences):
            row, _ = one.place
            key: Any = (row if beams[row] else one.place) if self._apart else None
            self._units.setdefault(key, []).append(index)
        self._unit_of = {index: key for key, unit in self._units.items() for index in unit}

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each sequence; "": not ended yet."""
        return [one.finish_reason for one in self._sequences]

    def take(self, events: Sequence[tuple[int, Event]]) -> list[list]:
        for index, event in events:
            self._sequences[index].take(event)
        ready = []
        for key in dict.fromkeys(self._unit_of[index] for index, _ in events):
            unit = self._units[key]
            open_before = self._open.intersection(unit)
            self._open -= {index for index in unit if self._sequences[index].finish_reason}
            ended = bool(open_before) and not self._open.intersection(unit)
            if ended or (self._streamed and len(unit) == 1 and self._sequences[unit[0]].num_tokens):
                ready.append(unit)
        self.finished = not self._open
        return [self._response(unit) for unit in ready]

    def _response(self, unit: list[int]) -> list:
        self.num_output_tokens += sum(self._sequences[index].num_tokens for index in unit)
        pieces: dict[int, list[_Piece]] = {}
        for index in unit:
            pieces.setdefault(self._sequences[index].place[0], []).append(self._sequences[index].report())
        return self._layout.tensors(pieces, self._sequences[unit[0]].place[1])


class EmptyAnswer:
    """Answers a stop request: one response without tensors, because plain infer needs one."""

    finished = True
    num_output_tokens = 0
    finish_reasons = ("stop_request",)

    def take(self, events: Sequence[tuple[int, Event]]) -> list[list]:
        return [[]]
