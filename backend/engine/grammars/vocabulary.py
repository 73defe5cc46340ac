"""The bytes of each token of a repository's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tridecode.backend.engine.grammars.matcher import Vocabulary
from tridecode.backend.text.byte_level import byte_of_characters, is_byte_level
from tridecode.backend.text.detokenizer import TokenizerView
from tridecode.backend.text.token_texts import TokenTexts
from tridecode.backend.text.tokenizer_files import load_tokenizer

#: stands for a space in the pieces of SentencePiece
_SPACE = "\u2581"


def read_vocabulary(
    folder: Path, vocab_size: int, end_ids: Iterable[int]
) -> tuple[Vocabulary, Callable[[bytes], list[int]]]:
    """Return the vocabulary of a tokenizer folder, and a function that tokenises a text.

    vocab_size: of the model; ids beyond the tokenizer's have no bytes. end_ids: of the model. Raises
    ConfigError for a folder without a valid tokenizer.
    """
    tokenizer = load_tokenizer(folder, "tokenizer_dir in config.pbtxt")
    added = tokenizer.get_added_tokens_decoder()
    special = {token for token, value in added.items() if value.special}
    ends = [token for token in dict.fromkeys(end_ids) if 0 <= token < vocab_size]
    bytes_of = _bytes_of_pieces(tokenizer)
    tokens = [b""] * vocab_size
    for token in range(min(vocab_size, tokenizer.get_vocab_size() + len(added))):
        if token in added:
            tokens[token] = added[token].content.encode("utf-8")
            continue
        piece = tokenizer.id_to_token(token)
        if piece is not None:
            tokens[token] = bytes_of(token, piece)

    found = Vocabulary(tokens, frozenset(special | set(ends)), ends)
    return found, _ExactEncoder(tokenizer, found)


class _ExactEncoder:
    """Tokenises a part of a text so that the bytes of the tokens are those of the part.

    A tokenizer may add a space before a text, or normalise it: then the longest token that fits comes next. A
    grammar's forced bytes would otherwise become tokens that it does not allow.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary):
        self._tokenizer, self._tokens, self._special = tokenizer, vocabulary.tokens, vocabulary.special
        self._ids: dict[bytes, int] = {}
        for token, text in enumerate(vocabulary.tokens):
            if text and token not in vocabulary.special:
                self._ids.setdefault(text, token)
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        is_text = all(token < len(self._tokens) and token not in self._special for token in ids)
        if is_text and b"".join(self._tokens[token] for token in ids) == text:
            return ids
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """Return the longest tokens in turn, up to the first byte that no token begins with."""
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids


def _bytes_of_pieces(tokenizer: Tokenizer) -> Callable[[int, str], bytes]:
    """Return the function from (id, piece of the vocabulary) to the bytes of a token within a text."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    if is_byte_level(decoder):
        byte_of = byte_of_characters()

        def of_characters(token: int, piece: str) -> bytes:
            try:
                return bytes([byte_of[character] for character in piece])
            except KeyError:  # not in the alphabet: as it is written
                return piece.encode("utf-8")

        return of_characters
    kinds = list(_kinds(decoder))
    if any(kind in ("Metaspace", "Replace") for kind in kinds) and _is_plain(decoder):
        has_bytes = "ByteFallback" in kinds

        def of_text(token: int, piece: str) -> bytes:
            if has_bytes and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace(_SPACE, " ").encode("utf-8")

        return of_text
    texts = TokenTexts(TokenizerView(tokenizer, skip_special_tokens=False))
    return lambda token, piece: texts.bytes_of(token)


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder.get("type", "")
    for one in decoder.get("decoders", []):
        yield from _kinds(one)


def _is_plain(decoder: dict[str, Any]) -> bool:
    """Return whether the decoder of SentencePiece's pieces is one that only replaces the sign of a space,
    joins bytes, and strips the first space of a text.
    """
    kind = decoder.get("type")
    if kind == "Sequence":
        return all(_is_plain(one) for one in decoder.get("decoders", []))
    if kind == "Replace":
        return decoder.get("pattern") == {"String": _SPACE} and decoder.get("content") == " "
    if kind == "Metaspace":
        return decoder.get("replacement") == _SPACE
    return kind in ("ByteFallback", "Fuse", "Strip")
