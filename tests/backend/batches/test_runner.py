"""A run of a batch over a service that answers everything."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tridecode.backend.batches import runner as module
from tridecode.backend.batches.answer_files import AnswerFiles
from tridecode.backend.batches.lines import InputLines, Request
from tridecode.backend.batches.meter import Meter
from tridecode.backend.batches.records import Response
from tridecode.backend.batches.runner import Runner


class _Slow:
    async def send(self, request: Request) -> Response:
        await asyncio.sleep(0.01)
        return Response(200, "r", msgspec.Raw(b"{}"))


def test_progress_continues_after_the_disk_was_full_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    source = tmp_path / "in.jsonl"
    body = {"model": "m", "prompt": "p"}
    requests = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(20)
    ]
    source.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in requests))
    shown: list[int] = []

    def show() -> None:
        shown.append(len(shown))
        if len(shown) in (1, 2):
            raise OSError(28, "No space left on device")

    with closing(InputLines(source)) as lines, AnswerFiles(tmp_path / "out", tmp_path / "errors") as files:
        runner = Runner(lines, files, Meter())
        asyncio.run(runner.run(_Slow(), 1, asyncio.Event(), show))
    assert len(shown) > 4 and runner.meter.totals.answers == 20
    assert sum("could not be shown" in record.getMessage() for record in caplog.records) == 1
