"""`tridecode bench load`: a running server under load."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tritonclient.utils import np_to_triton_dtype

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.models import read_model_config
from tridecode.model_repo_templates.repository import ENGINE_MODEL
from tridecode.tools.bench.load.generator import TOKEN_MODEL, choose_processes, run_load
from tridecode.tools.bench.load.prompts import find_tokenizer, read_prompts, text_prompts
from tridecode.tools.bench.load.summary import LoadReport, summarise
from tridecode.tools.bench.load.worker import LoadSpec, Prompt
from tridecode.tools.bench.reports.plots import plot_load
from tridecode.tools.bench.reports.report import environment, table, write_report
from tridecode.tools.bench.shapes.presets import random_prompts
from tridecode.tools.client.chat import served_repository
from tridecode.tools.client.generate import find_text_model, grpc_address
from tridecode.tools.progress import counter


@dataclass(frozen=True)
class LoadPlan:
    """Runs of the load generator: one per request rate if there are any, else one per concurrency."""

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
    max_seconds: float
    seed: int


@dataclass(frozen=True)
class _Target:
    """The served model. whole_type: Triton's type of its max_tokens. repository: if the server runs on this
    machine.
    """

    name: str
    whole_type: str
    repository: Path | None


_RATE_USERS = 64  # connections of an open loop (--request-rate)
_MOST_PROMPTS = 1024  # number of different prompts, which further requests reuse


def run_load_plan(plan: LoadPlan, output: Path) -> int:
    """Run the plan, print and write the results; return the number of failed requests.

    All runs together send requests for at most plan.max_seconds. Raises ConfigError for prompts that cannot
    be read, before the first request.
    """
    texts = read_prompts(plan.prompts, plan.requests) if plan.prompts is not None else []
    plan = replace(plan, url=grpc_address(plan.url))
    target = _find_target(plan)
    specs = [_spec(plan, target, concurrency, None) for concurrency in plan.concurrencies]
    if plan.request_rates:
        specs = [_spec(plan, target, _RATE_USERS, rate) for rate in plan.request_rates]
    prompts = _prompts(plan, target, texts, max(spec.num_requests for spec in specs))
    runs, deadline = {}, time.monotonic() + plan.max_seconds
    for left, spec in zip(range(len(specs), 0, -1), specs):
        label = f"{spec.request_rate:g}/s" if spec.request_rate else f"{spec.concurrency} at a time"
        share = max(0.0, deadline - time.monotonic()) / left
        with counter(label, spec.num_requests) as progress:
            runs[label] = run_load(replace(spec, prompts=prompts, start_within_s=share), progress)
    reports = {label: summarise(records) for label, records in runs.items()}
    console = Console()
    console.print(table(f"{target.name} at {plan.url}", ["", *reports], _rows(list(reports.values()))))
    _print_faults(reports.values(), console)
    for label, spec in zip(runs, specs):
        if len(runs[label]) < spec.num_requests:
            found = f"{label}: {len(runs[label])} of {spec.num_requests} requests were sent"
            console.print(f"{found}; --max-seconds {plan.max_seconds:g} ended the run", highlight=False)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(plan).items()}
    results = {label: asdict(report) for label, report in reports.items()}
    report = write_report(output / "load.json", "load", settings, results)
    picture = plot_load(output / "load.png", _title(plan, target), runs)
    console.print(f"wrote {report}, {picture}", highlight=False, soft_wrap=True)
    return sum(report.failed for report in reports.values())


def _find_target(plan: LoadPlan) -> _Target:
    repository = served_repository(plan.url)
    if plan.tokens_in:
        return _Target(plan.model or TOKEN_MODEL, "INT32", repository)
    found = find_text_model(plan.url, plan.model)
    dtype = found.dtypes.get("max_tokens", np.int32)
    return _Target(found.name, np_to_triton_dtype(np.dtype(dtype)), repository)


def _title(plan: LoadPlan, target: _Target) -> str:
    """Model, device, prompt and output length."""
    prompts = plan.prompts.name if plan.prompts else f"{plan.prompt_tokens} tokens"
    ends = "new tokens" if plan.forced_length else "new tokens at most"
    where = [_model_name(target), _device(plan, target)]
    return f"{', '.join(where)}\nprompts of {prompts}, {plan.output_tokens} {ends}, {target.name} over gRPC"


def _model_name(target: _Target) -> str:
    """model_name of the served repository's config.ini; the name at the server if it cannot be read."""
    if target.repository is None:
        return target.name
    try:
        folder = checkpoint_dir(str(target.repository / ENGINE_MODEL))
        return read_model_config(Path(folder)).model_name
    except TridecodeError:
        return target.name


def _device(plan: LoadPlan, target: _Target) -> str:
    """The device that the engine computes on, if it is this machine's."""
    if target.repository is None:
        return f"server {plan.url}"
    try:
        chosen = read_engine_parameters(str(target.repository / ENGINE_MODEL)).get("device", "auto")
    except TridecodeError:
        chosen = "auto"
    machine = environment()
    if machine["gpus"] and chosen != "cpu":
        return machine["gpus"][0]["name"]
    return f"{machine['cpu']} ({machine['cores']} cores)"


def _spec(plan: LoadPlan, target: _Target, concurrency: int, rate: float | None) -> LoadSpec:
    return LoadSpec(
        url=plan.url,
        model=target.name,
        whole_type=target.whole_type,
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


def _prompts(plan: LoadPlan, target: _Target, texts: list[str], requests: int) -> list[Prompt]:
    count = min(requests, _MOST_PROMPTS)
    if plan.tokens_in and plan.prompts is None:
        ids = random_prompts(count, plan.prompt_tokens, plan.vocab_size, plan.seed)
        return [np.asarray(prompt, np.int32) for prompt in ids]
    if not plan.tokens_in and plan.prompts is not None:
        return list(texts)
    place = plan.tokenizer or target.repository
    if place is None:
        raise ConfigError(
            "text prompts of a known length need --tokenizer (e.g. the served repository); otherwise use "
            "--prompts or --tokens"
            if plan.prompts is None
            else "--tokens with --prompts needs --tokenizer, to make ids of the texts"
        )
    tokenizer = find_tokenizer(place)
    if plan.prompts is not None:
        return [np.asarray(tokenizer.encode(text).ids, np.int32) for text in texts]
    return list(text_prompts(tokenizer, count, plan.prompt_tokens, plan.seed))


def _rows(reports: Sequence[LoadReport]) -> list[list[Any]]:
    """One row per figure, one column per run: a terminal is seldom wide enough for the transpose."""
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
    lines["tokens per response"] = [report.tokens_per_response for report in reports]
    return [[name, *values] for name, values in lines.items()]


def _print_faults(reports: Iterable[LoadReport], console: Console) -> None:
    for report in reports:
        for error, count in report.errors.items():
            console.print(f"{count} requests failed: {error}", style="red", highlight=False, markup=False)
        if not report.tokens_counted:
            console.print("the server sent no token counts: each response is counted as one token")
