"""A part of the fuzz of the OpenAI service, and hostile clients."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.reliability.front.calls import Reply
from tests.reliability.front.cases import GOOD, VALUES, Case, cases_of, form_cases, mixed_cases, places_of
from tests.reliability.front.fuzz import Outcome, Running, judge, report, running
from tests.reliability.front.hostile import LIMIT_S, TEMPLATE, Hostile, raise_file_limit
from tests.reliability.front.http_cases import http_cases

pytestmark = pytest.mark.slow

#: every 61st case is sent; `make fuzz` sends all
EVERY, MIXED, SEED = 61, 6, 7
CONNECTIONS = 600
BYTES = 100 << 20  # by which the service may grow meanwhile: bodies of 1 MB are parsed


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("front") / "fuzz", "--manage-adapters") as on:
        yield on


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with short limits, whose template does what templates must not."""
    folder = tmp_path_factory.mktemp("front")
    (folder / "template.jinja").write_text(TEMPLATE)
    options = ["--limit-seconds", str(LIMIT_S), "--chat-template", str(folder / "template.jinja")]
    with running(folder / "impatient", *options) as on:
        yield on


def check(on: Running, outcomes: Sequence[Outcome]) -> None:
    complaints = [f"{one.case}: {one.complaint}" for one in outcomes if one.complaint]
    assert not complaints, "\n".join(complaints)
    changed, on.fuzz.changed = on.fuzz.changed, []
    assert not changed, "\n".join(changed)


def test_every_route_of_the_document_is_fuzzed(fuzzed: Running) -> None:
    document = fuzzed.fuzz.document
    assert {path for path, methods in document["paths"].items() if "post" in methods} == set(GOOD)
    for route in GOOD:
        assert places_of(document, route)
    assert ("messages", 0, "content", 0, "text") in places_of(document, "/v1/chat/completions")
    good = fuzzed.fuzz.run(Case(route, (), "good", json.dumps(body).encode()) for route, body in GOOD.items())
    assert [one.status for one in good] == [
        400 if "/load_lora" in route else 404 if "lora" in route else 200 for route in GOOD
    ]


def test_every_body_ends_in_one_clean_error_or_one_whole_answer(fuzzed: Running) -> None:
    document, before = fuzzed.fuzz.document, fuzzed.usage()
    cases = [case for route in GOOD for case in cases_of(document, route)][::EVERY]
    cases += [case for route in GOOD for case in mixed_cases(document, route, MIXED, SEED)]
    outcomes = fuzzed.fuzz.run(cases)
    check(fuzzed, outcomes)
    assert sum(one.status == 200 for one in outcomes) > len(outcomes) / 20
    assert not fuzzed.settle(before)
    assert fuzzed.usage().memory - before.memory < BYTES
    assert report(outcomes).startswith(f"{len(outcomes):,} requests: ")


def test_hostile_schemas_grammars_and_tools_end_in_one_clean_error_or_one_whole_answer(
    fuzzed: Running,
) -> None:
    before = fuzzed.usage()
    check(fuzzed, fuzzed.fuzz.run([case for route in GOOD for case in form_cases(route)]))
    assert not fuzzed.settle(before)


def test_broken_http_ends_in_one_clean_error(fuzzed: Running) -> None:
    before = fuzzed.usage()
    check(fuzzed, fuzzed.fuzz.run(list(http_cases(["/health", "/v1/models", "/metrics"]))))
    assert not fuzzed.settle(before)


@pytest.mark.parametrize("kind", ["slow_senders", "leavers", "stalled_readers", "templates"])
def test_hostile_clients_harm_nobody(impatient: Running, kind: str) -> None:
    clients = Hostile(impatient)
    assert not clients.run(getattr(clients, kind))


def test_many_connections_and_those_beyond_the_limit(tmp_path: Path) -> None:
    count = raise_file_limit(CONNECTIONS)
    with running(tmp_path / "many", "--max-connections", str(count)) as on:
        clients = Hostile(on)
        assert not clients.run(functools.partial(clients.idle_connections, count - 50))
        assert not clients.run(functools.partial(clients.surplus_connections, count), beside=False)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_blocks(fuzzed: Running, streaming: bool) -> None:
    """The bound is that of a loaded machine; docs/lab/soak.md has measurements."""
    times = asyncio.run(Hostile(fuzzed).freeing_times(8, streaming))
    assert max(times) < 5.0, times


GOOD_ERROR = {"message": "top_k is -2; wanted -1 or more", "type": "x", "param": "top_k", "code": "y"}


@pytest.mark.parametrize(
    ("status", "error", "complaint"),
    [
        (400, {}, ""),
        (400, {"param": None, "message": "something is wrong"}, "does not name the field"),
        (500, {}, "status 500"),
        (400, {"message": 'top_k: File "x.py"'}, "not for clients"),
        (400, {"code": None}, "without type or code"),
        (400, {"extra": 1}, "not an error in OpenAI's shape"),
        (200, {}, "an error with status 200"),
    ],
)
def test_an_unclear_error_is_noticed(status: int, error: dict[str, object], complaint: str) -> None:
    body = json.dumps({"error": {**GOOD_ERROR, **error}})
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    found = judge(
        Case("/v1/completions", ("top_k",), "-2", b""), Reply(raw=bytearray((head + body).encode()))
    )
    assert complaint in found and bool(found) == bool(complaint)


def test_a_case_has_the_value_and_keeps_the_rest() -> None:
    fields = {"prompt": {"type": "string"}, "messages": {"items": {"anyOf": [{"properties": {"role": {}}}]}}}
    content = {"application/json": {"schema": {"properties": fields}}}
    document = {"paths": {"/tokenize": {"post": {"requestBody": {"content": content}}}}}
    cases = {str(case): case.body for case in cases_of(document, "/tokenize")}
    assert json.loads(cases["/tokenize: prompt: 2^31"]) == {"prompt": 2**31}
    assert json.loads(cases["/tokenize: messages.0.role: true"])["messages"] == [{"role": True}]
    assert cases["/tokenize: prompt: twice"] == b'{"prompt": 1, "prompt": 2}'
    assert b"NaN" in cases["/tokenize: prompt: NaN"] and len(cases) > 3 * len(VALUES)
