"""The inputs of each contract, one table each, and how they become SamplingParams.

Sources: config.pbtxt of the FasterTransformer backend (gpt, bloom) and of TensorRT-LLM's ensemble and bls. A
field that this version does not implement is refused by name as soon as its value asks for anything; no field
is passed over in silence.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tridecode.backend import messages
from tridecode.backend.doors.envelope import INT32_MAX, whole_number
from tridecode.backend.errors import RequestError, UnsupportedError
from tridecode.backend.messages import Limits, SamplingParams

WHOLE = (np.uint32, np.int32, np.uint64, np.int64)
REAL = (np.float32, np.float16, np.float64)
FLAG = (np.bool_,)
TEXT = (np.object_,)
ANY = (*WHOLE, *REAL, *FLAG, *TEXT, np.uint8)


@dataclass(frozen=True)
class Field:
    """One input tensor.

    dtypes: numpy types taken (Triton compares them with config.pbtxt before us). param: the sampling
    parameter that it sets. refused: not implemented; `neutral` lists the values that ask for nothing.
    alias_of: the field of which this is an older name. kind: which limits of the envelope count: "value" (one
    a row), "prompt" (one text a row), "ids" (many a row), "words" (texts), "csv" (words in one text a row),
    "word_ids" (a [B, 2, n] word list).
    """

    name: str
    dtypes: tuple = WHOLE
    param: str = ""
    required: bool = False
    refused: bool = False
    neutral: tuple = ()
    alias_of: str = ""
    kind: str = "value"


def _refused(name: str, dtypes: tuple = WHOLE, neutral: tuple = ()) -> Field:
    return Field(name, dtypes, refused=True, neutral=neutral)


FASTERTRANSFORMER = (
    Field("input_ids", required=True, kind="ids"),
    Field("input_lengths", required=True),
    Field("request_output_len", required=True),
    Field("runtime_top_k", param="top_k"),
    Field("runtime_top_p", REAL, param="top_p"),
    Field("temperature", REAL, param="temperature"),
    Field("repetition_penalty", REAL, param="repetition_penalty"),
    Field("presence_penalty", REAL, param="presence_penalty"),
    Field("min_length", param="min_tokens"),
    Field("random_seed", param="seed"),
    Field("top_p_decay", REAL, param="top_p_decay"),
    Field("top_p_min", REAL, param="top_p_min"),
    Field("top_p_reset_ids", param="top_p_reset_id"),
    Field("len_penalty", REAL),  # it compares beams, and there is one
    Field("start_id"),
    Field("end_id"),
    Field("stop_words_list", kind="word_ids"),
    Field("bad_words_list", kind="word_ids"),
    Field("is_return_log_probs", FLAG),
    Field("is_return_context_embeddings", FLAG),
    Field("priority"),
    _refused("beam_width", neutral=(1,)),
    _refused("beam_search_diversity_rate", REAL, neutral=(0.0,)),
    _refused("is_return_context_cum_log_probs", FLAG, neutral=(False,)),
    _refused("prompt_learning_task_name_ids"),
    _refused("request_prompt_embedding", REAL),
    _refused("request_prompt_lengths"),
    _refused("request_prompt_type"),
    _refused("session_len"),
    _refused("memory_len"),
)

TENSORRT_LLM = (
    Field("text_input", TEXT, required=True, kind="prompt"),
    Field("max_tokens", required=True),
    Field("top_k", param="top_k"),
    Field("top_p", REAL, param="top_p"),
    Field("temperature", REAL, param="temperature"),
    Field("repetition_penalty", REAL, param="repetition_penalty"),
    Field("presence_penalty", REAL, param="presence_penalty"),
    Field("frequency_penalty", REAL, param="frequency_penalty"),
    Field("min_tokens", param="min_tokens"),
    Field("min_length", alias_of="min_tokens"),
    Field("seed", param="seed"),
    Field("random_seed", alias_of="seed"),
    Field("top_p_decay", REAL, param="top_p_decay"),
    Field("top_p_min", REAL, param="top_p_min"),
    Field("top_p_reset_ids", param="top_p_reset_id"),
    Field("length_penalty", REAL),  # it compares beams, and there is one
    Field("early_stopping", FLAG),  # likewise
    Field("end_id"),
    Field("pad_id"),  # nothing is padded
    Field("bad_words", TEXT, kind="words"),
    Field("stop_words", TEXT, kind="words"),
    Field("exclude_input_in_output", FLAG),
    Field("stream", FLAG),
    Field("stop", FLAG),
    Field("return_log_probs", FLAG),
    Field("return_num_input_tokens", FLAG),
    Field("return_num_output_tokens", FLAG),
    Field("priority"),
    _refused("beam_width", neutral=(1,)),
    _refused("num_return_sequences", neutral=(1,)),
    _refused("beam_search_diversity_rate", REAL, neutral=(0.0,)),
    _refused("decoder_text_input", TEXT, neutral=(b"",)),
    _refused("image_input", REAL),
    _refused("image_bytes_input", ANY),
    _refused("image_url_input", TEXT, neutral=(b"",)),
    _refused("video_bytes_input", ANY),
    _refused("return_context_logits", FLAG, neutral=(False,)),
    _refused("return_generation_logits", FLAG, neutral=(False,)),
    _refused("return_perf_metrics", FLAG, neutral=(False,)),
    _refused("prompt_embedding_table", REAL),
    _refused("prompt_table_extra_id"),
    _refused("prompt_table_extra_ids"),
    _refused("prompt_vocab_size", neutral=(0,)),
    _refused("embedding_bias_words", TEXT, neutral=(b"",)),
    _refused("embedding_bias_weights", REAL, neutral=(0.0,)),
    _refused("num_draft_tokens", neutral=(0,)),
    _refused("use_draft_logits", FLAG, neutral=(False,)),
    _refused("lora_task_id", neutral=(0,)),
    _refused("lora_weights", REAL),
    _refused("lora_config"),
    _refused("guided_decoding_guide_type", TEXT, neutral=(b"",)),
    _refused("guided_decoding_guide", TEXT, neutral=(b"",)),
    _refused("retention_token_range_starts"),
    _refused("retention_token_range_ends"),
    _refused("retention_token_range_priorities"),
    _refused("retention_token_range_durations_ms"),
    _refused("retention_decode_priority"),
    _refused("retention_decode_duration_ms"),
)

#: request parameters that Triton, its clients and its front ends add on their own
HARMLESS_PARAMETERS = (
    "triton_*",
    "id",  # HTTP's generate endpoint hands the request id over as a parameter
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
)


_LONGEST_NAME = 64


class Inputs:
    """The input tensors of one request, checked against a table; a copy, so that the request can be let go.

    Nothing here is bounded: Envelope.check comes before.

    Raises RequestError or UnsupportedError, naming the field, from the constructor and from each reader.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], table: Sequence[Field]):
        self.arrays: dict[str, np.ndarray] = {}
        self._sent_as: dict[str, str] = {}  # the client's name of a field, for errors
        fields = {field.name: field for field in table}
        for name, array in arrays.items():
            field = fields.get(name)
            if field is None:
                raise UnsupportedError(f"input {name} is declared in config.pbtxt but unknown to this model")
            _check_dtype(field, array)
            if field.refused:
                _refuse(field, array)
            else:
                self._take(field, array)
        for field in table:
            if field.required and field.name not in self.arrays:
                raise RequestError(f"input {field.name} is missing; this model needs it")

    def _take(self, field: Field, array: np.ndarray) -> None:
        name = field.alias_of or field.name
        if name in self.arrays:
            other = self._sent_as[name]
            if not np.array_equal(self.arrays[name], array):
                raise RequestError(
                    f"{other} and {field.name} are two names of one input and differ; send one"
                )
            return
        self.arrays[name], self._sent_as[name] = np.array(array), field.name

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def rows(self, name: str, batch: int, default: Any = None) -> list:
        """One value for each of `batch` rows. Taken: [batch], [batch, 1], or one value for all of them."""
        array = self.arrays.get(name)
        if array is None:
            return [default] * batch
        if array.size == 1:
            return [array.reshape(-1)[0].item() if array.dtype != object else array.reshape(-1)[0]] * batch
        if array.size != batch:
            found = f"{self._sent_as[name]} has shape {list(array.shape)}"
            raise RequestError(f"{found}; wanted [{batch}, 1] for {batch} sequences")
        return array.reshape(-1).tolist()

    def flag(self, name: str, default: bool = False) -> bool:
        """One truth value for the whole request; rows that differ are refused."""
        array = self.arrays.get(name)
        if array is None or array.size == 0:
            return default
        if array.any() != array.all():
            raise RequestError(f"{name} differs between the rows of one request; send them apart")
        return bool(array.any())

    def params(self, batch: int, table: Sequence[Field]) -> list[dict[str, Any]]:
        """For each row the sampling parameters that the request names, in our vocabulary."""
        named = [field for field in table if field.param and field.name in self.arrays]
        columns = {field.param: self.rows(field.name, batch) for field in named}
        return [{param: column[row] for param, column in columns.items()} for row in range(batch)]

    def sent_as(self, name: str) -> str:
        return self._sent_as.get(name, name)


def _check_dtype(field: Field, array: np.ndarray) -> None:
    if array.dtype.type not in field.dtypes:
        wanted = " or ".join(np.dtype(dtype).name for dtype in field.dtypes)
        raise RequestError(f"{field.name} has dtype {array.dtype}; wanted {wanted}")


def _refuse(field: Field, array: np.ndarray) -> None:
    if array.size == 0:
        return
    if not field.neutral:
        raise UnsupportedError(f"{field.name} was sent, which this version does not implement; leave it out")
    values = [value for value in array.reshape(-1).tolist() if value not in field.neutral]
    if values:
        found = f"{field.name} is {_short(values[0])}, which this version does not implement"
        raise UnsupportedError(f"{found}; wanted {_short(field.neutral[0])} or none")


def _short(value: Any) -> str:
    text = repr(value.decode("utf-8", "replace")) if isinstance(value, bytes) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---------------------------------------------------------------- request parameters


def check_parameters(values: Mapping[str, Any], table: Sequence[Field], allowed: Iterable[str] = ()) -> None:
    """RequestError unless each of the request's own parameters is known to be harmless.

    HTTP's generate endpoint turns every field that is not an input into one of these, so a misspelt field
    ends here: the error names it and the input that was probably meant. allowed: more patterns that may pass.
    """
    patterns = (*HARMLESS_PARAMETERS, *allowed)
    for name in values:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        inputs = [field.name for field in table]
        if name in inputs:
            raise RequestError(f"{name} was sent as a request parameter; it is an input tensor of this model")
        close = difflib.get_close_matches(name[:_LONGEST_NAME], inputs, 1, 0.6)  # quadratic in the name
        meant = f"; did you mean the input {close[0]}?" if close else ""
        raise RequestError(f"request parameter {_short(name)} is unknown to this model{meant}")


def priorities(inputs: Inputs, parameters: Mapping[str, Any], batch: int) -> list[int]:
    """The priority of each row: the input, else the request parameter, else 0. RequestError beyond int32."""
    values = inputs.rows("priority", batch, parameters.get("priority", 0))
    return [whole_number("priority", v, -INT32_MAX - 1, INT32_MAX, "smaller is sooner") for v in values]


# ---------------------------------------------------------------- sampling


def sampling_params(
    named: Mapping[str, Any], limits: Limits, names: Mapping[str, str], clip_top_p: bool = False
) -> SamplingParams:
    """SamplingParams from what a request names, by FasterTransformer's rules, which TensorRT-LLM kept.

    top_k 0 and top_p 0, or neither: greedy. top_k alone: the best k. top_p alone: nucleus over the
    vocabulary. top_k beyond the vocabulary keeps everything. clip_top_p: a top_p beyond 1 counts as 1, as
    with FasterTransformer; else it is refused. top_p_decay, top_p_min and top_p_reset_ids matter to pure
    nucleus sampling only; 0 stands for the default of the first two (where FasterTransformer made a top_p_min
    of 0.5 of it). names: parameter -> the client's name of it, for errors.
    Raises RequestError.
    """
    values = dict(named)
    top_p = _nucleus(values.get("top_p", 0.0), names.get("top_p", "top_p"), clip_top_p)
    values["top_k"], values["top_p"] = _candidates(values.get("top_k", 0), top_p, limits)
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
    complaint = messages.check(params)
    if complaint:
        name, rest = complaint.split(" ", 1)
        raise RequestError(f"{names.get(name, name)} {rest}")
    return params


def _nucleus(top_p: float, name: str, clip: bool) -> float:
    """top_p from 0 to 1; RequestError if it is something else, a NaN included."""
    if clip and 1.0 < top_p < math.inf:
        return 1.0
    if not 0.0 <= top_p <= 1.0:
        wanted = "a number from 0 (no nucleus) to 1" + (", or more, which counts as 1" if clip else "")
        raise RequestError(f"{name} is {top_p}; wanted {wanted}")
    return top_p


def _candidates(top_k: int, top_p: float, limits: Limits) -> tuple[int, float]:
    if top_k == 0 and top_p == 0.0:
        return 1, 1.0
    return min(top_k, limits.vocab_size), top_p or 1.0


def check_one_penalty(named: Mapping[str, Any]) -> None:
    """FasterTransformer takes a repetition or a presence penalty: RequestError if both do something."""
    repetition, presence = named.get("repetition_penalty", 1.0), named.get("presence_penalty", 0.0)
    if repetition != 1.0 and presence != 0.0:
        found = f"repetition_penalty is {repetition} and presence_penalty is {presence}"
        raise RequestError(f"{found}; wanted one of them at its neutral value, 1 or 0")


def client_names(table: Sequence[Field], inputs: Inputs) -> dict[str, str]:
    """Sampling parameter -> the name under which this client sent it, or would."""
    return {field.param: inputs.sent_as(field.name) for field in table if field.param}


def check_length(prompt: int, output: int, limits: Limits, prompt_name: str, output_name: str) -> None:
    """RequestError if so many tokens do not fit into a sequence."""
    if prompt + output > limits.max_sequence_tokens:
        found = f"{prompt_name} has {prompt:,} tokens and {output_name} asks for {output:,} more"
        wanted = f"{limits.max_sequence_tokens:,} in all (max_sequence_tokens in config.pbtxt)"
        raise RequestError(f"{found}; this model accepts {wanted}")


def check_word_tokens(name: str, words: list[list[int]], limit: int) -> None:
    """RequestError if all ids of a sequence's words together exceed what the engine keeps room for."""
    count = sum(map(len, words))
    if count > limit:
        raise RequestError(f"{name} has {count:,} token ids; this model accepts {limit:,}")


def decode_text(value: Any, name: str, row: int | None = None) -> str:
    """UTF-8 bytes as text; RequestError naming field, row and byte if they are not."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        where = name if row is None else f"{name} of row {row}"
        byte = f"byte {error.start} is 0x{value[error.start]:02x}"
        raise RequestError(f"{where} is not valid UTF-8: {byte}") from None
