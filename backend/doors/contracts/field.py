"""A contract as a table of the tensors that a model takes and returns.

The tensors in config.pbtxt (model_repo_templates), the parsing of a request (`inputs`) and the tables in
docs/reference/requests.md (`python -m tridecode.tools.generated_docs.requests --write`) are made from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tridecode.backend.wire.sampling_params import SamplingParams, parameters

_WHOLE = (np.uint32, np.int32, np.uint64, np.int64)
_REAL = (np.float32, np.float16, np.float64)
#: Triton's type -> accepted numpy types: a config.pbtxt may declare another width than the table
_ACCEPTED: dict[str, tuple[type[np.generic], ...]] = {
    **dict.fromkeys(("UINT32", "INT32", "UINT64", "INT64"), _WHOLE),
    **dict.fromkeys(("FP16", "FP32"), _REAL),
    "BOOL": (np.bool_,),
    "STRING": (np.object_,),
    "UINT8": (*_WHOLE, *_REAL, np.bool_, np.object_, np.uint8),  # images: an array, a file, a text
}


@dataclass(frozen=True)
class Field:
    """One input tensor.

    dtype, dims: as in config.pbtxt, dims without the batch axis. meaning, default: for
    docs/reference/requests.md; default is used if the input is not sent. param: the sampling parameter that
    it sets; meaning and default are taken from that parameter's row unless given here. alias_of: the current
    name of a field whose older name this is. required: Triton refuses a request without it. keeps_axis: one
        fixed axis, not reshaped, where the original has a free one; Triton then refuses a request without
    rows.
        lenient: the model itself does not need it, so a config.pbtxt may make it optional. declared: false
    for a
        tensor that only foreign config.pbtxt files have. refused: not implemented; `neutral` lists the values
    without an effect, which are accepted. kind: selects the limits of the envelope: "value" (one per row),
    "prompt" (one text per row), "ids" (many per row), "words" (texts), "csv" (words in one text per row),
    "word_ids" (a [B, 2, n] word list), "table" (a [B, n, m] prompt table).
    """

    name: str
    dtype: str
    meaning: str = ""
    default: str = ""
    dims: tuple[int, ...] = (1,)
    kind: str = "value"
    param: str = ""
    alias_of: str = ""
    required: bool = False
    lenient: bool = False
    keeps_axis: bool = False
    declared: bool = True
    refused: bool = False
    neutral: tuple = ()

    @cached_property
    def dtypes(self) -> tuple[type[np.generic], ...]:
        return _ACCEPTED[self.dtype]


@dataclass(frozen=True)
class Output:
    """One output tensor; meaning "": the contract declares it, but it is never sent."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    meaning: str = ""


@dataclass(frozen=True)
class Contract:
    """The tensors of one model. reshape_scalars: inputs of dims [1] reach the model as [B], not [B, 1].

    parameters: request parameters that its clients send and that have no effect. batched: the original has a
    batch axis; False: shapes are the dims alone. own_batch_axis: config.pbtxt has max_batch_size 0 and the
    batch axis among the dims, so that Triton passes on a request without rows, which it would otherwise
        drop. leading_axis: every tensor has an axis of size 1 in front of the rows (interactive.py).
    """

    inputs: tuple[Field, ...]
    outputs: tuple[Output, ...]
    reshape_scalars: bool = False
    parameters: tuple[str, ...] = ()
    batched: bool = True
    own_batch_axis: bool = False
    leading_axis: bool = False

    @cached_property
    def by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.inputs}

    @cached_property
    def required(self) -> tuple[Field, ...]:
        """Return the fields without which the model cannot serve a request."""
        return tuple(field for field in self.inputs if field.required and not field.lenient)

    @cached_property
    def params(self) -> tuple[Field, ...]:
        """Return the fields that set a sampling parameter."""
        return tuple(field for field in self.inputs if field.param)


def special_tokens_field(name: str = "add_special_tokens") -> Field:
    """Return the flag that every model with a tokenised prompt has; see fields.add_special_tokens."""
    meaning = "false: add no BOS or other special token, because a chat template has added them"
    return Field(name, "BOOL", meaning, "`config.pbtxt`'s")


#: TensorRT-LLM's guided decoding, in the contracts that have it
GUIDE_FIELDS = (
    Field(
        "guided_decoding_guide_type",
        "STRING",
        "`json`, `json_schema`, `regex`, `ebnf_grammar` or `structural_tag`: what the answer follows",
        "none",
    ),
    Field(
        "guided_decoding_guide",
        "STRING",
        "the schema, regular expression or grammar; not with `json`",
        "none",
    ),
)


def refused(
    name: str,
    dtype: str,
    neutral: tuple = (),
    dims: tuple[int, ...] = (1,),
    declared: bool = True,
    kind: str = "value",
) -> Field:
    return Field(name, dtype, dims=dims, kind=kind, declared=declared, refused=True, neutral=neutral)


#: the use of the prefix cache and of drafts; common to every model of whole prompts
CACHE_FIELDS = (
    Field("cache", "STRING", default="`on`", param="cache"),
    Field("cache_salt", "STRING", default="none", param="cache_salt"),
    Field("speculate", "BOOL", default="true", param="speculate"),
)


def with_parameters(
    fields: Iterable[Field],
    whole: str,
    without: tuple[str, ...] = (),
    table: type[SamplingParams] = SamplingParams,
) -> tuple[Field, ...]:
    """Return the fields, and one more for each sampling parameter with a range, for those of the prefix
    cache and of drafts, that none of them sets.

    whole: dtype of integer fields. without: parameters that the contract leaves out.
    """
    fields = tuple(fields)
    named = {name for field in fields for name in (field.param, field.name)}.union(without)
    added = [
        Field(row.name, "FP32" if row.type is float else whole, param=row.name)
        for row in parameters(table)
        if row.range
    ]
    return fields + tuple(field for field in (*added, *CACHE_FIELDS) if field.name not in named)


#: common to every model of token ids
SAMPLING_PARAMS = Field(
    "sampling_params",
    "STRING",
    "JSON object of the row's sampling parameters, by the names of `SamplingParams`, instead of the inputs "
    "that set one each; the answer is `events` alone",
    "none",
)
EVENTS = Output(
    "events",
    "STRING",
    (-1,),
    "[1, n]: the engine's next events in MessagePack (`backend/wire/messages.py`), for `sampling_params`",
)

#: common to every model with an engine
RESUME = Field(
    "resume",
    "BOOL",
    "when the engine dies, wait for the rebuilt one and continue there; false: end with an error",
    "true",
)
