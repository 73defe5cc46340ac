"""PARITY.json: the comparison of a converted model with its reference, and whether it passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tridecode.converters.parity.files import (
    LmHead,
    Shards,
    TokenizerParity,
)
from tridecode.converters.parity.grades import grade, lower
from tridecode.converters.parity.quantized import QuantizationParity
from tridecode.converters.parity.record import PARITY_FORMAT
from tridecode.converters.parity.text import TextParity


@dataclass(frozen=True)
class PromptParity:
    """One prompt. steps: number of steps compared, up to and including the first with different tokens.

    margin: between transformers' two best logits at that last step, or the smallest margin if no token
    differs.
    """

    prompt: str
    tokens: int
    steps: int
    agrees: bool
    logit_error: float
    margin: float

    @property
    def equal_steps(self) -> int:
        return self.steps if self.agrees else self.steps - 1


@dataclass
class Parity:
    """PARITY.json: the comparison and its result. Logits are absolute, shares lie in [0, 1].

    greedy_agreement: share of the steps of `prompts` with transformers' token. logit_error_bound: None for a
    quantised directory, which `quantization` judges instead. reference_difference: largest logit difference
    of transformers' own runs in two precisions; None if it was not measured, as the usual bound held. text:
    of given texts, which must be within the same bound, or floor. tokenizer_round_trip: None without a
    tokenizer. reference: device, dtype, `of`: its checkpoint or weight directory, `independent`: false for a
    weight directory, which the same reader has read, `tensors`: who read those of a GGUF file, and
    `vocab_size` where the models' sizes differ.
    foreign_tokens: greedy tokens that the reference does not have.
    """

    passed: bool
    source: str
    family: str
    weight_dtype: str
    engine: dict[str, str]
    reference: dict[str, Any]
    largest_logit_error: float
    logit_error_bound: float | None
    largest_logit: float
    greedy_agreement: float
    smallest_margin: float
    tokenizer: TokenizerParity
    lm_head: LmHead
    shards: Shards
    prompts: list[PromptParity]
    reference_difference: float | None = None
    foreign_tokens: int = 0
    quantization: QuantizationParity | None = None
    text: TextParity | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: str = PARITY_FORMAT

    @property
    def passed_floor(self) -> bool:
        """Return whether the predictions of a quantised model are close enough to its source's."""
        return _reaches_floor(self.quantization, self.text)

    @property
    def grade(self) -> str:
        """The lower one of the fixed prompts and of the given texts; "" for a model that is not quantised."""
        if self.quantization is None:
            return ""
        on_text = "" if self.text is None else grade(self.text.mean_kl, self.text.agreement)
        return lower(self.quantization.grade, on_text)

    @property
    def compared_with(self) -> str:
        """The reference in words."""
        if self.reference.get("independent", True):
            return "transformers"
        return (
            f"transformers' model of the files of {self.reference['of']} (not independent: a wrong "
            "config.ini or conversion would not show; --reference CHECKPOINT compares with their source)"
        )

    def as_dict(self) -> dict:
        return asdict(self)

    def summary(self) -> str:
        """One line for people, with every part that did not pass."""
        bound = "" if self.logit_error_bound is None else f" (bound {self.logit_error_bound:.2g})"
        steps = sum(item.steps for item in self.prompts)
        parts = [
            f"largest logit error {self.largest_logit_error:.2g}{bound}, greedy tokens equal on "
            f"{self.greedy_agreement:.1%} of {steps} steps"
        ]
        if self.quantization is not None:
            parts = [self.quantization.summary()]
        if self.text is not None:
            parts.append(self.text.summary())
        if "vocab_size" in self.reference:
            parts.append(f"compared on the {self.reference['vocab_size']} token ids that both models have")
        if self.foreign_tokens:
            parts.append(f"{self.foreign_tokens} greedy tokens are ids that the reference does not have")
        if not self.tokenizer.passed:
            parts.append(f"tokenizer agrees on {self.tokenizer.agreement:.0%} of the texts")
        if not self.lm_head.passed:
            head = self.lm_head
            parts.append(f"lm_head {head.source} in the source, {head.stored} stored, {head.served} served")
        if self.shards.damaged:
            parts.append(f"{len(self.shards.damaged)} damaged weight files: {self.shards.damaged[0]}")
        return "; ".join(parts)


def compare_prompt(
    text: str,
    ids: list[int],
    ours: list[int],
    our_logits: np.ndarray,
    theirs: list[int],
    their_logits: np.ndarray,
) -> PromptParity:
    """Compare up to the first token that differs: later tokens have another prefix."""
    differing = next((step for step, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
    steps = len(theirs) if differing is None else differing + 1
    error = float(np.abs(our_logits[:steps] - their_logits[:steps]).max())
    best = np.sort(their_logits[:steps], axis=-1)
    margins = best[:, -1] - best[:, -2]
    margin = float(margins.min() if differing is None else margins[-1])
    return PromptParity(text, len(ids), steps, differing is None, error, margin)


def judge(compared: list[PromptParity], bound: float | None, **facts) -> Parity:
    """Return the Parity. It passes if rounding explains the differences of logits and tokens, and tokenizer,
    head and shards are right.

    bound: limit of the logits' error; None for a quantised directory. facts: the other fields of Parity.
    """
    files = (facts["tokenizer"], facts["lm_head"], facts["shards"])
    quality: QuantizationParity | None = facts.get("quantization")
    text: TextParity | None = facts.get("text")
    fine = _reaches_floor(quality, text) if bound is None else explained(compared, bound)
    if text is not None and bound is not None:  # it is a share of the largest logit
        share = max(1.0, text.largest_logit / facts["largest_logit"])
        fine = fine and text.largest_logit_error <= bound * share
    return Parity(
        passed=fine and all(part.passed for part in files),
        largest_logit_error=max(item.logit_error for item in compared),
        logit_error_bound=bound,
        greedy_agreement=sum(item.equal_steps for item in compared) / sum(item.steps for item in compared),
        smallest_margin=min(item.margin for item in compared),
        prompts=compared,
        **facts,
    )


def _reaches_floor(quality: QuantizationParity | None, text: TextParity | None) -> bool:
    if quality is None:
        return True
    return quality.passed and (text is None or quality.floor.is_reached(text.mean_kl, text.agreement))


def explained(compared: list[PromptParity], bound: float) -> bool:
    """Return whether no logit differs by more than `bound`, and no token unless the two best are within 2
    bounds.
    """
    within = all(item.logit_error <= bound for item in compared)  # a NaN compares false
    return within and all(item.agrees or item.margin <= 2 * bound for item in compared)
