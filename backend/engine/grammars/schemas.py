"""Prepares JSON schemas for the compiler, in the cases that the compiler does not handle.

A `oneOf` whose alternatives cannot overlap becomes `anyOf` (one_of.py), keywords that the compiler implements
inexactly are rewritten or refused (exact_schemas.py), and a schema that no finite value satisfies is refused.
This is Python code without time limits; if there is a checker, it runs in the checker's process.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from tridecode.backend.engine.grammars.exact_schemas import make_exact, strict_options
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.engine.grammars.one_of import Alternatives
from tridecode.backend.engine.grammars.schema_document import SchemaDocument, list_of
from tridecode.backend.wire.structured_output import StructuredOutput

#: literals, comments and regular expressions of Lark's notation, which hide what they contain; a schema
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<schema>%json\s*)')
_DECODER = json.JSONDecoder()


def prepare(output: StructuredOutput) -> StructuredOutput:
    """Return the output with the schemas that the compiler should compile. Raises GrammarFault."""
    try:
        text = _PREPARED.get(output.kind, _unchanged)(output.text)
    except GrammarFault as fault:
        raise GrammarFault(f"structured_output ({output.kind}) is refused: {fault}") from None
    except (ValueError, RecursionError):  # the compiler reports the fault
        text = None
    return output if text is None else msgspec.structs.replace(output, text=text)


def _unchanged(text: str) -> None:
    return None


def _schema(text: str) -> str | None:
    """Return the text of a schema; None if it stays as it is."""
    schema = json.loads(text)
    return _dumps(schema) if _prepare_schema(schema) else None


def _tags(text: str) -> str | None:
    found = json.loads(text)
    structures = found.get("structures") if isinstance(found, dict) else None
    if not isinstance(structures, list):
        return None
    changed = [
        _prepare_schema(one["schema"]) for one in structures if isinstance(one, dict) and "schema" in one
    ]
    return _dumps(found) if any(changed) else None


def _grammar(text: str) -> str | None:
    """Prepare the schemas within a grammar in Lark's notation."""
    parts, end = [], 0
    for found in _LARK.finditer(text) if "%json" in text else ():
        if found["schema"] is None or found.start() < end:
            continue
        schema, schema_end = _DECODER.raw_decode(text, found.end())
        _prepare_schema(schema)
        if isinstance(schema, dict):
            options = schema.get("x-guidance")
            strict = strict_options(text[found.end() : schema_end])
            schema["x-guidance"] = {**(options if isinstance(options, dict) else {}), **strict}
        parts += [text[end : found.end()], _dumps(schema)]
        end = schema_end
    return "".join([*parts, text[end:]]) if parts else None


_PREPARED = {"json_schema": _schema, "structural_tag": _tags, "grammar": _grammar}


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _prepare_schema(schema: Any) -> bool:
    """Prepare a schema in place; return whether it was changed. Raises GrammarFault without a prefix."""
    document = SchemaDocument(schema)
    finite = _Finite(document)
    if not finite.check():
        raise GrammarFault("no finite value satisfies it: it refers to itself without end")
    is_rewritten = finite.prune()
    is_rewritten |= Alternatives(document).rewrite()
    return make_exact(document) or is_rewritten


class _Finite:
    """Checks whether a finite value satisfies the schema, as far as references determine it."""

    def __init__(self, document: SchemaDocument):
        self._document = document

    def check(self) -> bool:
        """Return False only if certainly no finite value satisfies the schema."""
        schemas = self._document.all()
        self._known: dict[int, bool] = {id(one): False for one in schemas}
        changed = True
        while changed:
            changed = False
            for one in reversed(schemas):
                if not self._known[id(one)] and self._holds(one):
                    self._known[id(one)] = changed = True
        return self._has(self._document.root)

    def prune(self) -> bool:
        """Replace what no finite value satisfies by false, where values need not have it; return whether
        there was any. An answer would otherwise begin it, and never end.
        """
        if all(self._known.values()):
            return False
        for one in self._document.all():
            for key, value in one.items():
                if key in ("properties", "patternProperties") and isinstance(value, dict):
                    value.update({name: False for name, inner in value.items() if not self._has(inner)})
                elif key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
                    value[:] = [self._has(inner) and inner for inner in value]
                elif key in ("items", "additionalProperties") and not self._has(value):
                    one[key] = False
        return True

    def _has(self, schema: Any) -> bool:
        """Return whether a subschema has a finite value, as far as known; True if nothing is known."""
        return self._known.get(id(schema), True)

    def _holds(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema has a finite value if the subschemas that it requires have one."""
        if "$ref" in schema:
            return self._has(self._document.target(schema["$ref"]))
        if not all(map(self._has, list_of(schema, "allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and not any(map(self._has, schema[key])):
                return False
        if schema.get("type") == "object":
            properties = schema.get("properties")
            for name in list_of(schema, "required"):
                if isinstance(properties, dict) and not self._has(properties.get(name)):
                    return False
        if schema.get("type") == "array" and isinstance(schema.get("minItems"), int):
            first = list_of(schema, "prefixItems")
            needed = [*first, schema.get("items")][: max(schema["minItems"], 0)]
            return all(map(self._has, needed))
        return True
