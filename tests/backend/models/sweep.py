"""Random checkpoints of every family, through conversion in memory, against transformers.

    python -m tests.backend.models.sweep [checkpoints of each family] [first seed] [cpu|cuda]

prints a line for each checkpoint and the totals. Drawn are head counts, head sizes, MLP widths, biases,
rotary settings, tied and untied heads, residual forms.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.checkpoints import FAMILIES, FamilyCase
from tridecode.backend.wire.messages import SamplingParams

LENGTHS = (1, 6, 19, 33)
NEW = 10


@dataclass(frozen=True)
class Result:
    """The result of one checkpoint. error: largest difference of a logit up to the first token that differs,
    as a share of the largest logit; margin: between transformers' two best logits there, 0 if none
    differs."""

    settings: dict[str, Any]
    prompts: int
    agreeing: int
    error: float
    margin: float
    distinct: int


def compare(case: FamilyCase, random: Random, device: str = "cpu") -> Result:
    """A model drawn by `case`, greedy, all prompts in one batch."""
    settings = case.draw(random)
    model = case(seed=random.getrandbits(30), **settings)
    prompts = prompts_of(list(LENGTHS), model.config.vocab_size, seed=random.getrandbits(30))
    answers = offline_engine(model, device).generate(prompts, SamplingParams(max_tokens=NEW))
    agreeing, error, margin, seen = 0, 0.0, 0.0, set()
    for prompt, answer in zip(prompts, answers):
        tokens, logits = hf_greedy(model, prompt, NEW)
        steps = next((i for i, pair in enumerate(zip(tokens, answer.tokens)) if pair[0] != pair[1]), NEW)
        compared = slice(0, min(steps + 1, NEW))
        difference = np.abs(np.stack(answer.logits)[compared] - logits[compared]).max()
        error = max(error, float(difference / np.abs(logits).max()))
        agreeing += steps == NEW
        if steps < NEW:
            margin = max(margin, float(np.diff(np.sort(logits[steps])[-2:])[0]))
        seen.update(tokens)
    return Result(settings, len(prompts), agreeing, error, margin, len(seen))


def main(count: str = "20", first: str = "1000", device: str = "cpu") -> None:
    for family, case in FAMILIES.items():
        results = []
        for seed in range(int(first), int(first) + int(count)):
            results.append(compare(case, Random(f"{family} {seed}"), device))
            print(family, seed, results[-1], flush=True)
        print(
            f"{family}: {count} checkpoints, {sum(r.agreeing for r in results)} of "
            f"{sum(r.prompts for r in results)} prompts with equal tokens, largest relative logit error "
            f"{max(r.error for r in results):.1e}, largest margin of a difference "
            f"{max(r.margin for r in results):.1e}, least distinct tokens {min(r.distinct for r in results)}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
