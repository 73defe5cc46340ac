"""What `tridecode bench engine`, `server` and `compare` do: run, print a table, write JSON and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tridecode.backend.errors import ConfigError, TridecodeError
from tridecode.backend.models import read_model_config
from tridecode.tools.bench.engine import bench_engine, weight_directory
from tridecode.tools.bench.measure import Job, run_apart
from tridecode.tools.bench.plots import plot_batches
from tridecode.tools.bench.presets import preset as find_preset
from tridecode.tools.bench.prompts import find_tokenizer, read_prompts
from tridecode.tools.bench.report import table, write_report
from tridecode.tools.bench.server import compare_with_engine
from tridecode.tools.bench.workloads import workload_prompts
from tridecode.tools.progress import spinner

#: key of a row -> its title
_BATCH_COLUMNS = {
    "batch": "sequences",
    "first_token_ms": "first token ms",
    "step_ms": "ms/step",
    "tokens_per_s": "tokens/s decoding",
    "total_tokens_per_s": "tokens/s in all",
}
_WORKLOAD_COLUMNS = {
    "requests": "requests",
    "at_a_time": "at a time",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "seconds": "seconds",
    "tokens_per_s": "tokens/s",
}
_MODULES = {
    "tridecode": "tridecode.tools.bench.engine",
    "transformers": "tridecode.tools.bench.transformers_bench",
    "vLLM": "tridecode.tools.bench.vllm_bench",
}


def make_job(
    preset: str,
    directory: Path | None,
    dtype: str | None,
    device: str,
    batches: tuple[int, ...],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    tensor_para_size: int,
) -> Job:
    """Raises ConfigError for a preset that does not exist or sequences longer than it."""
    job = Job(
        preset="" if directory else preset,
        directory=str(directory or ""),
        dtype=dtype or "",
        device=device,
        batches=batches,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        tensor_para_size=tensor_para_size,
    )
    if not directory and job.longest > find_preset(preset).model.max_positions:
        found = f"prompts of {prompt_tokens} and outputs of {output_tokens} tokens"
        raise ConfigError(f"{found}; {preset} has {job.shape.max_positions} positions")
    return job


def with_prompts(job: Job, path: Path, tokenizer: Path | None, limit: int | None) -> Job:
    """The job with the lines of a file in place of random prompts; those without a token are left out.

    Raises ConfigError for lines that the job's model cannot be asked.
    """
    if tokenizer is None:
        raise ConfigError("--prompts needs --tokenizer: a tokenizer.json, its folder, or a repository")
    encode = find_tokenizer(tokenizer).encode
    ids = tuple(tuple(encode(text).ids) for text in read_prompts(path, limit))
    job = _asking(job, path.stem, tuple(prompt for prompt in ids if prompt))
    if job.preset and max(map(max, job.prompts)) >= job.shape.vocab_size:
        raise ConfigError(f"the tokenizer has ids beyond the {job.shape.vocab_size} of {job.preset}")
    return job


def with_workload(job: Job, name: str, limit: int | None) -> Job:
    """The job with a workload's prompts, the first `limit` of them. ConfigError for one that does not
    exist."""
    shape = job.shape if job.preset else read_model_config(weight_directory(job.directory))
    return _asking(job, name, workload_prompts(name, shape.vocab_size, limit, job.seed))


def _asking(job: Job, name: str, prompts: tuple[tuple[int, ...], ...]) -> Job:
    if len(job.batches) > 1:
        found = ", ".join(map(str, job.batches))
        raise ConfigError(f"--batches is {found}; wanted one number: prompts are answered so many at a time")
    job = replace(job, prompts=prompts, workload=name)
    if job.preset and job.longest > job.shape.max_positions:
        found = f"{name} has sequences of {job.longest} tokens"
        raise ConfigError(f"{found}; {job.preset} has {job.shape.max_positions} positions")
    return job


def run_engine(job: Job, output: Path) -> None:
    with spinner("the engine alone") as say:
        result = bench_engine(job, say)
    _conclude("engine", job, {"tridecode": result}, output)


def run_compare(job: Job, output: Path) -> None:
    """Each engine in a process of its own; one that fails or is absent is a line."""
    results = {}
    for name, module in _MODULES.items():
        with spinner(f"{name}: {job.preset}"):
            results[name] = run_apart(module, job)
    _conclude("compare", job, results, output)
    if "error" in results["tridecode"]:
        raise TridecodeError(results["tridecode"]["error"])


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
        )
        for alone, served, cost in zip(
            result["engine"]["batches"], result["server"]["batches"], result["overhead"]
        )
    ]
    columns = ("streams", "engine ms/step", "server ms/step", "cost", "engine first ms", "server first ms")
    Console().print(table(_title("what the server costs", job), columns, rows))
    engines = {name: result[name]["batches"] for name in ("engine", "server")}
    name, title = f"server-{_model(job)}", _title("engine alone and behind Triton", job)
    picture = plot_batches(output / f"{name}.png", title, engines)
    _wrote(write_report(output / f"{name}.json", "server", asdict(job), result), picture)


def ratios(results: Mapping[str, Mapping[str, Any]], ours: str = "tridecode") -> dict[str, dict[str, float]]:
    """How many times the output tokens a second of each other engine we make, prompts included: {engine:
    {sequences: times}}."""
    rates = {name: _rates(result) for name, result in results.items()}
    own = rates.pop(ours, {})
    found = {
        name: {batch: round(own[batch] / rate, 3) for batch, rate in theirs.items() if batch in own}
        for name, theirs in rates.items()
    }
    return {name: times for name, times in found.items() if times}


def _rates(result: Mapping[str, Any]) -> dict[str, float]:
    """Output tokens a second, prompts included, by the sequences at a time."""
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
        else:
            curves[label] = result["batches"]
            console.print(_table(_title(label, job), _BATCH_COLUMNS, result["batches"]))
    if times:
        rows = [[name, batch, ratio] for name, of in times.items() for batch, ratio in of.items()]
        console.print(table("tokens/s, times those of", ["", "sequences", "times"], rows))
    settings = asdict(replace(job, prompts=()))
    name = f"{kind}-{_model(job)}"  # a run of another model leaves these files alone
    if job.workload:
        name += f"-{job.workload}"
    report = {**results, "ratios": times} if times else dict(results)
    written = [write_report(output / f"{name}.json", kind, settings, report)]
    if curves:
        written.append(plot_batches(output / f"{name}.png", _title("decoding", job), curves))
    _wrote(*written)


def _table(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    return table(title, list(columns.values()), [[row[key] for key in columns] for row in rows])


def _model(job: Job) -> str:
    return Path(job.directory).resolve().name if job.directory else job.preset


def _title(what: str, job: Job) -> str:
    model = Path(job.directory).name if job.directory else f"{job.preset} {job.chosen_dtype}, random weights"
    asked = f"prompts of {job.prompt_tokens} tokens" if not job.prompts else job.workload
    return f"{what}: {model}, {asked}, {job.output_tokens} new tokens"


def _wrote(*paths: Path) -> None:
    Console().print("wrote " + ", ".join(map(str, paths)), highlight=False)
