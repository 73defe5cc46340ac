"""`tridecode bench front`: all phases, in turns with another tree's front if one is given."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.bench.front import phases
from tridecode.tools.bench.front.phases import Setting
from tridecode.tools.bench.front.setup import build_client, make_repository
from tridecode.tools.bench.reports.report import check_output, table, write_report

Phase = Callable[[Setting], dict[str, Any]]

#: seconds between steps: of a stream alone, of several, and of those whose tokens the front must merge
_ALONE_S, _STEP_S, _FAST_S = 0.005, 0.02, 0.001
#: columns of the table of a phase: name of a value, and its unit
_SHOWN = (
    ("cpu_us_per_chunk", "us a chunk"),
    ("tokens_per_s", "tokens/s"),
    ("tokens_per_chunk", "tokens a chunk"),
    ("cpu_us_per_request", "us a request"),
    ("requests_per_s", "requests/s"),
    ("rss_mb", "MB"),
    ("cancel_ms", "ms to the engine's cancel, p50"),
    ("first_event_ms_of_a_new_request", "ms of a new request, p50"),
    ("cpu_s", "s of CPU"),
)


@dataclass(frozen=True)
class FrontPlan:
    """beside: a folder with another tree's package tridecode, whose front takes turns with this one's."""

    streams: tuple[int, ...]
    idle: int
    workers: int
    seconds: float
    rounds: int
    beside: Path | None


def run_front(plan: FrontPlan, output: Path) -> Path:
    """Measure, print a table and write front.json, whose path is returned. Raises ConfigError."""
    check_output(output)
    if plan.beside is not None and not (plan.beside / "tridecode" / "backend").is_dir():
        raise ConfigError(f"--beside is {plan.beside}; wanted a folder that has tridecode/backend")
    trees: dict[str, Path | None] = {"this": None}
    if plan.beside is not None:
        trees["beside"] = plan.beside.absolute()
    console = Console()
    runs = _measure(plan, trees, console)
    medians = {
        label: {phase: _median(found) for phase, found in kinds.items()} for label, kinds in runs.items()
    }
    console.print(table("the front before a fake engine", ["", *medians], _rows(medians)))
    settings = {
        "streams": list(plan.streams),
        "idle": plan.idle,
        "workers": plan.workers,
        "seconds": plan.seconds,
        "rounds": plan.rounds,
        "beside": None if plan.beside is None else plan.beside.name,
    }
    report = write_report(output / "front.json", "front", settings, {"medians": medians, "runs": runs})
    console.print(f"wrote {report}", highlight=False, soft_wrap=True)
    return report


def _measure(
    plan: FrontPlan, trees: Mapping[str, Path | None], console: Console
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return label -> phase -> a result of each round."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {label: {} for label in trees}
    with tempfile.TemporaryDirectory(prefix="bench-front-") as name:
        folder = Path(name)
        repository, tokens, vocab_size = make_repository(folder / "repository")
        client = build_client(folder)
        for number in range(plan.rounds):
            for phase, call in _phases(plan).items():
                for label, tree in trees.items():
                    console.print(f"round {number + 1}: {phase}, {label}", highlight=False)
                    setting = Setting(repository, tokens, vocab_size, client, tree, plan.seconds)
                    found = {"load_average": os.getloadavg()[0], **call(setting)}  # of the machine, before
                    runs[label].setdefault(phase, []).append(found)
    return runs


def _phases(plan: FrontPlan) -> dict[str, Phase]:
    def streams(count: int, step_s: float, workers: int = 1) -> Phase:
        return lambda setting: phases.streams(setting, count, step_s, workers)

    found: dict[str, Phase] = {
        f"{count} streams": streams(count, _ALONE_S if count == 1 else _STEP_S) for count in plan.streams
    }
    most = max(plan.streams)
    found[f"{most} streams, merged"] = streams(most, _FAST_S)
    found["requests"] = phases.requests
    if plan.workers > 1:
        found[f"{most} streams, {plan.workers} workers"] = streams(most, _STEP_S, plan.workers)
        found[f"requests, {plan.workers} workers"] = lambda one: phases.requests(one, workers=plan.workers)
    if plan.idle:
        found["idle"] = lambda setting: phases.idle(setting, plan.idle)
    found["leaving after a token"] = lambda setting: phases.leaving(setting, 1)
    found["leaving before a token"] = lambda setting: phases.leaving(setting, 0)
    found["import"] = phases.importing
    return found


def _median(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each number, in nested objects too; of other values the first."""
    result: dict[str, Any] = {}
    for name, first in found[0].items():
        values = [one.get(name, first) for one in found]
        if isinstance(first, Mapping):
            result[name] = _median(values)
        else:
            result[name] = statistics.median(values) if isinstance(first, (int, float)) else first
    return result


def _rows(medians: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    columns = list(medians.values())
    for phase, found in columns[0].items():
        for name, unit in _SHOWN:
            if name in found:
                values = [column[phase][name] for column in columns]
                shown = [value["p50"] if isinstance(value, Mapping) else value for value in values]
                rows.append([f"{phase}: {unit}", *shown])
    return rows
