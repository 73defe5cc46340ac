"""The TensorRT-LLM ensemble's contract at one door: text in, text out, streamed or whole.

Source: config.pbtxt of TensorRT-LLM's ensemble and bls models, and what their clients send and read. The door
tokenises and talks directly to the engine, so a client that leaves is noticed and a stop word ends the
generation at once. Decisions where the contract leaves room:

  text_output is one flat array of texts. Prompt + answer is exactly the text that the model continued.
  Without `stream` a row gets one response, also from a decoupled model: HTTP's generate endpoint needs that.
  From a decoupled model each of several rows gets a response of its own, as soon as that row has ended.
  A streamed response merges what is pending; its num_output_tokens counts its own tokens only.
  num_output_tokens counts every generated token, including those of an end id or a stop word.
  Stop words are matched in the text and not shown; an empty stop word is ignored.
  A request that a stop request ends is a success, with the text generated so far.
  finish_reason comes with the last response of each row, where config.pbtxt declares it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tridecode.backend.doors import fields
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.doors.door import EngineDoor, Outputs, Received, Submission
from tridecode.backend.doors.envelope import MAX_STOP_WORD_BYTES, MAX_STOP_WORDS
from tridecode.backend.doors.fields import decode_text
from tridecode.backend.doors.senders import Stream
from tridecode.backend.doors.settings import DoorSettings, door_tokenizer
from tridecode.backend.errors import RequestCancelled, RequestError
from tridecode.backend.messages import Event, Limits, SamplingParams, SequenceRequest
from tridecode.backend.text.completion import Answer, Completion, Piece
from tridecode.backend.text.detokenizer import TokenizerView
from tridecode.backend.text.encoding import bad_word_ids, encode
from tridecode.backend.text.stop_words import StopAutomaton


class TritonPythonModel(EngineDoor):
    """A request of B texts becomes B requests of the engine, so that each can be stopped independently."""

    contract = TENSORRT_LLM

    def prepare(self, settings: DoorSettings) -> None:
        self.tokenizer, self.tokenizer_end_id = door_tokenizer(settings)
        self.view = TokenizerView(self.tokenizer, settings.skip_special_tokens)

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
        lora_names = fields.lora_names(inputs, len(texts))
        priorities = fields.priorities(inputs, received.parameters, len(texts))
        stop_words = _words(inputs, "stop_words", len(texts))
        for words in stop_words:
            _check_stop_words(words)
        prompts = self._tokenise(texts, params, limits, stream)
        exclude = inputs.flag("exclude_input_in_output", self.settings.exclude_input_in_output)
        echoes = [""] * len(texts) if streaming or exclude else texts
        automata = {words: StopAutomaton(words) for words in set(stop_words)}
        rows = [
            Completion(self.view, prompt, automata[words], partial(stream.cancel_row, row), echo)
            for row, (prompt, words, echo) in enumerate(zip(prompts, stop_words, echoes))
        ]
        stream.answer = TensorAnswer(rows, received, self.settings, streaming)
        submissions = [
            Submission([_sequence(prompt, one, name, limits)], partial(stream.put_row, row), priority)
            for row, (prompt, one, name, priority) in enumerate(zip(prompts, params, lora_names, priorities))
        ]
        self.submit(stream, submissions, received.timeout_s)
        if stream.stop_wanted:
            _stop_rows(stream)

    def _stop(self, stream: Stream, outputs: Outputs) -> None:
        """End the running requests with the same request id; the stop request itself gets an empty text."""
        if not stream.label:
            raise RequestError("stop is true; it needs the request id of the request to stop")
        for other in self.senders.open_streams():
            if other.label == stream.label and other is not stream:
                other.stop_wanted = True  # for a request that is still being prepared
                _stop_rows(other)
        stream.answer = _EmptyAnswer(outputs)
        stream.put(Event(0, 0, finish="length"))

    # ------------------------------------------------------------ reading

    def _read_params(self, inputs: Inputs, batch: int, limits: Limits) -> list[SamplingParams]:
        counts = inputs.rows("max_tokens", batch)
        default_end = limits.end_id if limits.end_id >= 0 else self.tokenizer_end_id
        end_ids = inputs.rows("end_id", batch, default_end)
        bad_words = bad_word_ids(self.tokenizer, _words(inputs, "bad_words", batch))
        stop_ids = [[token] for token in self.settings.stop_ids if 0 <= token < limits.vocab_size]
        log_probs = inputs.flag("return_log_probs")
        names = inputs.client_names()
        params = []
        for row, named in enumerate(inputs.params(batch)):
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
    ) -> list[list[int]]:
        """Token ids of the prompts, checked to fit. RequestCancelled as soon as the stream has ended."""
        prompts = []
        for ids, one in zip(encode(self.tokenizer, texts, self.settings.add_special_tokens), params):
            if stream.ended:
                raise RequestCancelled("the request ended while it was being prepared")
            _check_ids(ids, limits.vocab_size)
            fields.check_length(len(ids) or 1, one.max_tokens, limits, "text_input", "max_tokens")
            prompts.append(ids)
        return prompts


def _stop_rows(stream: Stream) -> None:
    """End every row as it is. The sender discards the events while there is no answer."""
    stream.cancel_rows()
    for row in range(len(stream.requests)):
        stream.put_row(row, Event(0, 0, finish="stopped"))


def _sequence(prompt: list[int], params: SamplingParams, lora_name: str, limits: Limits) -> SequenceRequest:
    return SequenceRequest(np.array(prompt or [limits.start_id], "<i4").tobytes(), params, lora_name)


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


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if max(ids, default=0) >= vocab_size:
        found = f"the tokenizer gives the id {max(ids)} for text_input"
        raise RequestError(
            f"{found}; the model's vocabulary has {vocab_size:,} ids: they do not belong together"
        )


# ---------------------------------------------------------------- answering


#: output -> the input that says whether it is wanted, and its default; with log-probs comes cum_log_probs
_OPTIONAL = {
    "output_log_probs": ("return_log_probs", False),
    "num_input_tokens": ("return_num_input_tokens", True),
    "num_output_tokens": ("return_num_output_tokens", True),
}


class TensorAnswer(Answer):
    """An Answer as output tensors: [rows, 1] with a batch dimension, [rows] without; text_output is flat."""

    def __init__(self, rows: list[Completion], received: Received, settings: DoorSettings, streamed: bool):
        super().__init__(rows, streamed, apart=settings.decoupled)
        self._outputs = received.outputs
        self._batched = settings.max_batch_size > 0
        self._unwanted = {
            name for name, (flag, default) in _OPTIONAL.items() if not received.inputs.flag(flag, default)
        }

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        return [self._tensors(pieces) for pieces in self.pieces(events)]

    def _tensors(self, pieces: dict[int, Piece]) -> list:
        rows = list(pieces.values())
        columns: dict[str, list[Any]] = {
            "num_input_tokens": [piece.num_prompt_tokens for piece in rows],
            "num_output_tokens": [piece.num_tokens for piece in rows],
            "batch_index": list(pieces),
            "sequence_index": [0] * len(rows),
        }
        if "output_log_probs" not in self._unwanted:
            longest = max(len(piece.log_probs) for piece in rows)
            columns["cum_log_probs"] = [piece.cum_log_prob for piece in rows]
            columns["output_log_probs"] = [p.log_probs + [0.0] * (longest - len(p.log_probs)) for p in rows]
        if all(piece.finish_reason for piece in rows):
            columns["finish_reason"] = [piece.finish_reason.encode() for piece in rows]
        # text_output is first: LiteLLM reads the first output, whatever its name
        arrays: dict[str, Any] = {"text_output": [piece.text.encode("utf-8") for piece in rows]}
        for name, column in columns.items():
            if name not in self._unwanted:
                arrays[name] = [[value] for value in column] if self._batched else column
        return self._outputs.tensors(arrays)


class _EmptyAnswer:
    """The answer to a stop request: one empty text, because HTTP's generate endpoint needs one response."""

    finished = True
    num_output_tokens = 0

    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        return [self._outputs.tensors({"text_output": [b""]})]
