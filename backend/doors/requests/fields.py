"""Reads fields that a request may send as tensors or as parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tridecode.backend.base.errors import RequestError
from tridecode.backend.doors.contracts.inputs import Inputs, decode_text
from tridecode.backend.service import structured_fields
from tridecode.backend.service.limits import INT32_MAX, whole_number
from tridecode.backend.service.structured_fields import GUIDE, GUIDE_TYPE
from tridecode.backend.wire.messages import MAX_LORA_NAME
from tridecode.backend.wire.structured_output import StructuredOutput


def priorities(inputs: Inputs, parameters: Mapping[str, Any], batch: int) -> list[int]:
    """Return the priority of each row: the input, else the request parameter, else 0.

    Raises RequestError beyond int32.
    """
    values = inputs.rows("priority", batch, parameters.get("priority", 0))
    return [whole_number("priority", v, -INT32_MAX - 1, INT32_MAX, "smaller is sooner") for v in values]


def one_priority(inputs: Inputs, parameters: Mapping[str, Any], batch: int) -> int:
    """Return the priority of a request whose rows share one. Raises RequestError if they differ."""
    values = priorities(inputs, parameters, batch)
    if min(values) != max(values):
        raise RequestError("priority differs between the rows of one request; send them apart")
    return values[0]


def lora_names(inputs: Inputs, batch: int) -> list[str]:
    """Return the adapter of each row, "" for none. Raises RequestError for a text that cannot be a name.

    The engine checks whether such an adapter exists.
    """
    names = [
        decode_text(value, "lora_name", row) for row, value in enumerate(inputs.rows("lora_name", batch, ""))
    ]
    for name in names:
        if len(name) > MAX_LORA_NAME:
            found = f"lora_name has {len(name):,} characters"
            raise RequestError(f"{found}; wanted the name of an adapter, at most {MAX_LORA_NAME}")
    return names


def guides(inputs: Inputs, batch: int) -> list[StructuredOutput | None]:
    """Return the constraint of each row, from TensorRT-LLM's inputs. Raises RequestError."""
    kinds, texts = (
        [decode_text(value, name, row) for row, value in enumerate(inputs.rows(name, batch, ""))]
        for name in (GUIDE_TYPE, GUIDE)
    )
    return [structured_fields.read_guide(kind, text) for kind, text in zip(kinds, texts)]


def add_special_tokens(inputs: Inputs, default: bool) -> bool:
    """Return whether the tokenizer adds its special tokens; one value applies to all rows of a request.

    default: that of the model's config.pbtxt."""
    return inputs.flag("add_special_tokens", inputs.flag("ADD_SPECIAL_TOKENS", default))
