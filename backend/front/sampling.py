"""Sampling parameters from the fields of a request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tridecode.backend.base.errors import RequestError, UnsupportedError
from tridecode.backend.front.errors import ApiError, bad_request, shown
from tridecode.backend.front.fields.sampling import NO_EFFECT, REFUSED, Sampled
from tridecode.backend.front.structured import Constraint, constraint_of
from tridecode.backend.service import limits as request_limits
from tridecode.backend.service import sampling_rules
from tridecode.backend.service.text_request import FieldNames, Prompt, TextRequest
from tridecode.backend.service.text_service import TextService
from tridecode.backend.wire.messages import Limits, SamplingParams
from tridecode.backend.wire.sampling_params import check

_random = random.Random()  # of seeds; seeded by the system once, because asking it costs each request 16 us
_OUR_NAMES = {"num_return_sequences": "n"}


def refuse_unsupported(wanted: msgspec.Struct) -> list[str]:
    """The names of the sent fields that have no effect. ApiError for a feature that the engine lacks."""
    silent = []
    for name in wanted.__struct_fields__:
        value = getattr(wanted, name)
        if value is None:
            continue
        if name in NO_EFFECT:
            silent.append(name)
        elif name in REFUSED and not any(value == neutral for neutral in REFUSED[name]):
            text = f"{name} is {shown(value)}, which this service does not implement; leave it out"
            raise ApiError(400, text, param=name, code="unsupported_parameter")
    return silent


def stop_words(wanted: Sampled) -> tuple[str, ...]:
    words = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop or []
    for word in words:
        check_text(word, "stop")
    return tuple(dict.fromkeys(word for word in words if word))


def check_text(text: str, name: str) -> None:
    """Refuse halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(f"{name} is not valid Unicode text", name) from None


def sampling_params(
    wanted: Sampled, texts: TextService, limits: Limits, max_tokens: int, sequences: int, top_log_probs: int
) -> SamplingParams:
    """max_tokens: of the answer. sequences: samples of each prompt. top_log_probs: -1: none.

    Raises ApiError, RequestError or UnsupportedError.
    """
    check_text(wanted.cache_salt or "", "cache_salt")
    min_tokens = wanted.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens is {min_tokens} and max_tokens is {max_tokens}; wanted at most that", "min_tokens"
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        num_return_sequences=sequences,
        **sampling_rules.drawn(
            limits,
            temperature=or_default(wanted.temperature, 1.0),
            top_k=or_default(wanted.top_k, 0),
            top_p=or_default(wanted.top_p, 1.0) or 1.0,
            min_p=or_default(wanted.min_p, 0.0),
            typical_p=or_default(wanted.typical_p, 1.0),
            repetition_penalty=or_default(wanted.repetition_penalty, 1.0),
            presence_penalty=or_default(wanted.presence_penalty, 0.0),
            frequency_penalty=or_default(wanted.frequency_penalty, 0.0),
        ),
        **sampling_rules.chosen_tokens(limits, wanted.logit_bias, wanted.allowed_token_ids),
        no_repeat_ngram_size=wanted.no_repeat_ngram_size or 0,
        seed=_random.getrandbits(64) if wanted.seed is None else wanted.seed % 2**64,
        **sampling_rules.checked_ends(
            () if wanted.ignore_eos else texts.end_ids(limits),
            wanted.stop_token_ids or (),
            min_tokens,
            limits,
        ),
        bad_words=_bad_words(wanted.bad_words or (), texts, limits),
        top_log_probs=top_log_probs,
        cache=wanted.cache or ("write" if wanted.skip_reading_prefix_cache else "on"),
        cache_salt=wanted.cache_salt or "",
        speculate=or_default(wanted.speculate, True),
    )
    complaint = check(params)
    if complaint:
        name, _, rest = complaint.partition(" ")
        raise RequestError(f"{_OUR_NAMES.get(name, name)} {rest}")
    return params


def or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def sampled_request(
    wanted: Sampled,
    limits: Limits,
    prompts: list[Prompt],
    params: list[SamplingParams],
    words: tuple[str, ...],
    adapter: str,
    names: FieldNames,
    constraint: Constraint | None = None,
    **own: Any,
) -> TextRequest:
    """Return a request for prompts, sampled as `wanted` says. constraint: of the answers; None: that of the
    fields. own: the other fields of TextRequest."""
    keep, batch = wanted.truncate_prompt_tokens or 0, len(prompts)
    field, output = constraint or constraint_of(wanted)
    return TextRequest(
        prompts=prompts,
        params=params,
        stop_words=[words] * batch,
        lora_names=[adapter] * batch,
        priorities=[wanted.priority or 0] * batch,
        streaming=bool(wanted.stream),
        exclude=True,
        show_stop=bool(wanted.include_stop_str_in_output),
        min_tokens=wanted.min_tokens or 0,
        keep_last=keep if keep >= 0 else limits.max_sequence_tokens - 1,
        skip_special=wanted.skip_special_tokens,
        structured_outputs=() if output is None else [output] * batch,
        names=replace(names, structured_output=field),
        **own,
    )


def _bad_words(words: Sequence[str], texts: TextService, limits: Limits) -> list[list[int]]:
    if len(words) > request_limits.MAX_WORDS:
        raise UnsupportedError(
            f"bad_words has {len(words):,} words; wanted {request_limits.MAX_WORDS:,} at most"
        )
    for word in words:
        check_text(word, "bad_words")
    ids = texts.bad_word_ids([tuple(dict.fromkeys(word for word in words if word))])[0]
    request_limits.check_word_tokens("bad_words", ids, limits.max_bad_word_tokens)
    return ids
