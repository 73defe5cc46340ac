"""Trains a drafter: texts, training, figures, files."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.host_memory import available_memory
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.weights.draft_files import DraftInfo
from tridecode.tools.train_draft.job import Job
from tridecode.tools.train_draft.kinds import KINDS
from tridecode.tools.train_draft.target import Target, open_target
from tridecode.tools.train_draft.texts import SEED_TOKENS, Texts, draw_prompts, read_prompts, write_texts

_MEMORY_SHARE = 0.5  # of the free memory, for the hidden states
#: tokens of the texts by default
_TOKENS = {"cpu": 100_000, "cuda": 500_000}
#: maximum number of answers to one prompt of a file
_REPEATS = 8


def train_draft(job: Job, console: Console) -> DraftInfo:
    """Train a drafter and write it to job.output. Raises ConfigError, CheckpointError, UnsupportedError."""
    if job.threads:
        torch.set_num_threads(job.threads)
    longest = (SEED_TOKENS if job.prompts is None else job.prompt_tokens) + job.answer_tokens + 1
    with _new_folder(job.output), open_target(job.model, job.device, longest) as target:
        job = replace(job, tokens=job.tokens or _TOKENS[target.device.type])
        kind = KINDS[job.kind](target, job)
        kind.check()
        _check_memory(job, target, kind.elements)
        prompts = None
        if job.prompts is not None:
            found = read_prompts(job.prompts, target.tokenizer, target.config, job.prompt_tokens)
            prompts = _enough(found, job)
        engine = target.engine(longest)
        texts = _texts(engine, prompts, job)
        console.print(
            f"{len(texts.train)} texts of {texts.num_tokens:,} tokens, {len(texts.held_back)} held back"
        )
        kind.read(engine, texts)
        del engine
        gc.collect()  # an engine is part of reference cycles
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
        return kind.train()


@contextmanager
def _new_folder(path: Path) -> Iterator[None]:
    """Make the output folder before the training, and remove it if nothing was written."""
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: {os.strerror(error.errno or 0)}; wanted a new folder that can be written (--output)"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty
            path.rmdir()


def _texts(engine: OfflineEngine, prompts: list[list[int]] | None, job: Job) -> Texts:
    if prompts is None:
        count = max(1, job.tokens // job.answer_tokens) + job.held_back
        prompts = draw_prompts(engine, count, job.plan.seed)
    return write_texts(engine, prompts, job.held_back, job.answer_tokens, job.temperature, job.plan.seed)


def _enough(prompts: list[list[int]], job: Job) -> list[list[int]]:
    """Return as many prompts as the texts need, shuffled by the seed.

    If there are too few, each is answered several times, because samples at --temperature differ. Held-back
    prompts are answered once.
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


def _check_memory(job: Job, target: Target, elements: int) -> None:
    """Raise ConfigError if the target's states, `elements` per token, need more than _MEMORY_SHARE of the
    available memory."""
    size = 4 if target.settings.data_type == "fp32" else 2
    wanted, free = size * job.tokens * elements, available_memory()
    if wanted > free * _MEMORY_SHARE:
        raise ConfigError(
            f"the hidden states of {job.tokens:,} tokens take {wanted:,} bytes; this machine has {free:,} "
            f"free, and they may take {_MEMORY_SHARE:.0%} of it (--tokens)"
        )
