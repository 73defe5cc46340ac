"""Token ids to text, piece by piece: what a streaming door needs and `tokenizers` alone does not give."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

#: what a decoder writes for bytes that are not (yet) UTF-8
BROKEN = "\ufffd"
#: tokens kept before the ones being decoded: a decoder strips the space of the first token it sees
_CONTEXT_TOKENS = 4
#: a window longer than this is cut back to its context once its end is a clean one
_TRIM_TOKENS = 24
#: a window whose end stays broken for so long is cut wherever the text does not change by it
_MAX_WINDOW_TOKENS = 64
#: byte tokens of one run that are held back until the run is whole
_MAX_BYTE_RUN = 32


class TokenizerView:
    """What a StreamDecoder has to know of a tokenizer, worked out once.

    dropped(id): ids that never show: unknown to the tokenizer, or special ones where these are skipped.
    byte_ids: the tokens <0x00> ... <0xFF> of a decoder with byte fallback.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self.byte_ids = frozenset(_byte_ids(tokenizer)) if _has_byte_fallback(decoder) else frozenset()

    def shown(self, ids: list[int]) -> list[int]:
        special, known = self._special, self.tokenizer.id_to_token
        return [i for i in ids if i >= 0 and i not in special and known(i) is not None]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _has_byte_fallback(decoder: dict) -> bool:
    return decoder.get("type") == "ByteFallback" or any(map(_has_byte_fallback, decoder.get("decoders", [])))


def _byte_ids(tokenizer: Tokenizer) -> list[int]:
    ids = (tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256))
    return [i for i in ids if i is not None]


class StreamDecoder:
    """Turns a growing list of ids into pieces of text; put together they are the decoding of the whole list.

    context: ids of the prompt, a whole text; the pieces continue it (the space before a first word stays).
    A character whose bytes are not all there yet is held back, and so is a run of byte tokens, which the
    decoders of SentencePiece models accept or refuse as a whole; only a malformed run of more than 32 byte
    tokens may come out otherwise than it would in one go. A push decodes at most 64 tokens and its own.
    """

    def __init__(self, tokens: TokenizerView, context: list[int] = ()):  # type: ignore[assignment]
        self._tokens = tokens
        self._window = self._context(tokens.shown(list(context[-_MAX_WINDOW_TOKENS:])))
        self._emitted = len(tokens.decode(self._window))  # characters of the window's text that are out

    def push(self, ids: list[int]) -> str:
        """The text that is certain after these ids too; may be empty."""
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
        """What was held back; call it once, after the last ids."""
        text = self._tokens.decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _stable_count(self) -> int:
        """How many tokens of the window stand before the run of byte tokens at its end.

        Of a run that is too long to be held, the part that ends with a whole character counts as well.
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
        """The last tokens of `ids`, a few more or less where the cut would tear a run of byte tokens."""
        start, byte_ids = max(0, len(ids) - _CONTEXT_TOKENS), self._tokens.byte_ids
        while start and len(ids) - start < _MAX_BYTE_RUN and ids[start] in byte_ids:
            start -= 1
        if start and ids[start] in byte_ids:
            start = self._clean_cut(ids, self._tokens.decode(ids)) or start
        return ids[start:]

    def _trim(self, stable: int, length: int) -> None:
        """Keep a little of the stable tokens, whose text has `length` characters, and what stands behind."""
        context = self._context(self._window[:stable])
        self._window = context + self._window[stable:]
        self._emitted += len(self._tokens.decode(context)) - length

    def _split(self) -> None:
        """Drop the front of a window whose end is broken."""
        place = self._clean_cut(self._window, self._tokens.decode(self._window))
        self._emitted = max(0, self._emitted - len(self._tokens.decode(self._window[:place])))
        self._window = self._window[place:]

    def _clean_cut(self, ids: list[int], text: str) -> int:
        """Where `ids` can be cut near their end so that the halves decode to `text`, the whole; or 0.

        A broken character has at most three bytes, hence tokens, so that one of the last places will do.
        """
        for place in range(len(ids) - 1, max(0, len(ids) - 6), -1):
            if self._tokens.decode(ids[:place]) + self._tokens.decode(ids[place:]) == text:
                return place
        return 0


class StopMatcher:
    """Finds the first of some stop words in text that comes in pieces.

    Text that may be the beginning of a stop word is held back. Among several, the one that is complete first
    wins, and of those the longest, so that the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop_words: list[str]):
        self._words = [word for word in stop_words if word]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can go out, whether a stop word was found); the stop word is swallowed."""
        if not self._words:
            return text, False
        text = self._held + text
        found = [(at + len(word), at) for word in self._words for at in [text.find(word)] if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max(_overlap(text, word) for word in self._words)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `word`."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
