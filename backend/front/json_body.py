"""The JSON body of a request: limits first, then the parser, then the struct.

Size and depth are checked before anything is parsed. A key twice, NaN and infinities are refused, a field
that nobody knows is refused with the most similar name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from tridecode.backend.front.errors import ApiError, bad_request, shown

MAX_DEPTH = 64
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_ENUM = re.compile(r"Invalid enum value ")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_PATH = re.compile(r" - at `\$([^`]*)`$")
_KINDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text",
    "array": "a list", "object": "a JSON object", "null": "null",
}  # fmt: skip

_T = TypeVar("_T", bound=msgspec.Struct)


async def read_body(request: Request, most: int) -> bytes:
    """The whole body. ApiError 413 if it has more than `most` bytes, 415 if it is compressed;
    ClientDisconnect if the client left."""
    check_encoding(request)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise _too_large(f"{int(length):,} bytes", most)
    pieces, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        size += len(message.get("body", b""))
        if size > most:
            raise _too_large("more", most)
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def check_encoding(request: Request) -> None:
    """Raise ApiError 415 for a compressed body."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        text = f"the body has the content-encoding {shown(encoding)}; wanted one that is not compressed"
        raise ApiError(415, text, code="unsupported_encoding", headers={"connection": "close"})


def _too_large(found: str, most: int) -> ApiError:
    text = f"the body has {found}; this service accepts {most:,} bytes"
    return ApiError(413, text, code="body_too_large", headers={"connection": "close"})


def parse(body: bytes, kind: type[_T]) -> _T:
    """The body as a struct. Raises ApiError."""
    return convert(parse_object(body), kind)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    if not body.strip():
        raise bad_request("the body is empty; wanted a JSON object", code="invalid_json")
    _check_depth(body)
    try:
        found = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: byte {error.start}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "a number has too many digits"
        raise bad_request(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise bad_request(f"the body is {shown(found)}; wanted a JSON object", code="invalid_json")
    return found


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _too_deep()


def _too_deep() -> ApiError:
    return bad_request(
        f"the body is nested too deeply; wanted {MAX_DEPTH} levels at most", code="invalid_json"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise bad_request(f"the body has the key {shown(twice)} twice; wanted each once", twice[:64])
    return found


def _refuse_constant(text: str) -> Any:
    raise bad_request(f"the body has the value {text}; wanted a finite number", code="invalid_json")


def convert(found: dict[str, Any], kind: type[_T]) -> _T:
    """A JSON object as a struct. Raises ApiError that names the field."""
    try:
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError:
            return msgspec.convert({name: _whole(value) for name, value in found.items()}, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), found, kind) from None
    except RecursionError:
        raise _too_deep() from None
    except UnicodeEncodeError:
        raise bad_request("a key of the body is not valid Unicode text", code="invalid_json") from None


def _whole(value: Any) -> Any:
    """Return 16.0 as 16, which JSON Schema takes for an integer, in a list, too."""
    if type(value) is float and value.is_integer():
        return int(value)
    return [_whole(one) for one in value] if type(value) is list else value


def _invalid(text: str, found: dict[str, Any], kind: type[msgspec.Struct]) -> ApiError:
    place = _PATH.search(text)
    path = place.group(1).lstrip(".") if place else ""
    text = _PATH.sub("", text)
    if unknown := _UNKNOWN.match(text):
        name = unknown.group(1)
        where = f" of {path}" if path else ""
        hint = nearest(name, _fields_at(kind, path))
        return bad_request(
            f"the field {shown(name)}{where} is unknown{hint}",
            f"{path}.{name}"[-64:] if path else name[:64],
            "unknown_parameter",
        )
    if missing := _MISSING.match(text):
        name = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return bad_request(f"{name} is missing", name, "missing_required_parameter")
    if _ENUM.match(text):
        words = f"{path} is {shown(_value_at(found, path))}; wanted one of {', '.join(_choices(kind, path))}"
        return bad_request(words, path, "invalid_value")
    wanted = text.removeprefix("Expected ").partition(", got ")[0].replace("`", "")
    for short, words in _KINDS.items():
        wanted = re.sub(rf"\b{short}\b", words, wanted)
    wanted = wanted.replace(" | ", " or ")
    value = shown(_value_at(found, path))
    return bad_request(f"{path or 'the body'} is {value}; wanted {wanted}", path or None, "invalid_type")


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean X?` for the most similar known name, if one is similar."""
    close = difflib.get_close_matches(name[:64].lower(), known, 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _steps(path: str) -> list[str | int]:
    return [int(index) if index else name for name, index in re.findall(r"([A-Za-z_]\w*)|\[(\d+)\]", path)]


def _value_at(found: Any, path: str) -> Any:
    for step in _steps(path):
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            return None
    return found


def _choices(kind: Any, path: str) -> list[str]:
    """Return the values that a field with a fixed set of values accepts."""
    above, _, name = path.rpartition(".")
    types = [field.type for field in _fields_of(kind, above) if field.encode_name == name]
    kinds = [one for whole in types for one in getattr(whole, "types", [whole])]
    return [str(value) for one in kinds for value in getattr(one, "values", ())]


def _fields_at(kind: Any, path: str) -> list[str]:
    """The known names of the struct at a path; [] where there is none."""
    return [field.encode_name for field in _fields_of(kind, path)]


def _fields_of(kind: Any, path: str) -> Sequence[msgspec.inspect.Field]:
    """Return the fields of the struct at a path; [] where there is none."""
    info = msgspec.inspect.type_info(kind)
    for step in [step for step in _steps(path) if isinstance(step, str)]:
        info = next(field.type for field in info.fields if field.encode_name == step)  # type: ignore[attr-defined]
        while not isinstance(info, msgspec.inspect.StructType):
            options = getattr(info, "types", None) or [getattr(info, "item_type", None)]
            inner = [one for one in options if not isinstance(one, msgspec.inspect.NoneType)]
            structs = [one for one in inner if hasattr(one, "fields") or hasattr(one, "item_type")]
            if not structs:
                return []
            info = structs[0]
    return info.fields  # type: ignore[attr-defined]
