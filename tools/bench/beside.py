"""`tridecode bench beside`: one checkpoint on one CPU, through our engine, our server, and other engines.

Other processes may use the machine meanwhile, so the engines alternate: each runs once per round, a figure is
its median over the rounds, and a ratio is the median of the per-round ratios. Each run's record has the
number of processors that other processes used; with --patience-s, a disturbed run is repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tridecode.backend.base.errors import TridecodeError
from tridecode.tools.bench.compare import BATCH_COLUMNS, rates_of
from tridecode.tools.bench.engines import BenchEngine, engines_of, ours, run_apart, server
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.neighbours import Neighbours
from tridecode.tools.bench.reports.plots import plot_batches
from tridecode.tools.bench.reports.report import table, write_report
from tridecode.tools.demo import demo_repository, packaged_model
from tridecode.tools.progress import spinner

ENGINE, SERVER = ours.ENGINE.name, server.ENGINE.name
_MOST_OF_OTHERS = 16  # transformers would take minutes for 64 sequences
_CALM_CORES = 0.15  # processors that others may use without disturbing a run
_LOOK_S = 3.0
_FIGURES = [key for key in BATCH_COLUMNS if key != "batch"]
Round = Mapping[str, Mapping[str, Any]]  # engine -> the result of its run, or its error


@dataclass(frozen=True)
class Ratio:
    """Ratio of the tokens per second, prompts included, of one (engine, sequences) to those of another."""

    over: tuple[str, int]
    under: tuple[str, int]

    def __str__(self) -> str:
        names = [f"{name} with {count}" for name, count in (self.over, self.under)]
        return " over ".join(names)

    def of(self, one: Round) -> float | None:
        over, under = (rates_of(one.get(name, {})).get(str(count)) for name, count in (self.over, self.under))
        return over / under if over and under else None


def run_beside(
    model: str | None, job: Job, rounds: int, patience_s: float, cache: Path, output: Path, name: str
) -> None:
    """Measure, print, and write `name`.json and `name`.png.

    model: a Hugging Face directory or .gguf file, None: SmolLM2-135M-Instruct; its repository is kept under
    `cache`. job.batches: streams; other engines run those up to 16. patience_s: time limit for the repetition
    of disturbed runs. Raises TridecodeError if our engine or server fails.
    """
    checkpoint = model or str(packaged_model())
    repository = demo_repository(checkpoint, cache)
    of_ours = replace(job, directory=str(repository), device="cpu")
    few = tuple(batch for batch in job.batches if batch <= _MOST_OF_OTHERS)
    of_others = replace(of_ours, directory=checkpoint, dtype="fp32", batches=few or (1,))
    engines = engines_of("beside")
    done: list[Round] = []
    until = time.monotonic() + patience_s
    with spinner("the engines in turns") as say:
        for number in range(1, rounds + 1):
            found: dict[str, Mapping[str, Any]] = {}
            for engine in engines:
                say(f"round {number} of {rounds}: {engine.name}")
                found[engine.name] = _undisturbed(engine, of_ours if engine.ours else of_others, until)
                if engine.ours and "error" in found[engine.name]:
                    raise TridecodeError(found[engine.name]["error"])
            done.append(found)
    medians = {engine: _medians(done, engine) for engine in done[0]}
    others = [engine.name for engine in engines if not engine.ours]
    ratios = {str(ratio): _median(ratio, done) for ratio in _ratios(job.batches, others)}
    title = f"{Path(checkpoint).name.removesuffix('.gguf')} fp32, {job.prompt_tokens} tokens in, "
    title += f"{job.output_tokens} out, {rounds} rounds"
    _show(title, done[0], medians, ratios)
    settings = {**asdict(replace(job, device="cpu")), "rounds": rounds, "model": Path(checkpoint).name}
    results = {"medians": medians, "ratios": ratios, "rounds": [_without_paths(one) for one in done]}
    written = write_report(output / f"{name}.json", "beside", settings, results)
    picture = plot_batches(output / f"{name}.png", title, {k: v for k, v in medians.items() if v})
    Console().print(f"wrote {written}, {picture}", highlight=False)


def _undisturbed(engine: BenchEngine, job: Job, until: float) -> dict[str, Any]:
    """Return the result of a run and, as "neighbours", the processors that others used; repeat it if they
    used too many.
    """
    while True:
        with Neighbours() as neighbours:
            found = run_apart(engine, job)
        found["neighbours"] = round(neighbours.cores, 3)
        if neighbours.cores <= _CALM_CORES or time.monotonic() > until:
            return found
        while time.monotonic() < until and _others_now() > _CALM_CORES:
            pass


def _others_now() -> float:
    with Neighbours() as neighbours:
        time.sleep(_LOOK_S)
    return neighbours.cores


def _rows(one: Round, engine: str) -> Sequence[Mapping[str, Any]]:
    return one.get(engine, {}).get("batches", ())


def _medians(rounds: Sequence[Round], engine: str) -> list[dict[str, Any]]:
    """One row per batch size; none for an engine that failed in any round."""
    tables = [_rows(one, engine) for one in rounds]
    if not all(tables):
        return []
    return [
        {"batch": rows[0]["batch"], **{key: _middle([row[key] for row in rows]) for key in _FIGURES}}
        for rows in zip(*tables)
    ]


def _middle(values: Sequence[float | None]) -> float | None:
    """Return the median, or None if a run lacks the figure: not every engine reports when its steps ended."""
    found = [value for value in values if value is not None]
    return round(statistics.median(found), 3) if found and len(found) == len(values) else None


def _ratios(batches: Sequence[int], others: Sequence[str]) -> list[Ratio]:
    pairs = [Ratio((ENGINE, batch), (ENGINE, batches[0])) for batch in batches[1:]]
    pairs += [Ratio((SERVER, batch), (SERVER, batches[0])) for batch in batches[1:]]
    pairs += [Ratio((SERVER, batch), (ENGINE, batch)) for batch in batches]
    few = [batch for batch in batches if batch <= _MOST_OF_OTHERS]
    return pairs + [Ratio((ENGINE, b), (other, b)) for other in others for b in few]


def _median(ratio: Ratio, rounds: Sequence[Round]) -> float | None:
    found = [ratio.of(one) for one in rounds]
    values = [value for value in found if value is not None]
    return _middle(values) if values else None


def _without_paths(one: Round) -> dict[str, Any]:
    return {engine: {k: v for k, v in found.items() if k != "model"} for engine, found in one.items()}


def _show(
    title: str, first: Round, medians: Mapping[str, Sequence], ratios: Mapping[str, float | None]
) -> None:
    console = Console()
    rows = [[engine, *(row[key] for key in BATCH_COLUMNS)] for engine in medians for row in medians[engine]]
    console.print(table(title, ["", *BATCH_COLUMNS.values()], rows))
    for engine, found in first.items():
        console.print(f"{engine}: {found.get('error', found.get('engine'))}", highlight=False, markup=False)
    console.print(table("tokens/s in all", ["", "ratio"], [[name, ratio] for name, ratio in ratios.items()]))
