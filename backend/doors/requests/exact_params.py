"""Requests whose sampling parameters are one JSON object a row, so that none is renamed or rounded.

`tridecode front --triton` sends them, because no contract has inputs for all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tridecode.backend.base.errors import RequestError, TridecodeError, UnsupportedError
from tridecode.backend.doors.answers.logit_tensors import WantedLogits
from tridecode.backend.doors.contracts.field import SAMPLING_PARAMS
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.requests import fields
from tridecode.backend.service import limits as request_limits
from tridecode.backend.wire import structured_output
from tridecode.backend.wire.messages import Limits, SamplingParams, SequenceRequest
from tridecode.backend.wire.sampling_params import MAX_TOP_LOG_PROBS, check
from tridecode.backend.wire.structured_output import StructuredOutput

_NAME = SAMPLING_PARAMS.name
#: inputs that go together with the JSON object
_TOGETHER = ("input_ids", "input_lengths", "request_output_len", _NAME, "priority", "lora_name", "resume")


class _Strict(SamplingParams, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """SamplingParams and the structured output, without the tolerance for fields that it does not know."""

    structured_output: StructuredOutput | None = None


_decoder = msgspec.json.Decoder(_Strict)


def exact_sequences(
    inputs: Inputs, prompts: Sequence[np.ndarray], counts: Sequence[int], limits: Limits
) -> list[SequenceRequest]:
    """Return the engine's sequences of a request with `sampling_params`.

    prompts: (n,) token ids of each row. counts: request_output_len, which replaces max_tokens. Raises
    RequestError, and UnsupportedError for beams.
    """
    others = [inputs.sent_as(name) for name in inputs.arrays if name not in _TOGETHER]
    if others:
        raise RequestError(f"{others[0]} was sent with {_NAME}, which replaces it; send one of them")
    texts = inputs.rows(_NAME, len(prompts))
    params = [
        msgspec.structs.replace(_read(texts[row], f"{_NAME} of row {row}", limits), max_tokens=count)
        for row, count in enumerate(counts)
    ]
    request_limits.check_sequences(sum(one.num_slots for one in params), limits)
    WantedLogits(
        any(one.return_context_logits for one in params), any(one.return_generation_logits for one in params)
    ).check(
        [len(prompt) for prompt in prompts],
        [one.num_sequences * one.max_tokens for one in params],
        limits,
    )
    lora_names = fields.lora_names(inputs, len(prompts))
    return [
        SequenceRequest(
            prompt.astype("<i4").tobytes(),
            msgspec.structs.replace(one, structured_output=None),
            name,
            structured_output=one.structured_output,
        )
        for prompt, one, name in zip(prompts, params, lora_names)
    ]


def _read(text: bytes, where: str, limits: Limits) -> _Strict:
    """Return the parameters of one row, in range."""
    try:
        params = _decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"{where} is not a JSON object of sampling parameters: {error}") from None
    if params.beam_width > 1:
        raise UnsupportedError(f"{where} has beam_width {params.beam_width}; wanted 1 here")
    if params.structured_output is not None:
        try:
            structured_output.check(params.structured_output, limits.max_grammar_bytes, limits.grammar_fault)
        except TridecodeError as error:
            raise type(error)(f"{where}: {error}") from None
    if complaint := check(params):
        raise RequestError(f"{where}: {complaint}")
    if not -1 <= params.top_log_probs <= MAX_TOP_LOG_PROBS:
        found = f"{where}: top_log_probs is {params.top_log_probs}"
        raise RequestError(f"{found}; wanted -1 (none) to {MAX_TOP_LOG_PROBS}")
    for name in ("end_id", "top_p_reset_id"):
        _check_ids([getattr(params, name)], -1, f"{where}: {name}", limits)
    _check_ids(params.more_end_ids, 0, f"{where}: more_end_ids", limits)
    _check_ids(params.allowed_token_ids, 0, f"{where}: allowed_token_ids", limits)
    _check_ids(list(params.logit_bias), 0, f"{where}: logit_bias", limits)
    for name, most in (
        ("stop_words", limits.max_stop_word_tokens),
        ("bad_words", limits.max_bad_word_tokens),
    ):
        words = getattr(params, name)
        request_limits.check_word_tokens(f"{where}: {name}", words, most)
        for word in words:
            _check_ids(word, 0, f"{where}: {name}", limits)
            if not word:
                raise RequestError(f"{where}: {name} has an empty word; wanted one token id or more")
    return params


def _check_ids(ids: Sequence[int], lowest: int, where: str, limits: Limits) -> None:
    wrong = next((token for token in ids if not lowest <= token < limits.vocab_size), None)
    if wrong is not None:
        raise RequestError(f"{where} has the token id {wrong}; wanted {lowest} to {limits.vocab_size - 1}")
