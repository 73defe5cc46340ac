"""The TensorRT-LLM ensemble's contract at one door: text in, text out, streamed or whole.

Source: config.pbtxt of TensorRT-LLM's ensemble and bls models, and what their clients send and read. The door
tokenises and talks directly to the engine, so a client that disconnects is noticed and a stop word ends the
generation at once. Decisions where the contract leaves room:

  text_output is one flat array of texts. Prompt + answer is exactly the text that the model continued.
  Without `stream` a row gets one response, also from a decoupled model: HTTP's generate endpoint needs that.
  From a decoupled model each of several rows gets a response of its own, as soon as that row has ended; so
  does each sample (num_return_sequences) or beam of a row, named by sequence_index. In one response the
  texts of a row follow each other.
  Beams can change until the search ends, so they are sent whole at its end, even with `stream`.
  A streamed response merges what is pending; its num_output_tokens counts its own tokens only.
  num_output_tokens counts every generated token, including an end id and the tokens of a stop word.
  Stop words are matched in the text and not shown; an empty stop word is ignored.
  A request that a stop request ends is a success, with the text generated so far.
  finish_reason comes with the last response of each row, where config.pbtxt declares it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.answers.logit_tensors import WantedLogits, metrics, piece_logits
from tridecode.backend.doors.answers.stream import Stream
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.tensorrt_llm import TENSORRT_LLM
from tridecode.backend.doors.door import EngineDoor, Outputs, Received
from tridecode.backend.doors.door_settings import DoorSettings
from tridecode.backend.doors.requests import fields, prompt_inputs
from tridecode.backend.doors.requests.embedding_bias import word_biases
from tridecode.backend.doors.requests.fields import decode_text
from tridecode.backend.doors.requests.stop_requests import stop_rows, stop_running
from tridecode.backend.service import limits as request_limits
from tridecode.backend.service import sampling_rules
from tridecode.backend.service.structured_fields import GUIDE
from tridecode.backend.service.text_request import FieldNames, TextRequest
from tridecode.backend.service.text_service import TextService
from tridecode.backend.service.text_tokenizer import TextTokenizer
from tridecode.backend.text.completion import Answer, Completion, Piece
from tridecode.backend.wire.messages import Event, Limits, SamplingParams

_NAMES = FieldNames(structured_output=GUIDE)


class TritonPythonModel(EngineDoor):
    """Translates between tensors and the text service.

    A door of another text contract overrides `contract`, `read` and `answer`.
    """

    contract = TENSORRT_LLM

    def prepare(self, settings: DoorSettings) -> None:
        setting = f"parameter tokenizer_dir in {settings.config_file}"
        self.tokenizer = TextTokenizer(settings.tokenizer_dir, setting, settings.skip_special_tokens)

    def connected(self) -> None:
        self.texts = TextService(self.engine, self.tokenizer, self.settings.stop_ids)

    def at_once(self, received: Received, stream: Stream) -> bool:
        if not received.inputs.flag("stop"):
            return False
        stop_running(self.senders, stream)
        stream.answer = _EmptyAnswer(received.outputs)
        stream.put(Event(0, 0, finish="length"))
        return True

    def accept(self, received: Received, stream: Stream) -> None:
        limits = self.limits()
        asked = self.read(received, limits)
        prepared = self.texts.prepare(asked, stream, limits)
        stream.answer = self.answer(prepared.rows, received, asked)
        self.submit(stream, prepared.submissions, received)
        if stream.stop_wanted:
            stop_rows(stream)

    # ------------------------------------------------------------ overridden by other contracts

    def read(self, received: Received, limits: Limits) -> TextRequest:
        """Parse the request. Raises RequestError or UnsupportedError that names the field."""
        inputs = received.inputs
        streaming = self.streaming(inputs, "stream")
        texts = read_texts(inputs, limits)
        params = self._read_params(inputs, len(texts), limits)
        return TextRequest(
            prompts=texts,
            params=params,
            stop_words=read_words(inputs, "stop_words", len(texts)),
            lora_names=fields.lora_names(inputs, len(texts)),
            priorities=fields.priorities(inputs, received.parameters, len(texts)),
            streaming=streaming,
            exclude=inputs.flag("exclude_input_in_output", self.settings.exclude_input_in_output),
            tables=prompt_inputs.read_virtual_tables(inputs, len(texts), limits),
            add_special_tokens=fields.add_special_tokens(inputs, self.settings.add_special_tokens),
            cut="max_tokens" not in inputs,
            structured_outputs=fields.guides(inputs, len(texts)),
            names=_NAMES,
        )

    def answer(self, rows: list[Completion], received: Received, asked: TextRequest) -> TensorAnswer:
        vocab_size = self.limits().vocab_size
        return TensorAnswer(rows, received, self.settings, asked.streaming, vocab_size=vocab_size)

    # ------------------------------------------------------------ reading

    def streaming(self, inputs: Inputs, name: str) -> bool:
        """Return the flag of that name. Raises RequestError if it is true and this model cannot stream."""
        streaming = inputs.flag(name)
        if streaming and not self.settings.decoupled:
            raise self.cannot_stream(name)
        return streaming

    def _read_params(self, inputs: Inputs, batch: int, limits: Limits) -> list[SamplingParams]:
        counts = inputs.rows("max_tokens", batch, self.settings.default_max_tokens)
        ends = self.texts.end_ids(limits)
        end_ids = inputs.rows("end_id", batch, ends[0] if ends else -1)
        bad_words = self.texts.bad_word_ids(read_words(inputs, "bad_words", batch))
        biases = word_biases(inputs, batch, self.tokenizer.tokenizer)
        flags = {
            "return_log_probs": inputs.flag("return_log_probs"),
            "return_perf_metrics": inputs.flag("return_perf_metrics"),
            **WantedLogits.of(inputs).params(),
        }
        names = inputs.client_names()
        params = []
        for row, named in enumerate(inputs.params(batch)):
            if "max_tokens" not in inputs:
                counts[row] = max(counts[row], named.get("min_tokens", 0))
            request_limits.check_word_tokens("bad_words", bad_words[row], limits.max_bad_word_tokens)
            named.update(
                max_tokens=counts[row],
                bad_words=bad_words[row],
                logit_bias=biases[row],
                **sampling_rules.chosen_ends(end_ids[row], ends, limits),
                **flags,
            )
            if "early_stopping" in named:
                named["early_stopping"] = int(named["early_stopping"])
            params.append(sampling_rules.sampling_params(named, limits, names))
        return params


def read_texts(inputs: Inputs, limits: Limits) -> list[str]:
    array = inputs.arrays["text_input"]
    if array.size == 0 or array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
        raise RequestError(f"text_input has shape {list(array.shape)}; wanted [B, 1]")
    request_limits.check_sequences(array.size, limits)
    return [decode_text(value, "text_input", row) for row, value in enumerate(array.reshape(-1).tolist())]


def read_words(inputs: Inputs, name: str, batch: int) -> list[tuple[str, ...]]:
    """Return the distinct non-empty words of each row. Accepted shapes: [B, n], or [n] for all rows."""
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


# ---------------------------------------------------------------- answering


#: output -> the input that requests it, and its default; cum_log_probs is sent with log-probs
_OPTIONAL = {
    "output_log_probs": ("return_log_probs", False),
    "num_input_tokens": ("return_num_input_tokens", True),
    "num_output_tokens": ("return_num_output_tokens", True),
}


class TensorAnswer(Answer):
    """Answers in output tensors: [rows, 1] with a batch dimension, [rows] without; text_output is flat."""

    def __init__(
        self,
        rows: list[Completion],
        received: Received,
        settings: DoorSettings,
        streamed: bool,
        together: bool = False,
        vocab_size: int = 0,
    ):
        """vocab_size: width of the logits, if the request wants them."""
        super().__init__(rows, streamed, apart=settings.decoupled and not together, together=together)
        self._outputs = received.outputs
        self._batched = settings.max_batch_size > 0
        self._logits, self._vocab_size = WantedLogits.of(received.inputs), vocab_size
        self._unwanted = {
            name for name, (flag, default) in _OPTIONAL.items() if not received.inputs.flag(flag, default)
        }
        self._plain = "output_log_probs" in self._unwanted  # most responses have no rare columns

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        return [self._tensors(pieces) for pieces in self.pieces(events)]

    def _tensors(self, pieces: dict[int, Piece]) -> list:
        rows = list(pieces.values())
        # text_output is first, because LiteLLM reads the first output whatever its name
        if len(rows) == 1:
            tensors = self._outputs.text("text_output", rows[0].text.encode("utf-8"))
        else:
            tensors = self._outputs.tensors({"text_output": [piece.text.encode("utf-8") for piece in rows]})
        key = tuple([(row, piece.num_tokens) for row, piece in pieces.items()])
        tensors += self._outputs.shared(key, lambda: self._counts(pieces))
        if self._plain and not any([piece.finish_reason or piece.extras for piece in rows]):
            return tensors
        return tensors + self._outputs.tensors(self._rare_columns(rows))

    def _counts(self, pieces: dict[int, Piece]) -> dict[str, tuple]:
        """Return the outputs that depend only on the rows and their numbers of tokens."""
        columns = {
            "num_input_tokens": [piece.num_prompt_tokens for piece in pieces.values()],
            "num_output_tokens": [piece.num_tokens for piece in pieces.values()],
            "batch_index": [self._rows[row].place[0] for row in pieces],
            "sequence_index": [self._rows[row].place[1] for row in pieces],
        }
        return {name: self._shaped(column) for name, column in columns.items() if name not in self._unwanted}

    def _shaped(self, column: list[int]) -> tuple:
        return tuple((value,) for value in column) if self._batched else tuple(column)

    def _rare_columns(self, rows: list[Piece]) -> dict[str, Any]:
        """Return the outputs that few responses have."""
        columns: dict[str, list[Any]] = {}
        if "output_log_probs" not in self._unwanted:
            longest = max(len(piece.log_probs) for piece in rows)
            columns["cum_log_probs"] = [piece.cum_log_prob for piece in rows]
            columns["output_log_probs"] = [p.log_probs + [0.0] * (longest - len(p.log_probs)) for p in rows]
        extras = [piece.extras for piece in rows]
        if all(piece.finish_reason for piece in rows):
            columns["finish_reason"] = [piece.finish_reason.encode() for piece in rows]
            columns.update(metrics(extras) if any(extras) else {})
        arrays: dict[str, Any] = {
            name: [[value] for value in column] if self._batched else column
            for name, column in columns.items()
            if name not in self._unwanted
        }
        if any(extras):
            for name, array in piece_logits(self._logits, extras, self._vocab_size).items():
                arrays[name] = array if self._batched else array[0]
        return arrays


class _EmptyAnswer:
    """Answers a stop request with one empty text, because HTTP's generate endpoint needs one response."""

    finished = True
    num_output_tokens = 0
    finish_reasons = ("stop_request",)

    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def take(self, events: list[tuple[int, Event]]) -> list[list]:
        return [self._outputs.tensors({"text_output": [b""]})]
