"""The lines with which `tridecode serve` says how to reach the models."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.chat.chat_template import ChatTemplate
from tridecode.backend.configuration.engine_config_file import checkpoint_dir
from tridecode.backend.models.config_ini import read_ini
from tridecode.model_repo_templates.served import ENGINE_MODEL
from tridecode.tools.client.generate import TEXT_MODELS

_PROMPT = "The capital of France is"
_QUESTION = "What is the capital of France?"
_TOKENS = 32


def example_lines(
    repository: Path, models: Sequence[str], host: str, http_port: int, openai_port: int | None
) -> list[str]:
    """Return one `curl` for an answer and one for a stream; [] where no model takes texts.

    models: names of those that are served. openai_port: None without the OpenAI service.
    """
    if openai_port is not None:
        return _openai(repository, f"http://{host}:{openai_port}/v1")
    text_model = next((name for name in TEXT_MODELS if name in models), None)
    if text_model is None:
        return []
    url = f"http://{host}:{http_port}/v2/models/{text_model}"
    body = {"text_input": _PROMPT, "max_tokens": _TOKENS}
    return [_curl(f"{url}/generate", body), _curl(f"{url}/generate_stream", {**body, "stream": True}, "-N")]


def model_name(repository: Path) -> str:
    """Return the model's own name; that of the folder where config.ini has none."""
    try:
        sections = read_ini(Path(checkpoint_dir(str(repository / ENGINE_MODEL))) / "config.ini")
    except (TridecodeError, OSError):
        return repository.name
    found = [section.items.get("model_name") for section in sections.values()]
    return next(filter(None, found), repository.name)


def _openai(repository: Path, url: str) -> list[str]:
    if _has_template(repository):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": _TOKENS}
        url = f"{url}/chat/completions"
    else:
        body = {"prompt": _PROMPT, "max_tokens": _TOKENS}
        url = f"{url}/completions"
    return [_curl(url, body), _curl(url, {**body, "stream": True}, "-N")]


def _has_template(repository: Path) -> bool:
    for file in repository.glob("*/1/tokenizer/tokenizer.json"):
        try:
            return ChatTemplate.find(file.parent) is not None
        except TridecodeError:
            return False
    return False


def _curl(url: str, body: Mapping[str, Any], *options: str) -> str:
    words = ["curl", *options, url, "-H", "content-type: application/json", "-d", json.dumps(body)]
    return shlex.join(words)
