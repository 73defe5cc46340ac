"""One request of `LLM` while the engine processes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from tridecode.backend.base.errors import RequestCancelled, TridecodeError
from tridecode.backend.service.client_request import FAILURES, ClientRequest, failure_of, failure_text
from tridecode.backend.service.link import Link
from tridecode.backend.service.prompt_scores import PromptScores
from tridecode.backend.text.completion import Answer, Piece
from tridecode.backend.text.token_texts import TokenTexts
from tridecode.backend.wire.messages import Event, TopLogProbs
from tridecode.tools.llm.outputs import CompletionOutput, Logprob, RequestOutput


class Running(ClientRequest):
    """Collects the events of a prompt; `take` turns them into its RequestOutput.

    notify: called with this request on the link's thread when `take` has news, and not again
    before the next `take`. follows: call notify at every event, not only at the end of a sequence: for
    streams, and if a stop text may end an answer before the engine does. texts: texts of tokens, for results
    with log probabilities; else None. engine: number of the engine that runs the request. scores: scores of
    the prompt's tokens, if requested. finish: called with the output of a request that has succeeded.
    """

    def __init__(
        self,
        link: Link,
        output: RequestOutput,
        notify: Callable[[Running], None],
        follows: bool,
        texts: TokenTexts | None,
        engine: int,
        scores: PromptScores | None = None,
        finish: Callable[[RequestOutput], None] = lambda output: None,
    ):
        super().__init__(link, output.request_id)
        self.output, self._notify, self._follows, self._texts = output, notify, follows, texts
        self._scores, self._finish = scores, finish
        self.engine = engine
        self._events: deque[tuple[int, Event]] = deque()
        self._tokens: list[list[int]] = [[] for _ in output.outputs]
        self._answer: Answer | None = None
        self._failure: TridecodeError | None = None
        self._woken = False

    @property
    def ended(self) -> bool:
        return self._failure is not None or (self._answer is not None and self._answer.finished)

    def begin(self, answer: Answer) -> None:
        """Called once, before the engine gets the request."""
        self._answer = answer

    def put_row(self, row: int, event: Event) -> None:
        self._events.append((row, event))
        if (self._follows or event.finish) and not self._woken:
            self._woken = True
            self._notify(self)

    def fail(self, error: TridecodeError) -> None:
        """End it with this error, unless it has ended; the engine's requests are cancelled."""
        if not self.ended:
            self._failure = error
            self.cancel_rows()

    def cancel(self) -> None:
        self.fail(RequestCancelled("the request was cancelled"))

    def take(self) -> bool:
        """Add what has come to `output`; return whether that changed it.

        Raises the TridecodeError that the request ended with.
        """
        self._woken = False  # before the events are read: later ones notify again
        assert self._answer is not None
        events: list[tuple[int, Event]] = []
        while self._events and self._failure is None:
            row, event = self._events.popleft()
            if event.finish in FAILURES:
                self.fail(failure_of(event)(failure_text(event)))
            else:
                events.append((row, event))
                self._tokens[row] += event.tokens
                if self._scores is not None and event.extra is not None:
                    self._scores.add(event.extra.context_logits)
                if event.context_embedding:
                    self.output.embedding = np.frombuffer(event.context_embedding, np.float32)
        if self._failure is not None:
            raise self._failure
        groups = self._answer.pieces(events) if events else []
        for group in groups:
            for row, piece in group.items():
                self._add(self.output.outputs[row], self._tokens[row], piece)
        if self._answer.finished and not self.output.finished:
            if self._scores is not None and self._texts is not None:
                self.output.prompt_logprobs = _of_prompt(self._scores, self._texts)
            self._finish(self.output)
        self.output.finished = self._answer.finished
        return bool(groups)

    def _add(self, output: CompletionOutput, tokens: list[int], piece: Piece) -> None:
        output.text += piece.text
        output.token_ids = tokens[: len(output.token_ids) + piece.num_tokens]
        if piece.tops and self._texts is not None:
            drawn = sum(top.log_prob for _, top in piece.tops)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + drawn
            output.logprobs = (output.logprobs or []) + [
                _logprobs(token, top, self._texts) for token, top in piece.tops
            ]
        elif piece.log_probs:  # of a beam search
            output.cumulative_logprob = piece.cum_log_prob
        output.finish_reason = piece.finish_reason or None
        output.stop_reason = piece.stop_word or None


def _of_prompt(scores: PromptScores, texts: TokenTexts) -> list[dict[int, Logprob] | None]:
    """Return an entry for each token of the prompt; None for the first, which has no score."""
    found: list[dict[int, Logprob] | None] = [None]
    for token, log_prob, rank, best in list(zip(scores.ids, scores.log_probs, scores.ranks, scores.best))[1:]:
        assert log_prob is not None
        step = {one: Logprob(value, place, texts.label(one)) for place, (one, value) in enumerate(best, 1)}
        step.setdefault(token, Logprob(log_prob, rank, texts.label(token)))
        found.append(step)
    return found


def _logprobs(token: int, top: TopLogProbs, texts: TokenTexts) -> dict[int, Logprob]:
    """Return the most likely tokens of a step, best first, and the drawn one."""
    found = {
        one: Logprob(log_prob, rank, texts.label(one))
        for rank, (one, log_prob) in enumerate(zip(top.ids, top.log_probs), 1)
    }
    found.setdefault(token, Logprob(top.log_prob, top.rank, texts.label(token)))
    return found
