"""Token ids to text, piece by piece: what a streaming door needs and `tokenizers` alone does not give."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable

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
#: beyond it `tokenizers` raises OverflowError in place of saying that it does not know an id
MAX_ID = 2**32 - 1


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
        return [i for i in ids if 0 <= i <= MAX_ID and i not in special and known(i) is not None]

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


class StopAutomaton:
    """Some stop words as an automaton that reads text a character at a time (Aho and Corasick 1975).

    A state is the longest end of the text read so far that begins a stop word. A step costs the same however
    many words there are. Rows with the same words share one.
    """

    def __init__(self, stop_words: Iterable[str]):
        self.empty = True
        self._next: list[dict[str, int]] = [{}]  # of each state, state 0 being the empty text
        self._back = [0]  # the state of the longest proper end of a state's text
        self._ends = [0]  # length of the longest word that a state's text ends with; 0: none
        self.depth = [0]  # length of a state's text
        for word in stop_words:
            if word:
                self._add(word)
                self.empty = False
        self._link()

    def _add(self, word: str) -> None:
        state = 0
        for character in word:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._back.append(0)
                self._ends.append(0)
                self.depth.append(self.depth[state] + 1)
            state = following
        self._ends[state] = len(word)

    def _link(self) -> None:
        """Fill in `_back`, nearest states first, so that what a state falls back to is known before it."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                self._back[following] = self.step(self._back[state], character)
                self._ends[following] = self._ends[following] or self._ends[self._back[following]]
                waiting.append(following)

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._back[state]
        return self._next[state].get(character, 0)

    def ending(self, state: int) -> int:
        """Length of the longest stop word that ends here; 0 if none does."""
        return self._ends[state]


class StopMatcher:
    """Finds the first of some stop words in text that comes in pieces.

    Text that may be the beginning of a stop word is held back. Among several, the one that is complete first
    wins, and of those the longest, so that the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop_words: StopAutomaton):
        self._words = stop_words
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can go out, whether a stop word was found); the stop word is swallowed."""
        words = self._words
        if words.empty:
            return text, False
        state, before = self._state, len(self._held)
        text = self._held + text
        for at in range(before, len(text)):
            state = words.step(state, text[at])
            length = words.ending(state)
            if length:
                self._held, self._state = "", 0
                return text[: at + 1 - length], True
        self._state, keep = state, words.depth[state]
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held, self._state = self._held, "", 0
        return held
