"""The interface to a grammar library, and what limits it. No torch, no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.wire.structured_output import StructuredOutput


class GrammarFault(RequestError):
    """A grammar that does not parse, is not supported, exceeds a limit, or allows no token.

    reason: one of counts.REASONS.
    """

    def __init__(self, text: str, reason: str = "refused"):
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model as bytes.

    tokens: of each id below the model's vocabulary size; b"" for an id that no text has. special: ids whose
    bytes are a name, which no text of an answer matches. end_ids: tokens that end a text of the model.
    """

    tokens: list[bytes]
    special: frozenset[int]
    end_ids: list[int]


class TokenMatcher(Protocol):
    """The state of one answer in its grammar. One thread at a time uses it."""

    def accept(self, tokens: list[int]) -> None:
        """Advance by the next tokens of the answer. Raises GrammarFault if the grammar does not allow
        them.
        """
        ...

    def fill(self, mask: np.ndarray) -> None:
        """Write the mask of the next token. mask: (W,) int32, see SamplingState.masks; ids that end a text
        are possible where the answer may end. Raises GrammarFault where no token is possible, or a limit is
        exceeded.
        """
        ...

    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        ...

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow, [] where there is a choice."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens. Raises GrammarFault for a matcher that has had a fault."""
        ...

    def copy(self) -> TokenMatcher:
        """Return an independent matcher in the same state."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for one vocabulary. Any thread."""

    def compile(self, output: StructuredOutput) -> TokenMatcher:
        """Return a matcher at the beginning of an answer. Raises GrammarFault."""
        ...

    def advance(self, matchers: list[Any], tokens: list[int], masks: np.ndarray) -> list[GrammarFault | None]:
        """Advance each matcher by one token and write its mask, on several threads of the library.

        matchers: made by `compile`, or copies. masks: (n, W) int32. Returns the fault of each, None for none.
        """
        ...
