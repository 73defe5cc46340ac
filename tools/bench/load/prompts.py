"""Prompts for benchmarks: texts of a known number of tokens, or the lines of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tridecode.backend.base.errors import ConfigError

_WORD = re.compile(r" [a-z]+")
_FEWEST_WORDS = 50
_TRIES = 64


def find_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model repository, a folder or a tokenizer.json. Raises ConfigError."""
    root = Path(path)
    places = (
        [root] if root.is_file() else [root / "tokenizer.json", *sorted(root.glob("*/1/tokenizer/*.json"))]
    )
    found = next((place for place in places if place.is_file() and place.suffix == ".json"), None)
    if found is None:
        raise ConfigError(f"{path} has no tokenizer.json; wanted a repository, a tokenizer's folder or file")
    try:
        return Tokenizer.from_file(str(found))
    except Exception as error:  # tokenizers raises nothing else
        raise ConfigError(f"{found} is not a readable tokenizer: {error}") from None


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """The field "text" of the first `limit` lines of a JSON-lines file. Raises ConfigError with the line."""
    texts: list[str] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(texts) >= limit:
                    break
                texts.append(_text_of_line(line, f"{path}, line {number}"))
    except OSError as error:
        raise ConfigError(f'{path} cannot be read ({error.strerror}); wanted lines with "text"') from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    if not texts:
        raise ConfigError(f'{path} has no lines; wanted JSON objects with "text"')
    return texts


def _text_of_line(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: wanted a JSON object with "text"')
    return text


def text_prompts(tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> list[str]:
    """Return `count` different texts of random words that the tokenizer splits into `tokens` tokens each.

    A token that the tokenizer adds itself (BOS) counts. Raises ConfigError if no such text is found.
    """
    rng = np.random.default_rng(seed)
    words = _single_token_words(tokenizer)
    return [_text_of(tokenizer, words, tokens, rng) for _ in range(count)]


def _single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Words of one token each; single letters if the vocabulary has few such words."""
    candidates = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
    return _alone(tokenizer, candidates) or list("abcdefghijklmnopqrstuvwxyz")


def _alone(tokenizer: Tokenizer, candidates: Iterator[str]) -> list[str]:
    base = len(tokenizer.encode("").ids)
    words: list[str] = []
    for text in candidates:
        if _WORD.fullmatch(text) and len(tokenizer.encode(text).ids) == base + 1:
            words.append(text)
        if len(words) == 2000:
            break
    return words if len(words) >= _FEWEST_WORDS else []


def _text_of(tokenizer: Tokenizer, words: list[str], tokens: int, rng: np.random.Generator) -> str:
    pieces: list[str] = [words[i] for i in rng.integers(0, len(words), tokens)]
    for _ in range(_TRIES):
        found = len(tokenizer.encode("".join(pieces)).ids)
        if found == tokens:
            return "".join(pieces)
        if found > tokens:
            del pieces[-(found - tokens) :]
        else:
            pieces += [words[i] for i in rng.integers(0, len(words), tokens - found)]
    raise ConfigError(f"no text of exactly {tokens} tokens was found with this tokenizer")
