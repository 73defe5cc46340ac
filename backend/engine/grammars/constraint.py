"""The grammar of one sequence: its state, and the mask of its next token. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.matcher import GrammarFault, TokenMatcher
from tridecode.backend.engine.grammars.token_masks import mask_of


class Constraint:
    """The grammar of one sequence. A worker has it while `ready` is false, otherwise the loop's thread.

    mask: (W,) int32, the possible ids of the next token (SamplingState.masks). error: why there is none.
    is_over: the answer is complete, and the request has no token that ends it. matcher: its state.
    """

    def __init__(
        self,
        matcher: TokenMatcher,
        words: int,
        model_ends: Items[int],
        ends: Items[int],
        allowed: Items[int] = (),
    ):
        """words: of a mask. model_ends: tokens that the matcher allows where the answer may end. ends: those
        of the request. allowed: the only ids that the request allows; (): all.
        """
        self.matcher = matcher
        self.mask = np.zeros(words, np.int32)
        self.ready = False
        self.error: TridecodeError | None = None
        self.is_over = False
        self.timed = 0  # masks that are still computed alone, and timed
        self._model_ends, self._ends = list(model_ends), list(ends)
        self._moves_ends = set(self._model_ends) != set(self._ends)
        self._bits = self.mask.view(np.uint32)
        self._allowed = mask_of(allowed, words) if allowed else None

    def advance(self, tokens: list[int], cpu_limit_s: float) -> None:
        """Take the next tokens of the answer and compute the mask behind them. Does not raise.

        cpu_limit_s: limit of the thread's CPU time.
        """
        begun = time.thread_time()
        try:
            self.matcher.accept(tokens)
            self._fill()
        except GrammarFault as fault:
            self.error = fault
        except BaseException as error:  # also a panic of the library: it ends only this request
            self.error = TridecodeError(
                f"structured_output: the mask of a token could not be computed: {type(error).__name__}"
            )
        taken = time.thread_time() - begun
        if self.error is None and taken > cpu_limit_s:
            found = f"structured_output: the mask of one token took {1e3 * taken:.1f} ms of CPU time"
            wanted = f"{1e3 * cpu_limit_s:g} (mask_cpu_ms in config.pbtxt)"
            self.error = GrammarFault(f"{found}; this model accepts {wanted}", "time")

    def _fill(self) -> None:
        self.matcher.fill(self.mask)
        self._limit()

    def take(self, mask: np.ndarray, fault: GrammarFault | None) -> None:
        """Take the result of GrammarCompiler.advance. mask: (W,) int32, which it keeps."""
        self.mask, self._bits, self.error = mask, mask.view(np.uint32), fault
        if fault is None:
            self._limit()

    def _limit(self) -> None:
        """Apply the request's end tokens and its allowed ids to the grammar's mask."""
        if self._moves_ends and self.matcher.is_accepting():
            self._place_ends()
        if self._allowed is not None and not self.is_over:
            self.mask &= self._allowed

    def _place_ends(self) -> None:
        """Make the request's end tokens possible, where the answer may end, instead of the model's."""
        for token in self._model_ends:
            self._bits[token // 32] &= ~np.uint32(1 << token % 32)
        for token in self._ends:
            self._bits[token // 32] |= np.uint32(1 << token % 32)
        self.is_over = not self.mask.any()
