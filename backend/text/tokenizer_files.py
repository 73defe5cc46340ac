"""A tokenizer folder as transformers writes it: tokenizer.json, and the end token in the files beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tokenizers import Tokenizer

from tridecode.backend.errors import ConfigError


def load_tokenizer(folder: Path, setting: str) -> Tokenizer:
    """The tokenizer of `folder`, with truncation and padding switched off.

    setting: what names the folder, for the text of ConfigError.
    """
    # no thread pool: in it, a short text would wait for all rows of a large request
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
            token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            found = tokenizer.token_to_id(token) if token else None
            if found is not None:
                return found
    return -1
