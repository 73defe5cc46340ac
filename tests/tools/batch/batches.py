"""Files of requests, and the command that answers them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tridecode.tools.cli import app


def completion(custom_id: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer begins with its custom_id."""
    body = {"prompt": f"{custom_id} ", "max_tokens": 8, "echo": True, "temperature": 0, **fields}
    return request(custom_id, "/v1/completions", body)


def request(custom_id: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Iterable[Any]) -> Path:
    """Write requests; a text is written as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8", errors="surrogateescape")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a file; the last one must be whole, too."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)])


def start(*arguments: object, log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own; its stderr goes to the end of `log`."""
    command = [sys.executable, "-m", "tridecode.tools.cli", "batch", *map(str, arguments)]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options)
