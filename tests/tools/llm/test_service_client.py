"""The HTTP of LLM.connect: addresses, keys and proxies."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.llm.service_client import ServiceClient


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"key": "%s"}' % self.headers.get("authorization", "").encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_service_of_this_machine_is_reached_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    server = HTTPServer(("127.0.0.1", 0), _Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = ServiceClient(f"http://127.0.0.1:{server.server_port}/v1", "secret", 60.0, 1)
    try:
        assert client.call("/v1/models") == {"key": "Bearer secret"}
    finally:
        client.close()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("url", ["localhost:9000", "http://[::1", "http://host:port"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="wanted http://host:port"):
        ServiceClient(url, "", 60.0, 1)
