"""The metrics page and the request log of a real tritonserver with a fake engine."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.backend.doors.metrics_page import counts_of, families, text_of, value
from tests.backend.doors.real_server import real_server
from tests.fake_engine import FakeEngine
from tests.integration.clients import post, stream, text_inputs
from tests.waiting import wait_until
from tridecode.backend.service.monitoring.metric_table import ALL_METRICS, BUCKETS, DOOR_METRICS
from tridecode.model_repo_templates.repository import repository_models

pytestmark = pytest.mark.server
TEXT = "tensorrt_llm_bls"
STEP_S = 0.02
PRINTED_S = 1e-3  # rounding of the page's figures
SECRET = "xyzzy-plugh"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_LOG_FORMAT", "json")
        patch.setenv("TRIDECODE_REQUEST_LOG", "on")
        models = repository_models(contracts=("fastertransformer", "tensorrt_llm"))
        with real_server(tmp_path_factory.mktemp("metrics"), models, step_s=STEP_S) as server:
            yield server


def request_lines(server) -> list[dict]:
    lines = server.log.read_text(errors="replace").splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in found if line.get("event") == "request"]


def line_of(server, label: str) -> dict:
    wait_until(lambda: any(line["id"] == label for line in request_lines(server)), 60, "the request's line")
    (found,) = [line for line in request_lines(server) if line["id"] == label]
    return found


def test_the_page_has_each_metric_once_with_its_type_and_its_meaning(server):
    post(server.http, f"{TEXT}/generate", {"text_input": "Hello", "max_tokens": 4})
    labels = {"engine": "fastertransformer"}
    wait_until(lambda: value(text_of(server.metrics), "tridecode_engine_epoch", **labels) == 1, 60, "a beat")
    time.sleep(1.5)  # every model publishes once a second
    text = text_of(server.metrics)
    page = families(text)
    rows = {name: row for row in ALL_METRICS for name in row.families}
    assert set(page) <= set(rows)
    for name, family in page.items():
        row = rows[name]
        wanted = {BUCKETS: "counter"}.get(row.kind, row.kind)
        assert (family.type, family.documentation) == (wanted, row.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(row.labels)
    models = {sample.labels["model"] for sample in page["tridecode_request_seconds"].samples}
    assert models == {"fastertransformer", "fastertransformer_streaming", TEXT, f"{TEXT}_plain"}
    engines = {sample.labels["engine"] for sample in page["tridecode_engine_free_blocks"].samples}
    assert engines == {"fastertransformer"} and len(page["tridecode_engine_free_blocks"].samples) == 1
    assert not [row.name for row in DOOR_METRICS if not set(row.families) <= set(page)]


class Emissions:
    """When the engine received each request and sent its first and its last token: a door's times lie between
    these and the times at which the client gets the responses, however busy the machine is."""

    def __init__(self, engine: FakeEngine, patch: pytest.MonkeyPatch):
        self.received: dict[tuple[bytes, int], float] = {}
        self.sent: dict[tuple[bytes, int], list[float]] = {}
        submit, send = engine._submit, engine._send

        def note_submit(socket, door, message) -> None:
            self.received[door, message.request] = time.monotonic()
            submit(socket, door, message)

        def note_send(socket, door, events) -> None:
            now = time.monotonic()
            for event in events:
                if event.tokens:
                    self.sent.setdefault((door, event.request), []).append(now)
            send(socket, door, events)

        patch.setattr(engine, "_submit", note_submit)
        patch.setattr(engine, "_send", note_send)

    def sums(self) -> tuple[float, float, float]:
        """Return the sums over the requests of the times of arrival, of the first and of the last token."""
        firsts, lasts = (sum(times[place] for times in self.sent.values()) for place in (0, -1))
        return sum(self.received.values()), firsts, lasts


def read_stream(
    server, tokens: int, label: str, on_response=lambda: None
) -> tuple[float, list[float], float]:
    """Send a request; return when it was sent, when each of its responses came, and when it had ended."""
    began, inputs, times = time.monotonic(), text_inputs("Hello", tokens, stream=True), []
    for _ in stream(server.grpc, TEXT, inputs, request_id=label):
        times.append(time.monotonic())
        on_response()
    return began, times, time.monotonic()


def page_after(server, before: str, streams: int) -> str:
    """Return the metrics page once it has this many more requests."""
    name = "tridecode_request_seconds_count"
    wanted = value(before, name, model=TEXT) + streams
    wait_until(lambda: value(text_of(server.metrics), name, model=TEXT) == wanted, 60, "the streams")
    return text_of(server.metrics)


def test_latencies_of_streams_lie_between_those_of_the_engine_and_of_the_client(server, monkeypatch):
    tokens, streams, before = 15, 4, text_of(server.metrics)
    engine = Emissions(server.engine, monkeypatch)
    with ThreadPoolExecutor(streams) as pool:
        seen = list(pool.map(lambda number: read_stream(server, tokens, f"s{number}"), range(streams)))
    page = page_after(server, before, streams)

    def grown(sample: str) -> float:
        was, now = (value(text, f"tridecode_{sample}", model=TEXT) for text in (before, page))
        return now - was

    def check(found: float, least: float, most: float) -> None:
        assert least - PRINTED_S <= found <= most + PRINTED_S

    arrived, emitted, last = engine.sums()
    began, first, ended = (sum(times) for times in zip(*((began, got[0], end) for began, got, end in seen)))
    assert last - emitted >= streams * (tokens - 1) * STEP_S  # the bounds below are not empty
    check(grown("request_seconds_sum"), last - arrived, ended - began)
    check(grown("time_to_first_token_seconds_sum"), emitted - arrived, first - began)
    check(grown("inter_token_seconds_sum"), last - first, ended - emitted)
    per_token = grown("time_per_output_token_seconds_sum") * (tokens - 1)
    check(per_token, last - first, ended - emitted)
    assert 0 < grown("inter_token_seconds_count") <= streams * (tokens - 1)
    assert grown("prompt_tokens_total") == streams
    assert grown("output_tokens_total") == streams * tokens


def test_each_token_that_is_delivered_alone_counts_one_gap(server, monkeypatch):
    """The engine makes a token when the client has the one before, so that none is merged with another."""
    tokens, before = 6, text_of(server.metrics)
    got: list[int] = []
    engine = Emissions(server.engine, monkeypatch)
    monkeypatch.setattr(
        server.engine,
        "before_step",
        lambda step: wait_until(lambda: len(got) == sum(map(len, engine.sent.values())), 60, "a response"),
    )
    _, times, _ = read_stream(server, tokens, "alone", lambda: got.append(1))
    page = page_after(server, before, 1)
    name = "tridecode_inter_token_seconds"
    assert value(page, f"{name}_count", model=TEXT) - value(before, f"{name}_count", model=TEXT) == tokens - 1
    (sent,) = engine.sent.values()
    least = [after - before for before, after in zip(times, sent[1:])]
    most = [after - before for before, after in zip(sent, times[1:])]
    old, new = (counts_of(text, name, model=TEXT) for text in (before, page))
    assert len(new) > 5
    for bound in new:
        count = new[bound] - old.get(bound, 0.0)
        assert sum(gap <= bound for gap in most) <= count <= sum(gap <= bound for gap in least), bound


def test_triton_measures_execute_alone_and_counts_refusals_as_success_as_the_documentation_says(server):
    def own(page: str, name: str, model: str) -> float:
        wanted = f'nv_inference_{name}{{model="{model}",version="1"}} '
        return sum(float(line[len(wanted) :]) for line in page.splitlines() if line.startswith(wanted))

    def after(before: str, model: str) -> str:
        name = "tridecode_requests_total"
        outcomes = ("ok", "invalid_arg")

        def count(page: str) -> float:
            return sum(value(page, name, model=model, outcome=outcome) for outcome in outcomes)

        wait_until(lambda: count(text_of(server.metrics)) > count(before), 60, "the request")
        return text_of(server.metrics)

    for model in (TEXT, f"{TEXT}_plain"):
        body = {"text_input": "Hello", "max_tokens": 15}
        before = text_of(server.metrics)
        assert post(server.http, f"{model}/generate", body)[0] == 200  # the first one is slower
        start = after(before, model)
        assert post(server.http, f"{model}/generate", body)[0] == 200
        page = after(start, model)
        ours, theirs = (
            value(page, "tridecode_request_seconds_sum", model=model)
            - value(start, "tridecode_request_seconds_sum", model=model),
            (own(page, "request_duration_us", model) - own(start, "request_duration_us", model)) / 1e6,
        )
        assert ours > 14 * STEP_S and theirs < ours / 3
        assert post(server.http, f"{model}/generate", {**body, "max_tokens": -1})[0] == 400
        refused = after(page, model)
        assert value(refused, "tridecode_requests_total", model=model, outcome="invalid_arg") == 1
        assert own(refused, "request_success", model) - own(page, "request_success", model) == 1


def test_several_models_of_one_engine_count_its_totals_once(server):
    def total(name: str) -> float:
        return value(text_of(server.metrics), f"tridecode_engine_{name}", engine="fastertransformer")

    server.engine.metrics = {"output_tokens": 1000.0, "shadow_ended": 7.0}
    wait_until(lambda: total("output_tokens_total") == 1000, 60, "the engine's total")
    server.engine.metrics = {"output_tokens": 1500.0, "shadow_ended": 8.0}
    wait_until(lambda: total("output_tokens_total") >= 1500, 60, "its growth")
    time.sleep(2.5)  # each of five doors publishes it twice more
    assert (total("output_tokens_total"), total("shadow_ended_total")) == (1500, 8)


def test_each_request_has_one_line_in_the_log_and_none_has_its_prompt(server):
    body = {"text_input": f"Hello {SECRET}", "max_tokens": 5, "id": "whole"}
    assert post(server.http, f"{TEXT}/generate", body)[0] == 200
    list(stream(server.grpc, TEXT, text_inputs(SECRET, 6, stream=True), request_id="streamed"))
    wrong = {"text_input": SECRET, "max_tokens": -3, "id": "refused"}
    status, text = post(server.http, f"{TEXT}/generate", wrong)
    assert status == 400 and "request 'refused'" in text
    post(server.http, "fastertransformer_ensemble/generate", {"id": "x"})
    whole = line_of(server, "whole")
    assert (whole["model"], whole["outcome"], whole["finish"]) == (TEXT, "ok", "length")
    assert whole["output_tokens"] == 5 and whole["prompt_tokens"] > 3 and whole["sequences"] == 1
    assert 0 < whole["first_token_s"] <= whole["total_s"] < 30 and "error" not in whole
    assert line_of(server, "streamed")["output_tokens"] == 6
    refused = line_of(server, "refused")
    assert (refused["outcome"], refused["output_tokens"]) == ("invalid_arg", 0)
    assert "max_tokens is -3" in refused["error"] and refused["first_token_s"] is None
    assert SECRET not in server.log.read_text(errors="replace")


def test_a_flood_of_refused_requests_is_answered_and_summed_up(server):
    def refuse(_: int) -> int:
        return post(server.http, f"{TEXT}_plain/generate", {"text_input": "x", "max_tokens": -1})[0]

    earlier = sum(line["model"] == f"{TEXT}_plain" for line in request_lines(server))
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(refuse, range(1500)))
    assert set(statuses) == {400}

    def counted() -> int:
        whole = server.log.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        mine = [line for line in lines if line.get("model") == f"{TEXT}_plain"]
        logged = sum(line["event"] == "request" for line in mine) - earlier
        return logged + sum(line["lines"] for line in mine if line["event"] == "requests_left_out")

    wait_until(lambda: counted() >= 1500, what="all lines or their number")
    time.sleep(0.5)
    assert counted() == 1500
