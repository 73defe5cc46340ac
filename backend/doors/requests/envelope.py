"""Size limits of a request: checked once, for every door, before any of it is parsed, copied, tokenised,
allocated or sent on.

Every limit is a field of Envelope or a constant here, and is listed in docs/reference/requests.md. Checks
look at shapes and lengths only, so their cost does not depend on the content. A request that passes can be
encoded as a message of backend/wire/messages.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tridecode.backend.base.errors import RequestError, TridecodeError

if TYPE_CHECKING:
    from tridecode.backend.doors.contracts.field import Contract
    from tridecode.backend.doors.door_settings import DoorSettings
    from tridecode.backend.wire.messages import Limits

MAX_ROWS = 1024  # sequences of one request; max_batch_size of our models
MAX_WORDS = 1024  # bad or stop words of one row, unless the engine's limit in tokens is higher
MAX_REQUEST_WORDS = 16_384  # bad or stop words of all rows
MAX_REQUEST_WORD_BYTES = 262_144
MAX_STOP_WORDS = 256  # of one row; the text doors match them in the text
MAX_STOP_WORD_BYTES = 4096
MAX_WORD_IDS = 16_384  # n of a [B, 2, n] word list
MAX_TABLES_BYTES = 268_435_456  # of the prompt tables of all rows
MAX_PARAMETERS = 64  # request parameters
MAX_PARAMETER_BYTES = 65_536  # of their JSON text
MAX_LABEL = 1024  # characters of a request id
_SHOWN_LABEL = 100  # of them, in an error
MAX_TIMEOUT_S = 30 * 86_400.0  # longer time-outs count as this

#: Ordinary text has 4 to 5 bytes per token, source code with its runs of blanks up to 16
BYTES_A_TOKEN = 32
#: Measured with GPT-2's and SmolLM2's tokenizers: 2.5 MB/s, so this takes 25 ms
_MIN_PROMPT_BYTES = 65_536
_MIN_REQUEST_BYTES = 4_194_304
#: max_sequence_tokens for a door that has no engine (preprocessing)
_UNKNOWN_SEQUENCE_TOKENS = 32_768
_MIN_WORD_BYTES = 16_384
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Envelope:
    """The limits of one door. Bytes are of UTF-8 text, elements are numbers of any dtype."""

    max_prompt_bytes: int  # of one text
    max_request_bytes: int  # of all texts of a request
    max_response_elements: int  # of one response's arrays, and of any input tensor
    max_stream_elements: int  # of all responses of a request together
    max_sequence_tokens: int  # the widest row
    max_words: int = MAX_WORDS
    max_word_bytes: int = _MIN_WORD_BYTES  # of the words of one row

    def check(self, arrays: Mapping[str, np.ndarray], contract: Contract) -> int:
        """Bytes of all texts of the request. RequestError for the first tensor that is too large."""
        total = 0
        for name, array in arrays.items():
            field = contract.by_name.get(name)
            if field is None or (field.refused and not field.neutral):
                continue  # Inputs refuses it, whatever its value
            self._check_count(name, field.kind, array)
            if array.dtype == object:
                total += self._check_texts(name, field.kind, array)
        if total > self.max_request_bytes:
            most = f"{self.max_request_bytes:,} (max_request_bytes in config.pbtxt)"
            raise _too_large(f"the request has {total:,} bytes of text", most)
        return total

    def _check_count(self, name: str, kind: str, array: np.ndarray) -> None:
        count = math.prod(max(1, size) for size in array.shape)  # an empty tensor may have huge axes
        if kind in ("ids", "word_ids"):
            if count > self.max_response_elements:
                most = f"{self.max_response_elements:,} elements (max_response_elements in config.pbtxt)"
                raise _too_large(_shape(name, array), most)
            if kind == "word_ids" and array.shape and array.shape[-1] > MAX_WORD_IDS:
                raise _too_large(_shape(name, array), f"{MAX_WORD_IDS:,} ids a row")
        elif kind == "table":
            if count * array.itemsize > MAX_TABLES_BYTES:
                raise _too_large(_shape(name, array), f"{MAX_TABLES_BYTES:,} bytes of prompt tables")
        elif kind == "words":
            if count > MAX_REQUEST_WORDS:
                raise _too_large(f"{name} has {count:,} words", f"{MAX_REQUEST_WORDS:,} in a request")
        elif count > MAX_ROWS:
            raise _too_large(_shape(name, array), f"one value a row and {MAX_ROWS:,} rows")

    def _check_texts(self, name: str, kind: str, array: np.ndarray) -> int:
        sizes = np.fromiter(map(len, array.reshape(-1).tolist()), np.int64, array.size)
        total = int(sizes.sum())
        if kind == "words":
            self._check_words(name, sizes.reshape(array.shape), total)
            return total
        most = self.max_word_bytes if kind == "csv" else self.max_prompt_bytes
        if sizes.size and (largest := int(sizes.max())) > most:
            where = f" of row {int(sizes.argmax())}" if array.size > 1 else ""
            setting = "" if kind == "csv" else " (max_prompt_bytes in config.pbtxt)"
            raise _too_large(f"{name}{where} has {largest:,} bytes", f"{most:,}{setting}")
        return total

    def _check_words(self, name: str, sizes: np.ndarray, total: int) -> None:
        """sizes: bytes of each word, [n] or [B, n]."""
        rows = (
            sizes.reshape(len(sizes), math.prod(sizes.shape[1:])) if sizes.ndim > 1 else sizes.reshape(1, -1)
        )
        row_bytes = int(rows.sum(axis=1).max()) if rows.size else 0
        if rows.shape[1] > self.max_words:
            raise _too_large(f"{name} has {rows.shape[1]:,} words a row", f"{self.max_words:,}")
        if row_bytes > self.max_word_bytes:
            raise _too_large(f"{name} has {row_bytes:,} bytes a row", f"{self.max_word_bytes:,}")
        if total > MAX_REQUEST_WORD_BYTES:
            raise _too_large(f"{name} has {total:,} bytes", f"{MAX_REQUEST_WORD_BYTES:,} in a request")

    def check_width(self, name: str, width: int) -> None:
        """RequestError for a width above max_sequence_tokens."""
        if width > self.max_sequence_tokens:
            most = f"{self.max_sequence_tokens:,} (max_sequence_tokens in config.pbtxt)"
            raise _too_large(f"{name} has a width of {width:,}", most)

    def check_response(self, rows: int, width: int, output: int, hidden: int, responses: int) -> None:
        """RequestError if FasterTransformer's responses would be too large: all ids, log-probs, embeddings.

        output: new tokens of the longest row. hidden: 0 without context embeddings. responses: their number
        in a stream where none are merged.
        """
        elements = rows * (width + 2 * output + hidden)
        if elements > self.max_response_elements:
            found = (
                f"{rows:,} rows of {width:,} ids and {output:,} new tokens make a response of {elements:,}"
            )
            most = f"{self.max_response_elements:,} (max_response_elements in config.pbtxt)"
            raise _too_large(f"{found} elements", f"{most}; send fewer rows at once")
        if elements * responses > self.max_stream_elements:
            found = f"{responses:,} responses of {elements:,} elements each are {elements * responses:,}"
            most = f"{self.max_stream_elements:,} (max_stream_elements in config.pbtxt)"
            raise _too_large(found, f"{most}; send fewer rows at once, or use the model that does not stream")

    def check_padded(self, name: str, rows: int, width: int) -> None:
        """RequestError if a tensor padded to [rows, width] is too large."""
        if rows * width > self.max_response_elements:
            most = f"{self.max_response_elements:,} elements (max_response_elements in config.pbtxt)"
            found = f"{name} has {rows:,} rows, and padded to the longest each has {width:,} ids"
            raise _too_large(found, f"{most}; send long and short texts apart")


def _too_large(found: str, most: str) -> RequestError:
    return RequestError(f"{found}; this model accepts {most}")


def _shape(name: str, array: np.ndarray) -> str:
    return f"{name} has shape {list(array.shape)}"


def envelope_of(settings: DoorSettings, limits: Limits | None = None) -> Envelope:
    """The limits of a door: those of its config.pbtxt, else derived from the engine's limits."""
    tokens = limits.max_sequence_tokens if limits else _UNKNOWN_SEQUENCE_TOKENS
    word_tokens = max(limits.max_bad_word_tokens, limits.max_stop_word_tokens) if limits else 0
    prompt = settings.max_prompt_bytes or max(_MIN_PROMPT_BYTES, BYTES_A_TOKEN * tokens)
    return Envelope(
        max_prompt_bytes=prompt,
        max_request_bytes=settings.max_request_bytes or max(_MIN_REQUEST_BYTES, 8 * prompt),
        max_response_elements=settings.max_response_elements,
        max_stream_elements=settings.max_stream_elements,
        max_sequence_tokens=tokens,
        max_words=max(MAX_WORDS, word_tokens),
        max_word_bytes=max(_MIN_WORD_BYTES, BYTES_A_TOKEN * word_tokens),
    )


# ---------------------------------------------------------------- request id, parameters, time-out


def read_label(request: Any) -> str:
    """The request id. RequestError if it is not UTF-8 or too long; pb_utils raises UnicodeDecodeError."""
    try:
        label = request.request_id()
    except UnicodeDecodeError:
        raise RequestError("the request id is not valid UTF-8 text") from None
    return check_label(label)


def check_label(label: str) -> str:
    if len(label) > MAX_LABEL:
        raise _too_large(f"the request id has {len(label):,} characters", f"{MAX_LABEL:,}")
    try:
        label.encode("utf-8")  # JSON can hold halves of surrogate pairs, which cannot be encoded
    except UnicodeEncodeError:
        raise RequestError("the request id is not valid UTF-8 text") from None
    return label


def read_parameters(request: Any) -> dict[str, Any]:
    """The request parameters; the size of their JSON text is checked before it is parsed."""
    try:
        text = request.parameters()
    except UnicodeDecodeError:
        raise RequestError("the request parameters are not valid UTF-8 text") from None
    if not text:
        return {}
    if len(text) > MAX_PARAMETER_BYTES:
        found = f"the request parameters have {len(text):,} characters of JSON"
        raise _too_large(found, f"{MAX_PARAMETER_BYTES:,}")
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
    """Seconds; 0: not sent."""
    return min(max(0, request.timeout()) / 1e6, MAX_TIMEOUT_S)


def whole_number(name: str, value: Any, low: int, high: int, meaning: str) -> int:
    """`value` as a whole number from low to high; also a text, as JSON parameters often are."""
    try:
        if isinstance(value, bool) or (isinstance(value, str) and len(value) > 20):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        number = high + 1
    if not low <= number <= high:
        text = value if isinstance(value, (int, float)) else repr(value)
        shown = str(text) if len(str(text)) <= 60 else str(text)[:57] + "..."
        raise RequestError(f"{name} is {shown}; wanted a whole number from {low} to {high}, {meaning}")
    return number


# ---------------------------------------------------------------- error texts for clients

#: an absolute path of two parts or more that is not part of a URL or a fraction
_PATH = re.compile(r"(?<![\w/:.~*])/(?:[\w.+@~-]+/)+([\w.+@~-]*)")


def public_text(text: str) -> str:
    """An error's text for a client: without directories of this server, and always valid UTF-8."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return _PATH.sub(lambda found: found.group(1) or "a directory", text)


def with_label(text: str, label: str) -> str:
    """An error's text that names the request id of the client, if it gave one: streams share a connection."""
    shown = label if len(label) <= _SHOWN_LABEL else label[: _SHOWN_LABEL - 3] + "..."
    return text if not label or repr(label) in text else f"{text} (request {shown!r})"


def internal_error(error: Exception, label: str) -> TridecodeError:
    """The client's error for a defect of this program; the log has the traceback."""
    which = f"request {label!r}" if label else "a request without an id"
    return TridecodeError(f"the door failed: {type(error).__name__} ({which}); the server's log says more")
