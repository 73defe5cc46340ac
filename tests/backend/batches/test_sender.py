"""Requests are repeated where the service could not take them, and only there."""

from __future__ import annotations

import asyncio
import email.utils
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tridecode.backend.base.errors import ConfigError, EngineDownError
from tridecode.backend.batches import sender as sender_module
from tridecode.backend.batches.lines import Request
from tridecode.backend.batches.records import LineError, Response
from tridecode.backend.batches.sender import Pause, Sender, retry_after
from tridecode.backend.batches.target import Described, Target, describe, service_url

OK = (200, {}, b'{"text":\n "x"}')
DOWN = (503, {"retry-after": "1"}, b'{"error": {"message": "no engine"}}')
LOST = (0, {}, b"")  # the connection is closed without an answer
REQUEST = Request(7, "mine", "/v1/completions", b'{"prompt": "x"}')


class Script:
    """Answers of a service: `posts` one after another, the last one repeated; `health` always."""

    def __init__(self, *posts: tuple[int, dict[str, str], bytes]):
        self.posts = list(posts)
        self.health = (200, {}, b"{}")
        self.models = (404, {}, b"")
        self.seen: list[tuple[str, str]] = []

    def answer(self, path: str, key: str) -> tuple[int, dict[str, str], bytes]:
        self.seen.append((path, key))
        if path in ("/health", "/v1/models"):
            return self.health if path == "/health" else self.models
        return self.posts.pop(0) if len(self.posts) > 1 else self.posts[0]

    @property
    def num_posts(self) -> int:
        return sum(path == REQUEST.url for path, _ in self.seen)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            status, headers, body = script.answer(self.path, self.headers.get("authorization") or "")
            if not status:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(daemon=True, target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(sender_module, "MAX_PAUSE_S", 0.02)


def send(url: str, patience_s: float = 60.0, timeout_s: float = 60.0, key: str = "", **target) -> Response:
    async def one() -> Response:
        sender = Sender(Target(url, key, **target), patience_s, timeout_s)
        try:
            return await sender.send(REQUEST)
        finally:
            await sender.close()

    return asyncio.run(one())


@pytest.mark.parametrize("away", [DOWN, LOST, (502, {}, b"<html>"), (429, {"retry-after": "0"}, b"")])
def test_a_request_is_repeated_until_the_service_takes_it(away) -> None:
    script = Script(away, away, away, (200, {"x-request-id": "r1"}, OK[2]))
    with serving(script) as url:
        found = send(url, key="secret")
    assert script.num_posts == 4
    assert (found.status_code, found.request_id, bytes(found.body)) == (200, "r1", b'{"text":"x"}')
    assert {key for _, key in script.seen} == {"Bearer secret"}
    assert any(path == "/health" for path, _ in script.seen) == (away[0] != 429)


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422, 500, 504])
def test_a_refusal_is_not_repeated_and_has_the_services_error(status) -> None:
    body = {"error": {"message": "it is too long", "type": "t", "param": "prompt", "code": "too_long"}}
    script = Script((status, {}, json.dumps(body, indent=1).encode()))
    with serving(script) as url, pytest.raises(LineError) as caught:
        send(url)
    assert script.num_posts == 1
    fields, response = caught.value.fields, caught.value.response
    assert (fields.line, fields.code, fields.param) == (7, "too_long", "prompt")
    assert fields.message == "it is too long" and caught.value.custom_id == "mine"
    assert response is not None and response.status_code == status
    assert json.loads(bytes(response.body)) == body and b"\n" not in bytes(response.body)


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        ((200, {}, b"<html>hi</html>"), "invalid_response", "<html>hi"),
        ((200, {}, b'{"text": "\xff"}'), "invalid_response", "text"),
        ((404, {}, b"nothing here"), "status_404", "nothing here"),
        ((400, {}, b'{"error": {"message": "m", "code": 7}}'), "status_400", "m"),
        ((302, {"location": "http://127.0.0.1:1/"}, b""), "status_302", ""),
    ],
)
def test_an_answer_of_another_shape_is_an_error(answer, code, text) -> None:
    with serving(Script(answer)) as url, pytest.raises(LineError) as caught:
        send(url)
    assert caught.value.fields.code == code and text in caught.value.fields.message


@pytest.mark.parametrize("away", [DOWN, LOST])
def test_a_line_that_the_service_never_survives_is_an_error(away) -> None:
    script = Script(away)
    with serving(script) as url, pytest.raises(LineError) as caught:
        send(url)
    assert script.num_posts == sender_module.MAX_SENDS
    assert caught.value.custom_id == "mine" and caught.value.fields.line == 7


def test_a_service_that_stays_busy_or_away_is_given_up() -> None:
    busy = Script((429, {}, b'{"error": {"message": "full", "code": "queue_full"}}'))
    with serving(busy) as url, pytest.raises(LineError) as caught:
        send(url, patience_s=0.1)
    assert caught.value.fields.code == "queue_full" and busy.num_posts > 2
    gone = Script(DOWN)
    gone.health = DOWN
    with serving(gone) as url, pytest.raises(EngineDownError, match=r"was away for 0 s .*no engine") as stop:
        send(url, patience_s=0.1)
    assert "run the same command again" in str(stop.value) and gone.num_posts == 1
    with serving(gone) as url, pytest.raises(EngineDownError, match="it has ended"):
        send(url, ended=lambda: "it has ended")


def test_a_silent_service_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(sender_module, "_HEALTH_TIMEOUT_S", 0.1)
    listening = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # nobody accepts
    try:
        with pytest.raises(EngineDownError, match="was away"):
            send(f"http://127.0.0.1:{listening.server_address[1]}", patience_s=0.0, timeout_s=0.1)
    finally:
        listening.server_close()


def test_a_wrong_key_ends_the_batch() -> None:
    wrong = (401, {}, b'{"error": {"message": "the API key is not known"}}')
    script = Script(wrong)
    script.models = wrong
    with serving(script) as url:
        for call in (lambda: send(url), lambda: describe(Target(url), 5.0, print)):
            with pytest.raises(ConfigError, match="the API key is not known; wanted --api-key"):
                call()


@pytest.mark.parametrize(
    ("models", "wanted", "concurrency"),
    [
        ({"data": [{"owned_by": "tridecode", "max_num_seqs": 96}]}, Described(True, 96), 120),
        ({"data": [{"owned_by": "tridecode", "max_num_seqs": 1}]}, Described(True, 1), 3),
        ({"data": [{"owned_by": "tridecode", "max_num_seqs": 10**6}]}, Described(True, 10**6), 1024),
        ({"data": [{"owned_by": "tridecode", "max_num_seqs": None}]}, Described(True, None), 64),
        ({"data": [{"owned_by": "vllm", "max_num_seqs": "x"}]}, Described(False, None), 64),
        ({"data": {}}, Described(False, None), 64),
        ([], Described(False, None), 64),
    ],
)
def test_a_service_describes_itself(models, wanted, concurrency) -> None:
    script = Script(OK)
    script.models = (200, {}, json.dumps(models).encode())
    with serving(script) as url:
        found = describe(Target(url), 5.0, print)
    assert found == wanted and found.concurrency() == concurrency


def test_an_engine_that_cannot_start_is_not_waited_for() -> None:
    script, states = Script(OK), []
    state = {"phase": "starting", "detail": "loading weights"}
    script.health = (503, {}, json.dumps({"engines": [state]}).encode())
    with serving(script) as url:
        with pytest.raises(EngineDownError, match="not ready after 0 s: starting, loading weights"):
            describe(Target(url), 0.0, states.append)
        script.health = (503, {}, json.dumps({"engines": [{"phase": "failed", "detail": "no GPU"}]}).encode())
        with pytest.raises(EngineDownError, match="the engine does not start: no GPU"):
            describe(Target(url), 5.0, states.append)
    assert states == ["starting, loading weights"]
    with pytest.raises(ConfigError, match="no service answers"):
        describe(Target(url), 5.0, states.append)


def test_pauses_double_up_to_a_limit(monkeypatch) -> None:
    monkeypatch.undo()
    pause = Pause(chance=lambda: 1.0)
    assert [pause.seconds() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert Pause(lambda: 0.0).seconds() == 0.25
    assert Pause(lambda: 1.0).seconds(7.0) == 7.0 and Pause().seconds(10**9) == 30


def test_retry_after_is_a_number_or_a_date() -> None:
    assert [retry_after(text) for text in ("", "2", "1.5", "x", "-3", "nan", "1e999", "9" * 500)][:5] == [
        *(0, 2, 1.5, 0, 0)
    ]
    assert 25 < retry_after(email.utils.formatdate(time.time() + 30, usegmt=True)) <= 31
    assert retry_after(email.utils.formatdate(0, usegmt=True)) == 0


def test_an_address_may_end_with_v1() -> None:
    assert service_url("http://localhost:9000/v1/") == service_url("http://localhost:9000/")
    assert service_url("https://host/proxy/v1") == "https://host/proxy"
    for text in ("localhost:9000", "ftp://host", "http://", "http://h:99999", "http://h?x=1", "http://\0"):
        with pytest.raises(ConfigError, match="wanted an address"):
            service_url(text)
