"""`tridecode bench front --preset`: streams through the front, next to those of the engine alone.

The engine is measured first, in a separate process, as by `tridecode bench engine`. Then the front starts the
same engine, and the client in C reads the same number of streams.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tridecode.backend.base.errors import TridecodeError
from tridecode.tools.bench.engines import ours, run_apart
from tridecode.tools.bench.engines.server import engine_settings
from tridecode.tools.bench.front.processes import Client, Front
from tridecode.tools.bench.front.setup import build_client
from tridecode.tools.bench.measure import Job, measure, one_length
from tridecode.tools.bench.reports.report import check_output, table, write_report
from tridecode.tools.bench.shapes.random_repo import write_random_repository

#: for a large model to load: its weights are drawn at the start
_READY_S = 600.0
_COLUMNS = {
    "streams": "streams",
    "engine_step_ms": "engine ms/step",
    "front_step_ms": "front ms/step",
    "step_ratio": "ratio",
    "engine_first_token_ms": "engine first token ms",
    "front_first_token_ms": "front",
    "front_first_event_p50_ms": "p50",
    "front_first_event_p99_ms": "p99",
    "tokens_per_event": "tokens an event",
}


class _Streams:
    """Generate through the front: one stream for each prompt, all with the first prompt's ids.

    totals: of the client, by (streams, tokens), a list of runs.
    """

    def __init__(self, program: Path, front: Front):
        self._program, self._front = program, front
        self.totals: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int | Sequence[int]) -> float:
        count, tokens = len(prompts), one_length(output_tokens)
        body = {"prompt": list(prompts[0]), "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": False}}
        client = Client(
            self._program,
            self._front,
            "/v1/completions",
            body,
            "-c",
            str(count),
            "-n",
            str(count),
            "-r",
            "1000000",
        )
        found = client.finish()[-1]
        self.totals.setdefault((count, tokens), []).append(found)
        return float(found["seconds"])


def run_served(job: Job, output: Path) -> Path:
    """Measure, print a table and write front-served.json, whose path is returned. Raises TridecodeError."""
    check_output(output)
    console = Console()
    console.print("the engine alone", highlight=False)
    alone = run_apart(ours.ENGINE, job)
    if "error" in alone:
        raise TridecodeError(alone["error"])
    console.print("the engine behind the front", highlight=False)
    served, streams = _through_the_front(job)
    rows = [_row(job, *pair, streams) for pair in zip(alone["batches"], served["batches"])]
    console.print(
        table("through the front", list(_COLUMNS.values()), [[row[key] for key in _COLUMNS] for row in rows])
    )
    totals = {f"{count} streams of {tokens}": runs for (count, tokens), runs in streams.totals.items()}
    results = {"rows": rows, "engine": alone, "front": served, "client": totals}
    report = write_report(output / "front-served.json", "front-served", asdict(job), results)
    console.print(f"wrote {report}", highlight=False, soft_wrap=True)
    return report


def _through_the_front(job: Job) -> tuple[dict[str, Any], _Streams]:
    with tempfile.TemporaryDirectory(prefix="bench-front-") as name:
        folder = Path(name)
        repository = write_random_repository(
            folder / "repository", job.shape, engine_settings(job, job.shape)
        )
        program = build_client(folder)
        front = Front(repository, folder, "", 1, None, ready_s=_READY_S)
        try:
            streams = _Streams(program, front)
            return measure(streams.generate, job, job.shape.vocab_size), streams
        finally:
            front.close()


def _row(job: Job, alone: dict[str, Any], served: dict[str, Any], streams: _Streams) -> dict[str, Any]:
    count = alone["batch"]
    runs = streams.totals[count, job.output_tokens][-job.repeats :]
    firsts = [run["first_event_ms"] for run in runs]
    return {
        "streams": count,
        "engine_step_ms": alone["step_ms"],
        "front_step_ms": served["step_ms"],
        "step_ratio": round(served["step_ms"] / alone["step_ms"], 4),
        "engine_first_token_ms": alone["first_token_ms"],
        "front_first_token_ms": served["first_token_ms"],
        "front_first_event_p50_ms": statistics.median(one["p50"] for one in firsts),
        "front_first_event_p99_ms": statistics.median(one["p99"] for one in firsts),
        "tokens_per_event": round(
            count * job.output_tokens / statistics.median(run["events"] for run in runs), 3
        ),
    }
