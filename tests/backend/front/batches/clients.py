"""A client of files and batches: OpenAI's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openai.types import Batch

from tests.backend.front.fronts import Front
from tests.waiting import wait_until

#: of the front of conftest.py
LIMITS = ("--batch-dir-bytes", str(50 << 20), "--batch-max-files", "200")
FINAL = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = "/v1/completions", **fields: Any) -> str:
    """A request whose answer begins with its custom_id."""
    body = {"prompt": f"{custom_id} ", "max_tokens": 8, "echo": True, "temperature": 0, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def upload(front: Front, lines: list[str], name: str = "in.jsonl") -> str:
    """Return the id of a file with these lines."""
    content = "".join(f"{one}\n" for one in lines).encode("utf-8", "surrogateescape")
    return front.openai.files.create(file=(name, content), purpose="batch").id


def create(front: Front, lines: list[str], endpoint: Any = "/v1/completions", window: Any = "24h") -> Batch:
    file_id = upload(front, lines)
    return front.openai.batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window=window, metadata={"of": "a test"}
    )


def wait(front: Front, batch_id: str, statuses: tuple[str, ...] = FINAL, seconds: float = 120) -> Batch:
    """Wait until the batch has one of these statuses."""
    found: list[Batch] = []

    def ended() -> bool:
        found.append(front.openai.batches.retrieve(batch_id))
        return found[-1].status in statuses

    wait_until(ended, seconds, f"a batch that is {' or '.join(statuses)}")
    return found[-1]


def results(front: Front, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file of results; none for None."""
    if file_id is None:
        return []
    content = front.openai.files.content(file_id).content
    assert content.endswith(b"\n")
    return [json.loads(one) for one in content.splitlines()]


def ids_of(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(one["custom_id"] for one in lines)


def data_files(folder: Path) -> int:
    return len(list((folder / "files").glob("*.data")))
