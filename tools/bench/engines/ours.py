"""Our engine without a server: the DecodeLoop that serves, over a front without a socket."""

from __future__ import annotations

import gc
import math
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.garbage import freeze_objects
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.engine_config_file import FILE, checkpoint_dir
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.resolved_settings import choose_device, resolve
from tridecode.backend.engine.loop import follow
from tridecode.backend.engine.ranks.parallel import ProcessRanks, Ranks, SingleRank
from tridecode.backend.models import model_config_ini, read_model_config
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.weights.draft_files import TRAINED
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.model_repo_templates.repository import ENGINE_MODEL
from tridecode.tools.bench.engines import BenchEngine
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import Job, Say, measure, silent
from tridecode.tools.bench.shapes.presets import preset
from tridecode.tools.bench.studies.floors import traffic


def weight_directory(path: str | Path) -> Path:
    """The weights of a model repository, or `path` itself."""
    engine_model = Path(path) / ENGINE_MODEL
    return Path(checkpoint_dir(str(engine_model))) if (engine_model / FILE).is_file() else Path(path)


def bench_engine(job: Job, say: Say = silent) -> dict[str, Any]:
    """measure() of the engine alone, with what it ran on: {"engine", "model", "device", "dtype", ...}.

    job.directory: a model repository or a weight directory. Raises TridecodeError.
    """
    say("loading")
    with open_engine(job) as engine:
        runner = LoopRunner(engine, job.rate, job.seed)
        found = measure(runner.generate, job, engine.model_config.vocab_size, say, runner.take_run)
        _add_roofs(found.get("batches", []), engine.model_config, engine.config, job)
    return {**described(engine, job), **found}


def _add_roofs(rows: list[dict[str, Any]], model: ModelConfig, config: EngineConfig, job: Job) -> None:
    """Add "roof_ms" to the figures of each batch: the time to read a step's bytes once on one H200 or, with
    several ranks, a rank's share of them. Contexts are those half-way through the outputs.
    """
    context = job.prompt_tokens + job.output_tokens / 2
    seen = [min(model.window(layer) or context, context) for layer in range(model.num_layers)]
    moved = traffic(model, config.data_type, config.kv_cache_dtype, config.head_mode > 0)
    for row in rows:
        roof = moved.roof_ms(row["batch"], sum(seen) / len(seen)) / _world(job)
        row["roof_ms"] = round(roof, 3)


def described(engine: Engine, job: Job) -> dict[str, Any]:
    """Describe an engine: its device and settings."""
    return {
        "engine": "tridecode",
        "model": engine.model_config.model_name,
        "device": str(engine.device),
        "dtype": engine.config.data_type,
        "kv_cache_dtype": engine.config.kv_cache_dtype,
        "int8_head": engine.config.head_mode > 0,
        "int8_head_inputs": engine.config.int8_head_inputs,
        "tensor_para_size": job.tensor_para_size,
        "pipeline_para_size": job.pipeline_para_size,
    }


def _model_and_config(job: Job) -> tuple[Path, ModelConfig, EngineConfig]:
    if job.directory:
        directory = weight_directory(job.directory)
        model = read_model_config(directory)
        dtype = job.dtype or model.weight_dtype
    else:
        directory, model, dtype = Path("."), job.shape, job.chosen_dtype
    config = EngineConfig(
        tensor_para_size=job.tensor_para_size,
        pipeline_para_size=job.pipeline_para_size,
        data_type=dtype,
        kv_cache_dtype=job.kv_cache_dtype,
        int8_head=job.int8_head,
        int8_head_inputs=job.int8_head_inputs,
        enable_custom_all_reduce=job.enable_custom_all_reduce,
        device=job.device,
        weights="files" if job.directory else "random",
        max_sequences=job.at_a_time,
        max_queued_requests=max(1024, len(job.prompts), *job.batches),
        max_sequence_tokens=min(job.longest, model.max_positions),
        request_timeout_s=math.inf,  # all prompts of a workload arrive at once
        prefix_cache=job.prefix_cache,
        cache_bytes=job.cache_bytes,
        speculation=job.speculation,
        draft_path=job.draft or "none",
        host_cache_bytes=job.host_cache_bytes,
        lora_path=job.lora_path,
    )
    return directory, model, config


def _world(job: Job) -> int:
    return job.tensor_para_size * job.pipeline_para_size


def _load(job: Job, rank: int, meeting: str) -> Engine:
    directory, model, config = _model_and_config(job)
    if torch.cuda.is_available() and config.device != "cpu":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = choose_device(config)
    ranks: Ranks = SingleRank()
    if _world(job) > 1:
        ranks = ProcessRanks(rank, job.tensor_para_size, job.pipeline_para_size, meeting, device)
    return load_engine(directory, model, resolve(config, model, device), ranks, device)


@contextmanager
def open_engine(job: Job) -> Iterator[Engine]:
    """Rank 0's engine; the other ranks are processes that follow it until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        meeting, job = f"file://{folder}/ranks", _with_draft(job, Path(folder))
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(target=_follow, args=(job, rank, meeting), daemon=True)
            for rank in range(1, _world(job))
        ]
        for process in others:
            process.start()
        try:
            engine = _load(job, 0, meeting)
            freeze_objects()  # as the serving process does
            yield engine
            engine.ranks.broadcast_plan(None)
            for process in others:
                process.join(10.0)
            engine.ranks.close()
        finally:
            gc.unfreeze()
            for process in others:
                process.kill()


def _with_draft(job: Job, folder: Path) -> Job:
    """Return the job with the weight directory of its draft model: a checkpoint is converted, and the
    directory of a preset has only config.ini.

    Raises ConfigError if one of the two models has random weights and the other comes from files.
    """
    if not job.draft or job.speculation in TRAINED:
        return job
    if Path(job.draft).is_dir() == bool(job.preset):
        raise ConfigError(f"--draft is {job.draft}; wanted a folder with --model, and a preset with --preset")
    draft = folder / "draft"
    if not job.preset:
        given = weight_directory(job.draft)
        if (given / "config.json").is_file() and not (given / "config.ini").is_file():
            plan_conversion(open_checkpoint(str(given))).write(draft)  # of train-draft
            given = draft
        return replace(job, draft=str(given))
    draft.mkdir()
    text = model_config_ini(preset(job.draft).model, job.tensor_para_size)
    (draft / "config.ini").write_text(text, encoding="utf-8")
    return replace(job, draft=str(draft))


def _follow(job: Job, rank: int, meeting: str) -> None:
    engine = _load(job, rank, meeting)
    freeze_objects()
    engine.pin_host_memory()
    follow(engine, RankStatus())
    engine.ranks.close()


ENGINE = BenchEngine("tridecode", ("compare", "beside", "mix"), bench_engine, ours=True)
