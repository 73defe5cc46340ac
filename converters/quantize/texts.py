"""Texts to calibrate with: lines of a JSONL file, or a short text of our own. Limits are checked first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tridecode.backend.base.checkpoint_files import require_file
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.file_digest import file_sha256

if TYPE_CHECKING:  # read_texts checks arguments before transformers is imported
    from transformers import PreTrainedTokenizerBase

MAX_FILE_BYTES = 256 << 20
MAX_TEXTS = 100_000
MAX_TEXT_CHARACTERS = 1 << 20
#: tokens of a sequence, and of all sequences together: more are ignored
SEQUENCE_TOKENS = 512
TOTAL_TOKENS = 128 * 1024

BUILT_IN_NOTE = (
    "calibrated with a built-in text of a few hundred words; a --calibrate file with some hundred texts like "
    "those of the service gives a better model"
)


class _Line(msgspec.Struct):
    text: str


def read_texts(path: Path) -> list[str]:
    """Return the field `text` of each line of a JSONL file, without empty lines and texts.

    Raises CheckpointError for a file that is missing or too large, ConfigError for one of another form,
    naming the line.
    """
    require_file(path, MAX_FILE_BYTES)
    decode = msgspec.json.Decoder(_Line).decode
    texts: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number > MAX_TEXTS:
                raise ConfigError(f"{path} has more than {MAX_TEXTS:,} lines; wanted at most as many")
            try:
                text = decode(line).text if line.strip() else ""
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                wanted = 'wanted {"text": "..."}'
                raise ConfigError(f"{path}, line {number}: {error}; {wanted}") from None
            if text.strip():
                texts.append(text)
    if not texts:
        raise ConfigError(f"{path} holds no text; wanted lines with a field text")
    check_texts(texts, str(path))
    return texts


@dataclass(frozen=True)
class GivenText:
    """The texts of a JSONL file, and the SHA-256 of the file."""

    name: str
    sha256: str
    texts: list[str]


def read_given_text(path: Path) -> GivenText:
    """Raises CheckpointError or ConfigError as read_texts."""
    texts = read_texts(path)
    return GivenText(path.name, file_sha256(path), texts)


def check_texts(texts: list[str], where: str) -> None:
    """Raise ConfigError for too many texts, or one that is too long."""
    if not 0 < len(texts) <= MAX_TEXTS:
        raise ConfigError(f"{where}: {len(texts):,} texts; wanted 1 to {MAX_TEXTS:,}")
    for number, text in enumerate(texts, start=1):
        if len(text) > MAX_TEXT_CHARACTERS:
            found = f"text {number} has {len(text):,} characters"
            raise ConfigError(f"{where}: {found}; wanted at most {MAX_TEXT_CHARACTERS:,}")


def token_sequences(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    longest: int,
    total: int = TOTAL_TOKENS,
) -> list[list[int]]:
    """The texts' token ids in sequences of at most SEQUENCE_TOKENS, or `longest`, until there are `total`.

    Ids beyond vocab_size are skipped. ConfigError if no token remains.
    """
    length = min(SEQUENCE_TOKENS, longest)
    sequences: list[list[int]] = []
    left = total
    for ids in _pieces(texts, tokenizer, vocab_size, length):
        sequences.append(ids[:left])
        left -= len(sequences[-1])
        if not left:
            break
    if not sequences:
        raise ConfigError("the texts have no token of the model")
    return sequences


def _pieces(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, vocab_size: int, length: int
) -> Iterator[list[int]]:
    for text in texts:
        ids = [token for token in tokenizer.encode(text) if token < vocab_size]
        for start in range(0, len(ids), length):
            yield ids[start : start + length]
