"""Prepares a JSON schema for the compiler, for two cases that the compiler does not handle.

A `oneOf` whose alternatives cannot overlap becomes `anyOf`, and a schema that no finite value satisfies is
refused. This is Python code without time limits; if there is a checker, it runs in the checker's process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import msgspec

from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.wire.structured_output import StructuredOutput

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
            "additionalItems", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
#: maximum length of a chain of references, and maximum depth of properties within properties
_DEPTH = 8
#: maximum number of alternatives of a `oneOf` that are compared in pairs
_MOST_PAIRED = 48


_TYPES = ("string", "number", "boolean", "null", "array", "object")
_TYPE_OF = {"integer": "number"}
#: types, values, required properties: see _Alternatives._facts
_Facts = tuple[set[str], set[Any] | None, dict[str, Any]]


def prepare(output: StructuredOutput) -> StructuredOutput:
    """Return the output with the schema that the compiler should compile. Raises GrammarFault."""
    if output.kind != "json_schema" or not ('"oneOf"' in output.text or '"$ref"' in output.text):
        return output
    try:
        schema = json.loads(output.text)
        if '"$ref"' in output.text and not _Finite(schema).check():
            found = "no finite value satisfies it: it refers to itself without end"
            raise GrammarFault(f"structured_output (json_schema) is refused: {found}")
        if '"oneOf"' in output.text and _Alternatives(schema).rewrite():
            return msgspec.structs.replace(output, text=json.dumps(schema, allow_nan=False))
    except (ValueError, RecursionError):  # the compiler reports the fault
        pass
    return output


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for key in _MAPS:
        if isinstance(found := schema.get(key), dict):
            yield from found.values()
    for key in _LISTS:
        if isinstance(found := schema.get(key), list):
            yield from found
    for key in _SINGLES:
        found = schema.get(key)
        yield from found if isinstance(found, list) else [found]


class _Document:
    """A schema and the references within it."""

    def __init__(self, root: Any):
        self.root = root
        # an $id changes the meaning of the references below it
        self._has_bases = any("$id" in one for one in self.all() if one is not root)

    def all(self) -> Iterator[dict[str, Any]]:
        todo = [self.root]
        while todo:
            one = todo.pop()
            if isinstance(one, dict):
                yield one
                todo += _subschemas(one)

    def target(self, reference: Any) -> Any:
        """Return the target of a reference; None if it is not certain."""
        if not isinstance(reference, str) or not reference.startswith("#") or self._has_bases:
            return None
        found, parts = self.root, unquote(reference[1:]).split("/")
        if parts[0]:
            return None
        for part in parts[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return None
        return found


class _Finite(_Document):
    """Checks whether a finite value satisfies the schema, as far as references determine it."""

    def check(self) -> bool:
        """Return False only if certainly no finite value satisfies the schema."""
        schemas = list(self.all())
        self._known: dict[int, bool] = {id(one): False for one in schemas}
        changed = True
        while changed:
            changed = False
            for one in reversed(schemas):
                if not self._known[id(one)] and self._holds(one):
                    self._known[id(one)] = changed = True
        return self._has(self.root)

    def _has(self, schema: Any) -> bool:
        """Return whether a subschema has a finite value, as far as known; True if nothing is known."""
        return self._known.get(id(schema), True)

    def _holds(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema has a finite value if the subschemas that it requires have one."""
        if "$ref" in schema:
            return self._has(self.target(schema["$ref"]))
        if not all(map(self._has, _list(schema, "allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and not any(map(self._has, schema[key])):
                return False
        if schema.get("type") == "object":
            properties = schema.get("properties")
            for name in _list(schema, "required"):
                if isinstance(properties, dict) and not self._has(properties.get(name)):
                    return False
        if schema.get("type") == "array" and isinstance(schema.get("minItems"), int):
            first = _list(schema, "prefixItems")
            needed = [*first, schema.get("items")][: max(schema["minItems"], 0)]
            return all(map(self._has, needed))
        return True


class _Alternatives(_Document):
    """Replaces `oneOf` by `anyOf` if no value can satisfy two alternatives."""

    def rewrite(self) -> bool:
        """Return whether anything was replaced."""
        changed = False
        for one in list(self.all()):
            alternatives = one.get("oneOf")
            if isinstance(alternatives, list) and "anyOf" not in one and self._are_apart(alternatives):
                names = list(one)
                values = [one.pop(name) for name in names]  # an answer has its properties in this order
                one.update(zip(("anyOf" if name == "oneOf" else name for name in names), values))
                changed = True
        return changed

    def _are_apart(self, alternatives: list[Any]) -> bool:
        if len(alternatives) < 2 or not all(isinstance(one, dict) for one in alternatives):
            return False
        values = [self._facts(one)[1] for one in alternatives]
        if all(one is not None for one in values):
            return _is_disjoint(values)
        if len(alternatives) > _MOST_PAIRED:
            return False
        return all(
            self._is_apart(one, other) for i, one in enumerate(alternatives) for other in alternatives[:i]
        )

    def _is_apart(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return True only if no value satisfies both."""
        if depth > _DEPTH or not isinstance(one, dict) or not isinstance(other, dict):
            return one is False or other is False
        types, values, needed = self._facts(one)
        other_types, other_values, other_needed = self._facts(other)
        if types.isdisjoint(other_types):
            return True
        if values is not None and other_values is not None:
            return values.isdisjoint(other_values)
        if types == other_types == {"object"}:
            return any(
                self._is_apart(needed[name], other_needed[name], depth + 1)
                for name in needed.keys() & other_needed.keys()
            )
        return False

    def _facts(self, schema: dict[str, Any], depth: int = 0) -> _Facts:
        """Return the types and values to which the schema restricts a value (None: any), and the schemas of
        its required properties. Keywords next to a reference are not used, because older drafts
        ignore them.
        """
        if "$ref" in schema:
            target = self.target(schema["$ref"])
            known = isinstance(target, dict) and depth < _DEPTH
            return self._facts(target, depth + 1) if known else (set(_TYPES), None, {})
        types, values, needed = set(_TYPES), None, {}
        found = schema.get("type", [])
        if found:
            types &= {_TYPE_OF.get(one, one) for one in ([found] if isinstance(found, str) else found)}
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and not any(isinstance(one, (list, dict)) for one in listed):
            values = {_value(one) for one in listed}
            types &= {kind for kind, _ in values}
        properties = schema.get("properties")
        if isinstance(properties, dict):
            needed = {name: properties[name] for name in _list(schema, "required") if name in properties}
        for part in _list(schema, "allOf") if depth < _DEPTH else ():
            if isinstance(part, dict):
                more_types, more_values, more_needed = self._facts(part, depth + 1)
                types &= more_types
                if more_values is not None:
                    values = more_values if values is None else values & more_values
                needed = {**more_needed, **needed}
        return types, values, needed


def _value(value: Any) -> tuple[str, Any]:
    """Return a JSON value with its type, so that true differs from 1, but 1 equals 1.0."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean"), value
    return ("string" if isinstance(value, str) else "number"), value


def _is_disjoint(sets: list[Any]) -> bool:
    return len(set().union(*sets)) == sum(map(len, sets))


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
