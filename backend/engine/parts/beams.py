"""Beam rows of a step: they return candidates instead of one token. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import ints, read, read_ints
from tridecode.backend.engine.step.plan import Commit, StepPart, StepPlan
from tridecode.backend.wire.sampling_params import MAX_BEAMS


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    num_rows: Annotated[int, msgspec.Meta(ge=0)]
    width: Annotated[int, msgspec.Meta(ge=1, le=2 * MAX_BEAMS)]
    rows: bytes
    slots: bytes
    tokens: bytes


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class BeamRows(StepPart):
    """The samples of a step that return the most likely tokens instead of one token.

    rows: (n,) int32, index among the step's samples; the slot of such a row is -1 in the plan. width: tokens
    for each. slots: (n,) int32, the batch slots with the sampling state of the beams. tokens: (n,) int32, the
    newest token of each beam, -1 for none, which its slot does not have yet: it is added before the
    candidates are chosen. The host chooses the tokens of beams, so each step carries the choice of the step
    before.

    Result: (n, W) int32 token ids and (n, W) float32 log probabilities, most likely first; the step's tokens
    and log_probs of these rows are undefined.
    """

    tag = "beams"
    rows: np.ndarray
    width: int
    slots: np.ndarray
    tokens: np.ndarray

    @property
    def captures(self) -> bool:
        """Return True: candidates are chosen after the graph, which leaves the logits of these rows
        unchanged.
        """
        return True

    @property
    def reads_samples(self) -> bool:
        return True

    def encode(self) -> Any:
        return _Frame(len(self.rows), self.width, ints(self.rows), ints(self.slots), ints(self.tokens))

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> BeamRows:
        found = read(_decoder, data, where)
        count = found.num_rows
        rows = read_ints(found.rows, count, f"{where}: rows")
        slots = read_ints(found.slots, count, f"{where}: slots")
        tokens = read_ints(found.tokens, count, f"{where}: tokens")
        if (rows < 0).any() or (rows >= plan.num_samples).any():
            raise TridecodeError(f"{where}: rows are not within the {plan.num_samples} samples of the plan")
        if (slots < 0).any() or len(set(slots.tolist())) < count:
            raise TridecodeError(f"{where}: slots are {slots.tolist()}; wanted different slots from 0 on")
        return cls(rows, found.width, slots, tokens)

    def commit(self, step: Commit, found: tuple[np.ndarray, np.ndarray]) -> None:
        rows = self.rows.tolist()
        step.taken += rows
        step.handlers[BeamRows]([step.sampled[row] for row in rows], found)

    def digest(self, tokens: np.ndarray, found: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Return a digest of the candidates, since beams have no sampled token."""
        return np.ascontiguousarray(found[0], np.int32)
