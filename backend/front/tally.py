"""The rows of an answer, as their pieces come: texts, token counts, log probabilities."""

from __future__ import annotations

from tridecode.backend.front.fields.answers import Usage
from tridecode.backend.front.reading import Pieces
from tridecode.backend.text.completion import Piece
from tridecode.backend.wire.messages import TopLogProbs


class Row:
    """One sequence. log_prob: the sum over its tokens."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tops: list[tuple[int, TopLogProbs]] = []
        self.num_tokens = 0
        self.log_prob = 0.0
        self.finish_reason = ""
        self.stop_word = ""

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.tops += piece.tops
        self.num_tokens += piece.num_tokens
        self.log_prob += sum(top.log_prob for _, top in piece.tops)
        self.finish_reason = piece.finish_reason
        self.stop_word = piece.stop_word

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Tally:
    """The rows of a request, those of one prompt next to each other, `sequences` each."""

    def __init__(self, prompts: int, sequences: int):
        self.rows = [Row() for _ in range(prompts * sequences)]
        self._sequences = sequences
        self._prompt_tokens = [0] * prompts
        self._cached_tokens = [0] * prompts
        self.completion_tokens = 0

    def add(self, pieces: Pieces, keep: bool) -> None:
        """keep: the pieces' texts and log probabilities, for a whole answer."""
        for group in pieces:
            for index, piece in group.items():
                prompt = index // self._sequences
                self._prompt_tokens[prompt] = piece.num_prompt_tokens
                self._cached_tokens[prompt] = max(self._cached_tokens[prompt], piece.cached_tokens)
                self.completion_tokens += piece.num_tokens
                if keep:
                    self.rows[index].add(piece)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    @property
    def usage(self) -> Usage:
        return Usage.of(self.prompt_tokens, self.completion_tokens, sum(self._cached_tokens))
