"""Compares a converted model with transformers: greedy tokens and logits on fixed prompts, the tokenizer on
fixed texts, the head's tying, and every weight file with its checksum.

The reference is transformers' model of the source checkpoint, its weights rounded to the dtype of the files
and its arithmetic in float32 if memory allows. The remaining difference is rounding in the arithmetic: a
wrong layout or a lost tensor gives an error thousands of times the bound, the wrong GELU five times.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.resolved_settings import choose_device
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.reader import TORCH_DTYPES, WeightReader
from tridecode.converters.checkpoint import Checkpoint
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.parity.files import (
    LmHead,
    Shards,
    TokenizerParity,
    check_shards,
    compare_tokenizers,
    lm_head,
)
from tridecode.converters.parity.grades import Floor, grade, lower
from tridecode.converters.parity.quantized import ProductsOf, QuantizationParity, compare_quantized
from tridecode.converters.parity.record import PARITY_FORMAT, compared_checksums
from tridecode.converters.parity.reference import (
    NEW_TOKENS,
    Greedy,
    fits,
    reference_dtype,
    reference_greedy,
    reference_vocabulary,
    shared_vocabulary,
)
from tridecode.converters.parity.text import TextComparison, TextParity
from tridecode.converters.quantize.texts import GivenText
from tridecode.converters.tokenizers.files import PROBES, load_tokenizer

MAX_PROMPT_TOKENS = 64
#: prompts of random ids: one token, a few, about a cache block, the longest
_RANDOM_LENGTHS = (1, 5, 33, MAX_PROMPT_TOKENS)
#: largest logit error that rounding explains, as a share of the largest logit; the coarser dtype decides
_BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
#: bound for models that amplify rounding more: a multiple of the difference between transformers' own runs in
#: two precisions
_OWN_DIFFERENCES = 4


@dataclass(frozen=True)
class PromptParity:
    """One prompt. steps: number of steps compared, up to and including the first with different tokens.

    margin: between transformers' two best logits at that last step, or the smallest if no token differs.
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


def fixed_prompts(tokenizer: Tokenizer | None, config: ModelConfig) -> list[tuple[str, list[int]]]:
    """(description, ids): the tokenizer's probes, and random ids of a fixed seed; all fit the model. Without
    a tokenizer: twice as many of the latter. config.vocab_size: of the ids."""
    longest = min(MAX_PROMPT_TOKENS, config.max_positions - NEW_TOKENS)
    prompts = []
    for text in PROBES:
        if tokenizer is None:
            break
        ids = [token for token in tokenizer.encode(text).ids if token < config.vocab_size][:longest]
        if ids:
            prompts.append((text, ids))
    random = np.random.default_rng(20240229)
    lengths = _RANDOM_LENGTHS if tokenizer is not None else (*_RANDOM_LENGTHS, 2, 12, 20, 48)
    for length in sorted({min(length, longest) for length in lengths}):
        prompts.append((f"{length} random ids", random.integers(0, config.vocab_size, length).tolist()))
    return prompts


def check_parity(
    checkpoint: Checkpoint,
    weights: Path,
    config: ModelConfig,
    tokenizer_file: Path | None,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    quantized: tuple[PlannedConversion, Floor] | None = None,
    text: GivenText | None = None,
) -> Parity:
    """Run both models on fixed_prompts, compare the tokenizer, the head's tying and the weight files.

    `passed` tells whether every difference of logits is one of rounding, and whether there is no other.
    tokenizer_file: a door's; None: the repository has none. source_tokenizer: transformers', to compare with;
    None: that of the checkpoint. quantized: the conversion of a quantised directory, and what it must reach
    in place of equal logits. text: also compare on it; needs a tokenizer (ConfigError).
    """
    shards = check_shards(WeightReader(weights, read_model_config(weights)))
    tokenizer, compared_tokenizer = None, TokenizerParity()
    if tokenizer_file is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        source_tokenizer = source_tokenizer or load_tokenizer(checkpoint)
        compared_tokenizer = compare_tokenizers(
            tokenizer_file.parent, tokenizer, source_tokenizer, checkpoint
        )
    # a directory may have padding rows that its checkpoint lacks, and the reverse
    shared = replace(config, vocab_size=shared_vocabulary(checkpoint, config))
    described = fixed_prompts(tokenizer, shared)
    prompts = [ids for _, ids in described]
    device = choose_device(EngineConfig())
    reference_name = reference_dtype(checkpoint, config, device)
    torch_dtype = TORCH_DTYPES[reference_name]
    on_text = None
    if text is not None and tokenizer_file is None:
        raise ConfigError(f"{checkpoint.path} has no tokenizer, and {text.name} has to be tokenised")
    if text is not None:
        text_tokenizer = source_tokenizer or load_tokenizer(checkpoint)
        on_text = TextComparison(text, text_tokenizer, shared, weights.parent, config.vocab_size)
    products = None if quantized is None else ProductsOf(quantized[0], weights, prompts)
    reference, source_tied = reference_greedy(
        checkpoint,
        shared,
        prompts,
        torch_dtype,
        device,
        None if products is None else products.measure,
        None if on_text is None else on_text.read_source,
    )
    # a CPU computes in float32 whatever the files hold: 16 bit is slower there
    engine_dtype = config.weight_dtype if device.type == "cuda" else "fp32"
    engine = EngineConfig(
        data_type=engine_dtype,
        max_sequences=16,
        max_sequence_tokens=max(map(len, prompts)) + NEW_TOKENS,
        verify_weights="sizes",  # check_shards has read every byte
    )
    tokens, logits = run_greedy(weights, prompts, NEW_TOKENS, engine)
    ours = tokens, [rows[:, : shared.vocab_size] for rows in logits]
    bound_share = max(_BOUNDS[engine_dtype], _BOUNDS[reference_name])
    largest = max(float(np.abs(logits).max()) for logits in reference[1])
    facts: dict[str, Any] = dict(
        source=checkpoint.path.name,
        family=config.family,
        weight_dtype=config.weight_dtype,
        engine={"device": device.type, "dtype": engine_dtype},
        reference=_reference_facts(checkpoint, config, shared, device, reference_name),
        foreign_tokens=sum(token >= shared.vocab_size for answer in tokens for token in answer),
        largest_logit=largest,
        tokenizer=compared_tokenizer,
        lm_head=lm_head(source_tied, config.tied_head, weights),
        shards=shards,
        checksums=compared_checksums(weights, tokenizer_file),
        versions=_versions(),
    )
    compared = _compare(described, ours, reference)
    if on_text is not None:
        facts["text"] = on_text.compare(weights, engine)
    if quantized is not None and products is not None:
        planned, floor = quantized
        facts["quantization"] = compare_quantized(planned, weights, ours, reference, floor, products)
        return judge(compared, None, **facts)
    parity = judge(compared, bound_share * largest, **facts)
    other_dtype = _other_dtype(checkpoint, engine_dtype, torch_dtype, device)
    if _explained(compared, bound_share * largest) or other_dtype is None:
        return parity
    other, _ = reference_greedy(checkpoint, shared, prompts, other_dtype, device)
    difference = max(item.logit_error for item in _compare(described, other, reference))
    bound = max(bound_share * largest, _OWN_DIFFERENCES * difference)
    return judge(compared, bound, reference_difference=difference, **facts)


def _reference_facts(
    checkpoint: Checkpoint, config: ModelConfig, shared: ModelConfig, device: torch.device, dtype: str
) -> dict[str, Any]:
    is_directory = checkpoint.plan is not None
    facts = {
        "device": device.type,
        "dtype": dtype,
        "of": checkpoint.path.name,
        "independent": not is_directory,
    }
    if checkpoint.reference_tensors:
        facts["tensors"] = checkpoint.reference_tensors
    if reference_vocabulary(checkpoint, config) != config.vocab_size:
        facts["vocab_size"] = shared.vocab_size
    return facts


def without_reference(
    why: str, source: str, weights: Path, config: ModelConfig, tokenizer_file: Path | None
) -> dict[str, Any]:
    """PARITY.json of a model that there is nothing independent to compare with: passed is null."""
    return {
        "passed": None,
        "source": source,
        "family": config.family,
        "weight_dtype": config.weight_dtype,
        "reference": {"none": why},
        "checksums": compared_checksums(weights, tokenizer_file),
        "versions": _versions(),
        "format": PARITY_FORMAT,
    }


def _compare(described: list[tuple[str, list[int]]], ours: Greedy, theirs: Greedy) -> list[PromptParity]:
    pairs = zip(described, *ours, *theirs, strict=True)
    return [compare_prompt(text, ids, a, b, c, d) for (text, ids), a, b, c, d in pairs]


def _other_dtype(
    checkpoint: Checkpoint, engine_dtype: str, reference: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """The precision of transformers' second run: the engine's, or float64 if that is the reference's own.
    None if memory is short."""
    if TORCH_DTYPES[engine_dtype] != reference:
        return TORCH_DTYPES[engine_dtype]
    return torch.float64 if fits(checkpoint, torch.float64, device) else None


def compare_prompt(
    text: str,
    ids: list[int],
    ours: list[int],
    our_logits: np.ndarray,
    theirs: list[int],
    their_logits: np.ndarray,
) -> PromptParity:
    """Compare up to the first token that differs: what follows has another prefix."""
    differing = next((step for step, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
    steps = len(theirs) if differing is None else differing + 1
    error = float(np.abs(our_logits[:steps] - their_logits[:steps]).max())
    best = np.sort(their_logits[:steps], axis=-1)
    margins = best[:, -1] - best[:, -2]
    margin = float(margins.min() if differing is None else margins[-1])
    return PromptParity(text, len(ids), steps, differing is None, error, margin)


def judge(compared: list[PromptParity], bound: float | None, **facts) -> Parity:
    """Passed: rounding explains the differences of logits and tokens; tokenizer, head and shards are right.

    bound: of the logits' error; None for a quantised directory. facts: the other fields of Parity.
    """
    files = (facts["tokenizer"], facts["lm_head"], facts["shards"])
    quality: QuantizationParity | None = facts.get("quantization")
    text: TextParity | None = facts.get("text")
    fine = _reaches_floor(quality, text) if bound is None else _explained(compared, bound)
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


def _explained(compared: list[PromptParity], bound: float) -> bool:
    """No logit differs by more than `bound`, and no token unless the two best are within 2 bounds."""
    within = all(item.logit_error <= bound for item in compared)  # a NaN compares false
    return within and all(item.agrees or item.margin <= 2 * bound for item in compared)


def _versions() -> dict[str, str]:
    names = ("tridecode", "torch", "transformers", "tokenizers", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
