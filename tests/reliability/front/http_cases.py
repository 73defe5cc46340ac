"""Requests that are wrong as HTTP: paths, methods, headers, bodies that are cut or chunked."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass

from tests.reliability.front.calls import post, request
from tests.reliability.front.cases import GOOD

_ROUTE = "/v1/completions"
_BODY = json.dumps(GOOD[_ROUTE]).encode()
_HEAD = f"POST {_ROUTE} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()


@dataclass(frozen=True)
class HttpCase:
    """statuses: those that are right. half_close: the client then closes its sending side."""

    what: str
    sent: bytes
    statuses: tuple[int, ...]
    half_close: bool = False

    def __str__(self) -> str:
        return self.what


def http_cases(gets: list[str]) -> Iterator[HttpCase]:
    """gets: the routes that are read."""
    yield from _paths()
    yield from _methods(gets)
    yield from _headers()
    yield from _bodies()
    yield from _lines()


def _paths() -> Iterator[HttpCase]:
    for path in (
        "/", "//v1/completions", "/v1/completions/", "/v1//completions", "/v1/./completions",
        "/V1/COMPLETIONS", "/v1/x/../completions", "/v1/completions%00", "/v1/completions;x=1",
        "/v1/completions%2f", "/v1/completions%", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/completions\\..\\x", "/.git/config", "/docs",
    ):  # fmt: skip
        yield HttpCase(f"path {path}", request(path, _BODY), (404,))
    for path in ("/v1/%63ompletions", "/v1/completions?x=1&x=2", "/v1/completions?" + "a" * 10_000):
        yield HttpCase(f"path {path[:40]}", request(path, _BODY), (200,))
    for name in (
        "..%2f..%2fetc%2fpasswd",
        "%00",
        "%ff%fe",
        "a" * 50_000,
        "%F0%9F%99%82",
        "../../x",
        "%0d%0aX:y",
    ):
        yield HttpCase(f"model {name[:40]}", request(f"/v1/models/{name}", b"", "GET"), (404,))
    yield HttpCase("path of 100,000 letters", request("/" + "a" * 100_000, b"", "GET"), (431,))
    yield HttpCase("path *", request("*", b"", "OPTIONS"), (400, 404, 405))
    yield HttpCase("another host's path", request("http://evil.test/v1/models", b"", "GET"), (200, 404))


def _methods(gets: list[str]) -> Iterator[HttpCase]:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        for route in GOOD:
            yield HttpCase(f"{method} {route}", request(route, _BODY, method), (405,))
    for method in ("POST", "PUT", "DELETE"):
        for route in gets:
            yield HttpCase(f"{method} {route}", request(route, b"{}", method), (405,))
    for method in ("post", "FOO", "P OST", "POST\t", "", "PRI", "CONNECT"):
        yield HttpCase(f"method {method!r}", request(_ROUTE, _BODY, method), (400, 405))


def _headers() -> Iterator[HttpCase]:
    for kind in (
        "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
        "application/xml", "", "application/json; charset=utf-16", "x" * 5000,
    ):  # fmt: skip
        yield HttpCase(
            f"content-type {kind[:40]}", post(_ROUTE, GOOD[_ROUTE], f"content-type: {kind}\r\n"), (200, 415)
        )
    multipart = b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\nhi\r\n--x--\r\n'
    headers = "content-type: multipart/form-data; boundary=x\r\n"
    yield HttpCase("a form", request(_ROUTE, multipart, headers=headers), (400, 415))
    for encoding in ("gzip", "br", "zstd", "gzip, gzip", "x"):
        packed = gzip.compress(_BODY)
        header = f"content-encoding: {encoding}\r\n"
        yield HttpCase(f"content-encoding {encoding}", request(_ROUTE, packed, headers=header), (415,))
    bomb = gzip.compress(b" " * (64 << 20))
    yield HttpCase("a bomb of gzip", request(_ROUTE, bomb, headers="content-encoding: gzip\r\n"), (415,))
    for value in ("a" * 5000, "\xe9", "\x01", "x: y", "\t", "{{7*7}}", "%0d%0a"):
        header = f"x-request-id: {value}\r\n"
        yield HttpCase(f"x-request-id {value[:20]!r}", post(_ROUTE, GOOD[_ROUTE], header), (200, 400))
    for value in ("Bearer", "Bearer ", "Basic eDp5", "x" * 10_000, "\xff\xff"):
        yield HttpCase(
            f"authorization {value[:20]!r}", post(_ROUTE, GOOD[_ROUTE], f"authorization: {value}\r\n"), (200,)
        )
    yield HttpCase(
        "1,000 headers", post(_ROUTE, GOOD[_ROUTE], "".join(f"x-{i}: y\r\n" for i in range(1000))), (200, 431)
    )
    yield HttpCase("headers of 100 kB", post(_ROUTE, GOOD[_ROUTE], f"x: {'a' * 100_000}\r\n"), (431,))
    yield HttpCase("another origin", post(_ROUTE, GOOD[_ROUTE], "origin: http://evil.test\r\n"), (403,))
    yield HttpCase(
        "an upgrade", post(_ROUTE, GOOD[_ROUTE], "upgrade: websocket\r\nconnection: upgrade\r\n"), (200, 400)
    )
    yield HttpCase("expect: 100-continue", post(_ROUTE, GOOD[_ROUTE], "expect: 100-continue\r\n"), (200,))
    yield HttpCase("no host", b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n", (200, 400))


def _bodies() -> Iterator[HttpCase]:
    good = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY)
    chunked = _HEAD + b"transfer-encoding: chunked\r\n\r\n"
    yield HttpCase("chunks", chunked + good, (200,))
    yield HttpCase(
        "chunks of a byte", chunked + b"".join(b"1\r\n%c\r\n" % b for b in _BODY) + b"0\r\n\r\n", (200,)
    )
    yield HttpCase("chunks with extensions", chunked + good.replace(b"\r\n{", b";x=y\r\n{", 1), (200,))
    yield HttpCase("chunks and a trailer", chunked + good[:-2] + b"x: y\r\n\r\n", (200, 400))
    yield HttpCase("a chunk size that is none", chunked + b"zz\r\n{}\r\n0\r\n\r\n", (400,))
    yield HttpCase("a negative chunk size", chunked + b"-1\r\n{}\r\n0\r\n\r\n", (400,))
    yield HttpCase("a chunk size beyond 64 bits", chunked + b"f" * 40 + b"\r\n{}", (400, 413))
    yield HttpCase("a chunk longer than its size", chunked + b"1\r\n{}{}\r\n0\r\n\r\n", (400,))
    yield HttpCase("two lengths", _HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x", (400,))
    both = b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"
    yield HttpCase("a length and chunks", _HEAD + both + good, (400,))
    for length in ("-1", "x", "1e3", "0x10", "99999999999999999999999", "+2", " ", "1, 1"):
        yield HttpCase(
            f"content-length {length}", _HEAD + f"content-length: {length}\r\n\r\n{{}}".encode(), (400,)
        )
    yield HttpCase("content-length of 100 GB", _HEAD + b"content-length: 99999999999\r\n\r\n{", (413,))
    yield HttpCase("an unknown transfer coding", _HEAD + b"transfer-encoding: gzip\r\n\r\n{}", (400, 501))
    yield HttpCase("no length", _HEAD + b"\r\n" + _BODY, (400,))


def _lines() -> Iterator[HttpCase]:
    for what, sent in {
        "no HTTP": b"harbour\r\n\r\n",
        "zeros": b"\0" * 1000 + b"\r\n\r\n",
        "TLS": bytes.fromhex("16030100a5010000a10303") + b"\x55" * 160,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/9.9": b"GET /v1/models HTTP/9.9\r\nhost: x\r\n\r\n",
        "a header without a colon": _HEAD + b"harbour\r\n\r\n",
        "a blank before the colon": _HEAD + b"content-length : 2\r\n\r\n{}",
        "a folded header": _HEAD + b"x: y\r\n z\r\ncontent-length: 2\r\n\r\n{}",
        "a header name of other bytes": _HEAD + b"\xff\xfe: y\r\n\r\n",
        "a lone CR": b"GET /v1/models HTTP/1.1\rhost: x\r\r",
    }.items():
        yield HttpCase(what, sent, (400, 505), half_close=True)
