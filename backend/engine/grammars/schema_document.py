"""A JSON schema as a document: its subschemas, and the references within it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
            "additionalItems", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip


class SchemaDocument:
    """A schema and the references within it."""

    def __init__(self, root: Any):
        self.root = root
        self._has_bases = False
        self._schemas = list(self._find())
        # an $id changes the meaning of the references below it
        self._has_bases = any("$id" in one for one in self._schemas if one is not root)

    def all(self) -> list[dict[str, Any]]:
        """Return each subschema once: also those that only references reach, as in an OpenAPI document."""
        return self._schemas

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

    def _find(self) -> Iterator[dict[str, Any]]:
        todo, seen = [self.root], set()
        while todo:
            one = todo.pop()
            if isinstance(one, dict) and id(one) not in seen:
                seen.add(id(one))
                yield one
                todo += _subschemas(one)
                if "$ref" in one:
                    todo.append(self.target(one["$ref"]))


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


def list_of(schema: dict[str, Any], key: str) -> list[Any]:
    """Return the list of a keyword; [] if it has none."""
    found = schema.get(key)
    return found if isinstance(found, list) else []
