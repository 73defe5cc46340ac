"""The logits that a step returns, for prompt tokens and for samples. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import ints, read, read_ints
from tridecode.backend.engine.schedule.sequence import Stage
from tridecode.backend.engine.step.plan import Commit, StepPart, StepPlan

_Index = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class LogitRows:
    """Prompt logits that a step returns: `count` tokens of the plan's row `row`, starting at its token
    `first`.

    targets: (count,) int32, the ids that follow these tokens; only the sum of their log probabilities is
        returned. None: the logits are returned.
    """

    row: int
    first: int
    count: int
    targets: np.ndarray | None = None


@dataclass
class FoundLogits:
    """The logits of a step. rows: for each of ReturnedLogits.rows (n, V) float32, or () float64 with targets.
    samples: (n, V) float32, n = len(ReturnedLogits.samples); None if it is empty.
    """

    rows: list[np.ndarray]
    samples: np.ndarray | None = None


class _Rows(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    row: _Index
    first: _Index
    count: _Index
    targets: bytes | None


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    rows: list[_Rows]
    samples: list[_Index]


_decoder = msgspec.msgpack.Decoder(_Frame)


@dataclass
class ReturnedLogits(StepPart):
    """Requests logits. rows: those of prompts. samples: indices, in row order, of the samples whose logits
    are returned. Result: FoundLogits.
    """

    tag = "logits"
    rows: list[LogitRows] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    @property
    def captures(self) -> bool:
        return not self.samples  # logits of prompts are computed after the graph

    def encode(self) -> Any:
        return _Frame(
            [
                _Rows(w.row, w.first, w.count, None if w.targets is None else ints(w.targets))
                for w in self.rows
            ],
            self.samples,
        )

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> ReturnedLogits:
        found, queries = read(_decoder, data, where), np.diff(plan.query_starts)
        for one in found.rows:
            if not (one.row < plan.num_rows and one.first + one.count <= queries[one.row]):
                raise TridecodeError(
                    f"{where} has tokens {one.first} to {one.first + one.count} of row {one.row}, which the "
                    "plan does not have"
                )
        if found.samples and max(found.samples) >= plan.num_samples:
            raise TridecodeError(
                f"{where} has sample {max(found.samples)}; the plan has {plan.num_samples} samples"
            )
        return cls([_logit_rows(one, where) for one in found.rows], found.samples)

    def commit(self, step: Commit, found: FoundLogits) -> None:
        """Add the logits to the `extras` of their sequences."""
        plan = step.plan
        for wanted, logits in zip(self.rows, found.rows):
            sequence = plan.sequences[wanted.row]
            if sequence.extra_outputs is None or sequence.stage is Stage.ENDED:
                continue
            if wanted.targets is None:
                sequence.extra_outputs.context.append(_bytes(logits))
            else:
                sequence.extra_outputs.log_prob += float(logits)
        if found.samples is not None:
            kept = step.kept
            for sequence in {step.sampled[index] for index in self.samples}:
                if sequence.extra_outputs is not None:
                    sequence.extra_outputs.generation = []
            for index, logits in zip(self.samples, found.samples):
                sequence = step.sampled[index]
                if kept[index] and sequence.extra_outputs is not None and sequence.stage is not Stage.ENDED:
                    sequence.extra_outputs.generation.append(_bytes(logits))
        step.news += [plan.sequences[wanted.row] for wanted in self.rows if not plan.samples[wanted.row]]


def _logit_rows(found: _Rows, where: str) -> LogitRows:
    where = f"{where}: targets of row {found.row}"
    targets = None if found.targets is None else read_ints(found.targets, found.count, where)
    return LogitRows(found.row, found.first, found.count, targets)


def _bytes(logits: np.ndarray) -> memoryview:
    """Return the logits' bytes without a copy: those of a prompt can have 100 MB, and the next step waits."""
    return np.ascontiguousarray(logits, "<f4").data.cast("B")
