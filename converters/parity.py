"""Compares a converted model with transformers: greedy tokens and logits on fixed prompts, the tokenizer on
fixed texts, the head's tying, and every weight file with its checksum.

The reference is transformers' model of the source checkpoint, its weights rounded to the dtype of the files
and its arithmetic in float32 if memory allows. The remaining difference is rounding in the arithmetic: a
wrong layout or a lost tensor gives an error thousands of times the bound, the wrong GELU five times.
"""

from __future__ import annotations

import gc
import math
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from tridecode.backend.config import EngineConfig, ModelConfig
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.engine.settings import choose_device
from tridecode.backend.host_memory import available_memory
from tridecode.backend.models import family, read_model_config
from tridecode.backend.weights import TORCH_DTYPES, WeightReader
from tridecode.converters.checkpoint import Checkpoint
from tridecode.converters.convert import PlannedConversion
from tridecode.converters.parity_files import (
    LmHead,
    Shards,
    TokenizerParity,
    check_shards,
    compare_tokenizers,
    compared_checksums,
    is_tied,
    lm_head,
)
from tridecode.converters.quantized_parity import Floor, QuantizationParity, compare_quantized
from tridecode.converters.tokenizer import PROBES, load_tokenizer

PARITY_FORMAT = "tridecode-parity-1"
NEW_TOKENS = 8
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


@dataclass
class Parity:
    """PARITY.json: the comparison and its result. Logits are absolute, shares lie in [0, 1].

    reference_difference: largest logit difference of transformers' own runs in two precisions; 0 if it was
    not measured, as the usual bound held. quantization: of a quantised directory, which this judges in place
    of the logits' bound, then 0. tokenizer_round_trip: None without a tokenizer.
    """

    passed: bool
    source: str
    family: str
    weight_dtype: str
    engine: dict[str, str]
    reference: dict[str, str]
    largest_logit_error: float
    logit_error_bound: float
    largest_logit: float
    greedy_agreement: float
    smallest_margin: float
    tokenizer: TokenizerParity
    lm_head: LmHead
    shards: Shards
    prompts: list[PromptParity]
    reference_difference: float = 0.0
    quantization: QuantizationParity | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: str = PARITY_FORMAT

    def as_dict(self) -> dict:
        return asdict(self)

    def summary(self) -> str:
        """One line for people, with every part that did not pass."""
        parts = [
            f"largest logit error {self.largest_logit_error:.2g} (bound {self.logit_error_bound:.2g}), "
            f"greedy tokens equal on {self.greedy_agreement:.0%} of {len(self.prompts)} prompts"
        ]
        if self.quantization is not None:
            parts = [self.quantization.summary()]
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
    a tokenizer: twice as many of the latter."""
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
) -> Parity:
    """Run both models on fixed_prompts, compare the tokenizer, the head's tying and the weight files.

    `passed` tells whether every difference of logits is one of rounding, and whether there is no other.
    tokenizer_file: a door's; None: the repository has none. source_tokenizer: transformers', to compare with;
    None: that of the checkpoint. quantized: the conversion of a quantised directory, and what it must reach
    in place of equal logits.
    """
    shards = check_shards(WeightReader(weights, read_model_config(weights)))
    tokenizer, compared_tokenizer = None, TokenizerParity()
    if tokenizer_file is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        compared_tokenizer = compare_tokenizers(tokenizer, source_tokenizer or load_tokenizer(checkpoint))
    described = fixed_prompts(tokenizer, config)
    prompts = [ids for _, ids in described]
    device = choose_device(EngineConfig())
    reference_dtype = _reference_dtype(checkpoint, config, device)
    torch_dtype = TORCH_DTYPES[reference_dtype]
    reference, source_tied = _reference_greedy(checkpoint, config, prompts, torch_dtype, device)
    # a CPU computes in float32 whatever the files hold: 16 bit is slower there
    engine_dtype = config.weight_dtype if device.type == "cuda" else "fp32"
    engine = EngineConfig(
        data_type=engine_dtype,
        max_sequences=16,
        max_sequence_tokens=max(map(len, prompts)) + NEW_TOKENS,
        verify_weights="sizes",  # check_shards has read every byte
    )
    ours = run_greedy(weights, prompts, NEW_TOKENS, engine)
    bound_share = max(_BOUNDS[engine_dtype], _BOUNDS[reference_dtype])
    largest = max(float(np.abs(logits).max()) for logits in reference[1])
    facts: dict[str, Any] = dict(
        source=checkpoint.path.name,
        family=config.family,
        weight_dtype=config.weight_dtype,
        engine={"device": device.type, "dtype": engine_dtype},
        reference={"device": device.type, "dtype": reference_dtype},
        largest_logit=largest,
        tokenizer=compared_tokenizer,
        lm_head=lm_head(source_tied, config.tied_head, weights),
        shards=shards,
        checksums=compared_checksums(weights, tokenizer_file),
        versions=_versions(),
    )
    compared = _compare(described, ours, reference)
    if quantized is not None:
        planned, floor = quantized
        facts["quantization"] = compare_quantized(planned, weights, ours, reference, floor)
        return judge(compared, 0.0, **facts)
    parity = judge(compared, bound_share * largest, **facts)
    other_dtype = _other_dtype(checkpoint, engine_dtype, torch_dtype, device)
    if _explained(compared, bound_share * largest) or other_dtype is None:
        return parity
    other, _ = _reference_greedy(checkpoint, config, prompts, other_dtype, device)
    difference = max(item.logit_error for item in _compare(described, other, reference))
    bound = max(bound_share * largest, _OWN_DIFFERENCES * difference)
    return judge(compared, bound, reference_difference=difference, **facts)


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


_Greedy = tuple[list[list[int]], list[np.ndarray]]  # tokens and logits, prompt by prompt


def _compare(described: list[tuple[str, list[int]]], ours: _Greedy, theirs: _Greedy) -> list[PromptParity]:
    pairs = zip(described, *ours, *theirs, strict=True)
    return [compare_prompt(text, ids, a, b, c, d) for (text, ids), a, b, c, d in pairs]


def _other_dtype(
    checkpoint: Checkpoint, engine_dtype: str, reference: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """The precision of transformers' second run: the engine's, or float64 if that is the reference's own.
    None if memory is short."""
    if TORCH_DTYPES[engine_dtype] != reference:
        return TORCH_DTYPES[engine_dtype]
    return torch.float64 if _fits(checkpoint, torch.float64, device) else None


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


def judge(compared: list[PromptParity], bound: float, **facts) -> Parity:
    """Passed: rounding explains the differences of logits and tokens; tokenizer, head and shards are right.

    facts: the other fields of Parity.
    """
    files = (facts["tokenizer"], facts["lm_head"], facts["shards"])
    quality: QuantizationParity | None = facts.get("quantization")
    fine = _explained(compared, bound) if quality is None else quality.passed
    return Parity(
        passed=fine and all(part.passed for part in files),
        largest_logit_error=max(item.logit_error for item in compared),
        logit_error_bound=bound,
        greedy_agreement=sum(item.agrees for item in compared) / len(compared),
        smallest_margin=min(item.margin for item in compared),
        prompts=compared,
        **facts,
    )


def _explained(compared: list[PromptParity], bound: float) -> bool:
    """No logit differs by more than `bound`, and no token unless the two best are within 2 bounds."""
    within = all(item.logit_error <= bound for item in compared)  # a NaN compares false
    return within and all(item.agrees or item.margin <= 2 * bound for item in compared)


def _reference_dtype(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> str:
    """fp32 if memory allows, else the dtype of the files."""
    return "fp32" if _fits(checkpoint, torch.float32, device) else config.weight_dtype


def _fits(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether twice the model's size in this dtype is free."""
    parameters = sum(int(np.prod(shape)) for shape in checkpoint.tensors.shapes.values())
    return 2 * dtype.itemsize * parameters < _free_memory(device)


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def too_large(config: ModelConfig) -> str:
    """Why the comparison would not fit the memory of this machine; "" if it does. For a sentence.

    The reference is loaded on the CPU in the dtype of the files, or wider; after it the engine on its device,
    on a CPU in fp32.
    """
    parameters = sum(math.prod(spec.shape) for spec in family(config.family).weight_specs(config))
    device = choose_device(EngineConfig())
    item = TORCH_DTYPES[config.weight_dtype].itemsize
    sizes = {torch.device("cpu"): item * parameters}
    sizes[device] = parameters * (item if device.type == "cuda" else 4)
    for place, size in sizes.items():
        free = _free_memory(place)
        if 1.1 * size > free:
            return (
                f"the comparison needs {size / 2**30:,.1f} GiB of memory ({place.type}), and "
                f"{free / 2**30:,.1f} GiB are available"
            )
    return ""


def _reference_greedy(
    checkpoint: Checkpoint,
    config: ModelConfig,
    prompts: list[list[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[_Greedy, bool | None]:
    """transformers' tokens and logits, and whether its head is tied."""
    model: Module = checkpoint.reference_model(TORCH_DTYPES[config.weight_dtype])
    tied = is_tied(model)
    model = model.to(device=device, dtype=dtype)
    try:
        with torch.inference_mode():
            results = [_greedy(model, prompt, device) for prompt in prompts]
    finally:
        del model  # the engine needs its memory next
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ([tokens for tokens, _ in results], [logits for _, logits in results]), tied


def _greedy(model: Module, prompt: list[int], device: torch.device) -> tuple[list[int], np.ndarray]:
    """NEW_TOKENS greedy tokens, past any end id, and their logits (NEW_TOKENS, V) float32."""
    tokens, rows, cache = [], [], None
    ids = torch.tensor([prompt], device=device)
    for _ in range(NEW_TOKENS):
        output = model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values  # None: a reference model of ours computes all tokens again
        rows.append(output.logits[0, -1].float().cpu().numpy())
        tokens.append(int(rows[-1].argmax()))
        newest = torch.tensor([tokens[-1:]], device=device)
        ids = newest if cache is not None else torch.cat([ids, newest], dim=1)
    return tokens, np.stack(rows)


def _versions() -> dict[str, str]:
    names = ("tridecode", "torch", "transformers", "tokenizers", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
