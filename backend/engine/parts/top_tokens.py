"""The most likely tokens of each sample, for the sequences that request them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tridecode.backend.engine.parts.encoding import ints, read, read_ints
from tridecode.backend.engine.step.plan import Commit, StepPart, StepPlan
from tridecode.backend.wire.messages import TopLogProbs

_decoder = msgspec.msgpack.Decoder(bytes)


@dataclass
class TopTokens(StepPart):
    """counts: (B,) int32, SamplingParams.top_log_probs of each row, -1 for none. Result: one entry per sample
    of the step, None if the sequence did not request them.
    """

    tag = "top_tokens"
    counts: np.ndarray

    @property
    def captures(self) -> bool:
        return True  # unless the device side needs the logits before sampling

    def encode(self) -> Any:
        return ints(self.counts)

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> TopTokens:
        return cls(read_ints(read(_decoder, data, where), plan.num_rows, where))

    def commit(self, step: Commit, found: list[TopLogProbs | None]) -> None:
        for sequence in step.sampled:
            sequence.tops = []
        for sequence, top, is_kept in zip(step.sampled, found, step.kept):
            if top is not None and is_kept:
                sequence.tops.append(top)
