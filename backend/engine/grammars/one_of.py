"""Replaces `oneOf`, which the compiler does not support, by `anyOf` where the two mean the same."""

from __future__ import annotations

from typing import Any

from tridecode.backend.engine.grammars.schema_document import SchemaDocument, list_of

#: maximum length of a chain of references, and maximum depth of properties within properties
_DEPTH = 8
#: maximum number of alternatives of a `oneOf` that are compared in pairs
_MOST_PAIRED = 48
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_TYPE_OF = {"integer": "number"}
#: types, values, required properties: see Alternatives._facts
_Facts = tuple[set[str], set[Any] | None, dict[str, Any]]


class Alternatives:
    """Replaces `oneOf` by `anyOf` if no value can satisfy two alternatives."""

    def __init__(self, document: SchemaDocument):
        self._document = document

    def rewrite(self) -> bool:
        """Return whether anything was replaced."""
        changed = False
        for one in self._document.all():
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
            target = self._document.target(schema["$ref"])
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
            needed = {name: properties[name] for name in list_of(schema, "required") if name in properties}
        for part in list_of(schema, "allOf") if depth < _DEPTH else ():
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
