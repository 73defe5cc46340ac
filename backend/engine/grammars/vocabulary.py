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

    def encode(text: bytes) -> list[int]:
        return tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids

    return Vocabulary(tokens, frozenset(special | set(ends)), ends), encode


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
