"""Finds stop words in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopAutomaton:
    """Stop words as an automaton that reads a character at a time (Aho and Corasick 1975).

    A state is the longest suffix of the text so far that is a prefix of a stop word. The cost of a step does
    not depend on the number of words. Empty words are ignored. Rows with the same words can share one.
    """

    def __init__(self, stop_words: Iterable[str]):
        self._next: list[dict[str, int]] = [{}]  # transitions of each state; state 0 is the empty text
        self._back = [0]  # failure links: the state of the longest proper suffix
        self.ends = [0]  # length of the longest stop word that ends in this state; 0: none
        self.depth = [0]  # length of a state's text
        for word in stop_words:
            state = 0
            for depth, character in enumerate(word, 1):
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._back.append(0)
                    self.ends.append(0)
                    self.depth.append(depth)
                state = self._next[state][character]
            self.ends[state] = len(word)
        self.empty = len(self._next) == 1
        self._link()

    def _link(self) -> None:
        """Fill in `_back` breadth first: a suffix is complete before the states that link to it."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                self._back[following] = self.step(self._back[state], character)
                self.ends[following] = self.ends[following] or self.ends[self._back[following]]
                waiting.append(following)

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._back[state]
        return self._next[state].get(character, 0)


class StopMatcher:
    """Finds the first stop word in text that arrives in pieces.

    Text that may be the beginning of a stop word is held back. The stop word that completes first wins; if
    several end at the same place, the longest wins. So the result does not depend on how the text was cut.
    """

    def __init__(self, stop_words: StopAutomaton, shown: bool = False):
        """shown: a stop word is part of the text that it ends."""
        self._words, self._shown = stop_words, shown
        self.found = ""  # the stop word that ended the text
        self._state = 0
        self._held = ""

    def push(self, text: str, check: bool = True) -> tuple[str, bool]:
        """Return (text that can be shown, whether a stop word was found).

        The stop word itself is dropped unless it is shown. check: False ignores stop words that this text
        completes.
        """
        words = self._words
        if words.empty:
            return text, False
        state, before = self._state, len(self._held)
        text = self._held + text
        for at in range(before, len(text)):
            state = words.step(state, text[at])
            if check and (length := words.ends[state]):
                self._held, self._state = "", 0
                self.found = text[at + 1 - length : at + 1]
                return text[: at + 1 - (0 if self._shown else length)], True
        self._state, keep = state, words.depth[state]
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held, self._state = self._held, "", 0
        return held
