"""The options of a training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tridecode.tools.train_draft.training import Plan


@dataclass(frozen=True)
class Job:
    """The options of the command. layers: of a draft model. tokens: of the texts, about; 0: by device.
    answer_tokens: of each answer, at most. prompts: file of prompts; None: drawn from the target. held_back:
    prompts that are not trained on. threads: of torch on the CPU; 0: torch's choice. dtype: of the file."""

    model: str
    output: Path
    kind: str
    plan: Plan
    layers: int
    tokens: int
    answer_tokens: int
    held_back: int
    temperature: float
    prompts: Path | None = None
    prompt_tokens: int = 256
    device: str = "auto"
    threads: int = 0
    dtype: torch.dtype = torch.bfloat16
