"""Rewrites what llguidance 1.9 does not implement exactly in a JSON schema, or refuses it.

Without this module some answers would not satisfy their schema: random answers, checked by jsonschema, showed
where.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.engine.grammars.schema_document import SchemaDocument, list_of

#: the compiler's bounds are doubles, and 64-bit integers behind them; the largest double below 2**63
_MOST_BOUND = 2**63 - 1024
#: integers up to here are doubles
_MOST_EXACT = 2**53
#: digits of a number that the compiler reads, and writes, without rounding; and its power of ten
_MOST_DIGITS, _MOST_POWER = 15, 22
#: products of two `multipleOf` overflow here
_MOST_PRODUCT = 2**32
#: keyword -> values with which it has no effect; the compiler refuses the keyword with any value
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
#: inclusive and exclusive bound, and the factor that makes it a lower bound
_SIDES = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
_LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
#: options that a schema cannot change. With `\uXXXX` a key could be a named one in another spelling
_STRICT = {"lenient": False, "coerce_one_of": False, "json_allow_general_unicode_escapes": False}
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
#: control characters in the text of a schema, which need `\uXXXX`
_CONTROL = re.compile(r"\\u00[01]|\\u007f|\x7f", re.IGNORECASE)
#: one part of a regular expression that only white space of JSON matches
_SPACE = r"(?:\\[nrt]|\\x(?:20|0[9AaDd])|[ \n\r\t])"
_SPACES = rf"(?:(?:{_SPACE}|\[{_SPACE}+\])(?:[*+?]|\{{\d{{0,4}}(?:,\d{{0,4}})?\}})?)*"
#: options of x-guidance that are regular expressions -> the only form in which an answer is still JSON
_SEPARATORS = {"whitespace_pattern": "", "item_separator": ",", "key_separator": ":"}


def make_exact(document: SchemaDocument) -> bool:
    """Change the schemas of a document in place; return whether one was changed. Raises GrammarFault."""
    changed = [isinstance(document.root, dict) and _fit_separators(document.root.get("x-guidance"))]
    schemas = document.all()
    for one in schemas:
        _check_values(one)
        _check_keys(one)
    bounded = [one for one in schemas if any(key in one for key in _LIMITS)]
    _check_multiples(bounded, schemas)
    changed += [_drop_neutral(one) for one in schemas]
    changed += [_fit_bounds(one) for one in bounded]
    return _open_bounds(bounded) or any(changed)


def strict_options(text: str) -> dict[str, Any]:
    """Return the options of x-guidance that override those of a schema. text: of the schema."""
    return _STRICT if _CONTROL.search(text) else {**_STRICT, **_ESCAPES}


def _fit_separators(options: Any) -> bool:
    if not isinstance(options, dict):
        return False
    for name, text in _SEPARATORS.items():
        found = options.get(name)
        if isinstance(found, str) and not re.fullmatch(_SPACES + text + _SPACES, found):
            wanted = f"{json.dumps(text)} and white space" if text else "white space"
            raise GrammarFault(
                f"x-guidance.{name} is {json.dumps(found)[:60]}; wanted a regular expression of {wanted}, "
                r"as [\x20\n]*"
            )
    if options.get("whitespace_flexible") is not False or isinstance(options.get("whitespace_pattern"), str):
        return False
    options["whitespace_pattern"] = ""  # else our default would count
    return True


# ---------------------------------------------------------------- values and keys


def _check_values(schema: dict[str, Any]) -> None:
    """Refuse numbers that the compiler would round."""
    todo = [(key, schema[key]) for key in ("const", "enum") if key in schema]
    while todo:
        key, value = todo.pop()
        if isinstance(value, (list, dict)):
            todo += [(key, inner) for inner in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and not _is_exact(value):
            raise GrammarFault(
                f"{key} has the number {_shown(value)}, which has too many digits; wanted whole numbers "
                f"up to 2**53, and {_MOST_DIGITS} digits of others"
            )


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return abs(value) <= _MOST_EXACT
    if not math.isfinite(value):
        return True  # the compiler refuses it
    _, digits, power = Decimal(repr(value)).normalize().as_tuple()
    return len(digits) <= _MOST_DIGITS and isinstance(power, int) and abs(power) <= _MOST_POWER


def _check_keys(schema: dict[str, Any]) -> None:
    """Refuse a least number of properties that repeated keys could reach."""
    least = schema.get("minProperties")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if isinstance(least, int) and not is_closed:
        named = len({name for name in list_of(schema, "required") if isinstance(name, str)})
        if least - named > 1:
            raise GrammarFault(
                f"minProperties is {least}, and {named} keys are required; wanted {named + 1} at most, "
                "because the grammar cannot keep an answer from repeating other keys"
            )


def _drop_neutral(schema: dict[str, Any]) -> bool:
    found = [
        key
        for key, values in _NEUTRAL.items()
        if key in schema and any(_same(schema[key], v) for v in values)
    ]
    for key in found:
        del schema[key]
    return bool(found)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _check_multiples(bounded: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> None:
    """Refuse multiples whose product the compiler computes modulo 2**32, if schemas are merged."""
    found = [Fraction(repr(value)) for one in bounded if (value := _number(one, "multipleOf")) is not None]
    if len(found) < 2 or not any("allOf" in one or "anyOf" in one or "$ref" in one for one in schemas):
        return
    scale = max(one.denominator for one in found)
    first, second = sorted(abs(one) * scale for one in found)[-2:]
    if first * second >= _MOST_PRODUCT:
        raise GrammarFault(
            f"multipleOf is {_shown(float(second / scale))} in one of several schemas that may be merged; "
            f"wanted numbers whose product, without decimal points, is less than {_MOST_PRODUCT:,}"
        )


# ---------------------------------------------------------------- bounds


def _number(schema: dict[str, Any], key: str) -> float | None:
    value = schema.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: float) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _fit_bounds(schema: dict[str, Any]) -> bool:
    """Replace bounds beyond 64 bits, and ones between two doubles, by the next double inside."""
    changed = False
    for inclusive, exclusive, sign in _SIDES:
        for key in (inclusive, exclusive):
            value = _number(schema, key)
            if value is None or abs(value) <= _MOST_EXACT:
                continue
            bound = _inside(sign * value, key == exclusive)
            if bound is None:
                most = f"{sign * _MOST_BOUND} at the most extreme"
                raise GrammarFault(f"{key} is {_shown(value)}; wanted {most}")
            del schema[key]
            _narrow(schema, inclusive, sign, bound)
            changed = True
    return changed


def _inside(value: float, is_exclusive: bool) -> float | None:
    """Return the least double that satisfies a lower bound beyond 2**53; None if it is too large."""
    if value <= -_MOST_BOUND:
        return -_MOST_BOUND
    if value > _MOST_BOUND or (is_exclusive and value == _MOST_BOUND):
        return None
    found = float(value)
    while found < value or (is_exclusive and found == value):
        found = math.nextafter(found, math.inf)
    return int(found)


def _narrow(schema: dict[str, Any], key: str, sign: int, bound: float) -> None:
    """Set an inclusive bound to sign * bound, unless the schema has a narrower one."""
    known = _number(schema, key)
    schema[key] = sign * (bound if known is None else max(bound, sign * known))


def _open_bounds(schemas: list[dict[str, Any]]) -> bool:
    """Replace `0 < x <= 0.9` by `1e-10 <= x <= 0.9`; return whether there was such a bound.

    The compiler allows the whole number that a bound excludes if the other bound is less than 1 from it. That
    bound may be in another schema, with which this one is merged.
    """
    changed = False
    for side, (inclusive, exclusive, sign) in enumerate(_SIDES):
        nearest: dict[int, float] = {}  # whole number -> least opposite bound above it
        for value in (_number(one, key) for one in schemas for key in _SIDES[1 - side][:2]):
            if value is not None and value != int(value):
                whole = math.floor(sign * value)
                nearest[whole] = min(sign * value, nearest.get(whole, math.inf))
        for one in schemas:
            is_flag = one.get(exclusive) is True  # draft 4, and OpenAPI 3.0
            bound = _number(one, inclusive if is_flag else exclusive)
            if bound is None or bound != int(bound) or int(sign * bound) not in nearest or sign * bound < 0:
                continue
            least = sign * bound
            step = 10.0 ** (math.floor(math.log10(nearest[int(least)] - least)) - 9)
            del one[exclusive]
            _narrow(one, inclusive, sign, max(least + step, math.nextafter(least, math.inf)))
            changed = True
    return changed
