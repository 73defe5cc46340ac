"""Prompt-learning tables that a step uses, receives and frees. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tridecode.backend.engine.parts.encoding import read
from tridecode.backend.engine.prompt_tables.plan import StepPrompts, check_prompts
from tridecode.backend.engine.step.plan import StepPart, StepPlan

_decoder = msgspec.msgpack.Decoder(StepPrompts)


@dataclass
class PromptTables(StepPart):
    """tables: executed before the step. No result."""

    tag = "prompt_tables"
    tables: StepPrompts

    @property
    def captures(self) -> bool:
        """Return whether only token ids are embedded: a graph cannot embed tables.

        Frees and clears precede it.
        """
        return not (self.tables.virtual or self.tables.uploads or self.tables.prefixes)

    def encode(self) -> Any:
        return self.tables

    @classmethod
    def decode(cls, data: msgspec.Raw, plan: StepPlan, where: str) -> PromptTables:
        tables = read(_decoder, data, where)
        check_prompts(tables, plan.num_tokens, where)
        return cls(tables)
