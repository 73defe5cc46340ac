"""Requests that nobody should send: one clean error each, and no harm to others."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backend.front.conftest import TEXT
from tests.backend.front.fronts import Front, error_of
from tests.backend.front.transports import Route
from tests.fake_engine import FakeEngine, FakeSupervisor
from tests.waiting import wait_until
from tridecode.backend.front.access import digest_of

#: body -> part of the message
BODIES = {
    b"": "the body is empty",
    b"\xff\xfe": "not UTF-8",
    b"{": "not valid JSON",
    b"[1]": "wanted a JSON object",
    b'"x"': "wanted a JSON object",
    b'{"prompt": "a", "prompt": "b"}': 'key "prompt" twice',
    b'{"prompt": "a", "stream_options": {"include_usage": true, "include_usage": true}}': "twice",
    b'{"prompt": "a", "temperature": NaN}': "the value NaN",
    b'{"prompt": "a", "temperature": Infinity}': "the value Infinity",
    b'{"prompt": "a", "temperature": 1e999}': "temperature is",
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}": "not valid JSON",
    b'{"prompt": "a", "seed": 99999999999999999999}': "seed is",
    b'{"prompt": ' + b"[" * 100_000 + b"}": "nested too deeply",
    b'{"x": ' * 100_000: "nested too deeply",
    b'{"prompt": {"a": 1}}': "prompt is",
    b'{"prompt": null}': "prompt is null",
    b'{"prompt": [[[1]]]}': "prompt mixes types",
    b'{"prompt": [true]}': "prompt mixes types",
    b'{"prompt": "a", "n": 1000000}': "n is 1000000",
    b'{"prompt": [' + b'"a",' * 999 + b'"a"], "n": 2}': "prompt has 1,000 prompts of 2 sequence(s) each",
    b'{"prompt": "a", "stop": ["' + b"x" * 10_000 + b'"]}': "stop has",
    b'{"prompt": "a", "\\ud800": 1}': "not valid Unicode",
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:40].decode("latin-1"))
def test_a_bad_body_has_one_clean_error(front: Front, body: bytes) -> None:
    response = front.post("/v1/completions", content=body)
    error = error_of(response)
    assert response.status_code == 400 and BODIES[body] in error["message"], error
    assert len(response.content) < 1000


def test_a_large_body_is_refused_before_it_is_read(front: Front) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
    answer = raw(front, head.encode())
    assert answer.startswith(b"HTTP/1.1 413") and b'"code":"body_too_large"' in answer
    chunk = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
    with connect(front) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(1000):
                connection.sendall(chunk)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404),
        (b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404),
        (b"GET /v1/models/%00%ff HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
            b"transfer-encoding: chunked\r\n\r\n{}",
            400,
        ),
    ],
)
def test_bad_http_has_an_error_in_the_same_shape(front: Front, sent: bytes, status: int) -> None:
    answer = raw(front, sent)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:200]
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}


def connect(front: Front) -> socket.socket:
    return socket.create_connection(("127.0.0.1", front.port), timeout=20)


def raw(front: Front, sent: bytes) -> bytes:
    """The answer until the connection is closed."""
    found = b""
    with connect(front) as connection:
        connection.sendall(sent)
        try:
            while piece := connection.recv(65_536):
                found += piece
        except ConnectionResetError:
            pass
    return found


@pytest.fixture
def impatient(engine_route: Route, toy_repository: Path, tmp_path: Path) -> Iterator[Front]:
    """A front whose limits of time are short."""
    options = ["--limit-seconds", "0.5", *engine_route.options]
    with Front(toy_repository, tmp_path / "log", *options, **engine_route.environment) as front:
        yield front


def test_slow_and_silent_clients_are_closed(impatient: Front) -> None:
    begun = time.monotonic()
    assert raw(impatient, b"") == b""
    slow = raw(impatient, b"POST /v1/completions HTTP/1.1\r\n")
    assert slow.startswith(b"HTTP/1.1 408") and b"headers" in slow
    half = raw(impatient, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
    assert half.startswith(b"HTTP/1.1 408") and b"body" in half
    assert time.monotonic() - begun < 6


def test_a_client_that_does_not_read_loses_its_request_and_others_do_not(
    impatient: Front, engine: FakeEngine, ids: Callable[[str], list[int]]
) -> None:
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect(("127.0.0.1", impatient.port))
    body = json.dumps(
        {"prompt": ["x"] * 40, "n": 4, "max_tokens": 500, "stream": True, "logprobs": 20}
    ).encode()
    stuck.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    wait_until(lambda: engine.running, 60, "the request")
    good = impatient.openai.completions.create(model="toy", prompt="x", max_tokens=len(ids(TEXT)))
    assert good.choices[0].text == TEXT
    wait_until(lambda: not engine.running, 30, "the end of the stuck request")
    wait_until(
        lambda: "outcome=cancelled" in impatient.text() or "outcome=unavailable" in impatient.text(), 10
    )
    stuck.close()


def test_keys_and_origins(supervisor: FakeSupervisor, toy_repository: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# the first\n{digest_of('first')}  -\n")
    options = ["--api-key", "own", "--api-key-file", str(keys), "--cors", "http://page.test"]
    environment = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
    with Front(toy_repository, tmp_path / "log", *options, **environment) as front:

        def status(key: str = "", path: str = "/v1/models") -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return front.http.get(path, headers=headers).status_code

        assert (status("own"), status("first"), status(), status("second")) == (200, 200, 401, 401)
        assert (status(path="/metrics"), status(path="/health"), status(path="/nothing")) == (401, 200, 401)
        keys.write_text(f"sha256:{digest_of('second')}\n")
        wait_until(lambda: status("second") == 200, what="the new key")
        assert (status("first"), status("own")) == (401, 200)
        keys.unlink()
        time.sleep(1.2)
        assert status("second") == 200
        authorized = {"authorization": "Bearer own"}
        body = {"prompt": "x", "max_tokens": 1}
        good = front.post("/v1/completions", body, headers={**authorized, "origin": "http://page.test"})
        assert good.headers["access-control-allow-origin"] == "http://page.test"
        evil = front.post("/v1/completions", body, headers={**authorized, "origin": "http://evil.test"})
        assert (evil.status_code, error_of(evil)["code"]) == (403, "origin_not_allowed")
        asked = {"origin": "http://page.test", "access-control-request-method": "POST"}
        assert front.http.options("/v1/completions", headers=asked).status_code == 200
        assert "own" not in front.text() and "Bearer" not in front.text()
