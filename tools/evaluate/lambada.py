"""LAMBADA's test set as questions with one right answer, in the two definitions of FasterTransformer's tools.

Paperno et al. 2016; the file is OpenAI's version, published with GPT-2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from tridecode.backend.base.errors import ConfigError

ITEMS = 5153  # of the whole test set
LAST_TOKEN, LAST_WORD = "last-token", "last-word"
DEFINITIONS = {
    LAST_TOKEN: "last token (fastertransformer_backend's evaluate_lambada.py)",
    LAST_WORD: "last word (FasterTransformer's bloom_lambada.py)",
}
_MAX_FILE_BYTES = 64 << 20  # the whole test set has 1.8 MB
_SOURCE = "OpenAI's lambada_test.jsonl (docs/guides/lambada.md says where it is)"


@dataclass(frozen=True)
class Question:
    """A prompt and its right answer.

    prompt, target: token ids; greedy decoding after `prompt` must give exactly `target`. prompt_text and
    target_text: the same as texts, for a model that tokenises itself.
    """

    item: int
    definition: str
    prompt: tuple[int, ...]
    target: tuple[int, ...]
    prompt_text: str
    target_text: str


def read_items(path: Path, limit: int | None = None) -> list[str]:
    """The texts of a .jsonl file with a "text" in each line, at most `limit`. ConfigError names the line."""
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} holds {size:,} bytes; wanted {_SOURCE}, 1.8 MB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); wanted {_SOURCE}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    texts = [_text(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ConfigError(f"{path} has no items; wanted {_SOURCE}")
    return texts[:limit]


def _text(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or " " not in text.strip("\n"):
        raise ConfigError(f'{where}: wanted {{"text": "two or more words"}}')
    return text


def last_token(tokenizer: Tokenizer, item: int, text: str, add_special_tokens: bool) -> Question:
    """Split off the last token of the text."""
    encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    ids = _without_end(encoded)
    if len(ids) < 2:
        raise ConfigError(f"item {item} is {len(ids)} tokens; wanted 2 or more")
    start = encoded.offsets[len(ids) - 1][0]
    return Question(item, LAST_TOKEN, tuple(ids[:-1]), (ids[-1],), text[:start], text[start:])


def last_word(tokenizer: Tokenizer, item: int, text: str, add_special_tokens: bool) -> Question:
    """The text before its last blank, and the tokens of the blank and the word.

    They are tokenised separately, as in the script. A tokenizer that prepends a blank to a text
    (SentencePiece) would then produce two: in that case the answer is the part of the whole text's tokens
    after the prompt.
    """
    prompt_text, word = text.strip("\n").rsplit(" ", 1)
    encoded = tokenizer.encode(prompt_text, add_special_tokens=add_special_tokens)
    prompt = _without_end(encoded)
    target = tokenizer.encode(f" {word}", add_special_tokens=False).ids
    if tokenizer.decode(target) != f" {word}":
        whole = tokenizer.encode(f"{prompt_text} {word}", add_special_tokens=add_special_tokens)
        ids = _without_end(whole)
        if ids[: len(prompt)] == prompt and len(ids) > len(prompt):
            target = ids[len(prompt) :]
    if not prompt or not target:
        raise ConfigError(f"item {item} has no tokens before or in its last word")
    return Question(item, LAST_WORD, tuple(prompt), tuple(target), prompt_text, f" {word}")


def _without_end(encoded: Encoding) -> list[int]:
    """Return the ids without trailing special tokens, which some tokenizers add."""
    end = len(encoded.ids)
    while end and encoded.special_tokens_mask[end - 1]:
        end -= 1
    return encoded.ids[:end]


def questions(
    tokenizer: Tokenizer, texts: list[str], definitions: list[str], add_special_tokens: bool = True
) -> list[Question]:
    """The questions of every text, in each definition."""
    make = {LAST_TOKEN: last_token, LAST_WORD: last_word}
    return [
        make[definition](tokenizer, item, text, add_special_tokens)
        for item, text in enumerate(texts)
        for definition in definitions
    ]
