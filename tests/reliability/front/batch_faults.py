"""Kills of every process while a batch runs, against the real server and engine.

    python -m tests.reliability.front.batch_faults --lines 400 --only kill:front

Faults strike one after the other. In the end each line has exactly one result, and its text is that of the
same request alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.reliability.service import Service, build_repository, end_on_sigterm
from tridecode.backend.front.batches.objects import FINAL, result_ids
from tridecode.tools.serve.ports import free_ports

WORKERS = 2
READY_S, END_S = 120.0, 400.0
#: roles in the order of their deaths; serve is started again afterwards
ROLES = ("batches", "front:0", "front", "rank0", "supervisor", "tritonserver", "serve")
FAULTS = [f"kill:{role}" for role in ROLES]


class BatchRange:
    """A batch that lives through all faults. folder: of the repository and of the store."""

    def __init__(self, folder: Path, lines: int = 400, tokens: int = 60):
        (self.port,) = free_ports(1)
        self.store = folder / "batches"
        self._repository = build_repository(
            folder, openai_port=self.port, openai_workers=WORKERS, openai_batch_dir=self.store
        )
        common = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self._bodies = {
            f"line {n}": {"prompt": [3 + n % 300, 3 + n // 300, 7, 11], **common} for n in range(lines)
        }
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self.service: Service | None = None
        self.batch = ""

    def start(self) -> None:
        """Start the server unless it runs, and the batch unless it exists."""
        if self.service is not None and self.service.ended():
            self.service.wait_nothing_left()
            self.service.close()
            self.service = None
        self.service = self.service or Service(self._repository)
        self._wait(lambda: self._get("/health").status_code == 200, "the OpenAI service")
        if not self.batch:
            url = "/v1/completions"
            asks = [
                {"custom_id": name, "method": "POST", "url": url, "body": body}
                for name, body in self._bodies.items()
            ]
            content = "\n".join(map(json.dumps, asks)).encode()
            form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in", content)}}
            file_id = self._http.post("/v1/files", **form).json()["id"]
            wanted = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
            self.batch = self._http.post("/v1/batches", json=wanted).json()["id"]

    def strike(self, fault: str) -> int:
        """Kill a process once further lines have been answered; return the number of results then."""
        self.start()
        assert self.service is not None
        before = self.done()
        self._wait(lambda: before < self.done(), "a result")
        self.service.note_regions()
        self.service.roles()[fault.removeprefix("kill:")].send_signal(signal.SIGKILL)
        return self.done()

    def done(self) -> int:
        """Results that are on the disk."""
        paths = [self.store / "files" / f"{file_id}.data" for file_id in result_ids(self.batch)]
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    def complaints(self) -> list[str]:
        """Wait for the end of the batch; return what is wrong with its results."""
        self.start()
        self._wait(lambda: self._get(f"/v1/batches/{self.batch}").json()["status"] in FINAL, "its end", END_S)
        found = self._get(f"/v1/batches/{self.batch}").json()
        wrong = (
            [] if found["status"] == "completed" else [f"the batch is {found['status']}: {found['errors']}"]
        )
        results = [line for name in ("output", "error") for line in self._lines(found[f"{name}_file_id"])]
        counts = Counter(line["custom_id"] for line in results)
        wrong += [f"{name} has {counts[name]} results" for name in self._bodies if counts[name] != 1]
        wrong += [f"{line['custom_id']}: {line['error']}" for line in results if line["error"]]
        answers = {line["custom_id"]: line["response"]["body"] for line in results if not line["error"]}
        for name in list(self._bodies)[:: max(1, len(self._bodies) // 20)]:
            alone = self._http.post("/v1/completions", json=self._bodies[name]).json()
            if name in answers and answers[name]["choices"] != alone["choices"]:
                wrong.append(f"{name} has another text than alone")
        return wrong

    def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        return (
            []
            if file_id is None
            else list(map(json.loads, self._get(f"/v1/files/{file_id}/content").iter_lines()))
        )

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path)
        except httpx.TransportError:
            return httpx.Response(503, json={"status": ""})

    @staticmethod
    def _wait(condition: Callable[[], object], what: str, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
            time.sleep(0.05)

    def close(self) -> None:
        self._http.close()
        if self.service is not None:
            self.service.close()
            self.service = None


def run(folder: Path, faults: Sequence[str], lines: int, tokens: int) -> list[str]:
    """Cause the faults; return complaints."""
    strikes = BatchRange(folder, lines, tokens)
    try:
        for fault in faults:
            print(f"{fault}: {strikes.strike(fault)} of {lines} lines had a result", flush=True)
        if strikes.done() >= lines:
            return ["the batch ended before the last fault; wanted more lines"]
        return strikes.complaints()
    finally:
        strikes.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--only", action="append", choices=FAULTS, default=[])
    arguments = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tdbatch") as folder:
        wrong = run(Path(folder), arguments.only or FAULTS, arguments.lines, arguments.tokens)
    print("\n".join(wrong[:20]) or "each line has one result")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
