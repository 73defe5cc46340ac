"""docs/reference/openai_fields.md has every field of the OpenAI service's requests."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from tridecode.backend.front.fields.meanings import MEANINGS, meaning_of
from tridecode.backend.front.fields.sampling import NO_EFFECT, REFUSED
from tridecode.backend.front.routes.openapi import _POSTS, openapi
from tridecode.tools.generated_docs.openai_fields import COMMAND, PAGE, STRUCTS, main, type_in_words

#: fields whose effect, or want of one, the page states in a sentence
_IN_PROSE = {
    "ChatMessage": {"refusal", "annotations", "audio", "function_call"},
    "ContentPart": {"refusal"},
    "StreamOptions": {"include_obfuscation"},
    "LoadAdapter": {"base_model_name"},
    "UnloadAdapter": {"lora_int_id"},
}


def test_the_tables_of_the_page_are_those_of_the_structs() -> None:
    assert main([]) == 0, f"run {COMMAND} --write"


@pytest.mark.parametrize("struct", [struct for struct, _ in STRUCTS.values()])
def test_every_field_has_a_meaning_or_is_named_as_one_without(struct: type[msgspec.Struct]) -> None:
    prose, page = _IN_PROSE.get(struct.__name__, set()), PAGE.read_text()
    for name in struct.__struct_fields__:
        listed = name in NO_EFFECT or name in REFUSED or name in prose
        assert listed == (meaning_of(struct, name) is None), (
            f"{struct.__name__}.{name}: see fields/meanings.py"
        )
        assert f"`{name}`" in page, name


def test_every_meaning_belongs_to_a_field() -> None:
    structs = {kind.__name__: kind for struct, _ in STRUCTS.values() for kind in struct.__mro__}
    names = {name for struct, _ in STRUCTS.values() for name in struct.__struct_fields__}
    for key in MEANINGS:
        owner, _, name = key.rpartition(".")
        assert name in (structs[owner].__struct_fields__ if owner else names), key


def test_every_request_of_the_document_is_on_the_page() -> None:
    shown = {struct for struct, _ in STRUCTS.values()}
    assert {post[0] for post in _POSTS.values()} <= shown
    headings = " ".join(re.findall(r"^#.*|^`/.*", PAGE.read_text(), re.MULTILINE)) + PAGE.read_text()
    assert all(f"`{path}`" in headings for path in _POSTS)


def test_the_openapi_document_has_the_meanings() -> None:
    schemas = openapi()["components"]["schemas"]
    found = schemas["CompletionRequest"]["properties"]["max_tokens"]
    assert found["description"] == "most tokens of an answer (default: 16)" and "anyOf" in found
    assert schemas["ChatMessage"]["properties"]["role"]["description"].startswith("system")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, "whole number, 0 or more"),
        (Annotated[float, Meta(gt=0.0, le=1e6)], "number above 0, at most 1,000,000"),
        (Annotated[float, Meta(ge=-2.0, le=2.0)] | None, "number, -2 to 2"),
        (list[Annotated[int, Meta(ge=0)]], "list of whole numbers, 0 or more"),
        (str | list[str] | None, "text or list of texts"),
        (bool | str | None, "true, false or text"),
        (list[Any], "list"),
        (dict[str, Any] | None, "JSON object"),
    ],
)
def test_types_are_written_as_a_reader_expects(kind: Any, words: str) -> None:
    assert type_in_words(msgspec.inspect.type_info(kind)) == words
