"""Token ids to text, piece by piece: incremental detokenisation, which `tokenizers` alone does not offer."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from tridecode.backend.text.byte_level import ByteLevelStream, TokenBytes, is_byte_level
from tridecode.backend.text.clean_up import StreamCleanUp, clean_up

#: replacement character: what a decoder writes for bytes that are not (yet) valid UTF-8
BROKEN = "\ufffd"
#: tokens of context before the new ones: a decoder strips the space of the first token that it decodes
_CONTEXT_TOKENS = 4
#: a longer window is trimmed to its context as soon as it ends with a complete character
_TRIM_TOKENS = 24
#: a longer window is split even if its last character is incomplete, at a place that keeps the text
_MAX_WINDOW_TOKENS = 64
#: byte tokens of one run that are held back until the run is complete
_MAX_BYTE_RUN = 32
#: for a larger id `tokenizers` raises OverflowError instead of reporting it as unknown
MAX_ID = 2**32 - 1


class TokenizerView:
    """Properties of a tokenizer that decoding needs, computed once.

    shown: special tokens that appear in a text although the others are skipped.
    byte_ids: the tokens <0x00> ... <0xFF> of a decoder with byte fallback; else empty. token_bytes: set where
    the decoder is the byte-level one. cleans_up: texts are cleaned up as transformers does it
    (tokenizer_files.cleans_up, clean_up).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        cleans_up: bool = False,
        shown: Collection[str] = (),
    ):
        self.tokenizer, self.cleans_up = tokenizer, cleans_up
        added = tokenizer.get_added_tokens_decoder().items() if skip_special_tokens else ()
        self._special = {i for i, token in added if token.special and token.content not in shown}
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self.byte_ids = frozenset(_byte_ids(tokenizer)) if _has_byte_fallback(decoder) else frozenset()
        self.token_bytes = TokenBytes(tokenizer, self._is_shown) if is_byte_level(decoder) else None

    def shown(self, ids: list[int]) -> list[int]:
        """Return the ids that appear in a text: known to the tokenizer, and not special if these are
        skipped.
        """
        return list(filter(self._is_shown, ids))

    def _is_shown(self, token: int) -> bool:
        if not 0 <= token <= MAX_ID or token in self._special:
            return False
        return self.tokenizer.id_to_token(token) is not None

    def text(self, ids: list[int]) -> str:
        """Return the whole text of shown ids, as decoded by transformers."""
        text = self.decode(ids)
        return clean_up(text) if self.cleans_up else text

    def decode(self, ids: list[int]) -> str:
        """Return the decoder's text without clean-up."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _has_byte_fallback(decoder: dict) -> bool:
    return decoder.get("type") == "ByteFallback" or any(map(_has_byte_fallback, decoder.get("decoders", [])))


def _byte_ids(tokenizer: Tokenizer) -> list[int]:
    ids = (tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256))
    return [i for i in ids if i is not None]


class StreamDecoder:
    """Turns a growing list of ids into pieces of text whose concatenation is the decoding of the whole list.

    context: ids of the prompt; the pieces continue its text, so the space before a first word is kept. An
    incomplete character is held back.
    """

    def __init__(self, tokens: TokenizerView, context: Sequence[int] = ()):
        self._clean_up = StreamCleanUp() if tokens.cleans_up else None
        self._stream: ByteLevelStream | WindowStream
        if tokens.token_bytes is not None:
            self._stream = ByteLevelStream(tokens.token_bytes, context)
        else:
            self._stream = WindowStream(tokens, context)

    def push(self, ids: list[int]) -> str:
        """Return the text that later ids cannot change; may be empty."""
        piece = self._stream.push(ids)
        return piece if self._clean_up is None else self._clean_up.push(piece)

    def flush(self) -> str:
        """Return the text that was held back; call it once, after the last ids."""
        piece = self._stream.flush()
        return piece if self._clean_up is None else self._clean_up.push(piece) + self._clean_up.flush()


class WindowStream:
    """Decodes the last few tokens again with each new one, for decoders whose text depends on neighbours.

    A run of byte tokens is held back, because the decoders of SentencePiece models accept or refuse a run as
    a whole. Only a malformed run of more than 32 byte tokens may differ from the decoding of the whole list.
    A push decodes at most 64 tokens besides its own.
    """

    def __init__(self, tokens: TokenizerView, context: Sequence[int] = ()):
        self._tokens = tokens
        self._window = self._context(tokens.shown(list(context[-_MAX_WINDOW_TOKENS:])))
        self._emitted = len(tokens.decode(self._window))  # characters of the window's text already returned

    def push(self, ids: list[int]) -> str:
        self._window += self._tokens.shown(ids)
        stable = self._stable_count()
        text = self._tokens.decode(self._window[:stable])
        broken = text.endswith(BROKEN)
        piece = text[self._emitted : len(text) - broken]
        self._emitted = max(self._emitted, len(text) - broken)
        if stable > _TRIM_TOKENS and not broken:
            self._trim(stable, len(text))
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            self._split()
        return piece

    def flush(self) -> str:
        text = self._tokens.decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _stable_count(self) -> int:
        """Return the number of tokens before the run of byte tokens at the window's end.

        A run that is too long to be held back is included up to its last complete character.
        """
        byte_ids, count = self._tokens.byte_ids, len(self._window)
        start = count
        while start and count - start <= _MAX_BYTE_RUN and self._window[start - 1] in byte_ids:
            start -= 1
        if count - start <= _MAX_BYTE_RUN:
            return start
        places = range(count, count - 4, -1)
        return next((p for p in places if not self._tokens.decode(self._window[:p]).endswith(BROKEN)), count)

    def _context(self, ids: list[int]) -> list[int]:
        """Return the last tokens of `ids`; a few more or fewer if the cut would split a run of byte
        tokens.
        """
        start, byte_ids = max(0, len(ids) - _CONTEXT_TOKENS), self._tokens.byte_ids
        while start and len(ids) - start < _MAX_BYTE_RUN and ids[start] in byte_ids:
            start -= 1
        if start and ids[start] in byte_ids:
            start = self._clean_cut(ids, self._tokens.decode(ids)) or start
        return ids[start:]

    def _trim(self, stable: int, length: int) -> None:
        """Keep the context of the stable tokens, whose text has `length` characters, and the tokens after."""
        context = self._context(self._window[:stable])
        self._window = context + self._window[stable:]
        self._emitted += len(self._tokens.decode(context)) - length

    def _split(self) -> None:
        """Drop the front of a window that ends with an incomplete character."""
        place = self._clean_cut(self._window, self._tokens.decode(self._window))
        self._emitted = max(0, self._emitted - len(self._tokens.decode(self._window[:place])))
        self._window = self._window[place:]

    def _clean_cut(self, ids: list[int], text: str) -> int:
        """Return a place near the end where `ids` can be split so that both parts decode to `text` together,
        or 0.

        An incomplete character has at most three bytes, and so at most three tokens.
        """
        for place in range(len(ids) - 1, max(0, len(ids) - 6), -1):
            if self._tokens.decode(ids[:place]) + self._tokens.decode(ids[place:]) == text:
                return place
        return 0
