"""Converts vLLM's sampling parameters (a JSON object or request parameters) to checked Python values.

Sizes are checked before the text is parsed. Every fault is one RequestError that names the key, what was
found and what was wanted. Numbers and booleans may be texts, because vLLM's own client sends them as texts.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tridecode.backend.base.errors import RequestError, UnsupportedError
from tridecode.backend.doors.contracts.inputs import advice_on
from tridecode.backend.doors.contracts.vllm import KEYS_BY_NAME, VLLM, Key
from tridecode.backend.wire.sampling_params import MAX_BIASES

MAX_JSON_BYTES = 65_536  # bytes of the JSON text
MAX_LIST = 4096  # items of one list
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
_LONGEST_NUMBER = 64  # characters of a number that is a text
_FIELD = "sampling_parameters"


def parse(text: str) -> dict[str, Any]:
    """Return the object's keys and converted values, without those that are null. An empty text has no keys.

    Raises RequestError or UnsupportedError.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_JSON_BYTES:
        raise RequestError(f"{_FIELD} has {size:,} bytes; this model accepts {MAX_JSON_BYTES:,}")
    if not text.strip():
        return {}
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError(f"{_FIELD} is nested too deeply; wanted one JSON object") from None
    except ValueError as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "a number has too many digits"
        raise RequestError(
            f'{_FIELD} is not valid JSON: {reason}; wanted a JSON object, as {{"temperature": 0.5}}'
        ) from None
    if not isinstance(found, dict):
        kind = _JSON_TYPES.get(type(found), "null")
        raise RequestError(f'{_FIELD} is {kind}; wanted a JSON object, as {{"temperature": 0.5}}')
    return convert(found, _FIELD)


def convert(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return checked values by key. where: what the keys belong to, for errors."""
    converted = {}
    for name, value in values.items():
        key = KEYS_BY_NAME.get(name)
        if key is None:
            raise RequestError(f"{where} has the key {_shown(name)}, which is unknown{_nearest(name)}")
        if key.refused:
            _refuse(key, value, where)
        elif value is not None:
            converted[name] = _CONVERT[key.kind](value, key, where)
    return converted


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(f"{_FIELD} has the key {_shown(twice)} twice; wanted each once")
    return found


def _refuse_constant(text: str) -> Any:
    raise RequestError(f"{_FIELD} has the value {text}; wanted a finite number")


def _nearest(name: str) -> str:
    if advice := advice_on(name, VLLM):
        return advice
    close = difflib.get_close_matches(name[:64], KEYS_BY_NAME, 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _refuse(key: Key, value: Any, where: str) -> None:
    if any(_equals(value, neutral) for neutral in key.neutral):
        return
    wanted = [_shown(neutral) for neutral in key.neutral if neutral is not None]
    raise UnsupportedError(
        f"{where}: {key.name} is {_shown(value)}, which this version does not implement; "
        f"{'wanted ' + wanted[0] + ' or none' if wanted else 'leave it out'}"
    )


def _equals(value: Any, neutral: Any) -> bool:
    """Return whether both are equal; a text may represent a number or a boolean."""
    if isinstance(value, str) and isinstance(neutral, (bool, int)):
        with contextlib.suppress(ValueError):
            return value.lower() == str(neutral).lower() or float(value[:_LONGEST_NUMBER]) == neutral
        return False
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


# ---------------------------------------------------------------- one function per kind


def _number(value: Any, key: Key, where: str) -> float:
    try:
        if isinstance(value, bool) or (isinstance(value, str) and len(value) > _LONGEST_NUMBER):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    above = key.low < number if key.wanted.startswith("a number in (") else key.low <= number
    if not (above and number <= key.high):
        raise _unlike(key, value, where)
    return number


def _whole(value: Any, key: Key, where: str) -> int:
    number = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str):
        number = int(value) if _WHOLE.fullmatch(value) else None
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if number is None or not key.low <= number <= key.high:
        raise _unlike(key, value, where)
    return number


def _truth(value: Any, key: Key, where: str) -> bool:
    found = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise _unlike(key, value, where)
    return found


def _text(value: Any, key: Key, where: str) -> str:
    if not isinstance(value, str) or len(value) > key.high:
        raise _unlike(key, value, where)
    return _utf8(value, key, where)


def _texts(value: Any, key: Key, where: str) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise _unlike(key, value, where)
    return [_utf8(item, key, where) for item in items]


def _ids(value: Any, key: Key, where: str) -> list[int]:
    if not isinstance(value, list):
        raise _unlike(key, value, where)
    if len(value) > MAX_LIST:
        raise RequestError(f"{where}: {key.name} has {len(value):,} items; this model accepts {MAX_LIST:,}")
    return [_whole(item, key, where) for item in value]


def _biases(value: Any, key: Key, where: str) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _unlike(key, value, where)
    if len(value) > MAX_BIASES:
        raise RequestError(f"{where}: {key.name} has {len(value):,} ids; this model accepts {MAX_BIASES:,}")
    found = {}
    for token, bias in value.items():
        if not (_WHOLE.fullmatch(token) and isinstance(bias, (int, float))) or isinstance(bias, bool):
            raise _unlike(key, {token: bias}, where)
        found[int(token)] = _number(bias, key, where)
    return found


def _utf8(text: str, key: Key, where: str) -> str:
    """Check that the text can be encoded: JSON can hold lone surrogates, which UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{where}: {key.name} is not valid UTF-8 text") from None
    return text


_CONVERT: dict[str, Callable[[Any, Key, str], Any]] = {
    "int": _whole,
    "float": _number,
    "bool": _truth,
    "text": _text,
    "texts": _texts,
    "ids": _ids,
    "biases": _biases,
    "object": lambda value, key, where: value,  # service/structured_fields.py reads it
}
_JSON_TYPES = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}


def _unlike(key: Key, value: Any, where: str) -> RequestError:
    return RequestError(f"{where}: {key.name} is {_shown(value)}; wanted {key.in_words}")


def _shown(value: Any) -> str:
    """Return the value as JSON, cut to 60 characters."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print very large integers
    if isinstance(value, (list, dict)) and len(value) > 8:
        return f"a {'list' if isinstance(value, list) else 'JSON object'} of {len(value):,} items"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
