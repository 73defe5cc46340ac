"""A server on the loopback interface that speaks the hub's protocol, as far as a download needs it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """repositories: "org/name" -> revision -> folder; a commit is named by the bytes of its files.

    missing: names of files that are listed and answered with 404. cuts: name -> bytes after which each
    connection is closed. requests: (method, path, Range header) of each request.
    """

    url: str = ""
    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    cuts: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables with which a program downloads from here into `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}

    def fetched(self, name: str) -> list[str]:
        """Return the Range headers of the downloads of a file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{name}")]

    def find(self, repository: str, revision: str) -> tuple[str, Path] | None:
        """Return commit and folder of a revision, which may be the commit itself."""
        revisions = self.repositories.get(repository, {})
        for name, folder in revisions.items():
            if revision in (name, commit := commit_of(folder)):
                return commit, folder
        return None


def commit_of(folder: Path) -> str:
    whole = hashlib.sha1()
    for path in _files(folder):
        whole.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
            self._tree(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], found[3], with_body)
        else:
            self._refuse("RepoNotFound")

    def _info(self, repository: str, revision: str) -> None:
        if (found := self._found(repository, revision)) is None:
            return
        commit, folder = found
        names = [{"rfilename": path.relative_to(folder).as_posix()} for path in _files(folder)]
        self._json({"_id": "1", "id": repository, "modelId": repository, "sha": commit, "siblings": names})

    def _tree(self, repository: str, revision: str) -> None:
        if (found := self._found(repository, revision)) is None:
            return
        _, folder = found
        self._json(
            [
                {
                    "type": "file",
                    "path": path.relative_to(folder).as_posix(),
                    "size": path.stat().st_size,
                    "oid": _etag(path),
                }
                for path in _files(folder)
            ]
        )

    def _file(self, repository: str, revision: str, name: str, with_body: bool) -> None:
        if (found := self._found(repository, revision)) is None:
            return
        commit, folder = found
        if name in self.hub.missing or not (folder / name).is_file():
            self._refuse("EntryNotFound")
            return
        data = (folder / name).read_bytes()
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(span[1]) if span else 0
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{_etag(folder / name)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data) - first))
        self.send_header("Accept-Ranges", "bytes")
        if span:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        data = data[first:]
        cut = self.hub.cuts.get(name)
        if cut is not None and len(data) > cut:
            self.wfile.write(data[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(data)

    def _found(self, repository: str, revision: str) -> tuple[str, Path] | None:
        found = self.hub.find(repository, revision)
        if found is None:
            self._refuse("RevisionNotFound" if repository in self.hub.repositories else "RepoNotFound")
        return found

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
