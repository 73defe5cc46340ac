"""TensorRT-LLM's LLM API contract at one door: the text door with other names, and no batch axis.

A request of several texts gets all of them in each response. The answer is greedy without temperature, top_k
and top_p, and with a temperature of 0, a top_k of 1 or a top_p of 0. Otherwise the parameters that are not
sent keep all tokens. Source: SamplingParams of TensorRT-LLM's LLM API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.answers.logit_tensors import metrics, newest_perfs
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.llmapi import LLMAPI
from tridecode.backend.doors.door import Received
from tridecode.backend.doors.door_settings import DoorSettings
from tridecode.backend.doors.requests import fields
from tridecode.backend.doors.text import (
    TensorAnswer,
    read_texts,
    read_words,
)
from tridecode.backend.doors.text import TritonPythonModel as TextModel
from tridecode.backend.service import sampling_rules
from tridecode.backend.service.text_request import FieldNames, TextRequest
from tridecode.backend.text.completion import Completion, Piece
from tridecode.backend.wire.messages import EventExtra, Limits, SamplingParams
from tridecode.backend.wire.sampling_params import MAX_BEAMS

_STOP = "sampling_param_stop"
_BEST_OF = "sampling_param_best_of"
_EXCLUDE = "sampling_param_exclude_input_from_output"
_NAMES = FieldNames(max_tokens="sampling_param_max_tokens", stop_words=_STOP)
_MAX_TOKENS = 32  # the LLM API's default


class TritonPythonModel(TextModel):
    contract = LLMAPI

    def read(self, received: Received, limits: Limits) -> TextRequest:
        inputs = received.inputs
        streaming = self.streaming(inputs, "streaming")
        texts = read_texts(inputs, limits)
        stop_words = read_words(inputs, _STOP, len(texts))
        best_of = _best_of(inputs, len(texts), streaming)
        log_probs = inputs.flag("return_cumulative_logprob") or best_of > 1
        params = [self._params(named, inputs, limits, log_probs) for named in inputs.params(len(texts))]
        if best_of > 1:
            if any(one.top_k == 1 for one in params):
                raise RequestError(
                    f"{_BEST_OF} is {best_of} and the answer is greedy; wanted {_BEST_OF} of 1"
                )
            params = [msgspec.structs.replace(one, num_return_sequences=best_of) for one in params]
        return TextRequest(
            prompts=texts,
            params=params,
            stop_words=stop_words,
            lora_names=fields.lora_names(inputs, len(texts)),
            priorities=fields.priorities(inputs, received.parameters, len(texts)),
            streaming=streaming,
            exclude=inputs.flag(_EXCLUDE, self.settings.exclude_input_in_output),
            add_special_tokens=fields.add_special_tokens(inputs, self.settings.add_special_tokens),
            names=_NAMES,
            best=1 if best_of > 1 else 0,
        )

    def _params(
        self, named: dict[str, Any], inputs: Inputs, limits: Limits, log_probs: bool
    ) -> SamplingParams:
        temperature, top_k, top_p = (named.get(name) for name in ("temperature", "top_k", "top_p"))
        is_greedy = temperature is None and top_k is None and top_p is None
        if is_greedy or temperature == 0 or top_k == 1 or top_p == 0:
            named["top_k"], named["top_p"] = 1, 1.0
        elif top_p is None:
            named["top_p"] = 1.0
        named.setdefault("max_tokens", _MAX_TOKENS)
        if named["max_tokens"] == 0:
            raise RequestError("sampling_param_max_tokens is 0; wanted 1 to 2**31 - 1")
        ends = self.texts.end_ids(limits)
        named.update(
            **sampling_rules.chosen_ends(ends[0] if ends else -1, ends, limits),
            return_log_probs=log_probs,
            return_perf_metrics=inputs.flag("sampling_param_return_perf_metrics"),
        )
        return sampling_rules.sampling_params(named, limits, inputs.client_names())

    def answer(self, rows: list[Completion], received: Received, asked: TextRequest) -> TensorAnswer:
        return LlmApiAnswer(rows, received, self.settings, asked)


def _best_of(inputs: Inputs, batch: int, streaming: bool) -> int:
    """Return sampling_param_best_of. Raises RequestError if it is out of range or the answer is streamed."""
    found = set(inputs.rows(_BEST_OF, batch, 1))
    wrong = [value for value in found if not 1 <= value <= MAX_BEAMS]
    if wrong or len(found) > 1:
        shown = wrong[0] if wrong else sorted(found)
        raise RequestError(f"{_BEST_OF} is {shown}; wanted one number from 1 to {MAX_BEAMS}")
    (best_of,) = found
    if best_of > 1 and streaming:
        text = f"{_BEST_OF} is {best_of} and streaming is true"
        raise RequestError(f"{text}; it chooses among whole answers: wanted no stream with it")
    return best_of


class LlmApiAnswer(TensorAnswer):
    """Output tensors [texts]; each response has all of them."""

    def __init__(
        self, rows: list[Completion], received: Received, settings: DoorSettings, asked: TextRequest
    ):
        super().__init__(rows, received, settings, asked.streaming, together=True)
        self._best = asked.best
        names = ("finish_reason", "stop_reason", "cumulative_logprob")
        self._wanted = {name for name in names if received.inputs.flag(f"return_{name}")}

    def _tensors(self, pieces: dict[int, Piece]) -> list:
        rows = self._chosen(pieces)
        columns = {
            "finish_reason": [(piece.finish_reason or "None").encode() for piece in rows],
            "stop_reason": [(piece.stop_word or "None").encode() for piece in rows],
            "cumulative_logprob": [piece.cum_log_prob for piece in rows],
        }
        arrays: dict[str, Any] = {"text_output": [piece.text.encode("utf-8") for piece in rows]}
        arrays.update((name, column) for name, column in columns.items() if name in self._wanted)
        if all(piece.finish_reason and piece.extras for piece in rows):
            arrays.update(_metrics([piece.extras for piece in rows]))
        return self._outputs.tensors(arrays)

    def _chosen(self, pieces: dict[int, Piece]) -> list[Piece]:
        """Return the pieces to send: with best_of, the most likely one of each text."""
        if not self._best:
            return list(pieces.values())
        likely: dict[int, Piece] = {}
        for row, piece in pieces.items():
            text = self._rows[row].place[0]
            if text not in likely or piece.cum_log_prob > likely[text].cum_log_prob:
                likely[text] = piece
        return list(likely.values())


def _metrics(pieces: Sequence[Sequence[tuple[int, EventExtra]]]) -> dict[str, list[Any]]:
    """Return performance metrics by the LLM API's names. Hits and misses are blocks of the prompt."""
    found = metrics(pieces)
    if not found:
        return {}
    reused = found.pop("kv_cache_reused_blocks")
    missed = [perf.missed_blocks for perf in newest_perfs(pieces)]
    rates = [hits / max(1, hits + misses) for hits, misses in zip(reused, missed)]
    return {
        **found,
        "kv_cache_reused_block": reused,
        "kv_cache_missed_block": missed,
        "kv_cache_hit_rate": rates,
    }
