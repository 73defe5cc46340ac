"""Programs written by a test, a model repository, and a fake of Triton's repository calls."""

from __future__ import annotations

import json
import stat
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tridecode.tools.serve import triton_access
from tridecode.tools.serve.triton_http import TritonHttp


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def repository(path: Path, name: str = "toy", text: str = "") -> Path:
    (path / name).mkdir(parents=True, exist_ok=True)
    (path / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\n{text}')
    return path


class FakeTriton:
    """Answers the repository calls and keeps them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.keys: list[str | None] = []
        self.state = "READY"
        self.failing_loads = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                fake.keys.append(self.headers.get(triton_access.HEADER))
                status, body = fake.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                assert self.path == "/v2/health/ready"
                self.send_response(200 if fake.state == "READY" else 400)
                self.end_headers()

            def log_message(self, *_arguments) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> tuple[int, bytes]:
        if path == "/v2/repository/index":
            return 200, json.dumps([{"name": "toy", "version": "1", "state": self.state}]).encode()
        self.calls.append(path.rsplit("/", 2)[-2] + " " + path.rsplit("/", 1)[-1])
        if path.endswith("/load") and self.failing_loads:
            self.failing_loads -= 1
            return 400, b'{"error": "failed to load toy"}'
        self.state = "READY" if path.endswith("/load") else "UNAVAILABLE"
        return 200, b""

    @property
    def http(self) -> TritonHttp:
        return TritonHttp(f"127.0.0.1:{self.server.server_port}")
