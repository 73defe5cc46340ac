"""Finds or makes the repository that `LLM` names, and starts its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.build_repo.cache import Conversion
from tridecode.tools.build_repo.find_repository import find_repository, is_checkpoint
from tridecode.tools.llm.local_engine import LocalEngine, logging_to
from tridecode.tools.llm.local_model import LocalModel

#: vLLM's names of weight types, besides our own
_DTYPES = {
    **{"auto": None, "half": "fp16", "float": "fp32"},
    **{"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"},
}


def open_model(
    model: str | Path,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    gpu_memory_utilization: float | None = None,
    enable_prefix_caching: bool | None = None,
    revision: str | None = None,
    cache: str | Path | None = None,
    chat_template: str | Path | None = None,
    log: str | Path | None = None,
    start_timeout_s: float = 900.0,
) -> LocalModel:
    """Return a model whose engine is ready.

    tensor_parallel_size: GPUs that share each layer. pipeline_parallel_size: stages of layers, each with GPUs
    of its own. dtype, quantization: as `build-repo --dtype` and `--quantize`; vLLM's names of types, too.
    max_model_len: tokens of prompt and answer; max_num_seqs: sequences at a time. gpu_memory_utilization:
    share of the free memory that the KV cache takes. enable_prefix_caching: reuse common beginnings of
    prompts. None: the engine's own choice. revision: branch, tag or commit of a hub id. All these apply to a
    checkpoint only, because a repository has its own.

    cache: folder of converted repositories. chat_template: a file that replaces the checkpoint's. log: a file
    for the lines of the engine's processes; None: stderr. start_timeout_s: longest wait for the engine.
    Raises ConfigError, CheckpointError and EngineDownError.
    """
    settings: dict[str, Any] = {
        "max_sequence_tokens": max_model_len,
        "max_sequences": max_num_seqs,
        "memory_fraction": gpu_memory_utilization,
        "prefix_cache": None if enable_prefix_caching is None else str(bool(enable_prefix_caching)).lower(),
    }
    conversion = Conversion(
        quantization,
        tensor_parallel_size,
        settings=tuple(f"{name}={value}" for name, value in settings.items() if value is not None),
        pp=pipeline_parallel_size,
        dtype=_DTYPES.get(dtype, dtype),
    )
    name = str(model)
    if not is_checkpoint(name) and (conversion != Conversion() or revision is not None):
        raise ConfigError(
            f"{name} is a model repository, whose config.pbtxt has the settings; wanted a checkpoint, or no "
            "tensor_parallel_size, pipeline_parallel_size, dtype, quantization, max_model_len, max_num_seqs, "
            "gpu_memory_utilization, enable_prefix_caching and revision"
        )
    template = None if chat_template is None else Path(chat_template)
    if template is not None and not template.is_file():
        raise ConfigError(f"chat_template is {template}; wanted a file that exists")
    source = f"{name}@{revision}" if revision is not None else name
    cached = Path(cache) if cache is not None and is_checkpoint(name) else None
    repository = find_repository(source, conversion, cached)
    with logging_to(log):
        return LocalModel(LocalEngine(repository, template, start_timeout_s), repository.name)
