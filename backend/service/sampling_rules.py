"""Rules for sampling parameters and end tokens of a request, shared by all front ends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tridecode.backend.base.errors import ConfigError, RequestError, UnsupportedError
from tridecode.backend.service.limits import check_word_tokens
from tridecode.backend.wire.messages import Limits
from tridecode.backend.wire.sampling_params import (
    GREEDY_BELOW,
    MAX_BIASES,
    MAX_END_IDS,
    MOST_BIAS,
    SamplingParams,
    check,
)

_LOWEST_TEMPERATURE = 0.01  # vLLM's _MAX_TEMP
_ID = re.compile("[0-9]{1,10}")


def sampling_params(
    named: Mapping[str, Any], limits: Limits, names: Mapping[str, str], clip_top_p: bool = False
) -> SamplingParams:
    """Return SamplingParams for the parameters that a request sets, by the rules of FasterTransformer and
    TensorRT-LLM.

    top_k 0 and top_p 0, or neither: greedy. top_k alone: the k most likely tokens. top_p alone: the nucleus
    of the vocabulary. A top_k above the vocabulary keeps all tokens. clip_top_p: a top_p above 1 counts as 1,
    as with FasterTransformer; else it is refused. top_p_decay, top_p_min and top_p_reset_id apply only
    without top-k; 0 means the default of the first two (FasterTransformer replaced a top_p_min of 0 by 0.5).
    names: the client's name of each parameter, for errors. Raises RequestError.
    """
    values = dict(named)
    top_p = _nucleus(values.get("top_p", 0.0), names.get("top_p", "top_p"), clip_top_p)
    top_k = min(values.get("top_k", 0), limits.vocab_size)
    values["top_k"] = 1 if top_k == 0 and top_p == 0.0 else top_k
    values["top_p"] = top_p or 1.0
    if values["top_k"] != 0:
        for name in ("top_p_decay", "top_p_min", "top_p_reset_id"):
            values.pop(name, None)
    for name in ("top_p_decay", "top_p_min"):
        if values.get(name) == 0:
            del values[name]
    reset = values.get("top_p_reset_id", -1)
    if reset in (-1, 2**32 - 1):
        values.pop("top_p_reset_id", None)
    elif not 0 <= reset < limits.vocab_size:
        name = names["top_p_reset_id"]
        raise RequestError(f"{name} is {reset}; wanted a token id below {limits.vocab_size}")
    params = SamplingParams(**values)
    complaint = check(params)
    if complaint:
        name, rest = complaint.split(" ", 1)
        raise RequestError(f"{names.get(name, name)} {rest}")
    return params


def _nucleus(top_p: float, name: str, clip: bool) -> float:
    """Return top_p, from 0 to 1. Raises RequestError for any other value, NaN included."""
    if clip and 1.0 < top_p < math.inf:
        return 1.0
    if not 0.0 <= top_p <= 1.0:
        wanted = "a number from 0 (no nucleus) to 1" + (", or more, which counts as 1" if clip else "")
        raise RequestError(f"{name} is {top_p}; wanted {wanted}")
    return top_p


def check_one_penalty(named: Mapping[str, Any]) -> None:
    """Raise RequestError if both a repetition and a presence penalty have an effect, as with
    FasterTransformer.
    """
    repetition, presence = named.get("repetition_penalty", 1.0), named.get("presence_penalty", 0.0)
    if repetition != 1.0 and presence != 0.0:
        found = f"repetition_penalty is {repetition} and presence_penalty is {presence}"
        raise RequestError(f"{found}; wanted one of them at its neutral value, 1 or 0")


def model_ends(limits: Limits, more: Iterable[int] = (), first: int | None = None) -> list[int]:
    """Return the tokens that end a text of the model, its end_id first.

    more: further ones from config.pbtxt. first: replaces the model's end_id. Raises ConfigError if there are
    too many.
    """
    ids = dict.fromkeys((limits.end_id if first is None else first, *limits.more_end_ids, *more))
    ends = [token for token in ids if 0 <= token < limits.vocab_size]
    if len(ends) > MAX_END_IDS:
        found = f"config.ini and stop_ids in config.pbtxt name {len(ends)} end tokens"
        raise ConfigError(f"{found}; wanted {MAX_END_IDS} at most")
    return ends


def chosen_ends(end_id: int, ends: Sequence[int], limits: Limits) -> dict[str, Any]:
    """Return the parameters of a request that sends this end_id.

    If end_id is one of the model's `ends`, each of these ends the text. Any other id of the vocabulary ends
    it alone; with an id outside the vocabulary no token ends it.
    """
    if end_id in ends:
        return {"end_id": end_id, "more_end_ids": [token for token in ends if token != end_id]}
    return {"end_id": end_id if 0 <= end_id < limits.vocab_size else -1}


def drawn(
    limits: Limits,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
) -> dict[str, Any]:
    """Return the parameters of the distribution from those of OpenAI and vLLM, which sample from all tokens
    by default. top_k: -1 or 0: all. Raises UnsupportedError for penalties that cannot be combined."""
    greedy = temperature < GREEDY_BELOW
    if not greedy:
        temperature = max(temperature, _LOWEST_TEMPERATURE)
    counted = presence_penalty or frequency_penalty
    if repetition_penalty != 1.0 and counted:
        found = f"repetition_penalty is {repetition_penalty:g} with a presence_penalty or frequency_penalty"
        raise UnsupportedError(f"{found}, which this version does not implement together; wanted one kind")
    # vLLM subtracts before it divides by the temperature, the engine after
    divisor = 1.0 if greedy else temperature
    return {
        "temperature": 1.0 if greedy else temperature,
        "top_k": 1 if greedy else min(max(top_k, 0), limits.vocab_size),
        "top_p": 1.0 if greedy else top_p,
        "min_p": 0.0 if greedy else min_p,
        "typical_p": 1.0 if greedy else typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty / divisor,
        "frequency_penalty": frequency_penalty / divisor,
        "count_prompt": not counted,
    }


def chosen_tokens(
    limits: Limits,
    logit_bias: Mapping[Any, float] | None,
    allowed_token_ids: Sequence[int] | None,
) -> dict[str, Any]:
    """Return the parameters of single tokens from those of OpenAI and vLLM. None: not sent.

    logit_bias: by token id, a number or a text. Raises RequestError that names the field.
    """
    biases: dict[int, float] = {}
    size = limits.vocab_size
    if logit_bias:
        if len(logit_bias) > MAX_BIASES:
            found = f"logit_bias has {len(logit_bias):,} token ids"
            raise RequestError(f"{found}; this model accepts {MAX_BIASES:,}")
        for key, bias in logit_bias.items():
            token = int(key) if isinstance(key, int) or _ID.fullmatch(key) else -1
            if not 0 <= token < size:
                raise RequestError(f"logit_bias has {str(key)[:40]!r}; wanted token ids below {size}")
            if not -MOST_BIAS <= bias <= MOST_BIAS:  # NaN, too
                found = f"logit_bias of token id {token} is {bias}"
                raise RequestError(f"{found}; wanted a number from -{MOST_BIAS:g} to {MOST_BIAS:g}")
            biases[token] = float(bias)
    if allowed_token_ids is None:
        return {"logit_bias": biases}
    if not allowed_token_ids:
        raise RequestError("allowed_token_ids is empty; wanted one token id or more")
    wrong = [token for token in allowed_token_ids if not 0 <= token < size]
    if wrong:
        raise RequestError(f"allowed_token_ids has {wrong[0]}; wanted token ids below {size}")
    return {"logit_bias": biases, "allowed_token_ids": list(dict.fromkeys(allowed_token_ids))}


def checked_ends(
    model: Iterable[int], stop_token_ids: Sequence[int], min_tokens: int, limits: Limits
) -> dict[str, Any]:
    """Return the parameters of a request that ends at the model's tokens and at its own, as `all_ends` does.

    model: (): the request ignores them. Raises RequestError for ids beyond the vocabulary or too many.
    """
    wrong = [token for token in stop_token_ids if not 0 <= token < limits.vocab_size]
    if wrong:
        raise RequestError(f"stop_token_ids has {wrong[0]}; wanted token ids below {limits.vocab_size}")
    check_word_tokens("stop_token_ids", [list(stop_token_ids)], limits.max_stop_word_tokens)
    return all_ends([*model, *stop_token_ids], min_tokens)


def all_ends(tokens: Iterable[int], min_tokens: int) -> dict[str, Any]:
    """Return the parameters of a request that ends at any of these tokens, but not before min_tokens. Raises
    UnsupportedError if there are too many tokens for that."""
    ids = list(dict.fromkeys(tokens))
    ends, others = ids[:MAX_END_IDS], ids[MAX_END_IDS:]
    if others and min_tokens > 0:
        found = f"stop_token_ids and the model's end tokens are {len(ids)} ids and min_tokens is set"
        raise UnsupportedError(f"{found}; this version holds {MAX_END_IDS} back: wanted as many at most")
    return {
        "end_id": ends[0] if ends else -1,
        "more_end_ids": ends[1:],
        "stop_words": [[token] for token in others],
    }
