"""Schemas that are prepared for the compiler; jsonschema is the reference for their meaning."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from tests.backend.engine.grammar_models import constrained_engine, sampled
from tests.checkpoints import tiny_tokenizer
from tridecode.backend.base.errors import RequestError
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.engine.grammars.schemas import prepare
from tridecode.backend.wire.structured_output import StructuredOutput


def schema(value: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value))


def kind(value: object, **more: object) -> dict[str, Any]:
    """Return an object with a required property `kind`."""
    return {"type": "object", "properties": {"kind": value, **more}, "required": ["kind"]}


DEFINITIONS = {
    "cat": kind({"const": "cat"}, lives={"enum": [7, 9]}),
    "dog": {"allOf": [kind({"enum": ["dog", "wolf"]})]},
    "link": {"$ref": "#/$defs/cat"},
    "a/b~": {"type": "integer"},
}
#: alternatives -> whether they become anyOf
ONE_OF: list[tuple[list[Any], bool]] = [
    ([{"const": 1}, {"const": 2}], True),
    ([{"const": 1}, {"const": 1.0}], False),
    ([{"const": 1}, {"const": True}, {"const": None}, {"const": "1"}], True),
    ([{"enum": [1, 2]}, {"enum": [3, 2]}], False),
    ([{"enum": ["a"]}, {"type": "integer"}], True),
    ([{"enum": [[1]]}, {"enum": [[2]]}], False),
    ([{"type": ["string", "null"]}, {"type": "integer"}], True),
    ([{"type": "number"}, {"type": "integer"}], False),
    ([{"type": "integer"}, {}], False),
    ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], True),
    ([{"$ref": "#/$defs/link"}, {"$ref": "#/$defs/dog"}], True),
    ([{"$ref": "#/$defs/link"}, {"$ref": "#/$defs/cat"}], False),
    ([{"$ref": "#/$defs/a~1b~0"}, {"type": "string"}], True),
    ([{"$ref": "#/$defs/missing"}, {"type": "string"}], False),
    ([{"$ref": "other.json"}, {"type": "string"}], False),
    ([kind(kind({"const": 1})), kind(kind({"const": 2}))], True),
    ([kind({"const": "x"}), {"properties": {"kind": {"const": "y"}}, "required": ["kind"]}], False),
    ([{"type": "object", "properties": {"kind": {"const": v}}} for v in "xy"], False),
    ([{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}], False),
    ([{"const": number} for number in range(500)], True),
]
VALUES: list[Any] = [
    *(None, True, 1, 2, 3, 1.5, 7, "1", "a", "abcd", [], [1], {}),
    *({"kind": value} for value in ("cat", "dog", "wolf", "x", "y", 1, 2)),
    *({"kind": {"kind": value}} for value in (1, 2, 3)),
    *({"kind": value, "lives": 7} for value in ("cat", "dog")),
]


def counts(alternatives: list[Any], value: Any) -> int:
    """Return how many alternatives a value satisfies."""
    wholes = [{**one, "$defs": DEFINITIONS} for one in alternatives]
    return sum(jsonschema.Draft202012Validator(one).is_valid(value) for one in wholes)


@pytest.mark.parametrize(("alternatives", "are_apart"), ONE_OF, ids=lambda one: str(one)[:40])
def test_alternatives_that_cannot_overlap_become_any_of(alternatives: list[Any], are_apart: bool) -> None:
    given = schema({"title": "t", "oneOf": alternatives, "$defs": DEFINITIONS})
    found = prepare(given)
    if not are_apart:
        assert found is given
        return
    assert json.loads(found.text) == {"title": "t", "anyOf": alternatives, "$defs": DEFINITIONS}
    assert list(json.loads(found.text)) == ["title", "anyOf", "$defs"]
    if len(alternatives) < 50:
        assert max(counts(alternatives, value) for value in VALUES) == 1


def test_random_alternatives_are_replaced_only_where_values_agree() -> None:
    parts: list[Any] = list(itertools.chain.from_iterable(one for one, _ in ONE_OF if len(one) < 50))
    parts = [one for one in parts if "other.json" not in str(one) and "missing" not in str(one)]
    r, replaced = random.Random(1), 0
    for _ in range(400):
        alternatives = [r.choice(parts) for _ in range(r.randint(2, 3))]
        found = prepare(schema({"oneOf": alternatives, "$defs": DEFINITIONS}))
        if '"anyOf"' in found.text:
            replaced += 1
            assert max(counts(alternatives, value) for value in VALUES) <= 1, alternatives
    assert 40 < replaced < 360


def test_names_of_properties_and_values_are_not_keywords() -> None:
    inner = {"oneOf": [{"const": 1}, {"const": 2}]}
    for one in (
        {"properties": {"oneOf": [{"const": 1}, {"const": 2}]}},
        {"const": inner},
        {"enum": [inner]},
        {"default": inner},
        {"oneOf": inner["oneOf"], "anyOf": [{}]},
    ):
        given = schema(one)
        assert prepare(given) is given
    nested = {"properties": {"oneOf": inner}, "items": [{"not": inner}]}
    assert prepare(schema(nested)).text.count("anyOf") == 2


def test_an_id_may_change_the_meaning_of_a_reference() -> None:
    cat = {"$id": "http://example.com/x", "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
    given = schema({"properties": {"p": cat}, "$defs": DEFINITIONS})
    assert prepare(given) is given


ENDLESS = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"$ref": "#"}]},
    {"allOf": [{}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]},
]
ENDING = [
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
    {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    {"type": "object", "required": ["other"], "properties": {"next": {"$ref": "#"}}},
]


@pytest.mark.parametrize("given", ENDLESS, ids=str)
def test_a_schema_without_a_finite_value_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(GrammarFault, match=r"^structured_output \(json_schema\) is refused: no finite value"):
        prepare(schema(given))


@pytest.mark.parametrize("given", ENDING, ids=str)
def test_a_recursive_schema_with_a_finite_value_is_kept(given: dict[str, Any]) -> None:
    assert prepare(schema(given)) == schema(given)


def test_answers_to_a_discriminated_union_are_valid() -> None:
    """The union has pydantic's form; an endless schema in the same batch is refused by name."""
    cat = {**DEFINITIONS["cat"], "required": ["kind", "lives"], "additionalProperties": False}
    dog = {**kind({"const": "dog"}, age={"type": "integer", "minimum": 0, "maximum": 20}),
           "additionalProperties": False}  # fmt: skip
    union = {
        "$defs": {"Cat": cat, "Dog": dog},
        "type": "object",
        "properties": {
            "pet": {
                "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            },
            "size": {"oneOf": [{"const": 1}, {"const": 22}, {"type": "null"}]},
        },
        "required": ["pet", "size"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": ""},
    }
    offline = constrained_engine()
    numbers = [
        offline.submit([5, 6, 7], sampled(seed=seed), structured_output=schema(union)) for seed in range(8)
    ]
    offline.run()
    kinds = set()
    for number in numbers:
        answer = offline.generations[number]
        assert answer.finish == "end_id"
        value = json.loads(tiny_tokenizer().decode(answer.tokens[:-1]))
        jsonschema.validate(value, union)
        kinds.add(value["pet"]["kind"])
    assert kinds == {"cat", "dog"}
    with pytest.raises(RequestError, match="no finite value satisfies it"):
        offline.submit([5, 6, 7], sampled(), structured_output=schema(ENDLESS[2]))
        offline.run()
    offline.scheduler.grammars.close()
