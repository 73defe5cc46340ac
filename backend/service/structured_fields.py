"""The fields with which clients constrain an answer, read by the same rules for every front end.

Only forms are checked here; the engine compiles schemas and grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tridecode.backend.base.errors import RequestError, UnsupportedError
from tridecode.backend.chat.fields import FieldError, UnsupportedField, shown
from tridecode.backend.wire import structured_output
from tridecode.backend.wire.limits import Limits
from tridecode.backend.wire.structured_output import StructuredOutput

_OUR_NAME = re.compile(r"structured_output\b")
_PLACE = re.compile(r"at \d+\(\d+\): ")
MAX_CHOICES = 4096
#: inputs of TensorRT-LLM's models
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
#: guided_decoding_guide_type of TensorRT-LLM -> kind
GUIDE_TYPES = {
    "json": "json",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
#: options of vLLM's StructuredOutputsParams; other values than these and null are refused
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
}
#: fields without effect: there is one implementation of grammars
_NO_EFFECT = ("disable_fallback", "backend", "backend_was_auto", "_backend", "_backend_was_auto")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")

Output = StructuredOutput | None


def read_response_format(where: str, value: Any) -> Output:
    """Return the constraint of OpenAI's field; None for text. Raises FieldError and UnsupportedField."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind is None:
        raise FieldError(where, f'is {shown(value)}; wanted a JSON object, as {{"type": "json_object"}}')
    if kind == "text":
        _check_keys(where, value, ("type",))
        return None
    if kind == "json_object":  # instructor and others add a schema
        _check_keys(where, value, ("type", "schema"))
        schema = value.get("schema")
        return StructuredOutput("json") if schema is None else _schema(f"{where}.schema", schema)
    if kind == "json_schema":
        _check_keys(where, value, ("type", "json_schema"))
        return _schema_format(f"{where}.json_schema", value.get("json_schema"))
    if kind == "structural_tag":
        return _tag(where, {key: inner for key, inner in value.items() if key != "type"})
    raise UnsupportedField(f"{where}.type", f"is {shown(kind)}; wanted {', '.join(_FORMATS)}")


def _schema_format(where: str, value: Any) -> StructuredOutput:
    if not isinstance(value, Mapping):
        raise FieldError(where, f"is {shown(value)}; wanted a JSON object with name and schema")
    _check_keys(where, value, ("name", "description", "schema", "strict"))
    for name, kind, words in (("name", str, "a text"), ("description", str, "a text"),
                              ("strict", bool, "true or false")):  # fmt: skip
        inner = value.get(name)
        if inner is not None and not isinstance(inner, kind):
            raise FieldError(f"{where}.{name}", f"is {shown(inner)}; wanted {words}")
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        found = "missing" if schema is None else shown(schema)
        raise FieldError(f"{where}.schema", f"is {found}; wanted a JSON schema")
    return StructuredOutput("json_schema", _json(where, schema))


def _check_keys(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise FieldError(where, f"has the unknown key {shown(unknown)}; wanted {', '.join(known)}")


def read_structured_outputs(where: str, value: Any) -> Output:
    """Return the constraint of vLLM's object, or of its JSON text; None if it has none.

    Raises FieldError and UnsupportedField.
    """
    if isinstance(value, str):
        value = parse_json(where, value) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise FieldError(where, f'is {shown(value)}; wanted a JSON object, as {{"json": SCHEMA}}')
    found = {}
    for key, inner in value.items():
        if inner is None or key in _NO_EFFECT:
            continue
        if key in _OPTIONS:
            if not any(inner is neutral for neutral in _OPTIONS[key]):
                raise UnsupportedField(f"{where}.{key}", f"is {shown(inner)}; leave it out")
        elif key in _READERS:
            found[f"{where}.{key}"] = _READERS[key](f"{where}.{key}", inner)
        else:
            wanted = ", ".join(_READERS)
            raise FieldError(where, f"has the unknown key {shown(key)}; wanted one of {wanted}")
    return one_of(found)[1]


def read_fields(values: Mapping[str, Any], prefix: str = "") -> tuple[str, Output]:
    """Return the field of FIELDS that constrains the answer, and the constraint; ("", None) if none does.

    values: of the fields that were sent. prefix: of their names in errors. Raises FieldError and
    UnsupportedField.
    """
    found = {}
    for name, value in values.items():
        if name in FIELDS and value is not None:
            found[prefix + name] = FIELDS[name](prefix + name, value)
    return one_of(found)


def one_of(found: Mapping[str, Output]) -> tuple[str, Output]:
    """Return the only constraint among these, and its field. Raises FieldError if there are several."""
    real = {name: output for name, output in found.items() if output is not None}
    if len(real) > 1:
        names = list(real)
        raise FieldError(names[0], f"and {names[1]} are both sent; wanted one of them")
    return next(iter(real.items()), ("", None))


def read_guide(kind: str, guide: str) -> Output:
    """Return the constraint of TensorRT-LLM's two inputs; "": not sent. Raises RequestError."""
    if not kind:
        if guide:
            raise RequestError(f"{GUIDE} is sent without {GUIDE_TYPE}; wanted both")
        return None
    if kind not in GUIDE_TYPES:
        raise RequestError(f"{GUIDE_TYPE} is {shown(kind)}; wanted one of {', '.join(GUIDE_TYPES)}")
    if kind == "json":
        if guide.strip() not in ("", "{}"):
            wanted = f"wanted none, or {GUIDE_TYPE} json_schema"
            raise RequestError(f"{GUIDE} is {shown(guide)} and {GUIDE_TYPE} is json; {wanted}")
        return StructuredOutput("json")
    if not guide:
        raise RequestError(f"{GUIDE} is missing and {GUIDE_TYPE} is {kind}; wanted both")
    return StructuredOutput(GUIDE_TYPES[kind], guide)


def check_output(output: StructuredOutput, limits: Limits, name: str) -> None:
    """Raise RequestError for what the engine cannot take, UnsupportedError if it has no grammars.

    name: the client's field, for errors.
    """
    try:
        structured_output.check(output, limits.max_grammar_bytes, limits.grammar_fault)
    except (RequestError, UnsupportedError) as error:
        raise type(error)(renamed(str(error), name)) from None


def renamed(text: str, name: str) -> str:
    """Return the text of an error with the client's field in the place of ours."""
    if not _OUR_NAME.match(text):
        return text
    if name == "tools":  # the client has not written the grammar that the place is in
        text = _PLACE.sub("", text)
    return _OUR_NAME.sub(name, text, count=1)


# ---------------------------------------------------------------- one function per form


def _schema(where: str, value: Any) -> StructuredOutput:
    if isinstance(value, Mapping):
        return StructuredOutput("json_schema", _json(where, value))
    return StructuredOutput("json_schema", _text(where, value, "a JSON schema, as an object or a text"))


def _any_json(where: str, value: Any) -> Output:
    if not isinstance(value, bool):
        raise FieldError(where, f"is {shown(value)}; wanted true or false")
    return StructuredOutput("json") if value else None


def _choice(where: str, value: Any) -> StructuredOutput:
    if not isinstance(value, list) or not value or len(value) > MAX_CHOICES:
        raise FieldError(where, f"is {shown(value)}; wanted a list of 1 to {MAX_CHOICES:,} texts")
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise FieldError(f"{where}[{index}]", f"is {shown(item)}; wanted a text")
    return StructuredOutput("choice", _json(where, value))


def _tag(where: str, value: Any) -> StructuredOutput:
    if isinstance(value, str):
        value = parse_json(where, value)
    if not isinstance(value, Mapping):
        raise FieldError(where, f"is {shown(value)}; wanted a JSON object with structures and triggers")
    for key in ("structures", "triggers"):
        if not isinstance(value.get(key), list):
            raise FieldError(f"{where}.{key}", f"is {shown(value.get(key))}; wanted a list")
    kept = {key: inner for key, inner in value.items() if key != "type"}
    return StructuredOutput("structural_tag", _json(where, kept))


def _text(where: str, value: Any, wanted: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise FieldError(where, f"is {shown(value)}; wanted {wanted}")
    return value


def _json(where: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise FieldError(where, f"is not JSON: {error}") from None


def parse_json(where: str, text: str) -> Any:
    """Return the value of a JSON text. Raises FieldError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise FieldError(where, f"is {shown(text)}; wanted a JSON object") from None


_READERS: dict[str, Callable[[str, Any], Output]] = {
    "json": _schema,
    "json_object": _any_json,
    "regex": lambda where, value: StructuredOutput("regex", _text(where, value, "a regular expression")),
    "choice": _choice,
    "grammar": lambda where, value: StructuredOutput("grammar", _text(where, value, "a grammar")),
    "structural_tag": _tag,
}
#: fields of OpenAI's API and of vLLM's -> reader
FIELDS: dict[str, Callable[[str, Any], Output]] = {
    "response_format": read_response_format,
    "structured_outputs": read_structured_outputs,
    "guided_decoding": read_structured_outputs,
    **{f"guided_{name}": _READERS[name] for name in ("json", "regex", "choice", "grammar")},
    "structural_tag": _tag,
}
