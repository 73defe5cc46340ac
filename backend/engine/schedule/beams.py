"""Beam search of one prompt: it chooses the candidates that become beams, and ends the search. No torch, no
device.

A step returns the most likely next tokens of each running beam. The best `width` of all of them are the next
beams. There are two rules for a beam that ended (by end_id, a stop word or its length):

Competition (FasterTransformer): it stays among the beams at no cost and with its own length, as long as
its score is good enough. score = cum / length ** len_penalty, where length counts prompt and new tokens; the
search is over when all beams have ended.

Pool (transformers' beam search): it moves to a pool of the best `width` ended beams if it was among the best
`width` candidates. Running beams compare cum; the pool compares cum / length ** len_penalty, where length
counts new tokens. early_stopping says when the pool is final: 1, as soon as it is full; 0, when the best
running beam, at its length, is not better than the worst of the pool; 2, when it could not become better at
any length, with a positive len_penalty at max_tokens.

cum is the sum of the log probabilities of the new tokens. beam_search_diversity_rate * (rank of the candidate
within its beam, modulo width) is added where candidates are compared, never to cum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.schedule.sequence import Finish, Sequence, SequenceGroup, no_token_error
from tridecode.backend.wire.beam_tree import BeamText
from tridecode.backend.wire.messages import BeamStep, Event
from tridecode.backend.wire.sampling_params import SamplingParams


@dataclass(eq=False)
class Beam:
    """One continuation of the prompt. sequence: None if it has ended. log_probs: of each token of output."""

    output: list[int]
    log_probs: list[float]
    cum: float
    sequence: Sequence | None
    finish: Finish | None = None
    score: float = -np.inf  # among the ended ones


class Choice(NamedTuple):
    """A candidate that was chosen. token: -1 for a beam that had ended before."""

    parent: int  # index of its beam
    token: int
    log_prob: float
    cum: float
    finish: Finish | None


@dataclass
class BeamSearch:
    """The beams of one group, best first, and the rules. `first` is the sequence that computes the prompt.

    branch(parent, child): the child takes a slot and shares what the parent has in the cache. drop(sequence):
    it gives slot and blocks back. Both are called by `advance` only.
    """

    first: Sequence
    branch: Callable[[Sequence, Sequence], None]
    drop: Callable[[Sequence], None]
    beams: list[Beam] = field(default_factory=list)
    pool: list[Beam] = field(default_factory=list)
    is_over: bool = False
    embedding: bytes = b""  # of the prompt, until an event takes it

    def __post_init__(self) -> None:
        self.params: SamplingParams = self.first.params
        self.group: SequenceGroup = self.first.group
        self.width = self.params.beam_width
        self.beams = [Beam([], [], 0.0, self.first)]
        self._candidates: dict[Sequence, tuple[np.ndarray, np.ndarray]] = {}

    def take(self, sequence: Sequence, ids: np.ndarray, log_probs: np.ndarray) -> bool:
        """Keep the candidates of a running beam, (W,) int32 and (W,) float32, most likely first. Returns
        whether all running beams have theirs.
        """
        self._candidates[sequence] = ids, log_probs
        return len(self._candidates) == len(self.group.sequences)

    def forget(self) -> None:
        """Forget the candidates of the running beams, because the beams are computed again."""
        self._candidates.clear()

    def restore(self, texts: list[BeamText]) -> None:
        """Continue with these beams, best first, of a search without a pool.

        Call this before the group is queued; the search is over if all of them have ended.
        """
        self.beams = []
        first: Sequence | None = self.first
        for text in texts:
            self.first.output = text.tokens[:-1]
            finish = self.first.end_with(text.tokens[-1])
            self.beams.append(Beam(text.tokens, text.log_probs, text.cum_log_prob, None, finish))
        running = [beam for beam in self.beams if beam.finish is None]
        for beam in running:
            beam.sequence = first or self.first.split(self.first.index)
            if first is None:
                beam.sequence.extra_outputs = None  # the first beam returns the prompt's
            beam.sequence.output, first = beam.output, None
        self.is_over = not running

    def advance(self) -> BeamStep:
        """Choose the next beams. Raises RequestError if no token is possible in any beam and the pool is
        empty, ArithmeticError if the logits of one are not numbers: no beam is better or worse than that one.

        The sequences of the group are then those of the beams that run on; none if `is_over`.
        """
        cums, ids, log_probs = self._tables()
        chosen = self._choose(cums, ids, log_probs)
        self.embedding += self.first.take_embedding()
        if not self.params.beam_pool:
            self.is_over = all(choice.finish is not None for choice in chosen)
        before, self.beams = self.beams, [self._continue(choice) for choice in chosen]
        if self.is_over:
            for beam in before:
                self._stop(beam)
        else:
            self._share(before, chosen)
        return BeamStep(
            [choice.parent for choice in chosen],
            [choice.token for choice in chosen],
            [choice.log_prob for choice in chosen],
        )

    def best(self) -> list[Beam]:
        """Return the answer, best first: the pool or the beams."""
        return self.pool if self.params.beam_pool else self.beams

    def event(self, step: BeamStep) -> Event:
        """Return the event of a step that is not the last one."""
        return self._event(0, beams=step)

    def last_events(
        self, finish: Finish | None, error: TridecodeError | None, step: BeamStep | None
    ) -> list[Event]:
        """Return one event for each of the group's sequences.

        finish: None if the search is over, ended by `step`.
        """
        numbers = range(self.params.num_sequences)
        if finish is not None:
            text, code = (str(error), error.code) if error else ("", "")
            return [self._event(i, finish.value, error=text, code=code) for i in numbers]
        if self.params.beam_pool:
            return [self._step_event(i) for i in numbers]
        by_length = any(beam.finish is Finish.LENGTH for beam in self.beams)
        last = Finish.LENGTH if by_length else self.beams[0].finish or Finish.LENGTH
        return [self._event(0, last.value, beams=step)]

    def _step_event(self, i: int) -> Event:
        """Return the whole text of one of the best beams, or an empty text if the search has found fewer."""
        if i >= len(self.pool):
            return self._event(i, Finish.LENGTH.value)
        beam = self.pool[i]
        log_probs = beam.log_probs if self.params.return_log_probs else []
        finish = (beam.finish or Finish.LENGTH).value
        return self._event(i, finish, tokens=beam.output, log_probs=log_probs)

    def _event(self, i: int, finish: str = "", **fields: Any) -> Event:
        """Return an event of the group's sequence i. The first one carries what belongs to the prompt."""
        if i > 0:
            return Event(self.group.request, self.first.index + i, finish=finish, **fields)
        embedding = self.embedding + self.first.take_embedding()
        extra_outputs, self.embedding = self.first.extra_outputs, b""
        has_token = any(beam.output for beam in (*self.beams, *self.pool))
        extra = extra_outputs.take(self.params, int(has_token), bool(finish)) if extra_outputs else None
        return Event(
            self.group.request,
            self.first.index,
            finish=finish,
            context_embedding=embedding,
            extra=extra,
            queued_s=self.group.take_queued(),
            cached_tokens=self.group.take_cached(),
            **fields,
        )

    # ------------------------------------------------------------ candidates

    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return cum (B, W) float64, -inf without a candidate, and token ids and log probabilities (B, W)
        of the candidates of all beams.

        An ended beam has one candidate, itself.
        """
        width = max(len(ids) for ids, _ in self._candidates.values())
        ids = np.full((len(self.beams), width), -1, np.int64)
        log_probs = np.full((len(self.beams), width), -np.inf)
        for row, beam in enumerate(self.beams):
            if beam.sequence is None:
                log_probs[row, 0] = 0.0
            else:
                ids[row], log_probs[row] = self._candidates[beam.sequence]
        self._candidates.clear()
        if np.isnan(log_probs).any():
            raise ArithmeticError("the logits of a beam are not numbers (NaN or infinite)")
        cums = log_probs + np.array([beam.cum for beam in self.beams])[:, None]
        if not self.pool and not np.isfinite(cums).any():
            raise no_token_error(next(beam.sequence for beam in self.beams if beam.sequence is not None))
        return cums, ids, log_probs

    def _choose(self, cums: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> list[Choice]:
        """Return the next beams, best first; ended ones go to the pool, if there is one."""
        scores = cums if self.params.beam_pool else cums / self._lengths(cums) ** self.params.len_penalty
        ranks = np.arange(cums.shape[1]) % self.width
        scores = (scores + self.params.beam_search_diversity_rate * ranks).reshape(-1)
        order = np.argsort(-scores, kind="stable")
        chosen: list[Choice] = []
        for rank, index in enumerate(order.tolist()):
            row, column = divmod(index, cums.shape[1])
            if len(chosen) == self.width or not np.isfinite(cums[row, column]):
                break
            choice = self._choice(row, int(ids[row, column]), float(log_probs[row, column]))
            if self.params.beam_pool and choice.finish is not None:
                if rank < self.width:
                    self._add_to_pool(choice)
            else:
                chosen.append(choice)
        if self.params.beam_pool:
            self.is_over = not chosen or self._pool_is_final(chosen[0].cum)
            self.pool.sort(key=lambda beam: -beam.score)
        return chosen

    def _lengths(self, cums: np.ndarray) -> np.ndarray:
        """Return (B, 1): tokens of prompt and output of the candidates of each beam."""
        prompt = len(self.first.prompt)
        lengths = [prompt + len(beam.output) + (beam.sequence is not None) for beam in self.beams]
        return np.array(lengths, np.float64)[:, None]

    def _choice(self, row: int, token: int, log_prob: float) -> Choice:
        beam = self.beams[row]
        finish = beam.finish if beam.sequence is None else beam.sequence.end_with(token)
        return Choice(row, token, log_prob, beam.cum + log_prob, finish)

    # ------------------------------------------------------------ the pool

    def _add_to_pool(self, choice: Choice) -> None:
        beam = self._continue(choice)
        beam.score = choice.cum / len(beam.output) ** self.params.len_penalty
        self.pool.append(beam)
        self.pool.sort(key=lambda one: -one.score)
        del self.pool[self.width :]

    def _pool_is_final(self, best_cum: float) -> bool:
        if len(self.pool) < self.width:
            return False
        if self.params.early_stopping == 1:
            return True
        length = len(next(b for b in self.beams if b.sequence is not None).output) + 1
        if self.params.early_stopping == 2 and self.params.len_penalty > 0.0:
            length = self.params.max_tokens
        return best_cum / length**self.params.len_penalty <= self.pool[-1].score

    # ------------------------------------------------------------ beams and their sequences

    def _continue(self, choice: Choice) -> Beam:
        """Return the beam that a choice makes of its parent; its sequence comes with `_share`."""
        parent = self.beams[choice.parent]
        if choice.token < 0:
            return parent
        output, log_probs = [*parent.output, choice.token], [*parent.log_probs, choice.log_prob]
        return Beam(output, log_probs, choice.cum, None, choice.finish)

    def _share(self, before: list[Beam], chosen: list[Choice]) -> None:
        """Give every beam that runs on a sequence: the first child of a beam takes its parent's, the others
        branch off it. Sequences without a child go first, so that their slots are free.
        """
        running = [
            (beam, before[choice.parent].sequence)
            for beam, choice in zip(self.beams, chosen)
            if choice.finish is None
        ]
        continued = {id(sequence) for _, sequence in running}
        for beam in before:
            if beam.sequence is not None and id(beam.sequence) not in continued:
                self._stop(beam)
        taken: set[int] = set()
        for beam, sequence in running:
            assert sequence is not None
            beam.sequence = sequence
            if id(sequence) in taken:
                beam.sequence = sequence.split(sequence.index)
                beam.sequence.extra_outputs = None  # the first beam returns the prompt's
                self.branch(sequence, beam.sequence)
            taken.add(id(sequence))
        for beam, _ in running:
            assert beam.sequence is not None
            beam.sequence.output = beam.output

    def _stop(self, beam: Beam) -> None:
        if beam.sequence is not None:
            self.drop(beam.sequence)
            beam.sequence = None
