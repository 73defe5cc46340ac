"""`tridecode bench engine`, `server` and `compare`: run, print a table, write JSON and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tridecode.backend.base.errors import TridecodeError
from tridecode.tools.bench.engines import engines_of, ours, run_apart
from tridecode.tools.bench.engines.server import bench_server
from tridecode.tools.bench.measure import Job, Say, silent
from tridecode.tools.bench.reports.plots import plot_batches
from tridecode.tools.bench.reports.report import table, write_report
from tridecode.tools.progress import spinner

#: key of a row -> its title
BATCH_COLUMNS = {
    "batch": "sequences",
    "first_token_ms": "first token ms",
    "step_ms": "ms/step",
    "steady_step_ms": "ms/step steady",
    "tokens_per_s": "tokens/s decoding",
    "total_tokens_per_s": "tokens/s in all",
}
#: of our own engine: the time to read a step's bytes once
_ROOF = {"roof_ms": "ms of its bytes"}
_WORKLOAD_COLUMNS = {
    "requests": "requests",
    "at_a_time": "at a time",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "seconds": "seconds",
    "tokens_per_s": "tokens/s",
}
#: figures of engines that report when their steps ended
_LATENCY_COLUMNS = {
    "first_token_p50_ms": "first token ms p50",
    "first_token_p95_ms": "p95",
    "token_gap_p50_ms": "between tokens ms p50",
    "token_gap_p99_ms": "p99",
    "decode_steps": "decode steps",
    "decode_step_ms": "ms",
    "mixed_steps": "steps with prompts",
    "mixed_step_ms": "ms",
    "prompt_tokens_per_mixed_step": "their prompt tokens",
    "decoding_share": "slots that decode",
}


def run_engine(job: Job, output: Path) -> None:
    with spinner("the engine alone") as say:
        result = ours.bench_engine(job, say)
    cache = "" if job.kv_cache_dtype == "auto" else f"-{job.kv_cache_dtype}-cache"
    cache += "-int8-head-inputs" if job.int8_head_inputs else "-int8-head" if job.int8_head else ""
    _conclude(f"engine{cache}", job, {ours.ENGINE.name: result}, output)


def run_compare(job: Job, output: Path, command: str = "compare") -> None:
    """Run each engine in its own process; one that fails or is absent becomes one line of the report.

    command: "compare" or "mix"; the engines of "mix" end each request of a batch individually.
    """
    results = {}
    for engine in engines_of(command):
        with spinner(f"{engine.name}: {_model(job)}"):
            results[engine.name] = run_apart(engine, job)
    _conclude(command, job, results, output)
    if "error" in results[ours.ENGINE.name]:
        raise TridecodeError(results[ours.ENGINE.name]["error"])


def compare_with_engine(
    job: Job, *, tokens_in: bool = False, door_python: str | None = None, say: Say = silent
) -> dict[str, Any]:
    """Measure the engine alone, then the server, on this machine: {"engine", "server", "overhead"}.

    overhead: per batch size, the server's milliseconds per step relative to the engine's, in percent, and the
    difference of their times to the first token.
    """
    say("the engine alone")
    alone = run_apart(ours.ENGINE, job)
    if "error" in alone:
        raise TridecodeError(alone["error"])
    served = bench_server(job, tokens_in=tokens_in, door_python=door_python, say=say)
    overhead = [
        {
            "batch": engine["batch"],
            "step_percent": round(100 * (server["step_ms"] / engine["step_ms"] - 1), 2),
            "first_token_ms": round(server["first_token_ms"] - engine["first_token_ms"], 3),
        }
        for engine, server in zip(alone["batches"], served["batches"])
    ]
    return {"engine": alone, "server": served, "overhead": overhead}


def run_server(job: Job, output: Path, *, tokens_in: bool, door_python: str | None) -> None:
    with spinner("the engine alone, then the server") as say:
        result = compare_with_engine(job, tokens_in=tokens_in, door_python=door_python, say=say)
    rows = [
        (
            alone["batch"],
            alone["step_ms"],
            served["step_ms"],
            f"{cost['step_percent']:+.1f} %",
            alone["first_token_ms"],
            served["first_token_ms"],
            "{} / {} / {}".format(*served["responses_per_stream"]),
        )
        for alone, served, cost in zip(
            result["engine"]["batches"], result["server"]["batches"], result["overhead"]
        )
    ]
    sides = [f"{side} {figure}" for figure in ("ms/step", "first ms") for side in ("engine", "server")]
    responses = f"responses of {job.output_tokens} tokens"
    columns = ["streams", *sides[:2], "overhead", *sides[2:], responses]
    Console().print(table(_title("overhead of the server", job), columns, rows))
    engines = {name: result[name]["batches"] for name in ("engine", "server")}
    name, title = f"server-{_model(job)}", _title("engine alone and behind Triton", job)
    picture = plot_batches(output / f"{name}.png", title, engines)
    _wrote(write_report(output / f"{name}.json", "server", asdict(job), result), picture)


def ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the ratio of our output tokens per second, prompts included, to each other engine's: {engine:
    {sequences: ratio}}.
    """
    rates = {name: rates_of(result) for name, result in results.items()}
    own = rates.pop(ours.ENGINE.name, {})
    found = {
        name: {batch: round(own[batch] / rate, 3) for batch, rate in theirs.items() if batch in own}
        for name, theirs in rates.items()
    }
    return {name: times for name, times in found.items() if times}


def rates_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Output tokens per second, prompts included, by the number of sequences."""
    if "workload" in result:
        return {str(result["workload"]["at_a_time"]): result["workload"]["tokens_per_s"]}
    return {str(row["batch"]): row["total_tokens_per_s"] for row in result.get("batches", ())}


def _conclude(kind: str, job: Job, results: Mapping[str, Mapping[str, Any]], output: Path) -> None:
    console, curves, times = Console(), {}, ratios(results)
    for name, result in results.items():
        label = result.get("engine", name)
        if "error" in result:
            console.print(f"{name}: {result['error']}", highlight=False, markup=False)
        elif "workload" in result:
            console.print(_table(_title(label, job), _WORKLOAD_COLUMNS, [result["workload"]]))
            if "decode_steps" in result["workload"]:
                console.print(_table(f"{name}, step by step", _LATENCY_COLUMNS, [result["workload"]]))
        else:
            curves[label] = result["batches"]
            console.print(_table(_title(label, job), {**BATCH_COLUMNS, **_ROOF}, result["batches"]))
    if times:
        rows = [[name, batch, ratio] for name, of in times.items() for batch, ratio in of.items()]
        console.print(table("tokens/s over those of", ["", "sequences", "ratio"], rows))
    settings = asdict(replace(job, prompts=(), outputs=()))
    name = f"{kind}-{_model(job)}"  # one file per model
    if job.workload and job.workload != kind:
        name += f"-{job.workload}"
    report = {**results, "ratios": times} if times else dict(results)
    written = [write_report(output / f"{name}.json", kind, settings, report)]
    if curves:
        written.append(plot_batches(output / f"{name}.png", _title("decoding", job), curves))
    _wrote(*written)


def _table(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = [key for key in columns if all(key in row for row in rows)]
    return table(title, [columns[key] for key in shown], [[row[key] for key in shown] for row in rows])


def _model(job: Job) -> str:
    if job.directory:
        return Path(job.directory).resolve().name
    return f"{job.preset}-{job.quantization}" if job.quantization else job.preset


def _title(what: str, job: Job) -> str:
    model = Path(job.directory).name if job.directory else f"{_model(job)} {job.chosen_dtype}, random weights"
    prompts = f"prompts of {job.prompt_tokens} tokens" if not job.prompts else job.workload
    outputs = (
        f"{job.output_tokens} new tokens" if not job.outputs else f"{sum(job.outputs):,} new tokens in all"
    )
    return f"{what}: {model}, {prompts}, {outputs}"


def _wrote(*paths: Path) -> None:
    Console().print("wrote " + ", ".join(map(str, paths)), highlight=False)
