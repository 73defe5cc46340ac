"""Turns the engine's events into the answer of a request: text pieces, token counts, log-probs, finish
reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tridecode.backend.text.detokenizer import StreamDecoder, TokenizerView
from tridecode.backend.text.stop_words import StopAutomaton, StopMatcher
from tridecode.backend.wire.messages import Event, EventExtra, TopLogProbs

#: Event.finish -> vLLM's finish reason; "stopped": by a stop request of the client
FINISH_REASONS = {"end_id": "stop", "stop_word": "stop", "length": "length", "stopped": "abort"}


class Piece(NamedTuple):
    """The part of a completion that one response adds to one row.

    text and log_probs (natural logarithms, one per token) are those of the num_tokens new tokens;
    cum_log_prob is the sum over the row so far. finish_reason: "" unless the row has ended. tops: each new
    token with the most likely ones of its step, for requests that want them. stop_word: the text that
    ended the row, if one did. extras: of the events, each with the number of its tokens that count.
    embedding: of the prompt, (hidden,) float32, once.
    cached_tokens: tokens of the prompt that the engine did not compute.
    """

    num_prompt_tokens: int
    text: str
    num_tokens: int
    log_probs: list[float]
    cum_log_prob: float
    finish_reason: str
    tops: list[tuple[int, TopLogProbs]] = []
    stop_word: str = ""
    extras: list[tuple[int, EventExtra]] = []
    embedding: bytes = b""
    cached_tokens: int = 0


class Completion:
    """The generated text of one sequence. Buffers what has not been reported yet.

    End ids and stop words are shown only with show_stop, but their tokens are counted.
    """

    def __init__(
        self,
        view: TokenizerView,
        prompt: Sequence[int],
        stop_words: StopAutomaton,
        cancel: Callable[[], None],
        echo: str = "",
        show_stop: bool = False,
        min_tokens: int = 0,
        stops_by_id: bool = False,
        ended: Callable[[], None] = lambda: None,
    ):
        """prompt: its token ids. cancel(): called when a stop word ends the text before the engine does;
        ended(): when the engine ends it. echo: text to be reported ahead of the generated text. show_stop:
        the text includes what ended it. min_tokens: a stop word that is completed by one of the first
        min_tokens tokens is ignored. stops_by_id: the engine has the ids of the stop words, too, so its last
        tokens may be one.
        """
        self.text = ""
        self.num_tokens = 0
        self.finish_reason = ""  # "": not ended yet
        self.place = (0, 0)  # (text of the request, index of the sequence)
        self.prompt = prompt
        self._echo, self._num_prompt_tokens = echo, len(prompt)
        self._log_probs: list[float] = []
        self._tops: list[tuple[int, TopLogProbs]] = []
        self._extras: list[tuple[int, EventExtra]] = []
        self._embedding = b""
        self._cum_log_prob = 0.0
        self._cached_tokens = 0
        self._decoder = StreamDecoder(view, prompt)
        self._matcher = StopMatcher(stop_words, show_stop)
        self._show_stop, self._unchecked = show_stop, min_tokens
        self._by_token = not stop_words.empty
        self._stops_by_id = stops_by_id and not stop_words.empty
        self._cancel, self._ended = cancel, ended
        self._undecoded: list[int] = []  # tokens of events that `settle` decodes together

    def take(self, event: Event) -> None:
        """Add an event; events after the end are ignored. The caller handles failures (Event.error)."""
        if self.finish_reason:
            return
        tokens = event.tokens
        self._cached_tokens = self._cached_tokens or event.cached_tokens
        if event.finish or self._by_token:
            used = self._take_checked(event)
        else:
            used = len(tokens)
            self._undecoded += tokens
        self.num_tokens += used
        if event.log_probs:
            self._log_probs += event.log_probs[:used]
            self._cum_log_prob += sum(event.log_probs[:used])
        if event.top_log_probs:
            self._tops += zip(tokens[:used], event.top_log_probs)
        if event.extra is not None:
            self._extras.append((used, event.extra))
        if event.context_embedding:
            self._embedding = event.context_embedding
        if self.finish_reason:
            (self._ended if event.finish else self._cancel)()
        elif event.finish:
            self._end(FINISH_REASONS.get(event.finish, event.finish))
            self._ended()

    def _take_checked(self, event: Event) -> int:
        """Decode an event that may end the text. Returns how many of its tokens were used."""
        self.settle()
        tokens = event.tokens
        hidden = event.finish in ("end_id", "stop_word") and not self._show_stop
        shown = tokens[:-1] if hidden else tokens
        used = self._push(shown, len(tokens))
        if event.finish == "stop_word" and self._stops_by_id and not self.finish_reason:
            used = self._push(tokens[-1:], 1) + len(shown)
        return used

    def settle(self) -> None:
        """Decode what has come, so that `text` is complete. Tokens that came together are decoded at once."""
        if self._undecoded:
            self.text += self._decoder.push(self._undecoded)
            self._undecoded = []

    def report(self) -> Piece:
        """Return everything since the last report."""
        self.settle()
        piece = Piece(
            self._num_prompt_tokens,
            self._echo + self.text,
            self.num_tokens,
            self._log_probs,
            self._cum_log_prob,
            self.finish_reason,
            self._tops,
            self._matcher.found,
            self._extras,
            self._embedding,
            self._cached_tokens,
        )
        self._echo, self.text, self.num_tokens = "", "", 0
        self._log_probs, self._tops, self._extras, self._embedding = [], [], [], b""
        return piece

    def _push(self, shown: list[int], count: int) -> int:
        """Decode tokens. Returns how many of `count` were used: all, unless a stop word ended the text."""
        # token by token, so that the token that ends the text does not depend on how events were merged
        for index, ids in enumerate([[token] for token in shown] if self._by_token else [shown]):
            text, stopped = self._matcher.push(self._decoder.push(ids), self._unchecked <= 0)
            self._unchecked -= len(ids)
            self.text += text
            if stopped:
                self.finish_reason = "stop"
                return index + 1
        return count

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        text, stopped = self._matcher.push(self._decoder.flush(), self._unchecked <= 0)
        self.text += text if stopped else text + self._matcher.flush()


class Siblings:
    """The `count` completions of one request.

    The request is cancelled when all have ended but the engine still runs some, whose text a stop word ended.
    """

    def __init__(self, count: int, cancel: Callable[[], None]):
        self._open, self._cancel = count, cancel
        self._stopped = False

    def stopped(self) -> None:
        """Note that a stop word ended the text of one before the engine did."""
        self._stopped = True
        self.ended()

    def ended(self) -> None:
        """Note that one has ended."""
        self._open -= 1
        if self._open == 0 and self._stopped:
            self._cancel()


class Answer:
    """Decides which pieces of a request's rows go out together, and when.

    streamed: one response for each row with new text, with everything since its last one. Otherwise whole
    rows: each in a response of its own as soon as it has ended (apart), or all in one response when the last
    has ended. together: a streamed response has all rows, even those without new text. ends: a row that ends
    without text and tokens has a streamed response, too.
    """

    def __init__(
        self,
        rows: list[Completion],
        streamed: bool,
        apart: bool = False,
        together: bool = False,
        ends: bool = False,
    ):
        self.finished = False  # every row has ended
        self.num_output_tokens = 0  # of all rows, so far
        self.num_rows = len(rows)
        self._rows, self._streamed, self._apart = rows, streamed, streamed or apart
        self._together, self._ends = together and streamed, ends
        self._open = set(range(len(rows)))

    @property
    def finish_reasons(self) -> list[str]:
        """Return each row's finish reason; "" if it has not ended."""
        return [row.finish_reason for row in self._rows]

    def pieces(self, events: Sequence[tuple[int, Event]]) -> list[dict[int, Piece]]:
        """Return the responses to these (row, event) pairs: row -> its piece, one dict per response."""
        rows = self._rows
        for index, event in events:
            rows[index].take(event)
        ready = []
        for index in dict(events):
            row = rows[index]
            row.settle()
            if row.finish_reason:
                if index in self._open:
                    self._open.discard(index)
                    tells = row.text or row.num_tokens or row.finish_reason == "abort"
                    if tells or self._ends or not self._streamed:
                        ready.append(index)
            elif self._streamed and row.text:
                ready.append(index)
        self.finished = not self._open
        if self._together and ready:
            ready = list(range(len(rows)))
        for index in ready:
            self.num_output_tokens += rows[index].num_tokens
        if self._together:
            return [{index: rows[index].report() for index in ready}] if ready else []
        if self._apart:
            return [{index: rows[index].report()} for index in ready]
        return [{index: row.report() for index, row in enumerate(rows)}] if self.finished else []
