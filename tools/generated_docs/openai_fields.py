"""The tables of docs/reference/openai_fields.md, made from the structs of the OpenAI service's requests.

    python -m tridecode.tools.generated_docs.openai_fields --write

Without --write: exit code 1 if the page has other tables than would be written.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect

from tridecode.backend.front.fields import chat, completions, embeddings, sampling
from tridecode.backend.front.fields.meanings import meaning_of
from tridecode.backend.front.routes import adapters, colossal, generate, tokens
from tridecode.tools.generated_docs.tables import DOCS, markdown, write_or_compare

PAGE = DOCS / "reference" / "openai_fields.md"
COMMAND = "python -m tridecode.tools.generated_docs.openai_fields"
_WIDTH = 120
_WORDS = {
    inspect.BoolType: "true or false",
    inspect.StrType: "text",
    inspect.AnyType: "any",
    inspect.DictType: "JSON object",
}
_NUMBERS = {inspect.IntType: "whole number", inspect.FloatType: "number"}
#: bounds of the integer types themselves, which tell a reader nothing
_WIDE = {2**31 - 1, -(2**31), 2**63 - 1, -(2**63)}

#: name in a marker -> (struct, the struct whose fields the page has elsewhere)
STRUCTS: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct] | None]] = {
    "sampled": (sampling.Sampled, None),
    "stream options": (sampling.StreamOptions, None),
    "completions": (completions.CompletionRequest, sampling.Sampled),
    "chat": (chat.ChatRequest, sampling.Sampled),
    "message": (chat.ChatMessage, None),
    "part": (chat.ContentPart, None),
    "embeddings": (embeddings.EmbeddingRequest, None),
    "generate": (generate.GenerateRequest, None),
    "tokenize": (tokens.TokenizeRequest, None),
    "detokenize": (tokens.DetokenizeRequest, None),
    "colossal": (colossal.ColossalFields, None),
    "colossal generate": (colossal.GenerateFields, colossal.ColossalFields),
    "colossal chat": (colossal.ChatFields, colossal.ColossalFields),
    "load": (adapters.LoadAdapter, None),
    "unload": (adapters.UnloadAdapter, None),
}


def tables() -> dict[str, str]:
    """Name in a marker -> Markdown."""
    made = {name: field_table(struct, base) for name, (struct, base) in STRUCTS.items()}
    everywhere = set(sampling.Sampled.__struct_fields__)
    made["no effect"] = _sentence(f"`{name}`" for name in sorted(sampling.NO_EFFECT & everywhere))
    made["no effect, chat"] = _sentence(f"`{name}`" for name in sorted(sampling.NO_EFFECT - everywhere))
    made["refused"] = markdown(("field", "values that are accepted"), _refused())
    return made


def field_table(struct: type[msgspec.Struct], base: type[msgspec.Struct] | None = None) -> str:
    """A row for each field with a meaning. base: whose rows are left out where they are the same."""
    rows = []
    for field in inspect.type_info(struct).fields:  # type: ignore[attr-defined]
        meaning = meaning_of(struct, field.name)
        same = base is not None and field.name in base.__struct_fields__
        if meaning is None or (same and base is not None and meaning == meaning_of(base, field.name)):
            continue
        rows.append((f"`{field.name}`", type_in_words(field.type), meaning.default, meaning.text))
    return markdown(("field", "type", "default", "meaning"), rows)


def type_in_words(kind: inspect.Type) -> str:
    """A type with its range. null, which every optional field takes for its default, is left out."""
    if isinstance(kind, inspect.Metadata):
        return type_in_words(kind.type)
    if isinstance(kind, inspect.UnionType):
        words = [type_in_words(one) for one in kind.types if not isinstance(one, inspect.NoneType)]
        return " or ".join(words).replace("true or false or", "true, false or")
    if isinstance(kind, inspect.ListType):
        return "list" if isinstance(kind.item_type, inspect.AnyType) else f"list of {_plural(kind.item_type)}"
    if isinstance(kind, inspect.StructType):
        return f"`{kind.cls.__name__}`"
    for number, word in _NUMBERS.items():
        if isinstance(kind, number):
            return word + _range(kind)
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(f"`{value}`" for value in kind.values)
    return next(word for known, word in _WORDS.items() if isinstance(kind, known))


def _plural(kind: inspect.Type) -> str:
    noun, comma, rest = type_in_words(kind).partition(",")
    return f"{noun}{' objects' if noun.startswith('`') else 's'}{comma}{rest}"


def _range(kind: Any) -> str:
    low = kind.ge if kind.ge not in _WIDE else None
    high = kind.le if kind.le not in _WIDE else None
    if kind.gt is not None:
        return f" above {_number(kind.gt)}" + (f", at most {_number(high)}" if high is not None else "")
    if low is not None and high is not None:
        return f", {_number(low)} to {_number(high)}"
    return f", {_number(low)} or more" if low is not None else ""


def _number(value: float) -> str:
    return f"{value:,}".removesuffix(".0")


def _refused() -> Iterable[tuple[str, str]]:
    for name, neutral in sampling.REFUSED.items():
        values = dict.fromkeys(msgspec.json.encode(value).decode() for value in neutral)
        yield f"`{name}`", ", ".join(f"`{value}`" for value in ("null", *values) if value != "1.0")


def _sentence(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names) + ".", _WIDTH)


def main(arguments: list[str]) -> int:
    return write_or_compare({PAGE: tables()}, "--write" in arguments, COMMAND)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
