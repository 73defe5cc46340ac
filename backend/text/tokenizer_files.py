"""A tokenizer folder as transformers writes it: tokenizer.json, and the end token in the files next to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from tridecode.backend.base.errors import ConfigError


def load_tokenizer(folder: Path, setting: str) -> Tokenizer:
    """Return the tokenizer of `folder`, with truncation and padding switched off. setting: names the folder
    in the text of ConfigError.
    """
    # no thread pool, in which a short text would wait for all rows of a large request
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ConfigError(f"{path} is not a valid tokenizer: {error} ({setting})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_token_id(folder: Path, tokenizer: Tokenizer) -> int:
    """The id of eos_token in tokenizer_config.json or special_tokens_map.json; -1 if neither has one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.exists():
            token = _settings(path).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            found = tokenizer.token_to_id(token) if token else None
            if found is not None:
                return found
    return -1


def cleans_up(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return whether transformers cleans up decoded text (text/clean_up.py): tokenizer_config.json requests
    it, and either the model is not BPE or it requests it for BPE too.
    """
    path = folder / "tokenizer_config.json"
    settings = _settings(path) if path.exists() else {}
    if not settings.get("clean_up_tokenization_spaces", False):
        return False
    key = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return not isinstance(tokenizer.model, models.BPE) or bool(settings.get(key))


def _settings(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConfigError for any other content."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; wanted an object")
    return found
