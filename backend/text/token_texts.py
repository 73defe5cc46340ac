"""The text and the bytes of single tokens, as in the middle of a text, for log probabilities by token."""

from __future__ import annotations

import codecs
import json
from typing import Any

from tridecode.backend.text.byte_level import byte_of_characters
from tridecode.backend.text.detokenizer import BROKEN, TokenizerView


class TokenTexts:
    """Maps token ids to their texts, which are cached. A token that is part of a character gives U+FFFD, a
    special token its name, an id that the tokenizer does not know "".

    A decoder strips the space of the first token that it decodes, so a token is decoded after another one.
    """

    def __init__(self, view: TokenizerView):
        self._view = view
        anchor = view.tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor, self._skipped = anchor, view.decode(anchor)
        self._known: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self._added = {i for i, _ in view.tokenizer.get_added_tokens_decoder().items()}
        decoder = json.loads(view.tokenizer.to_str()).get("decoder") or {}
        self._byte_of = byte_of_characters() if _has(decoder, "ByteLevel") else {}
        self._is_fallback = _has(decoder, "ByteFallback")

    def __getitem__(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._decode(token)
        return text

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token; those of its part of a character where it has no text."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    def label(self, token: int) -> str:
        """Return the text of a token; its bytes as \\xe6\\xb8 where it is part of a character."""
        text = self[token]
        if BROKEN not in text:
            return text
        found = self.bytes_of(token)
        if found == text.encode("utf-8"):
            return text  # a token whose text is U+FFFD
        return "".join(f"\\x{byte:02x}" for byte in found)

    def is_shown(self, token: int) -> bool:
        """Return whether the token's text is part of an answer: skipped special tokens are not."""
        return bool(self._view.shown([token]))

    def _decode(self, token: int) -> str:
        if self._view.tokenizer.id_to_token(token) is None:
            return ""
        text = self._view.decode([*self._anchor, token])
        if text.startswith(self._skipped):
            return text[len(self._skipped) :]
        return self._view.decode([token])

    def _find_bytes(self, token: int) -> bytes:
        text = self[token]
        piece = self._view.tokenizer.id_to_token(token)
        if BROKEN in text and piece is not None and token not in self._added:
            if self._is_fallback and len(piece) == 6 and piece.startswith("<0x"):
                return bytes([int(piece[3:5], 16)])
            if self._byte_of and all(character in self._byte_of for character in piece):
                return bytes(self._byte_of[character] for character in piece)
        return text.encode("utf-8")


class TextOffsets:
    """Finds where tokens begin in the text of an answer, in characters. The tokens of one character begin
    where it does."""

    def __init__(self, texts: TokenTexts, start: int = 0):
        """start: characters before the first token."""
        self._texts, self._offset = texts, start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def end(self) -> int:
        """Characters of the text up to the last token."""
        return self._offset

    def next(self, token: int) -> int:
        """Return where the next token, which is this one, begins."""
        begins = self._offset
        if self._texts.is_shown(token):
            self._offset += len(self._decoder.decode(self._texts.bytes_of(token)))
        return begins


def _has(decoder: dict[str, Any], kind: str) -> bool:
    return decoder.get("type") == kind or any(_has(one, kind) for one in decoder.get("decoders", []))
