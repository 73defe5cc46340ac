"""Trains a drafter: texts, training, figures, files."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.weights.draft_files import FORMAT, HEADS, MODEL, DraftInfo, write_draft, write_info
from tridecode.tools.train_draft.figures import tokens_per_step
from tridecode.tools.train_draft.hidden import read_hidden
from tridecode.tools.train_draft.small_model import cut_model, model_drafts, save_model, train_model
from tridecode.tools.train_draft.target import Target, open_target
from tridecode.tools.train_draft.texts import SEED_TOKENS, Texts, draw_prompts, read_prompts, write_texts
from tridecode.tools.train_draft.training import Plan, states_of, train_heads

_MEMORY_SHARE = 0.5  # of the free memory, for the hidden states
#: tokens of the texts by default
_TOKENS = {"cpu": 100_000, "cuda": 500_000}
#: most often that a given prompt is answered
_REPEATS = 8


@dataclass(frozen=True)
class Job:
    """The options of the command. layers: of a draft model. tokens: of the texts, about; 0: by device.
    answer_tokens: of each answer, at most. prompts: file of prompts; None: drawn from the target. held_back:
    prompts that are not trained on. dtype: of the file."""

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
    dtype: torch.dtype = torch.bfloat16


def train_draft(job: Job, console: Console) -> DraftInfo:
    """Train a drafter and write it to job.output. Raises ConfigError, CheckpointError, UnsupportedError."""
    longest = (SEED_TOKENS if job.prompts is None else job.prompt_tokens) + job.answer_tokens + 1
    with open_target(job.model, job.device, longest) as target:
        job = replace(job, tokens=job.tokens or _TOKENS[target.device.type])
        if job.kind == MODEL and target.checkpoint is None:
            raise ConfigError(
                f"{job.model} has converted weights; wanted the checkpoint that they were made from, for "
                f"--kind {MODEL}"
            )
        _check_memory(job, target)
        prompts = None
        if job.prompts is not None:
            found = read_prompts(job.prompts, target.tokenizer, target.config, job.prompt_tokens)
            prompts = _enough(found, job)
        engine = target.engine(longest)
        texts = _texts(engine, prompts, job)
        console.print(
            f"{len(texts.train)} texts of {texts.num_tokens:,} tokens, {len(texts.held_back)} held back"
        )
        hidden = read_hidden(engine, texts.train)
        unseen = read_hidden(engine, texts.held_back)
        del engine
        gc.collect()  # an engine is part of reference cycles
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
        if job.kind == HEADS:
            tensors, rates = _train_heads(target, texts, hidden, unseen, job)
            info = _info(target, texts, rates, job)
            write_draft(job.output, info, tensors)
            return info
        rates = _train_model(target, texts, hidden, job)
        info = _info(target, texts, rates, job)
        write_info(job.output, info)
        return info


def _train_heads(
    target: Target, texts: Texts, hidden: list[Tensor], unseen: list[Tensor], job: Job
) -> tuple[Mapping[str, Tensor], list[float]]:
    """Return the tensors of heads, in the dtype of the file, and their tokens per step."""
    device = target.device
    head, bias = target.head(torch.bfloat16 if device.type == "cuda" else torch.float32)
    head, bias = head.to(device), None if bias is None else bias.to(device)
    embedding = head if target.config.tied_head else target.matrix("model.wte", head.dtype).to(device)
    heads = train_heads(states_of(texts.train, hidden), embedding, head, bias, job.plan, device)
    tensors = {name: x.to(job.dtype) for name, x in heads.state_dict().items()}
    rounded = heads.to(job.dtype).to(head.dtype)
    drafted = (
        (text, rounded.drafts(text, states, embedding, head, bias))
        for text, states in zip(texts.held_back, unseen)
    )
    return tensors, tokens_per_step(drafted, job.plan.depth)


def _train_model(target: Target, texts: Texts, hidden: list[Tensor], job: Job) -> list[float]:
    """Write a draft model; return its tokens per step."""
    assert target.checkpoint is not None
    model = cut_model(target.checkpoint, job.layers)
    train_model(model, texts.train, hidden, job.plan, target.device)
    depth = job.plan.depth
    rates = tokens_per_step(((text, model_drafts(model, text, depth)) for text in texts.held_back), depth)
    save_model(model, target.checkpoint, job.output, job.dtype)
    return rates


def _texts(engine: OfflineEngine, prompts: list[list[int]] | None, job: Job) -> Texts:
    if prompts is None:
        count = max(1, job.tokens // job.answer_tokens) + job.held_back
        prompts = draw_prompts(engine, count, job.plan.seed)
    return write_texts(engine, prompts, job.held_back, job.answer_tokens, job.temperature, job.plan.seed)


def _enough(prompts: list[list[int]], job: Job) -> list[list[int]]:
    """Return as many prompts as the texts need, in an order that depends on the seed alone.

    Fewer prompts are answered several times, as draws at --temperature differ; held-back ones only once.
    """
    if len(prompts) <= job.held_back:
        raise ConfigError(
            f"{job.prompts} has {len(prompts)} prompts; wanted more than --held-back {job.held_back}"
        )
    order = np.random.default_rng(job.plan.seed).permutation(len(prompts))
    mixed = [prompts[index] for index in order]
    train, held_back = mixed[: len(mixed) - job.held_back], mixed[len(mixed) - job.held_back :]
    wanted = max(1, job.tokens // job.answer_tokens)
    repeats = min(-(-wanted // len(train)), _REPEATS if job.temperature else 1)
    return (train * repeats)[:wanted] + held_back


def _check_memory(job: Job, target: Target) -> None:
    """Raise ConfigError if the hidden states would take more than _MEMORY_SHARE of the free memory."""
    size = 4 if target.settings.data_type == "fp32" else 2
    wanted, free = 2 * size * job.tokens * target.config.hidden_size, available_memory()
    if wanted > free * _MEMORY_SHARE:
        raise ConfigError(
            f"the hidden states of {job.tokens:,} tokens take {wanted:,} bytes; this machine has {free:,} "
            f"free, and they may take {_MEMORY_SHARE:.0%} of it (--tokens)"
        )


def _info(target: Target, texts: Texts, rates: list[float], job: Job) -> DraftInfo:
    plan, config = job.plan, target.config
    trained = {
        "tokens": texts.num_tokens,
        "prompts": len(texts.train),
        "held_back": len(texts.held_back),
        "epochs": plan.epochs,
        "temperature": job.temperature,
        "seed": plan.seed,
    }
    if job.kind == MODEL:
        trained["layers"] = job.layers
    return DraftInfo(
        format=FORMAT,
        kind=job.kind,
        family=config.family,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        depth=plan.depth,
        width=plan.width_of(config.hidden_size) if job.kind == HEADS else config.hidden_size,
        target=target.digest,
        tokens_per_step=[round(rate, 4) for rate in rates],
        texts=trained,
    )
