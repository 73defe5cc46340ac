"""Builds the Job described by the options of `tridecode bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.models import read_model_config
from tridecode.tools.bench.engines.ours import weight_directory
from tridecode.tools.bench.load.prompts import find_tokenizer, read_prompts
from tridecode.tools.bench.load.workloads import MIX, mix_requests, workload_prompts
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.shapes.presets import QUANTIZATIONS
from tridecode.tools.bench.shapes.presets import preset as find_preset


def make_job(preset: str, directory: Path | None, dtype: str | None, **fields: Any) -> Job:
    """fields: the others of Job. ConfigError for an unknown preset or quantisation, a directory that is to be
    quantised, or sequences beyond a preset's positions.
    """
    job = Job("" if directory else preset, str(directory or ""), dtype or "", **fields)
    if job.quantization not in ("", *QUANTIZATIONS):
        known = ", ".join(QUANTIZATIONS)
        raise ConfigError(f"--quantization is {job.quantization!r}; wanted one of {known}")
    if job.quantization and directory:
        raise ConfigError(f"--quantization rounds a preset's matrices; {directory} has its own")
    if not directory and job.longest > find_preset(preset).model.max_positions:
        found = f"prompts of {job.prompt_tokens} and outputs of {job.output_tokens} tokens"
        raise ConfigError(f"{found}; {preset} has {job.shape.max_positions} positions")
    return job


def with_prompts(job: Job, path: Path, tokenizer: Path | None, limit: int | None) -> Job:
    """Return the job with the lines of a file instead of random prompts; lines without a token are skipped.

    Raises ConfigError for token ids outside the preset's vocabulary.
    """
    if tokenizer is None:
        raise ConfigError("--prompts needs --tokenizer: a tokenizer.json, its folder, or a repository")
    encode = find_tokenizer(tokenizer).encode
    ids = tuple(tuple(encode(text).ids) for text in read_prompts(path, limit))
    job = _with(job, path.stem, tuple(prompt for prompt in ids if prompt))
    if job.preset and max(map(max, job.prompts)) >= job.shape.vocab_size:
        raise ConfigError(f"the tokenizer has ids beyond the {job.shape.vocab_size} of {job.preset}")
    return job


def with_workload(job: Job, name: str, limit: int | None) -> Job:
    """The job with the first `limit` prompts of a workload. Raises ConfigError for an unknown one."""
    shape = job.shape if job.preset else read_model_config(weight_directory(job.directory))
    return _with(job, name, workload_prompts(name, shape.vocab_size, limit, job.seed))


def with_mix(job: Job, count: int) -> Job:
    """The job with `count` requests of the workload `mix`."""
    shape = job.shape if job.preset else read_model_config(weight_directory(job.directory))
    prompts, outputs = mix_requests(shape.vocab_size, count, job.seed)
    return _with(replace(job, outputs=outputs), MIX, prompts)


def _with(job: Job, name: str, prompts: tuple[tuple[int, ...], ...]) -> Job:
    if len(job.batches) > 1:
        found = ", ".join(map(str, job.batches))
        raise ConfigError(f"--batches is {found}; wanted one number: the sequences in flight")
    job = replace(job, prompts=prompts, workload=name)
    if job.preset and job.longest > job.shape.max_positions:
        found = f"{name} has sequences of {job.longest} tokens"
        raise ConfigError(f"{found}; {job.preset} has {job.shape.max_positions} positions")
    return job
