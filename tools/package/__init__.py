"""Tridecode serves GPT-family language models; here is its Python interface, imported on first use.

`from tridecode import LLM, SamplingParams` runs a checkpoint or a model repository in processes of its own.
"""

from __future__ import annotations

from typing import Any

_MODULES = {
    "LLM": "llm",
    "SamplingParams": "params",
    "BeamSearchParams": "params",
    "PoolingParams": "params",
    "PromptTable": "prompt_table",
    "Session": "session",
    "RequestOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingParams",
    "PromptTable",
    "RequestOutput",
    "SamplingParams",
    "Session",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tridecode' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tridecode.tools.llm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
