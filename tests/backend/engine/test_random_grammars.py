"""Random schemas: jsonschema accepts each finished answer. Hostile ones end alone."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.backend.engine.grammar_models import constrained_engine, sampled
from tests.backend.engine.grammar_schemas import hostile_output, schema_of
from tests.backend.engine.step_watch import WatchedEngine
from tests.checkpoints import tiny_tokenizer
from tridecode.backend.base.errors import RequestError, TridecodeError, UnsupportedError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.structured_output import StructuredOutput

PROMPT = [5, 6, 7]


def valid_answers(every: Sequence[dict[str, Any]]) -> int:
    """Validate the answers to schemas; return how many ended by themselves."""
    offline, tokenizer = constrained_engine(), tiny_tokenizer()
    ended = 0
    for first in range(0, len(every), 8):
        schemas = every[first : first + 8]
        numbers = [
            offline.submit(
                PROMPT,
                sampled(seed=first + i, max_tokens=300),
                structured_output=StructuredOutput("json_schema", json.dumps(schema)),
            )
            for i, schema in enumerate(schemas)
        ]
        offline.run()
        for schema, number in zip(schemas, numbers):
            answer = offline.generations[number]
            if answer.finish == "end_id":
                ended += 1
                value = json.loads(tokenizer.decode(answer.tokens[:-1]))
                jsonschema.validate(
                    value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
                )
    offline.scheduler.grammars.close()
    return ended


def random_schemas(count: int, seed: int) -> list[dict[str, Any]]:
    r = random.Random(seed)
    return [schema_of(r) for _ in range(count)]


def kubernetes_schemas() -> list[dict[str, Any]]:
    """The newest strict schemas of kubernetes-validate, each with the definitions that it refers to.

    Left out, because both are refused by name: "oneOf", whose alternatives overlap in null, and formats of
    OpenAPI that JSON Schema does not have.
    """
    root = Path(str(kubernetes_validate.__file__)).parent / "kubernetes-json-schema"
    newest = max(root.glob("v*-local-strict"), key=lambda path: int(path.name.split(".")[1]))
    text = (newest / "_definitions.json").read_text().replace("/api/_definitions.json#", "#")
    definitions = json.loads(text)["$defs"]
    found = []
    for name in sorted(definitions):
        needed, open_names = {}, [name]
        while open_names:
            one = open_names.pop()
            if one not in needed:
                needed[one] = definitions[one]
                open_names += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(definitions[one]))
        schema = {"$ref": f"#/$defs/{name}", "$defs": needed}
        if not re.search(r'"oneOf"|"format": "(byte|int-or-string|quantity)"', json.dumps(schema)):
            found.append(schema)
    return found


def test_answers_to_random_schemas_are_valid() -> None:
    assert valid_answers(random_schemas(32, 1)) >= 16


def test_answers_to_schemas_of_kubernetes_are_valid() -> None:
    schemas = kubernetes_schemas()
    assert len(schemas) > 300
    assert valid_answers(random.Random(6).sample(schemas, 24)) >= 8


@pytest.mark.nightly  # test_answers_to_schemas_of_kubernetes_are_valid has fewer of them
@pytest.mark.slow
def test_answers_to_all_schemas_of_kubernetes_are_valid() -> None:
    assert valid_answers(kubernetes_schemas()) >= 250


@pytest.mark.nightly  # test_answers_to_random_schemas_are_valid has fewer of them
@pytest.mark.slow
def test_answers_to_five_hundred_schemas_are_valid() -> None:
    assert valid_answers(random_schemas(500, 2)) >= 250


def send_hostile(count: int, seed: int) -> tuple[int, int]:
    """Send hostile outputs, each batch with a control; return how many were refused and how many answered."""
    offline, r = constrained_engine(max_sequences=8), random.Random(seed)
    control = offline.submit(PROMPT, sampled(seed=3, max_tokens=12))
    offline.run()
    wanted, refused, answered = offline.generations[control].tokens, 0, 0
    for _ in range(0, count, 7):
        again = offline.submit(PROMPT, sampled(seed=3, max_tokens=12))
        numbers = []
        for i in range(7):
            try:
                output = hostile_output(r)
                numbers.append(
                    offline.submit(PROMPT, sampled(seed=i, max_tokens=12), structured_output=output)
                )
            except (RequestError, UnsupportedError):
                refused += 1
        until = time.monotonic() + 60.0
        while offline.scheduler.has_work:
            assert time.monotonic() < until, "a hostile grammar does not end"
            try:
                offline.step()
            except TridecodeError as error:
                assert isinstance(error, RequestError) and "structured_output" in str(error), error
                assert len(str(error)) < 700
        found = [offline.generations[number] for number in numbers]
        answered += sum(bool(one.finish) for one in found)
        refused += sum(not one.finish for one in found)
        assert offline.generations[again].tokens == wanted
    assert offline.scheduler.grammars.num_waiting == offline.scheduler.grammars.outstanding == 0
    offline.scheduler.grammars.close()
    return refused, answered


def test_hostile_grammars_end_alone() -> None:
    refused, answered = send_hostile(210, 4)
    assert refused > 40 and answered > 20


@pytest.mark.nightly  # test_hostile_grammars_end_alone has fewer of them
@pytest.mark.slow
def test_ten_thousand_hostile_grammars_end_alone() -> None:
    refused, answered = send_hostile(10_000, 5)
    assert refused > 2000 and answered > 1000


@pytest.mark.nightly  # test_grammars.py has random models
@pytest.mark.slow
def test_a_trained_model_answers_by_a_schema(tmp_path: Path) -> None:
    """SmolLM2, whose end token llguidance would guess wrongly, and whose vocabulary is byte-level."""
    from tridecode.converters.checkpoint import open_checkpoint
    from tridecode.converters.convert import plan_conversion
    from tridecode.converters.tokenizers.files import load_tokenizer
    from tridecode.tools.demo import packaged_model

    checkpoint = open_checkpoint(packaged_model())
    plan_conversion(checkpoint, "fp32").write(tmp_path / "w")
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    offline = WatchedEngine.load(
        tmp_path / "w",
        EngineConfig(
            device="cpu",
            verify_weights="sizes",
            max_sequences=4,
            max_sequence_tokens=256,
            cache_bytes=1 << 26,
        ),
        tokenizer_dir=tmp_path / "tokenizer",
    )
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "country": {"enum": ["France", "Norway", "Japan"]},
            "population": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
        },
        "required": ["city", "country", "population"],
        "additionalProperties": False,
    }
    text = "<|im_start|>user\nDescribe Oslo as JSON.<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text, add_special_tokens=False)
    end = tokenizer.eos_token_id
    output = StructuredOutput("json_schema", json.dumps(schema))
    for params in ({"top_k": 1}, {"top_k": 0, "seed": 3}, {"top_k": 0, "seed": 4, "temperature": 1.5}):
        number = offline.submit(
            prompt, SamplingParams(max_tokens=150, end_id=end, **params), structured_output=output
        )
        offline.run()
        answer = offline.generations[number]
        assert answer.finish == "end_id" and answer.tokens[-1] == end
        jsonschema.validate(json.loads(tokenizer.decode(answer.tokens[:-1])), schema)
