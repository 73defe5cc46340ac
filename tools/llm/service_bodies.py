"""JSON of the service's routes: bodies from parameters, results from answers."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from tridecode.backend.base.errors import UnsupportedError
from tridecode.tools.llm.outputs import CompletionOutput, Logprob, RequestOutput
from tridecode.tools.llm.params import BeamSearchParams, PoolingParams, SamplingParams, check_types

_ID_LABEL = "token_id:"
#: fields of SamplingParams with the service's names
_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "bad_words",
    "ignore_eos",
    "min_tokens",
    "logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
)


def check_params(params: SamplingParams | BeamSearchParams | PoolingParams) -> None:
    """Raise RequestError for an invalid field, UnsupportedError for a beam search and for prompt_logprobs."""
    if isinstance(params, BeamSearchParams):
        raise UnsupportedError("a service has no beam search; run the model with LLM(…) instead")
    check_types(params)
    if isinstance(params, SamplingParams):
        params.check_counts()
    if params.prompt_logprobs is not None:
        raise UnsupportedError("a service returns no prompt_logprobs; run the model with LLM(…) instead")


def generate_body(
    ids: list[int], params: SamplingParams, model: str, room: int, stream: bool
) -> dict[str, Any]:
    """Return the body for /inference/v1/generate. room: most tokens of the answer."""
    fields: dict[str, Any] = {name: getattr(params, name) for name in _FIELDS}
    if params.num_answers > params.n:  # keep_best selects the best n
        fields |= {"n": params.num_answers, "logprobs": params.logprobs or 0}
    fields["max_tokens"] = max(1, room) if params.max_tokens is None else params.max_tokens
    fields["stop"] = list(params.stop_words())
    fields["stop_token_ids"] = list(params.stop_token_ids or ())
    fields["return_tokens_as_token_ids"] = True
    if params.timeout_s > 0:
        fields["timeout_s"] = params.timeout_s
    return {
        "token_ids": ids,
        "model": model,
        "sampling_params": {name: value for name, value in fields.items() if value is not None},
        "priority": params.priority,
        "return_text": True,
        "stream": stream,
    }


def embedding_body(ids: list[int], params: PoolingParams, model: str) -> dict[str, Any]:
    """Return the body for /v1/embeddings; the vector comes as it is, not scaled."""
    body = {
        "input": [ids],
        "model": model,
        "pooling": params.pooling,
        "normalize": False,
        "encoding_format": "base64",
        "priority": params.priority,
    }
    return {**body, "timeout_s": params.timeout_s} if params.timeout_s > 0 else body


def read_embedding(answer: Mapping[str, Any]) -> np.ndarray:
    """Return (hidden_size,) float32."""
    return np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4").astype(np.float32)


def add_choices(output: RequestOutput, answer: Mapping[str, Any]) -> bool:
    """Add the choices of an answer, or of an event of a stream; return whether there are any."""
    for choice in answer["choices"]:
        _add(output.outputs[choice["index"]], choice)
    return bool(answer["choices"])


def _add(output: CompletionOutput, choice: Mapping[str, Any]) -> None:
    output.text += choice["text"]
    output.token_ids += choice["token_ids"]
    if (logprobs := choice.get("logprobs")) is not None:
        output.logprobs = output.logprobs or []
        for step in logprobs["content"]:
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + step["logprob"]
            output.logprobs.append(_step(step))
    output.finish_reason = choice.get("finish_reason")
    output.stop_reason = choice.get("stop_reason")


def _step(step: Mapping[str, Any]) -> dict[int, Logprob]:
    """Return the most likely tokens of a step, best first, and the drawn one."""
    found = {
        _id_of(one): Logprob(one["logprob"], rank, _text_of(one))
        for rank, one in enumerate(step["top_logprobs"], 1)
    }
    found.setdefault(_id_of(step), Logprob(step["logprob"], None, _text_of(step)))
    return found


def _id_of(entry: Mapping[str, Any]) -> int:
    return int(entry["token"].removeprefix(_ID_LABEL))


def _text_of(entry: Mapping[str, Any]) -> str:
    """Return the token's text; its bytes where it is part of a character, as LLM without a service does."""
    data = bytes(entry["bytes"] or ())
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"\\x{one:02x}" for one in data)
