"""The engine's events to the answer of a request: pieces of text, token counts, log-probs, finish reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple

from tridecode.backend.messages import Event
from tridecode.backend.text.detokenizer import StreamDecoder, TokenizerView
from tridecode.backend.text.stop_words import StopAutomaton, StopMatcher

#: Event.finish -> finish reason, in vLLM's words; "stopped": by another request of the client
FINISH_REASONS = {"end_id": "stop", "stop_word": "stop", "length": "length", "stopped": "abort"}


class Piece(NamedTuple):
    """What one response says about one row.

    text and log_probs (natural logarithms, one per token) are those of the num_tokens new tokens;
    cum_log_prob is the sum over the row so far. finish_reason: "" unless the row has ended.
    """

    num_prompt_tokens: int
    text: str
    num_tokens: int
    log_probs: list[float]
    cum_log_prob: float
    finish_reason: str


class Completion:
    """The generated text of one sequence. Keeps what has not been reported yet.

    Neither an end id nor a stop word is shown, but their tokens are counted.
    """

    def __init__(
        self,
        view: TokenizerView,
        prompt: Sequence[int],
        stop_words: StopAutomaton,
        cancel: Callable[[], None],
        echo: str = "",
    ):
        """prompt: its token ids. cancel(): called when a stop word ends the text before the engine does.
        echo: text to be reported ahead of the generated text."""
        self.text = ""
        self.num_tokens = 0
        self.finish_reason = ""  # "": it has not ended
        self._echo, self._num_prompt_tokens = echo, len(prompt)
        self._log_probs: list[float] = []
        self._cum_log_prob = 0.0
        self._decoder = StreamDecoder(view, prompt)
        self._matcher = StopMatcher(stop_words)
        self._by_token = not stop_words.empty
        self._cancel = cancel

    def take(self, event: Event) -> None:
        """Add an event; none counts after the end. Failures (Event.error) are the caller's."""
        if self.finish_reason:
            return
        tokens = event.tokens
        shown = tokens[:-1] if event.finish in ("end_id", "stop_word") else tokens
        used = self._push(shown, len(tokens))
        self.num_tokens += used
        self._log_probs += event.log_probs[:used]
        self._cum_log_prob += sum(event.log_probs[:used])
        if self.finish_reason:
            if not event.finish:
                self._cancel()
        elif event.finish:
            self._end(FINISH_REASONS.get(event.finish, event.finish))

    def report(self) -> Piece:
        """Everything since the last report."""
        text, count, log_probs = self._echo + self.text, self.num_tokens, self._log_probs
        self._echo, self.text, self.num_tokens, self._log_probs = "", "", 0, []
        return Piece(self._num_prompt_tokens, text, count, log_probs, self._cum_log_prob, self.finish_reason)

    def _push(self, shown: list[int], count: int) -> int:
        """Decode tokens. Returns how many of `count` were used: all, unless a stop word ended the text."""
        # token by token, so that the token that ends the text does not depend on how events were merged
        for index, ids in enumerate([[token] for token in shown] if self._by_token else [shown]):
            text, stopped = self._matcher.push(self._decoder.push(ids))
            self.text += text
            if stopped:
                self.finish_reason = "stop"
                return index + 1
        return count

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        text, stopped = self._matcher.push(self._decoder.flush())
        self.text += text if stopped else text + self._matcher.flush()


class Answer:
    """Decides which pieces of a request's rows go out together, and when.

    streamed: a response for each row with new text, with everything since its last one. Else whole rows: each
    in a response of its own as soon as it has ended (apart), or all in one response when the last has ended.
    """

    def __init__(self, rows: list[Completion], streamed: bool, apart: bool = False):
        self.finished = False  # every row has ended
        self.num_output_tokens = 0  # of all rows, so far
        self._rows, self._streamed, self._apart = rows, streamed, streamed or apart
        self._open = set(range(len(rows)))

    def pieces(self, events: Sequence[tuple[int, Event]]) -> list[dict[int, Piece]]:
        """The responses to these (row, event) pairs: row -> its piece, one dict per response."""
        rows = self._rows
        for index, event in events:
            rows[index].take(event)
        ready = []
        for index in dict(events):
            row = rows[index]
            if row.finish_reason:
                if index in self._open:
                    self._open.discard(index)
                    if not self._streamed or row.text or row.num_tokens or row.finish_reason == "abort":
                        ready.append(index)
            elif self._streamed and row.text:
                ready.append(index)
        self.finished = not self._open
        for index in ready:
            self.num_output_tokens += rows[index].num_tokens
        if self._apart:
            return [{index: rows[index].report()} for index in ready]
        return [{index: row.report() for index, row in enumerate(rows)}] if self.finished else []
