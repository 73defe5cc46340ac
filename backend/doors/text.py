"""The TensorRT-LLM ensemble's contract at one door: text in, text out, streamed or whole.

Source: config.pbtxt of TensorRT-LLM's ensemble and bls models, and what their clients send and read. The door
tokenises itself and talks straight to the engine, so a client that leaves is noticed and a stop word ends
the generation at once. Chosen where the contract leaves room:

  text_output is one flat array of texts, each going on from its prompt exactly: prompt + answer is the text.
  Without `stream` a request gets one response, as HTTP's generate wants it, even from a decoupled model.
  A streamed response merges what has piled up; its num_output_tokens is its own, so that they add up.
  num_output_tokens counts every generated token, those of an end id or a stop word included.
  Stop words are matched in the text and not shown; one that is the empty string is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

import numpy as np
from tokenizers import Tokenizer

from tridecode.backend.doors import fields
from tridecode.backend.doors.detokenizer import StopMatcher, StreamDecoder, TokenizerView
from tridecode.backend.doors.door import EngineDoor, Outputs
from tridecode.backend.doors.fields import TENSORRT_LLM, Inputs, decode_text
from tridecode.backend.doors.senders import Stream
from tridecode.backend.doors.settings import DoorSettings, end_token_id, load_tokenizer
from tridecode.backend.errors import RequestCancelled, RequestError
from tridecode.backend.messages import Event, Limits, SequenceRequest

_MAX_STOP_WORDS = 256  # of one sequence; each is looked for after each token
_MAX_STOP_WORD_BYTES = 4096


class TritonPythonModel(EngineDoor):
    """One request of B texts becomes B requests of the engine, so that each can be stopped by itself."""

    table = TENSORRT_LLM

    def prepare(self, settings: DoorSettings) -> None:
        self.tokenizer = load_tokenizer(settings)
        self.view = TokenizerView(self.tokenizer, settings.skip_special_tokens)
        self.tokenizer_end_id = end_token_id(settings, self.tokenizer)

    def accept(self, request: Any, stream: Stream) -> None:
        inputs, parameters = self.read(request, stream)
        outputs = Outputs(self.settings.outputs, request.requested_output_names())
        if inputs.flag("stop"):
            self._stop(stream, outputs)
            return
        prompts = self._read_prompts(inputs)
        streaming = inputs.flag("stream")
        if streaming and not self.settings.decoupled:
            wanted = "model_transaction_policy { decoupled: true }"
            raise RequestError(
                f"stream is true; this model cannot stream ({wanted} in config.pbtxt would allow it)"
            )
        sequences = self._read_sequences(inputs, prompts, self.limits())
        rows = self._rows(inputs, prompts, stream)
        exclude = inputs.flag("exclude_input_in_output", self.settings.exclude_input_in_output)
        wants = {
            "cum_log_probs": inputs.flag("return_log_probs"),
            "output_log_probs": inputs.flag("return_log_probs"),
            "num_input_tokens": inputs.flag("return_num_input_tokens", True),
            "num_output_tokens": inputs.flag("return_num_output_tokens", True),
        }
        shape = Shape(outputs, wants, batched=self.settings.max_batch_size > 0)
        stream.answer = StreamedAnswer(rows, shape) if streaming else WholeAnswer(rows, shape, exclude)
        stream.requests = [self.link.reserve() for _ in rows]
        schedule = self.schedule(request, inputs, parameters)
        for row, (number, sequence) in enumerate(zip(stream.requests, sequences)):
            self.link.submit(number, [sequence], _sink(stream, row), label=stream.label, **schedule)

    def _stop(self, stream: Stream, outputs: Outputs) -> None:
        """Cancel the running requests of the same request id; the stop request itself gets an empty text."""
        if not stream.label:
            raise RequestError("stop is true; it needs the request id of the request that is to be stopped")
        for other in self.senders.open_streams():
            if other.label == stream.label and other is not stream:
                other.fail(
                    RequestCancelled("a request with stop = true and the same request id has ended it")
                )
        stream.answer = _Nothing(outputs)
        stream.put(Event(0, 0, finish="length"))

    # ------------------------------------------------------------ reading

    def _read_prompts(self, inputs: Inputs) -> list[Prompt]:
        array = inputs.arrays["text_input"]
        if array.size == 0 or array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
            raise RequestError(f"text_input has shape {list(array.shape)}; wanted [B, 1]")
        texts = [
            decode_text(value, "text_input", row) for row, value in enumerate(array.reshape(-1).tolist())
        ]
        special = self.settings.add_special_tokens
        return [Prompt(text, self.tokenizer.encode(text, add_special_tokens=special).ids) for text in texts]

    def _read_sequences(self, inputs: Inputs, prompts: list[Prompt], limits: Limits) -> list[SequenceRequest]:
        batch = len(prompts)
        counts = inputs.rows("max_tokens", batch)
        end_ids = inputs.rows("end_id", batch, self._end_id(limits))
        bad_words = [_ids_of_words(words, self.tokenizer) for words in _words(inputs, "bad_words", batch)]
        stop_ids = [[token] for token in self.settings.stop_ids if 0 <= token < limits.vocab_size]
        names = fields.client_names(TENSORRT_LLM, inputs)
        sequences = []
        for row, named in enumerate(inputs.params(batch, TENSORRT_LLM)):
            ids = prompts[row].ids or [limits.start_id]
            _check_ids(ids, limits.vocab_size)
            fields.check_length(len(ids), counts[row], limits, "text_input", "max_tokens")
            fields.check_word_tokens("bad_words", bad_words[row], limits.max_bad_word_tokens)
            named.update(
                max_tokens=counts[row],
                end_id=end_ids[row] if 0 <= end_ids[row] < limits.vocab_size else -1,
                stop_words=stop_ids,
                bad_words=bad_words[row],
                return_log_probs=inputs.flag("return_log_probs"),
            )
            params = fields.sampling_params(named, limits, names)
            sequences.append(SequenceRequest(np.array(ids, "<i4").tobytes(), params))
        return sequences

    def _end_id(self, limits: Limits) -> int:
        return limits.end_id if limits.end_id >= 0 else self.tokenizer_end_id

    def _rows(self, inputs: Inputs, prompts: list[Prompt], stream: Stream) -> list[Row]:
        stop_words = _words(inputs, "stop_words", len(prompts))
        for words in stop_words:
            _check_stop_words(words)
        return [
            Row(prompt, self.view, words, partial(stream.cancel_row, row))
            for row, (prompt, words) in enumerate(zip(prompts, stop_words))
        ]


@dataclass
class Prompt:
    text: str
    ids: list[int]


def _sink(stream: Stream, row: int) -> Callable[[Event], None]:
    return lambda event: stream.put_row(row, event)


def _words(inputs: Inputs, name: str, batch: int) -> list[list[str]]:
    """The non-empty words of each row: [B, n], or [n] for all rows."""
    array = inputs.arrays.get(name)
    if array is None:
        return [[]] * batch
    if array.ndim < 2 or array.shape[0] == 1:
        rows = [array.reshape(-1).tolist()] * batch
    elif array.shape[0] == batch:
        rows = array.reshape(batch, -1).tolist()
    else:
        raise RequestError(f"{name} has shape {list(array.shape)}; wanted [{batch}, n]")
    texts = [[decode_text(value, name, row) for value in values] for row, values in enumerate(rows)]
    return [[text for text in words if text] for words in texts]


def _check_stop_words(words: list[str]) -> None:
    size = sum(len(word.encode("utf-8")) for word in words)
    if len(words) > _MAX_STOP_WORDS or size > _MAX_STOP_WORD_BYTES:
        found = f"stop_words has {len(words):,} words of {size:,} bytes"
        raise RequestError(
            f"{found}; this model accepts {_MAX_STOP_WORDS} of {_MAX_STOP_WORD_BYTES:,} together"
        )


def _ids_of_words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each word as it stands at the start of a text and as it stands after a space."""
    ids: list[list[int]] = []
    for word in words:
        for text in (word, f" {word}"):
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if tokens and tokens not in ids:
                ids.append(tokens)
    return ids


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if max(ids) >= vocab_size:
        found = f"the tokenizer gives the id {max(ids)} for text_input"
        raise RequestError(
            f"{found}; the model's vocabulary has {vocab_size:,} ids: they do not belong together"
        )


# ---------------------------------------------------------------- answering


class Row:
    """The text of one sequence as it grows; text, num_tokens and log_probs hold what was not yet reported."""

    def __init__(
        self, prompt: Prompt, view: TokenizerView, stop_words: list[str], cancel: Callable[[], None]
    ):
        self.prompt = prompt
        self.text = ""
        self.num_tokens = 0
        self.log_probs: list[float] = []
        self.cum_log_prob = 0.0
        self.ended = False
        self._decoder = StreamDecoder(view, prompt.ids)
        self._matcher = StopMatcher(stop_words)
        self._by_token = bool(stop_words)  # else a stop word would be found later where tokens came merged
        self._cancel = cancel

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
            self._end()

    def _push(self, shown: list[int], count: int) -> int:
        """Decode the tokens; how many of `count` were used when a stop word ended the text, else all."""
        if not self._by_token:
            self.text += self._decoder.push(shown)
            return count
        for index, token in enumerate(shown):
            text, self.ended = self._matcher.push(self._decoder.push([token]))
            self.text += text
            if self.ended:
                return index + 1
        return count

    def _end(self) -> None:
        self.ended = True
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
        for name, column in columns.items():
            if name not in self._unwanted:
                arrays[name] = [[value] for value in column] if self._batched else column
        return self._outputs.tensors(arrays)


class WholeAnswer:
    """One response with the texts of all rows, when the last has ended."""

    def __init__(self, rows: list[Row], shape: Shape, exclude_input: bool):
        self.finished = False
        self.num_output_tokens = 0
        self._rows, self._shape, self._exclude_input = rows, shape, exclude_input

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        for index, event in events:
            self._rows[index].take(event)
        self.num_output_tokens = sum(row.num_tokens for row in self._rows)
        self.finished = all(row.ended for row in self._rows)
        if not self.finished:
            return []
        reports: dict[int, tuple[Row, str, int, list[float]]] = {}
        for index, row in enumerate(self._rows):
            text, count, log_probs = row.report()
            reports[index] = (row, text if self._exclude_input else row.prompt.text + text, count, log_probs)
        return [self._shape.tensors(reports)]


class StreamedAnswer:
    """A response for each row that has new text, with everything since its last one; never the prompt."""

    def __init__(self, rows: list[Row], shape: Shape):
        self.finished = False
        self.num_output_tokens = 0
        self._rows, self._shape = rows, shape

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        for index, event in events:
            self._rows[index].take(event)
        responses = []
        for index in dict(events):
            row = self._rows[index]
            if row.text or (row.ended and row.num_tokens):
                text, count, log_probs = row.report()
                self.num_output_tokens += count
                responses.append(self._shape.tensors({index: (row, text, count, log_probs)}))
        self.finished = all(row.ended for row in self._rows)
        return responses


class _Nothing:
    """The answer to a stop request: an empty text, because HTTP's generate wants exactly one response."""

    finished = True
    num_output_tokens = 0

    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        return [self._outputs.tensors({"text_output": [b""]})]
