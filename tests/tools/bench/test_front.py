"""`tridecode bench front`: the client in C counts what a server sends, and the report has every phase."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.bench.front import run, setup
from tridecode.tools.bench.front.run import FrontPlan, run_front
from tridecode.tools.bench.front.served import run_served
from tridecode.tools.bench.jobs import make_job

_EVENTS = [b'data: {"a": 1}\n\n', b": waiting\n\n", b"data: x\n\ndata: y\n\n", b"data: [DONE]\n\n"]


class _Answers(http.server.BaseHTTPRequestHandler):
    """Chunked events for /stream, cut at odd places; a JSON body for /whole; a cut stream for /broken."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200 if body == b"[1]" else 400)
        if self.path == "/whole":
            self.send_header("content-length", "5")
            self.end_headers()
            self.wfile.write(b"[1,2]")
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        data = b"".join(_EVENTS if self.path == "/stream" else _EVENTS[:2])
        for begin in range(0, len(data), 7):
            part = data[begin : begin + 7]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return setup.build_client(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def _totals(client: Path, port: int, path: str, folder: Path, *options: str) -> dict:
    body = folder / "body"
    body.write_bytes(b"[1]")
    done = subprocess.run(
        [client, str(port), path, body, *options], stdout=subprocess.PIPE, timeout=60, check=False
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_client_counts_events_and_bytes_of_chunked_streams(client, port, tmp_path):
    found = _totals(client, port, "/stream", tmp_path, "-c", "3", "-n", "7")
    assert (found["requests"], found["failed"], found["statuses"]) == (7, 0, {"200": 7})
    assert (found["events"], found["bytes"]) == (7 * 3, 7 * sum(map(len, _EVENTS)))
    assert 0 < found["first_event_ms"]["p50"] <= found["request_ms"]["max"]


def test_the_client_reads_whole_answers_over_connections_that_stay(client, port, tmp_path):
    found = _totals(client, port, "/whole", tmp_path, "-c", "2", "-n", "20")
    assert (found["requests"], found["failed"], found["events"], found["bytes"]) == (20, 0, 0, 100)


def test_the_client_says_which_streams_did_not_end(client, port, tmp_path):
    found = _totals(client, port, "/broken", tmp_path, "-n", "2")
    assert (found["requests"], found["failed"]) == (0, 2)
    assert found["error"] == "a stream ended without [DONE]"


def test_the_report_has_the_figures_of_each_phase(tmp_path, monkeypatch):
    plan = FrontPlan((2,), idle=20, workers=1, seconds=0.3, rounds=1, beside=None)
    every = run._phases(plan)
    assert {"2 streams, merged", "leaving after a token", "leaving before a token", "import"} <= set(every)
    some = {name: every[name] for name in ("2 streams", "requests", "idle")}
    monkeypatch.setattr(run, "_phases", lambda plan: some)
    report = json.loads(run_front(plan, tmp_path).read_text())
    medians = report["results"]["medians"]["this"]
    streams = medians["2 streams"]
    assert streams["tokens"] == 2 * 16 and 0 < streams["chunks"] <= streams["tokens"] + 2 * 2
    assert medians["idle"]["streams"] == 20 and medians["requests"]["requests"] > 0
    assert medians["requests"]["statuses"].keys() == {"200"}
    assert report["settings"]["streams"] == [2] and report["environment"]["cores"]


def test_streams_through_the_front_are_reported_beside_the_engine_alone(tmp_path):
    job = make_job(
        "toy", None, None, batches=(1, 2), repeats=1, prompt_tokens=8, output_tokens=4, device="cpu"
    )
    results = json.loads(run_served(job, tmp_path).read_text())["results"]
    assert [row["streams"] for row in results["rows"]] == [1, 2]
    for row in results["rows"]:
        assert row["front_first_event_p99_ms"] >= row["front_first_event_p50_ms"] > 0
        assert row["tokens_per_event"] >= 0.5
    # each stream of 4 tokens was answered whole: the client counts [DONE] as an event too
    assert all(run["requests"] == 2 and not run["failed"] for run in results["client"]["2 streams of 4"])


def test_a_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--beside is .*; wanted a folder that has tridecode/backend"):
        run_front(FrontPlan((1,), 0, 1, 0.1, 1, tmp_path), tmp_path)
