"""`tridecode bench load`: a running server under load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tridecode.backend.errors import ConfigError
from tridecode.tools.bench.load import TOKEN_MODEL, choose_processes, run_load
from tridecode.tools.bench.load_report import LoadReport, summarise
from tridecode.tools.bench.load_worker import LoadSpec, Prompt, Record
from tridecode.tools.bench.plots import plot_load
from tridecode.tools.bench.presets import random_prompts
from tridecode.tools.bench.prompts import find_tokenizer, read_prompts, text_prompts
from tridecode.tools.bench.report import table, write_report
from tridecode.tools.generate import find_text_model
from tridecode.tools.progress import counter


@dataclass(frozen=True)
class LoadPlan:
    """Runs of the load generator, one for each of request_rates or else of concurrencies."""

    url: str
    model: str | None
    tokens_in: bool
    concurrencies: tuple[int, ...]
    request_rates: tuple[float, ...]
    requests: int | None
    prompt_tokens: int
    output_tokens: int
    prompts: Path | None
    tokenizer: Path | None
    vocab_size: int
    forced_length: bool
    processes: int | None
    timeout_s: float
    seed: int


_RATE_USERS = 64  # connections and processes are made for so many, where requests come at a rate
_MOST_PROMPTS = 1024  # different ones; more requests use them again


def run_load_plan(plan: LoadPlan, output: Path) -> int:
    """Run it, print and write the results. The number of requests that failed."""
    model = plan.model or _find_model(plan)
    specs = [_spec(plan, model, concurrency, None) for concurrency in plan.concurrencies]
    if plan.request_rates:
        specs = [_spec(plan, model, _RATE_USERS, rate) for rate in plan.request_rates]
    prompts = _prompts(plan, max(spec.num_requests for spec in specs))
    runs: dict[str, list[Record]] = {}
    for spec in specs:
        label = f"{spec.request_rate:g}/s" if spec.request_rate else f"{spec.concurrency} at a time"
        with counter(label, spec.num_requests) as progress:
            runs[label] = run_load(replace(spec, prompts=prompts), progress)
    reports = {label: summarise(records) for label, records in runs.items()}
    Console().print(table(f"{model} at {plan.url}", ["", *reports], _rows(list(reports.values()))))
    _tell_faults(reports.values(), Console())
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(plan).items()}
    results = {label: asdict(report) for label, report in reports.items()}
    title = f"{model}, {plan.output_tokens} new tokens"
    report = write_report(output / "load.json", "load", settings, results)
    picture = plot_load(output / "load.png", title, runs)
    Console().print(f"wrote {report}, {picture}", highlight=False)
    return sum(report.failed for report in reports.values())


def _find_model(plan: LoadPlan) -> str:
    return TOKEN_MODEL if plan.tokens_in else find_text_model(plan.url).name


def _spec(plan: LoadPlan, model: str, concurrency: int, rate: float | None) -> LoadSpec:
    return LoadSpec(
        url=plan.url,
        model=model,
        prompts=[],
        output_tokens=plan.output_tokens,
        num_requests=plan.requests or 4 * concurrency,
        concurrency=concurrency,
        request_rate=rate,
        tokens_in=plan.tokens_in,
        forced_length=plan.forced_length,
        processes=plan.processes or choose_processes(concurrency),
        timeout_s=plan.timeout_s,
        seed=plan.seed,
    )


def _prompts(plan: LoadPlan, requests: int) -> list[Prompt]:
    count = min(requests, _MOST_PROMPTS)
    tokenizer = find_tokenizer(plan.tokenizer) if plan.tokenizer is not None else None
    if plan.prompts is not None:
        texts = read_prompts(plan.prompts, plan.requests)
        if not plan.tokens_in:
            return list(texts)
        if tokenizer is None:
            raise ConfigError("--tokens with --prompts needs --tokenizer, to make ids of the texts")
        return [np.asarray(tokenizer.encode(text).ids, np.int32) for text in texts]
    if plan.tokens_in:
        ids = random_prompts(count, plan.prompt_tokens, plan.vocab_size, plan.seed)
        return [np.asarray(prompt, np.int32) for prompt in ids]
    if tokenizer is None:
        raise ConfigError(
            "text prompts of a known length need --tokenizer (the repository that is served will do); "
            "else use --prompts or --tokens"
        )
    return list(text_prompts(tokenizer, count, plan.prompt_tokens, plan.seed))


def _rows(reports: Sequence[LoadReport]) -> list[list[Any]]:
    """A line a figure, a column a run: a terminal is seldom wide enough for the other way round."""
    lines: dict[str, list[Any]] = {
        "requests": [report.requests for report in reports],
        "failed": [report.failed for report in reports],
    }
    for key in ("p50", "p90", "p99"):
        lines[f"first token, ms {key}"] = [report.first_token_ms.get(key) for report in reports]
    for key in ("mean", "p50", "p90", "p99"):
        lines[f"between tokens, ms {key}"] = [report.inter_token_ms.get(key) for report in reports]
    lines["tokens/s"] = [report.tokens_per_s for report in reports]
    lines["requests/s"] = [report.requests_per_s for report in reports]
    lines["tokens a response"] = [report.tokens_per_response for report in reports]
    return [[name, *values] for name, values in lines.items()]


def _tell_faults(reports: Iterable[LoadReport], console: Console) -> None:
    for report in reports:
        for error, count in report.errors.items():
            console.print(f"{count} requests failed: {error}", style="red", highlight=False, markup=False)
        if not report.tokens_counted:
            console.print("the server sent no token counts: each response was taken for one token")
