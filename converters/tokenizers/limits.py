"""Limits on a tokenizer's files, counted before a library makes objects of what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tridecode.backend.base.checkpoint_files import (
    MAX_JSON_BYTES,
    MAX_SETTINGS_BYTES,
    read_json,
    require_file,
)
from tridecode.backend.base.errors import CheckpointError

#: limits of a JSON file's elements, counted by a byte that each contains: a vocabulary of 262,144 tokens has
#: 514,906 merges, lists of two
_MAX_COUNTS = {b"{": 500_000, b"[": 2_000_000, b",": 6_000_000}
_MAX_ADDED_TOKENS = 100_000
_MAX_TEMPLATE = 1000  # parts and ids of a template, which are added to each text
_MAX_PIECES = 500_000  # of a sentencepiece model
_MAX_PIECE_WORK = 1_000_000_000  # sum of squared lengths: each piece is split at each of its places


def check_tokenizer_files(directory: Path) -> None:
    """Raise CheckpointError for a file with more elements than a tokenizer has."""
    for name, limit in (
        ("tokenizer.json", MAX_JSON_BYTES),
        ("vocab.json", MAX_JSON_BYTES),
        ("merges.txt", MAX_JSON_BYTES),
        ("tokenizer_config.json", MAX_SETTINGS_BYTES),
        ("special_tokens_map.json", MAX_SETTINGS_BYTES),
        ("added_tokens.json", MAX_SETTINGS_BYTES),
    ):
        path = directory / name
        if path.exists():
            require_file(path, limit)
            if name != "merges.txt":
                _check_counts(path)
    if (directory / "tokenizer.json").exists():
        _check_state(directory / "tokenizer.json")
    if (directory / "tokenizer_config.json").exists():
        path = directory / "tokenizer_config.json"
        _check_added(read_json(path).get("added_tokens_decoder"), path)
    if (directory / "tokenizer.model").exists():
        check_pieces(directory / "tokenizer.model")


def _check_counts(path: Path) -> None:
    data = path.read_bytes()
    for byte, limit in _MAX_COUNTS.items():
        if (found := data.count(byte)) > limit:
            raise CheckpointError(f"{path} has {found:,} times {byte.decode()!r}; wanted at most {limit:,}")


def _check_state(path: Path) -> None:
    state = read_json(path, MAX_JSON_BYTES)
    _check_added(state.get("added_tokens"), path)
    size = _template_size(state.get("post_processor"))
    if size > _MAX_TEMPLATE:
        raise CheckpointError(
            f"{path}: its post_processor has {size:,} parts and ids; wanted at most {_MAX_TEMPLATE:,}"
        )


def _check_added(tokens: Any, path: Path) -> None:
    if isinstance(tokens, (list, dict)) and len(tokens) > _MAX_ADDED_TOKENS:
        raise CheckpointError(f"{path} adds {len(tokens):,} tokens; wanted at most {_MAX_ADDED_TOKENS:,}")


def _template_size(processor: Any) -> int:
    if not isinstance(processor, dict):
        return 0
    inner = processor.get("processors")
    size = sum(map(_template_size, inner)) if isinstance(inner, list) else 0
    size += sum(len(part) for key in ("single", "pair") if isinstance(part := processor.get(key), list))
    special = processor.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        size += len(ids) if isinstance(ids, list) else 0
    return size


def check_pieces(path: Path) -> None:
    """Count the pieces of a sentencepiece model in protobuf's wire format.

    Other data passes: its reader reports it.
    """
    data = require_file(path, MAX_JSON_BYTES).read_bytes()
    at, pieces, work = 0, 0, 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            if tag & 7 != 2:  # a number: no repeated field of a model is one
                at = _skip(data, at, tag & 7)
                continue
            length, at = _varint(data, at)
            if tag == 10:
                pieces, work = pieces + 1, work + length * length
                if pieces > _MAX_PIECES or work > _MAX_PIECE_WORK:
                    raise CheckpointError(
                        f"{path} has more than {_MAX_PIECES:,} pieces, or pieces of thousands of characters"
                    )
            at += length
    except IndexError:
        return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 127
    shift = 7
    while data[at] & 128 and shift < 70:
        at += 1
        value |= (data[at] & 127) << shift
        shift += 7
    return value, at + 1


def _skip(data: bytes, at: int, kind: int) -> int:
    if kind == 0:
        return _varint(data, at)[1]
    if kind not in (1, 5):
        raise IndexError
    return at + (8 if kind == 1 else 4)
