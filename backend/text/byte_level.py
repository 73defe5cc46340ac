"""Text of byte-level tokenizers (GPT-2, BLOOM, LLaMA-3, Qwen and others) from the bytes of their tokens.

Their decoder maps each token to bytes, whatever its neighbours are, and decodes all bytes as UTF-8. So a new
token costs a look-up and the decoding of its own bytes; `tokenizers` would have to decode a window of tokens.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

#: tokens of a prompt that its last, incomplete character may have begun in; hidden ones have no bytes
_CONTEXT_TOKENS = 64


def byte_of_characters() -> dict[str, int]:
    """Return the bytes that the characters of a byte-level vocabulary stand for: GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def is_byte_level(decoder: dict[str, Any]) -> bool:
    """Return whether this decoder of a tokenizer.json is the byte-level one and nothing else."""
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders", [])
        return len(steps) == 1 and is_byte_level(steps[0])
    return decoder.get("type") == "ByteLevel"


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes in a text, found at its first use; b"" for ids that do not appear in one."""

    def __init__(self, tokenizer: Tokenizer, is_shown: Callable[[int], bool]):
        super().__init__()
        self._tokenizer, self._is_shown = tokenizer, is_shown
        self._byte_of = byte_of_characters()

    def __missing__(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token) if self._is_shown(token) else None
        if piece is None:
            return b""  # not stored: the ids of clients have no bound
        try:
            found = bytes([self._byte_of[character] for character in piece])
        except KeyError:  # an added token, whose text is not in the vocabulary's alphabet
            found = piece.encode("utf-8")
        self[token] = found
        return found


class ByteLevelStream:
    """Turns a growing list of ids into pieces of text, as StreamDecoder says."""

    def __init__(self, table: TokenBytes, context: Sequence[int] = ()):
        self._table = table
        before = b"".join([table[token] for token in context[-_CONTEXT_TOKENS:]])
        self._left = before[utf_8_decode(before, "replace", False)[1] :]  # of an incomplete character
        self._skipped = bool(self._left)  # a character of the prompt: it is not part of the pieces

    def push(self, ids: list[int]) -> str:
        table = self._table
        data = self._left + (table[ids[0]] if len(ids) == 1 else b"".join([table[token] for token in ids]))
        text, used = utf_8_decode(data, "replace", False)
        self._left = data[used:]
        return self._without_first(text) if self._skipped else text

    def flush(self) -> str:
        text = utf_8_decode(self._left, "replace", True)[0]
        self._left = b""
        return self._without_first(text) if self._skipped else text

    def _without_first(self, text: str) -> str:
        self._skipped = not text
        return text[1:]
