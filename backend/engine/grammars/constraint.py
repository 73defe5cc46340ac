"""The grammar of one sequence: its state, the mask of its next token, and its drafts. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.matcher import GrammarFault, TokenMatcher
from tridecode.backend.engine.grammars.token_masks import allows, mask_of


class Constraint:
    """The grammar of one sequence. A worker has it while `ready` is false, otherwise the loop's thread.

    mask: (W,) int32, the possible ids of the next token (SamplingState.masks). error: why there is none.
    is_over: the answer is complete, and the request has no token that ends it. matcher: its state.
    drafts: tokens behind the newest one, which the grammar forces (is_forced) or allows; none ends the
    answer. draft_masks: (len(drafts), W) int32, masks of the token behind each draft. mask_s: CPU seconds of
    one of them, as last measured; 0.0: not yet.
    """

    def __init__(
        self,
        matcher: TokenMatcher,
        words: int,
        model_ends: Items[int],
        ends: Items[int],
        allowed: Items[int] = (),
        most_drafts: int = 0,
    ):
        """matcher: at the beginning of the answer; a copy of it is used. words: of a mask. model_ends: tokens
        that the matcher allows where the answer may end. ends: those of the request. allowed: the only ids
        that the request allows; (): all. most_drafts: 0: `drafts` stays empty.
        """
        self.matcher = matcher.copy()
        self.mask = np.zeros(words, np.int32)
        self.ready = False
        self.error: TridecodeError | None = None
        self.is_over = False
        self.timed = 0  # masks that are still computed alone, and timed
        self.drafts: list[int] = []
        self.is_forced = True
        self.draft_masks = np.zeros((0, words), np.int32)
        self.mask_s = 0.0
        self._most_drafts = most_drafts
        self._beginning, self._tokens = matcher, list[int]()  # of the answer so far, if there are drafts
        self._model_ends, self._ends = list(model_ends), list(ends)
        self._moves_ends = set(self._model_ends) != set(self._ends)
        self._allowed = mask_of(allowed, words) if allowed else None

    def advance(self, tokens: list[int], cpu_limit_s: float, proposed: Items[int] = ()) -> None:
        """Take the next tokens of the answer, compute the mask behind them, and draft. Does not raise.

        cpu_limit_s: limit of the thread's CPU time. proposed: drafts for where the grammar forces none.
        """
        begun = time.thread_time()
        try:
            self.matcher.accept(tokens)
            self.matcher.fill(self.mask)
            self.is_over = self._limit(self.mask)
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
        self._draft(tokens, proposed, cpu_limit_s)

    def accept(self, tokens: list[int]) -> None:
        """Take the tokens before the newest one, which `GrammarCompiler.advance` then takes. Does not raise:
        that call returns the fault of the matcher."""
        try:
            self.matcher.accept(tokens)
        except GrammarFault:
            pass

    def take(
        self,
        tokens: list[int],
        mask: np.ndarray,
        fault: GrammarFault | None,
        cpu_limit_s: float,
        proposed: Items[int] = (),
    ) -> None:
        """Take the result of GrammarCompiler.advance, and draft. tokens: the newest ones. mask: (W,) int32,
        which it keeps. cpu_limit_s: of the thread's CPU time for drafts. proposed: see `advance`."""
        self.mask, self.error = mask, fault
        if fault is None:
            self.is_over = self._limit(mask)
        self._draft(tokens, proposed, cpu_limit_s)

    def _draft(self, tokens: list[int], proposed: Items[int], cpu_limit_s: float) -> None:
        """Set the drafts behind `tokens`, which are the newest ones. Forced ones that are known remain."""
        if not self._most_drafts:
            return
        self._tokens += tokens
        count = len(tokens)
        known = (
            self.is_forced
            and self.error is None
            and count < len(self.drafts)
            and self.drafts[:count] == tokens
        )
        if known:
            self.drafts, self.draft_masks = self.drafts[count:], self.draft_masks[count:]
            return
        self.drafts, self.draft_masks = [], self.draft_masks[:0]
        if self.error is not None or self.is_over:
            return
        masks: list[np.ndarray] = []
        try:
            self._look_ahead(proposed, masks, time.thread_time() + cpu_limit_s)
        except BaseException:  # also a panic of the library: the draft fails where it is drawn, as any token
            self._most_drafts = 0
            self._restore()
        self.drafts = self.drafts[: len(masks)]
        if masks:
            self.draft_masks = np.stack(masks)

    def _look_ahead(self, proposed: Items[int], masks: list[np.ndarray], until: float) -> None:
        """Draft the tokens that must follow, or the first of the proposed ones that may follow; append the
        mask behind each to `masks`, and return to the newest token. until: of this thread's CPU time,
        about."""
        matcher, mask, taken, begun = self.matcher, self.mask, 0, time.thread_time()
        forced = matcher.forced_tokens()
        self.is_forced = bool(forced)
        self.drafts = list(forced or proposed)[: self._most_drafts]
        for token in self.drafts:
            ends = token in self._ends or token in self._model_ends
            if ends or not allows(mask, token) or time.thread_time() > until:
                break
            matcher.accept([token])
            taken, mask = taken + 1, np.zeros_like(mask)
            matcher.fill(mask)
            if self._limit(mask):  # the answer is complete: it ends when the token is drawn
                break
            masks.append(mask)
        if taken:
            self.mask_s = (time.thread_time() - begun) / taken
        matcher.rollback(taken)

    def _restore(self) -> None:
        """Return to the newest token with another matcher, after a fault of this one."""
        try:
            self.matcher = self._beginning.copy()
            self.matcher.accept(self._tokens)
        except BaseException as error:
            self.error = TridecodeError(f"structured_output: {type(error).__name__} behind a token")

    def _limit(self, mask: np.ndarray) -> bool:
        """Apply the request's end tokens and its allowed ids to the grammar's mask, of the matcher's state.
        Return whether the answer is complete, and no token ends it."""
        if self._moves_ends and self.matcher.is_accepting():
            self._place_ends(mask.view(np.uint32))
            if not mask.any():
                return True
        if self._allowed is not None:
            mask &= self._allowed
        return False

    def _place_ends(self, bits: np.ndarray) -> None:
        """Make the request's end tokens possible, where the answer may end, instead of the model's."""
        for token in self._model_ends:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
        for token in self._ends:
            bits[token // 32] |= np.uint32(1 << token % 32)
