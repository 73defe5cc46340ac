"""Compares a converted model with transformers: greedy tokens and logits on fixed prompts, the tokenizer on
fixed texts, the head's tying, and every weight file with its checksum.

The reference is transformers' model of the source checkpoint, its weights rounded to the dtype of the files
and its arithmetic in float32 if memory allows. The remaining difference is rounding in the arithmetic: a
wrong layout or a lost tensor gives an error thousands of times the bound, the wrong GELU five times.
"""

from __future__ import annotations

import platform
from dataclasses import replace
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
    TokenizerParity,
    check_shards,
    compare_tokenizers,
    lm_head,
)
from tridecode.converters.parity.grades import Floor
from tridecode.converters.parity.quantized import ProductsOf, compare_quantized
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
from tridecode.converters.parity.report import Parity, PromptParity, compare_prompt, explained, judge
from tridecode.converters.parity.text import TextComparison
from tridecode.converters.quantize.texts import GivenText
from tridecode.converters.tokenizers.files import PROBES, load_tokenizer

MAX_PROMPT_TOKENS = 64
#: prompts of random ids: one token, a few, about a cache block, the longest
_RANDOM_LENGTHS = (1, 5, 33, MAX_PROMPT_TOKENS)
#: largest logit error that rounding explains, relative to the largest logit; the coarser dtype applies
_BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
#: bound for models that amplify rounding more: a multiple of the difference between transformers' own runs in
#: two precisions
_OWN_DIFFERENCES = 4


def fixed_prompts(tokenizer: Tokenizer | None, config: ModelConfig) -> list[tuple[str, list[int]]]:
    """(description, ids): the tokenizer's probes, and random ids of a fixed seed; all fit the model. Without
    a tokenizer: twice as many of the latter. config.vocab_size: of the ids.
    """
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

    `passed`: rounding explains every difference of logits, and nothing else differs.
    tokenizer_file: a door's; None: the repository has none. source_tokenizer: transformers', to compare with;
    None: that of the checkpoint. quantized: the conversion of a quantised directory, and the quality that it
    must reach instead of equal logits. text: also compare on it; needs a tokenizer (ConfigError).
    """
    shards = check_shards(WeightReader(weights, read_model_config(weights)))
    tokenizer, compared_tokenizer = None, TokenizerParity()
    if tokenizer_file is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        source_tokenizer = source_tokenizer or load_tokenizer(checkpoint)
        compared_tokenizer = compare_tokenizers(
            tokenizer_file.parent, tokenizer, source_tokenizer, checkpoint
        )
    # a directory may have padding rows that its checkpoint lacks, and vice versa
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
    if explained(compared, bound_share * largest) or other_dtype is None:
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
    """Return PARITY.json for a model without an independent reference: passed is null."""
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
    None if memory is short.
    """
    if TORCH_DTYPES[engine_dtype] != reference:
        return TORCH_DTYPES[engine_dtype]
    return torch.float64 if fits(checkpoint, torch.float64, device) else None


def _versions() -> dict[str, str]:
    names = ("tridecode", "torch", "transformers", "tokenizers", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
