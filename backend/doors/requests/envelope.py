"""Size limits of a request, checked once for every door before any part of it is parsed, copied or tokenised.

backend/service/limits.py has the limits that all front ends share; docs/reference/requests.md lists all
limits. Checks look at shapes and lengths only, so their cost does not depend on the content. A request that
passes can be encoded as a message of backend/wire/messages.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tridecode.backend.base.errors import RequestError
from tridecode.backend.service.limits import MAX_TIMEOUT_S, TextLimits, check_label, text_limits, too_large

if TYPE_CHECKING:
    from tridecode.backend.doors.contracts.field import Contract
    from tridecode.backend.doors.door_settings import DoorSettings
    from tridecode.backend.wire.messages import Limits

MAX_ROWS = 1024  # rows of one request; max_batch_size of our models
MAX_REQUEST_WORDS = 16_384  # bad or stop words of all rows
MAX_WORD_IDS = 16_384  # n of a [B, 2, n] word list
MAX_TABLES_BYTES = 268_435_456  # of the prompt tables of all rows
MAX_PARAMETERS = 64  # request parameters
MAX_PARAMETER_BYTES = 65_536  # of their JSON text


@dataclass(frozen=True)
class Envelope(TextLimits):
    """The limits of one door. An element is one number of any dtype."""

    max_response_elements: int  # elements of one response's arrays, and of any input tensor
    max_stream_elements: int  # elements of all responses of a request together

    def check(self, arrays: Mapping[str, np.ndarray], contract: Contract) -> int:
        """Return the bytes of all texts of the request.

        Raises RequestError for the first tensor that is too large.
        """
        total = 0
        for name, array in arrays.items():
            field = contract.by_name.get(name)
            if field is None or (field.refused and not field.neutral):
                continue  # Inputs refuses it, whatever its value
            self._check_count(name, field.kind, array)
            if array.dtype == object:
                total += self._check_texts(name, field.kind, array)
        self.check_total(total)
        return total

    def _check_count(self, name: str, kind: str, array: np.ndarray) -> None:
        count = math.prod(max(1, size) for size in array.shape)  # an empty tensor may have huge axes
        if kind in ("ids", "word_ids"):
            if count > self.max_response_elements:
                most = f"{self.max_response_elements:,} elements (max_response_elements in config.pbtxt)"
                raise too_large(_shape(name, array), most)
            if kind == "word_ids" and array.shape and array.shape[-1] > MAX_WORD_IDS:
                raise too_large(_shape(name, array), f"{MAX_WORD_IDS:,} ids a row")
        elif kind == "table":
            if count * array.itemsize > MAX_TABLES_BYTES:
                raise too_large(_shape(name, array), f"{MAX_TABLES_BYTES:,} bytes of prompt tables")
        elif kind == "words":
            if count > MAX_REQUEST_WORDS:
                raise too_large(f"{name} has {count:,} words", f"{MAX_REQUEST_WORDS:,} in a request")
        elif count > MAX_ROWS:
            raise too_large(_shape(name, array), f"one value a row and {MAX_ROWS:,} rows")

    def _check_texts(self, name: str, kind: str, array: np.ndarray) -> int:
        sizes = np.fromiter(map(len, array.reshape(-1).tolist()), np.int64, array.size)
        total = int(sizes.sum())
        if kind == "words":
            rows = sizes.reshape(1, -1)
            if array.ndim > 1:
                rows = sizes.reshape(len(array), math.prod(array.shape[1:]))
            row_bytes = int(rows.sum(axis=1).max()) if rows.size else 0
            self.check_words(name, rows.shape[1], row_bytes, total)
        elif sizes.size:
            where = f"{name} of row {int(sizes.argmax())}" if array.size > 1 else name
            largest = int(sizes.max())
            if kind != "csv":
                self.check_prompt(where, largest)
            elif largest > self.max_word_bytes:
                raise too_large(f"{where} has {largest:,} bytes", f"{self.max_word_bytes:,}")
        return total

    def check_width(self, name: str, width: int) -> None:
        """Raise RequestError for a width above max_sequence_tokens."""
        if width > self.max_sequence_tokens:
            most = f"{self.max_sequence_tokens:,} (max_sequence_tokens in config.pbtxt)"
            raise too_large(f"{name} has a width of {width:,}", most)

    def check_response(self, rows: int, width: int, output: int, hidden: int, responses: int) -> None:
        """Raise RequestError if FasterTransformer's responses would be too large.

        output: new tokens of the longest row. hidden: 0 without context embeddings. responses: number of
        responses in a stream that merges none.
        """
        elements = rows * (width + 2 * output + hidden)
        if elements > self.max_response_elements:
            found = (
                f"{rows:,} rows of {width:,} ids and {output:,} new tokens make a response of {elements:,}"
            )
            most = f"{self.max_response_elements:,} (max_response_elements in config.pbtxt)"
            raise too_large(f"{found} elements", f"{most}; send fewer rows at once")
        if elements * responses > self.max_stream_elements:
            found = f"{responses:,} responses of {elements:,} elements each are {elements * responses:,}"
            most = f"{self.max_stream_elements:,} (max_stream_elements in config.pbtxt)"
            raise too_large(found, f"{most}; send fewer rows at once, or use the model that does not stream")

    def check_padded(self, name: str, rows: int, width: int) -> None:
        """Raise RequestError if a tensor padded to [rows, width] is too large."""
        if rows * width > self.max_response_elements:
            most = f"{self.max_response_elements:,} elements (max_response_elements in config.pbtxt)"
            found = f"{name} has {rows:,} rows, and padded to the longest each has {width:,} ids"
            raise too_large(found, f"{most}; send long and short texts apart")


def _shape(name: str, array: np.ndarray) -> str:
    return f"{name} has shape {list(array.shape)}"


def envelope_of(settings: DoorSettings, limits: Limits | None = None) -> Envelope:
    """Return the limits of a door: those of its config.pbtxt, else derived from the engine's limits."""
    texts = text_limits(limits, settings.max_prompt_bytes, settings.max_request_bytes)
    return Envelope(
        **vars(texts),
        max_response_elements=settings.max_response_elements,
        max_stream_elements=settings.max_stream_elements,
    )


# ---------------------------------------------------------------- request id, parameters, time-out


def read_label(request: Any) -> str:
    """Return the request id.

    Raises RequestError if it is too long or not UTF-8 (UnicodeDecodeError of pb_utils).
    """
    try:
        label = request.request_id()
    except UnicodeDecodeError:
        raise RequestError("the request id is not valid UTF-8 text") from None
    return check_label(label)


def read_parameters(request: Any) -> dict[str, Any]:
    """Return the request parameters; the size of their JSON text is checked before it is parsed."""
    try:
        text = request.parameters()
    except UnicodeDecodeError:
        raise RequestError("the request parameters are not valid UTF-8 text") from None
    if not text:
        return {}
    if len(text) > MAX_PARAMETER_BYTES:
        found = f"the request parameters have {len(text):,} characters of JSON"
        raise too_large(found, f"{MAX_PARAMETER_BYTES:,}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("the request parameters are not a valid JSON object") from None
    if not isinstance(values, dict):
        raise RequestError("the request parameters are not a JSON object")
    if len(values) > MAX_PARAMETERS:
        raise RequestError(f"{len(values):,} request parameters were sent; wanted {MAX_PARAMETERS} at most")
    return values


def read_timeout_s(request: Any) -> float:
    """Return the request's time-out in seconds; 0: not sent."""
    return min(max(0, request.timeout()) / 1e6, MAX_TIMEOUT_S)
