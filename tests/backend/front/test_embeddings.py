"""/v1/embeddings by OpenAI's own client and by hostile ones, before a fake engine."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import jsonschema
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import CreateEmbeddingResponse
from prometheus_client.parser import text_string_to_metric_families

from tests.backend.front.fronts import Front, error_of, repository
from tests.fake_engine import LIMITS, FakeEngine, FakeSupervisor, rebuilt, toy_pooled
from tests.waiting import wait_until
from tridecode.backend.front.fields.embeddings import EmbeddingRequest

Ids = Callable[[str], list[int]]
WIDTH = LIMITS.hidden_size


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector.astype(np.float64))


def vectors(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]]


def test_openais_client_reads_vectors_of_length_one(front: Front, engine: FakeEngine, ids: Ids) -> None:
    """The client requests base64 by default."""
    found = front.openai.embeddings.create(model="toy", input="When does it leave?")
    CreateEmbeddingResponse.model_validate(found.model_dump())
    prompt = ids("When does it leave?")
    assert found.model == "toy" and found.usage.prompt_tokens == found.usage.total_tokens == len(prompt)
    (one,) = found.data
    assert one.embedding == pytest.approx(unit(toy_pooled(prompt, "last", WIDTH)), rel=1e-6)
    params = engine.submits[-1].sequences[0].params
    assert (params.max_tokens, params.pooling) == (0, "last")
    again = front.openai.embeddings.create(model="toy", input="When does it leave?", encoding_format="float")
    CreateEmbeddingResponse.model_validate(again.model_dump())
    assert again.data[0].embedding == pytest.approx(one.embedding, rel=1e-6)


def test_texts_and_ids_alone_and_in_lists(front: Front, ids: Ids) -> None:
    texts = ["one", "two and two", "three"]
    every = front.openai.embeddings.create(model="toy", input=texts)
    assert [one.index for one in every.data] == [0, 1, 2]
    assert every.usage.prompt_tokens == sum(len(ids(text)) for text in texts)
    for text, one in zip(texts, every.data):
        wanted = unit(toy_pooled(ids(text), "last", WIDTH))
        assert one.embedding == pytest.approx(wanted, rel=1e-6)
        assert front.openai.embeddings.create(model="toy", input=ids(text)).data[0].embedding == one.embedding
    lists = front.openai.embeddings.create(model="toy", input=[ids(text) for text in texts])
    assert [one.embedding for one in lists.data] == [one.embedding for one in every.data]


def test_the_mean_and_vectors_as_they_are(front: Front) -> None:
    body = {"input": [[3, 4, 8], [9]], "pooling": "mean", "normalize": False}
    wanted = [toy_pooled([3, 4, 8], "mean", WIDTH), toy_pooled([9], "mean", WIDTH)]
    assert vectors(front.post("/v1/embeddings", body)) == [one.tolist() for one in wanted]
    coded = vectors(front.post("/v1/embeddings", {**body, "encoding_format": "base64"}))
    assert [base64.b64decode(one) for one in coded] == [one.astype("<f4").tobytes() for one in wanted]
    long = vectors(front.post("/v1/embeddings", {**body, "input": [5] * 600, "truncate_prompt_tokens": -1}))
    assert long == [toy_pooled([5], "mean", WIDTH).tolist()]
    kept = vectors(front.post("/v1/embeddings", {**body, "input": [3, 4, 8], "truncate_prompt_tokens": 2}))
    assert kept == [toy_pooled([4, 8], "mean", WIDTH).tolist()]


def test_fields_without_effect_and_the_models_own_number_of_dimensions(front: Front) -> None:
    response = front.post("/v1/embeddings", {"input": "x", "user": "me", "dimensions": WIDTH})
    assert response.headers["x-tridecode-no-effect"] == "user" and len(vectors(response)[0]) == WIDTH
    labelled = front.post("/v1/embeddings", {"input": "x"}, headers={"x-request-id": "mine"})
    assert labelled.headers["x-request-id"] == "mine"


def test_an_adapter_is_named_as_the_model(
    supervisor: FakeSupervisor, engine: FakeEngine, tmp_path: Path
) -> None:
    repo = repository(tmp_path / "repo", lora_path="adapters")
    (repo / "fastertransformer" / "adapters" / "french").mkdir(parents=True)
    with Front(repo, tmp_path / "log", TRIDECODE_CONTROL_ENDPOINT=supervisor.endpoint) as front:
        names = [card.id for card in front.openai.models.list()]
        assert "french" in names, names
        found = front.openai.embeddings.create(model="french", input=["x", "y"])
        assert found.model == "french"
        assert [submit.sequences[0].lora_name for submit in engine.submits[-2:]] == ["french"] * 2


def test_the_document_describes_the_route(front: Front) -> None:
    document = front.http.get("/openapi.json").json()
    components = {"components": document["components"]}
    wanted = {"$ref": "#/components/schemas/EmbeddingRequest", **components}
    jsonschema.validate({"input": ["a"], "pooling": "mean", "encoding_format": "base64"}, wanted)
    for wrong in ({}, {"input": 3}, {"input": "a", "pooling": "cls"}, {"input": "a", "inputs": "b"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, wanted)
    answer = front.post("/v1/embeddings", {"input": ["a", "b"]}).json()
    jsonschema.validate(answer, {"$ref": "#/components/schemas/EmbeddingList", **components})


def test_the_request_is_counted_and_logged_without_tokens_of_output(front: Front) -> None:
    def value(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(front.http.get("/metrics").text)
        samples = [s for family in families for s in family.samples if s.name == name]
        return next(s.value for s in samples if labels.items() <= s.labels.items())

    names = ("tridecode_prompt_tokens_total", "tridecode_output_tokens_total")
    names += ("tridecode_time_to_first_token_seconds_count", "tridecode_request_seconds_count")
    before = [value(name) for name in names]
    front.post("/v1/embeddings", {"input": [[5, 6, 7], [8]], "request_id": "counted"})
    added = [value(name) - old for name, old in zip(names, before)]
    assert added == [4, 0, 0, 1]
    wait_until(lambda: "counted" in front.text(), 60, "the line of the log")
    (line,) = [line for line in front.text().splitlines() if "counted" in line]
    assert "outcome=ok" in line and "length" not in line


BAD = {
    '{"input": ""}': ("input", "is an empty text"),
    '{"input": ["a", ""]}': ("input", "input of row 1 is an empty text"),
    '{"input": []}': ("input", "input is an empty list"),
    '{"input": [[]]}': ("input", "an empty list of token ids"),
    '{"input": [[1], "a"]}': ("input", "input mixes types"),
    '{"input": [1, "a"]}': ("input", "input mixes types"),
    '{"input": [1, true]}': ("input", "input mixes types"),
    '{"input": [[[1]]]}': ("input", "input mixes types"),
    '{"input": {"a": 1}}': ("input", "input is"),
    '{"input": null}': ("input", "input is null"),
    "{}": ("input", "input is missing"),
    '{"input": [1, 1000]}': ("input", "has the token id 1000"),
    '{"input": [-1]}': ("input", "has the token id -1"),
    '{"input": [99999999999999999999]}': ("input", "has the token id"),
    '{"input": [[1], [2, 5000]]}': ("input", "row 1 of input has the token id 5000"),
    '{"input": "\\ud800"}': ("input", "not valid Unicode"),
    '{"input": "a", "encoding_format": "hex"}': ("encoding_format", 'wanted "float" or "base64"'),
    '{"input": "a", "pooling": "cls"}': ("pooling", 'pooling is "cls"; wanted "last" or "mean"'),
    '{"input": "a", "pooling": ["mean"]}': ("pooling", "pooling is"),
    '{"input": "a", "dimensions": 2}': ("dimensions", "dimensions is 2; this model's vectors have 4 numbers"),
    '{"input": "a", "dimensions": 0}': ("dimensions", "dimensions is 0"),
    '{"input": "a", "dimensions": 1e400}': ("dimensions", "dimensions is"),
    '{"input": "a", "normalize": "yes"}': ("normalize", "normalize is"),
    '{"input": "a", "inputs": "b"}': ("inputs", "did you mean input?"),
    '{"input": "a", "stream": true}': ("stream", "the field"),
    '{"input": "a", "truncate_prompt_tokens": -2}': (
        "truncate_prompt_tokens",
        "truncate_prompt_tokens is -2",
    ),
    '{"input": "a", "timeout_s": NaN}': (None, "the value NaN"),
    '{"input": "a", "input": "b"}': ("input", 'key "input" twice'),
    '{"input": ' + "[" * 100_000 + "}": (None, "nested too deeply"),
    '{"input": ' + json.dumps(["a"] * 2049) + "}": ("input", "input has 2,049 items; wanted 2,048 at most"),
    '{"input": ' + json.dumps([[1]] * 2049) + "}": ("input", "input has 2,049 items"),
    '{"input": "' + "x" * 70_000 + '"}': ("input", "input has 70,000 bytes; this model accepts 65,536"),
}


@pytest.mark.parametrize("body", BAD, ids=lambda body: body[:40])
def test_a_bad_body_has_one_clean_error(front: Front, engine: FakeEngine, body: str) -> None:
    param, text = BAD[body]
    before = len(engine.submits)
    response = front.post("/v1/embeddings", content=body.encode())
    error = error_of(response)
    assert response.status_code == 400 and text in error["message"], error
    assert error["param"] == param and len(response.content) < 1000
    assert len(engine.submits) == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([5] * 513, "input has 513 tokens; this model accepts 512 (max_sequence_tokens in config.pbtxt)"),
        ([[5], [6] * 600], "input of row 1 has 600 tokens; this model accepts 512"),
        ("ab " * 600, "tokens; this model accepts 512"),
    ],
)
def test_an_input_that_is_too_long_names_length_and_limit(front: Front, value: object, text: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        front.openai.embeddings.create(model="toy", input=value)  # type: ignore[arg-type]
    assert text in caught.value.message
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_an_unknown_model_does_not_exist(front: Front) -> None:
    with pytest.raises(openai.NotFoundError):
        front.openai.embeddings.create(model="nobody", input="x")


def test_more_inputs_than_the_engine_may_queue_follow_each_other(front: Front, engine: FakeEngine) -> None:
    """The engine takes 256 open requests here and refuses a further one."""
    rows = [[3 + i % 900, 5 + i % 7] for i in range(2048)]
    found = front.openai.embeddings.create(model="toy", input=rows)
    assert found.usage.prompt_tokens == 2 * len(rows)
    assert [one.index for one in found.data] == list(range(2048))
    for row, one in zip(rows, found.data):
        assert one.embedding == pytest.approx(unit(toy_pooled(row, "last", WIDTH)), rel=1e-6)
    late = [[5]] * 400 + [[1000]]
    error = error_of(front.post("/v1/embeddings", {"input": late}))
    assert "row 400 of input has the token id 1000" in error["message"]
    wait_until(lambda: not engine.running, 60, "the end of all requests")


@pytest.fixture
def slow(toy_repository: Path, tmp_path: Path) -> Iterator[tuple[Front, FakeEngine]]:
    """A front before an engine whose steps take half a second."""
    with FakeEngine(step_s=0.5) as engine, FakeSupervisor(engine) as supervisor:
        log = tmp_path / "front.log"
        with Front(toy_repository, log, TRIDECODE_CONTROL_ENDPOINT=supervisor.endpoint) as front:
            yield front, engine


def test_a_client_that_leaves_cancels_what_is_left(slow: tuple[Front, FakeEngine]) -> None:
    front, engine = slow
    with pytest.raises(httpx.ReadTimeout):
        front.post("/v1/embeddings", {"input": [[5]] * 1000}, timeout=1.0)
    wait_until(lambda: "outcome=cancelled" in front.text(), 30, "the cancelled request")
    time.sleep(2.0)  # several steps: the engine has read what was sent before the cancellation
    submitted = len(engine.submits)
    assert 0 < submitted < 1000
    wait_until(lambda: not engine.running, 30, "the end of all requests")
    time.sleep(1.0)
    assert len(engine.submits) == submitted


def test_an_engine_that_dies_is_a_pause(toy_repository: Path, tmp_path: Path) -> None:
    """The first engine takes the inputs and never computes them; the next one gets them again."""
    with FakeEngine() as engine, FakeSupervisor(engine) as supervisor, ExitStack() as stack:
        log = tmp_path / "front.log"
        front = stack.enter_context(
            Front(toy_repository, log, TRIDECODE_CONTROL_ENDPOINT=supervisor.endpoint)
        )
        engine._step = lambda socket: time.sleep(0.01)  # type: ignore[method-assign]
        pool = stack.enter_context(ThreadPoolExecutor(1))
        answer = pool.submit(front.post, "/v1/embeddings", {"input": [[5], [6, 7]], "normalize": False})
        wait_until(lambda: len(engine.submits) == 2, 20, "the inputs")
        with rebuilt(engine, supervisor) as following:
            found = vectors(answer.result(60))
            assert [len(submit.sequences[0].prompt) // 4 for submit in following.submits] == [1, 2]
    assert found == [toy_pooled(row, "last", WIDTH).tolist() for row in ([5], [6, 7])]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
_GOOD = st.text(min_size=1, max_size=20) | st.lists(st.integers(0, 999), min_size=1, max_size=9)
_VALUES = st.sampled_from(["mean", "base64", 4, "toy"])
_FIELDS = [*EmbeddingRequest.__struct_fields__, "inputs", "logit_bias", ""]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=_GOOD | st.lists(_GOOD, max_size=4) | _JSON,
    others=st.dictionaries(st.sampled_from(_FIELDS), _JSON | _VALUES, max_size=3),
)
def test_whatever_a_body_has_the_answer_is_vectors_or_one_clean_error(
    front: Front, value: object, others: dict[str, object]
) -> None:
    body = json.dumps({"input": value, **others})
    response = front.post("/v1/embeddings", content=body.encode())
    if response.status_code == 200:
        assert len(response.json()["data"]) >= 1
        for vector in vectors(response):
            assert isinstance(vector, str) or len(vector) == WIDTH
    else:
        assert response.status_code in (400, 404, 504), response.text
        assert error_of(response)["message"] and len(response.content) < 2000


def test_a_deadline_ends_the_whole_answer(slow: tuple[Front, FakeEngine]) -> None:
    front, engine = slow
    response = front.post("/v1/embeddings", {"input": [[5]] * 1000, "timeout_s": 0.7})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    wait_until(lambda: not engine.running, 30, "the end of all requests")
