"""What the fields of a request mean, by rules that FasterTransformer and TensorRT-LLM have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tridecode.backend.base.errors import ConfigError, RequestError
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.requests.envelope import INT32_MAX, whole_number
from tridecode.backend.wire.messages import MAX_LORA_NAME, Limits
from tridecode.backend.wire.sampling_params import MAX_END_IDS, SamplingParams, check


def priorities(inputs: Inputs, parameters: Mapping[str, Any], batch: int) -> list[int]:
    """The priority of each row: the input, else the request parameter, else 0. RequestError beyond int32."""
    values = inputs.rows("priority", batch, parameters.get("priority", 0))
    return [whole_number("priority", v, -INT32_MAX - 1, INT32_MAX, "smaller is sooner") for v in values]


def lora_names(inputs: Inputs, batch: int) -> list[str]:
    """The adapter of each row, "" for none. RequestError for text that no name can be; the engine knows the
    names."""
    names = [
        decode_text(value, "lora_name", row) for row, value in enumerate(inputs.rows("lora_name", batch, ""))
    ]
    for name in names:
        if len(name) > MAX_LORA_NAME:
            found = f"lora_name has {len(name):,} characters"
            raise RequestError(f"{found}; wanted the name of an adapter, at most {MAX_LORA_NAME}")
    return names


def add_special_tokens(inputs: Inputs, default: bool) -> bool:
    """Whether the tokenizer adds its special tokens to the prompts of a request, which says it for all rows.
    default: that of the model's config.pbtxt."""
    return inputs.flag("add_special_tokens", inputs.flag("ADD_SPECIAL_TOKENS", default))


def sampling_params(
    named: Mapping[str, Any], limits: Limits, names: Mapping[str, str], clip_top_p: bool = False
) -> SamplingParams:
    """SamplingParams from the parameters that a request sets, by FasterTransformer's rules, as TensorRT-LLM.

    top_k 0 and top_p 0, or neither: greedy. top_k alone: the k most likely tokens. top_p alone: the nucleus
    of the vocabulary. A top_k above the vocabulary keeps all tokens. clip_top_p: a top_p above 1 counts as 1,
    as with FasterTransformer; else it is refused. top_p_decay, top_p_min and top_p_reset_id are used without
    top-k only; 0 stands for the default of the first two (FasterTransformer replaced a top_p_min of 0 by
    0.5). names: parameter -> the client's name of it, for errors. Raises RequestError.
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
    """top_p from 0 to 1; RequestError for any other value, NaN included."""
    if clip and 1.0 < top_p < math.inf:
        return 1.0
    if not 0.0 <= top_p <= 1.0:
        wanted = "a number from 0 (no nucleus) to 1" + (", or more, which counts as 1" if clip else "")
        raise RequestError(f"{name} is {top_p}; wanted {wanted}")
    return top_p


def check_one_penalty(named: Mapping[str, Any]) -> None:
    """RequestError if both a repetition and a presence penalty have an effect, as with FasterTransformer."""
    repetition, presence = named.get("repetition_penalty", 1.0), named.get("presence_penalty", 0.0)
    if repetition != 1.0 and presence != 0.0:
        found = f"repetition_penalty is {repetition} and presence_penalty is {presence}"
        raise RequestError(f"{found}; wanted one of them at its neutral value, 1 or 0")


def model_ends(limits: Limits, more: Iterable[int] = (), first: int | None = None) -> list[int]:
    """The tokens that end a text of the model, its end_id first. more: further ones, of config.pbtxt. first:
    in place of the model's end_id. Raises ConfigError if they are too many."""
    ids = dict.fromkeys((limits.end_id if first is None else first, *limits.more_end_ids, *more))
    ends = [token for token in ids if 0 <= token < limits.vocab_size]
    if len(ends) > MAX_END_IDS:
        found = f"config.ini and stop_ids in config.pbtxt name {len(ends)} end tokens"
        raise ConfigError(f"{found}; wanted {MAX_END_IDS} at most")
    return ends


def chosen_ends(end_id: int, ends: Sequence[int], limits: Limits) -> dict[str, Any]:
    """The parameters of a request that names this end_id: with one of the model's `ends` all of these end the
    text, with another that one alone, and with none of the vocabulary no token does."""
    if end_id in ends:
        return {"end_id": end_id, "more_end_ids": [token for token in ends if token != end_id]}
    return {"end_id": end_id if 0 <= end_id < limits.vocab_size else -1}


def check_sequences(count: int, limits: Limits) -> None:
    """RequestError if the engine can never hold `count` sequences of one request, however idle it is."""
    most = limits.max_sequences + limits.max_queued_requests
    if count > most:
        found = f"the request has {count:,} sequences (rows and their beams or samples)"
        wanted = f"{most:,} (max_sequences and max_queued_requests in config.pbtxt)"
        raise RequestError(f"{found}; this model accepts {wanted}")


def check_length(prompt: int, output: int, limits: Limits, prompt_name: str, output_name: str) -> None:
    """RequestError if prompt and output, in tokens, do not fit into a sequence."""
    if prompt + output > limits.max_sequence_tokens:
        found = f"{prompt_name} has {prompt:,} tokens and {output_name} asks for {output:,} more"
        wanted = f"{limits.max_sequence_tokens:,} in all (max_sequence_tokens in config.pbtxt)"
        raise RequestError(f"{found}; this model accepts {wanted}")


def cut_to_room(
    prompt: int, params: SamplingParams, limits: Limits, prompt_name: str, output_name: str
) -> SamplingParams:
    """The parameters with a max_tokens that fits behind the prompt; RequestError if not one token does."""
    room = limits.max_sequence_tokens - prompt
    if room < 1:
        check_length(prompt, 1, limits, prompt_name, output_name)
    if params.max_tokens <= room:
        return params
    return msgspec.structs.replace(params, max_tokens=room)


def check_word_tokens(name: str, words: list[list[int]], limit: int) -> None:
    """RequestError if the ids of a sequence's words together exceed the engine's limit."""
    count = sum(map(len, words))
    if count > limit:
        setting = "max_bad_word_tokens" if "bad" in name.lower() else "max_stop_word_tokens"
        most = f"{limit:,} in all words of a row ({setting} in config.pbtxt)"
        raise RequestError(f"{name} has {count:,} token ids; this model accepts {most}")


def decode_text(value: Any, name: str, row: int | None = None) -> str:
    """UTF-8 bytes as text; RequestError naming field, row and byte if they are not."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        where = name if row is None else f"{name} of row {row}"
        byte = f"byte {error.start} is 0x{value[error.start]:02x}"
        raise RequestError(f"{where} is not valid UTF-8: {byte}; wanted UTF-8 text") from None
