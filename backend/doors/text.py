"""The TensorRT-LLM ensemble's contract at one door: text in, text out, streamed or whole.

Source: config.pbtxt of TensorRT-LLM's ensemble and bls models, and what their clients send and read. The door
tokenises itself and talks straight to the engine, so a client that leaves is noticed and a stop word ends
the generation at once. Chosen where the contract leaves room:

  text_output is one flat array of texts, each going on from its prompt exactly: prompt + answer is the text.
  Without `stream` a request gets one response, as HTTP's generate wants it, even from a decoupled model.
  From a decoupled model each row of several gets a response of its own, as soon as that row has ended.
  A streamed response merges what has piled up; its num_output_tokens is its own, so that they add up.
  num_output_tokens counts every generated token, those of an end id or a stop word included.
  Stop words are matched in the text and not shown; one that is the empty string is none.
  A request that another one stops ends as one that has all its tokens, with the text that there was.
  finish_reason comes with the last response of each row, where config.pbtxt declares it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

import numpy as np
from tokenizers import Tokenizer

from tridecode.backend.doors import fields
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.doors.detokenizer import StopAutomaton, StopMatcher, StreamDecoder, TokenizerView
from tridecode.backend.doors.door import EngineDoor, Outputs, Received, Submission
from tridecode.backend.doors.envelope import MAX_STOP_WORD_BYTES, MAX_STOP_WORDS
from tridecode.backend.doors.fields import decode_text
from tridecode.backend.doors.senders import Stream
from tridecode.backend.doors.settings import DoorSettings, end_token_id, load_tokenizer
from tridecode.backend.doors.tokenising import encode
from tridecode.backend.errors import RequestCancelled, RequestError
from tridecode.backend.messages import Event, Limits, SamplingParams, SequenceRequest


class TritonPythonModel(EngineDoor):
    """One request of B texts becomes B requests of the engine, so that each can be stopped by itself."""

    table = TENSORRT_LLM

    def prepare(self, settings: DoorSettings) -> None:
        self.tokenizer = load_tokenizer(settings)
        self.view = TokenizerView(self.tokenizer, settings.skip_special_tokens)
        self.tokenizer_end_id = end_token_id(settings, self.tokenizer)

    def at_once(self, received: Received, stream: Stream) -> bool:
        if not received.inputs.flag("stop"):
            return False
        self._stop(stream, received.outputs)
        return True

    def accept(self, received: Received, stream: Stream) -> None:
        inputs, limits = received.inputs, self.limits()
        streaming = inputs.flag("stream")
        if streaming and not self.settings.decoupled:
            wanted = "model_transaction_policy { decoupled: true }"
            raise RequestError(
                f"stream is true; this model cannot stream ({wanted} in config.pbtxt would allow it)"
            )
        texts = _read_texts(inputs)
        params = self._read_params(inputs, len(texts), limits)
        priorities = fields.priorities(inputs, received.parameters, len(texts))
        stop_words = _words(inputs, "stop_words", len(texts))
        for words in stop_words:
            _check_stop_words(words)
        prompts = self._tokenise(texts, params, limits, stream)
        rows = self._rows(prompts, stop_words, stream)
        shape = Shape(received.outputs, _wanted(inputs), batched=self.settings.max_batch_size > 0)
        exclude = inputs.flag("exclude_input_in_output", self.settings.exclude_input_in_output)
        stream.answer = (
            StreamedAnswer(rows, shape)
            if streaming
            else WholeAnswer(rows, shape, exclude, apart=self.settings.decoupled)
        )
        submissions = [
            Submission([_sequence(prompt, one, limits)], _sink(stream, row), priority)
            for row, (prompt, one, priority) in enumerate(zip(prompts, params, priorities))
        ]
        self.submit(stream, submissions, received.timeout_s)
        if stream.stop_wanted:
            _stop_rows(stream)

    def _stop(self, stream: Stream, outputs: Outputs) -> None:
        """End the running requests of the same request id; the stop request itself gets an empty text."""
        if not stream.label:
            raise RequestError("stop is true; it needs the request id of the request that is to be stopped")
        for other in self.senders.open_streams():
            if other.label == stream.label and other is not stream:
                other.stop_wanted = True  # for one that is being prepared
                _stop_rows(other)
        stream.answer = _Nothing(outputs)
        stream.put(Event(0, 0, finish="length"))

    # ------------------------------------------------------------ reading

    def _read_params(self, inputs: Inputs, batch: int, limits: Limits) -> list[SamplingParams]:
        counts = inputs.rows("max_tokens", batch)
        end_ids = inputs.rows("end_id", batch, self._end_id(limits))
        bad_words = _ids_of_words(_words(inputs, "bad_words", batch), self.tokenizer)
        stop_ids = [[token] for token in self.settings.stop_ids if 0 <= token < limits.vocab_size]
        log_probs = inputs.flag("return_log_probs")
        names = inputs.client_names(TENSORRT_LLM)
        params = []
        for row, named in enumerate(inputs.params(batch, TENSORRT_LLM)):
            fields.check_word_tokens("bad_words", bad_words[row], limits.max_bad_word_tokens)
            named.update(
                max_tokens=counts[row],
                end_id=end_ids[row] if 0 <= end_ids[row] < limits.vocab_size else -1,
                stop_words=stop_ids,
                bad_words=bad_words[row],
                return_log_probs=log_probs,
            )
            params.append(fields.sampling_params(named, limits, names))
        return params

    def _tokenise(
        self, texts: list[str], params: list[SamplingParams], limits: Limits, stream: Stream
    ) -> list[Prompt]:
        """The prompts, each known to fit. Gives up between texts if the stream has ended meanwhile."""
        prompts = []
        for text, one, ids in zip(
            texts, params, encode(self.tokenizer, texts, self.settings.add_special_tokens)
        ):
            if stream.ended:
                raise RequestCancelled("the request ended while it was being prepared")
            used = ids or [limits.start_id]
            _check_ids(used, limits.vocab_size)
            fields.check_length(len(used), one.max_tokens, limits, "text_input", "max_tokens")
            prompts.append(Prompt(text, ids))
        return prompts

    def _end_id(self, limits: Limits) -> int:
        return limits.end_id if limits.end_id >= 0 else self.tokenizer_end_id

    def _rows(self, prompts: list[Prompt], stop_words: list[tuple[str, ...]], stream: Stream) -> list[Row]:
        automata = {words: StopAutomaton(words) for words in dict.fromkeys(stop_words)}
        return [
            Row(prompt, self.view, automata[words], partial(stream.cancel_row, row))
            for row, (prompt, words) in enumerate(zip(prompts, stop_words))
        ]


@dataclass
class Prompt:
    text: str
    ids: list[int]


def _sink(stream: Stream, row: int) -> Callable[[Event], None]:
    return lambda event: stream.put_row(row, event)


def _stop_rows(stream: Stream) -> None:
    """End every row where it is. The sender passes the events over while there is no answer."""
    stream.cancel_rows()
    for row in range(len(stream.requests)):
        stream.put_row(row, Event(0, 0, finish="stopped"))


def _sequence(prompt: Prompt, params: SamplingParams, limits: Limits) -> SequenceRequest:
    return SequenceRequest(np.array(prompt.ids or [limits.start_id], "<i4").tobytes(), params)


def _wanted(inputs: Inputs) -> dict[str, bool]:
    """Output -> whether the request wants it; those that are not named are always made."""
    return {
        "cum_log_probs": inputs.flag("return_log_probs"),
        "output_log_probs": inputs.flag("return_log_probs"),
        "num_input_tokens": inputs.flag("return_num_input_tokens", True),
        "num_output_tokens": inputs.flag("return_num_output_tokens", True),
    }


def _read_texts(inputs: Inputs) -> list[str]:
    array = inputs.arrays["text_input"]
    if array.size == 0 or array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
        raise RequestError(f"text_input has shape {list(array.shape)}; wanted [B, 1]")
    return [decode_text(value, "text_input", row) for row, value in enumerate(array.reshape(-1).tolist())]


def _words(inputs: Inputs, name: str, batch: int) -> list[tuple[str, ...]]:
    """The non-empty words of each row, each once: [B, n], or [n] for all rows."""
    array = inputs.arrays.get(name)
    if array is None:
        return [()] * batch
    if array.ndim < 2 or array.shape[0] == 1:
        return [_row_words(array, name, 0)] * batch
    if array.shape[0] != batch:
        raise RequestError(f"{name} has shape {list(array.shape)}; wanted [{batch}, n]")
    return [_row_words(values, name, row) for row, values in enumerate(array)]


def _row_words(values: np.ndarray, name: str, row: int) -> tuple[str, ...]:
    texts = [decode_text(value, name, row) for value in values.reshape(-1).tolist()]
    return tuple(dict.fromkeys(text for text in texts if text))


def _check_stop_words(words: tuple[str, ...]) -> None:
    size = sum(len(word.encode("utf-8")) for word in words)
    if len(words) > MAX_STOP_WORDS or size > MAX_STOP_WORD_BYTES:
        found = f"stop_words has {len(words):,} words of {size:,} bytes"
        raise RequestError(
            f"{found}; this model accepts {MAX_STOP_WORDS} of {MAX_STOP_WORD_BYTES:,} together"
        )


def _ids_of_words(rows: list[tuple[str, ...]], tokenizer: Tokenizer) -> list[list[list[int]]]:
    """Token ids of each word as it stands at the start of a text and as it stands after a space."""
    texts = list(dict.fromkeys(text for words in rows for word in words for text in (word, f" {word}")))
    ids = dict(zip(texts, map(tuple, encode(tokenizer, texts))))
    known: dict[tuple[str, ...], list[list[int]]] = {}  # rows often have the same words
    for words in rows:
        if words not in known:
            found = dict.fromkeys(ids[text] for word in words for text in (word, f" {word}"))
            known[words] = [list(tokens) for tokens in found if tokens]
    return [known[words] for words in rows]


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if max(ids) >= vocab_size:
        found = f"the tokenizer gives the id {max(ids)} for text_input"
        raise RequestError(
            f"{found}; the model's vocabulary has {vocab_size:,} ids: they do not belong together"
        )


# ---------------------------------------------------------------- answering

#: why the engine, or a stop request ("stopped"), ended a sequence -> finish_reason, in vLLM's words
_REASONS = {"end_id": "stop", "stop_word": "stop", "length": "length", "stopped": "abort"}


class Row:
    """The text of one sequence as it grows; text, num_tokens and log_probs hold what was not yet reported."""

    def __init__(
        self, prompt: Prompt, view: TokenizerView, stop_words: StopAutomaton, cancel: Callable[[], None]
    ):
        self.prompt = prompt
        self.text = ""
        self.num_tokens = 0
        self.log_probs: list[float] = []
        self.cum_log_prob = 0.0
        self.finish_reason = ""  # "": it has not ended
        self._decoder = StreamDecoder(view, prompt.ids)
        self._matcher = StopMatcher(stop_words)
        # with stop words token by token: else one would be found later where tokens came merged
        self._by_token = not stop_words.empty
        self._cancel = cancel

    @property
    def ended(self) -> bool:
        return bool(self.finish_reason)

    def take(self, event: Event) -> None:
        if self.ended:
            return
        tokens = event.tokens
        shown = tokens[:-1] if event.finish in ("end_id", "stop_word") else tokens
        used = self._push(shown, len(tokens))
        self.num_tokens += used
        self.log_probs += event.log_probs[:used]
        self.cum_log_prob += sum(event.log_probs[:used])
        if self.ended:
            if not event.finish:
                self._cancel()
        elif event.finish:
            self._end(_REASONS.get(event.finish, event.finish))

    def _push(self, shown: list[int], count: int) -> int:
        """Decode the tokens; how many of `count` were used when a stop word ended the text, else all."""
        if not self._by_token:
            self.text += self._decoder.push(shown)
            return count
        for index, token in enumerate(shown):
            text, stopped = self._matcher.push(self._decoder.push([token]))
            self.text += text
            if stopped:
                self.finish_reason = "stop"
                return index + 1
        return count

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        text, stopped = self._matcher.push(self._decoder.flush())
        self.text += text if stopped else text + self._matcher.flush()

    def report(self) -> tuple[str, int, list[float]]:
        """What was not yet reported: text, number of tokens, their log-probs."""
        reported = self.text, self.num_tokens, self.log_probs
        self.text, self.num_tokens, self.log_probs = "", 0, []
        return reported


class Shape:
    """Puts values of some rows into output tensors: [rows, 1] with a batch dimension, [rows] without."""

    def __init__(self, outputs: Outputs, wants: dict[str, bool], batched: bool):
        self._outputs, self._batched = outputs, batched
        self._unwanted = {name for name, wanted in wants.items() if not wanted}

    def tensors(self, rows: dict[int, tuple[Row, str, int, list[float]]]) -> list:
        """rows: index -> (row, its text, number of tokens, their log-probs)."""
        longest = max(len(log_probs) for _, _, _, log_probs in rows.values())
        padded = [log_probs + [0.0] * (longest - len(log_probs)) for _, _, _, log_probs in rows.values()]
        columns: dict[str, list[Any]] = {
            "cum_log_probs": [row.cum_log_prob for row, _, _, _ in rows.values()],
            "output_log_probs": padded,
            "num_input_tokens": [len(row.prompt.ids) for row, _, _, _ in rows.values()],
            "num_output_tokens": [count for _, _, count, _ in rows.values()],
            "batch_index": list(rows),
            "sequence_index": [0] * len(rows),
        }
        # the text is first: LiteLLM reads the first output, whatever its name
        arrays: dict[str, Any] = {"text_output": [text.encode("utf-8") for _, text, _, _ in rows.values()]}
        reasons = [row.finish_reason for row, _, _, _ in rows.values()]
        if all(reasons):
            columns["finish_reason"] = [reason.encode() for reason in reasons]
        for name, column in columns.items():
            if name not in self._unwanted:
                arrays[name] = [[value] for value in column] if self._batched else column
        return self._outputs.tensors(arrays)


class WholeAnswer:
    """The texts of all rows in one response, when the last row has ended; or, apart, one response a row, each
    as soon as its row has ended."""

    def __init__(self, rows: list[Row], shape: Shape, exclude_input: bool, apart: bool):
        self.finished = False
        self.num_output_tokens = 0
        self._rows, self._shape, self._exclude_input, self._apart = rows, shape, exclude_input, apart
        self._open = set(range(len(rows)))

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        touched = dict.fromkeys(index for index, _ in events)
        for index, event in events:
            self._rows[index].take(event)
        ended = [index for index in touched if index in self._open and self._rows[index].ended]
        self._open.difference_update(ended)
        self.finished = not self._open
        self.num_output_tokens += sum(self._rows[index].num_tokens for index in ended)
        if self._apart:
            return [self._response([index]) for index in ended]
        return [self._response(range(len(self._rows)))] if self.finished else []

    def _response(self, indices: Iterable[int]) -> list:
        reports: dict[int, tuple[Row, str, int, list[float]]] = {}
        for index in indices:
            row = self._rows[index]
            text, count, log_probs = row.report()
            reports[index] = (row, text if self._exclude_input else row.prompt.text + text, count, log_probs)
        return self._shape.tensors(reports)


class StreamedAnswer:
    """A response for each row that has new text, with everything since its last one; never the prompt."""

    def __init__(self, rows: list[Row], shape: Shape):
        self.finished = False
        self.num_output_tokens = 0
        self._rows, self._shape = rows, shape
        self._open = set(range(len(rows)))

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        for index, event in events:
            self._rows[index].take(event)
        responses = []
        for index in dict(events):
            row = self._rows[index]
            if row.finish_reason:
                if index not in self._open:
                    continue
                self._open.discard(index)
            if row.text or (row.ended and row.num_tokens) or row.finish_reason == "abort":
                text, count, log_probs = row.report()
                self.num_output_tokens += count
                responses.append(self._shape.tensors({index: (row, text, count, log_probs)}))
        self.finished = not self._open
        return responses


class _Nothing:
    """The answer to a stop request: an empty text, because HTTP's generate wants exactly one response."""

    finished = True
    num_output_tokens = 0

    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        return [self._outputs.tensors({"text_output": [b""]})]
