"""`tridecode bench speculate`: plain decoding and decoding with drafts, in turns; one JSON file, one plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.weights.draft_files import TRAINED
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.bench.engines.ours import described, open_engine
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.reports.plots import plot_ratios
from tridecode.tools.bench.reports.report import table, write_report
from tridecode.tools.bench.shapes.presets import random_prompts
from tridecode.tools.bench.speculate.forced import ForcedDrafts
from tridecode.tools.bench.speculate.runner import Ran, SpeculationRunner
from tridecode.tools.progress import spinner

#: kind of run -> the kind that its ratios refer to
KINDS = {"plain": "plain", "forced": "plain", "sampled": "sampled", "sampled, drafts": "sampled"}
#: kinds of runs with a draft model or a trained drafter: its own drafts, greedily
OWN = {"greedy": "greedy", "own drafts": "greedy"}
#: Temperature of plain and forced runs: the noise of the draws decides their texts. Rounding depends on the
#: number of rows of a step and changes greedy texts where logits are close, as those of random weights are.
_NOISE = 1000.0
_COLUMNS = {
    "tokens_per_step": "tok/step",
    "step_ms": "ms",
    "step_ratio": "x",
    "tokens_per_s": "tok/s",
    "tokens_ratio": "x",
    "drafted": "drafts",
    "accepted": "right",
}


@dataclass(frozen=True)
class SpeculatePlan:
    """A measurement. drafts: of each row of a forced step. right: of them, those that are accepted."""

    batches: tuple[int, ...]
    drafts: int
    right: int
    repeats: int


def batches_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a list separated by commas. Raises ConfigError."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"--batches is {text!r}; wanted numbers of 1 or more, as in 1,8,64")
    return found


def run_speculate(plan: SpeculatePlan, job: Job, output: Path) -> None:
    """Measure, print a table, write speculate-<model>.json and .png."""
    if plan.right > plan.drafts:
        raise ConfigError(f"--right is {plan.right} of {plan.drafts} drafts; wanted at most that")
    with spinner("loading") as say, open_engine(job) as engine:
        rows = [row for batch in plan.batches for row in _batch(engine, plan, job, batch, say)]
        found = {**described(engine, job), "rows": rows}
    name = job.preset or Path(job.directory).resolve().name
    kind = "-".join(part for part in (job.quantization, job.kv_cache_dtype) if part and part != "auto")
    stem = f"speculate-{name}" + (f"-{kind}" if kind else "")
    stem += f"-{Path(job.draft).resolve().name}" if job.draft else ""
    stem += f"-{job.speculation}" if job.speculation in TRAINED else ""
    shown = [[row["batch"], row["kind"], *(row[key] for key in _COLUMNS)] for row in rows]
    Console().print(table(f"drafts: {name} {kind}".rstrip(), ["batch", "", *_COLUMNS.values()], shown))
    settings = {**asdict(plan), "job": asdict(job)}
    ratios = {
        kind: [(row["batch"], row["tokens_ratio"]) for row in rows if row["kind"] == kind]
        for kind in ("forced", "sampled, drafts", *(OWN if job.draft else ()))
    }
    picture = plot_ratios(output / f"{stem}.png", f"{name}: tokens/s over plain decoding", ratios)
    path = write_report(output / f"{stem}.json", "speculate", settings, found)
    Console().print(f"wrote {path}, {picture}", highlight=False)


def _batch(engine: Engine, plan: SpeculatePlan, job: Job, batch: int, say: Any) -> list[dict[str, Any]]:
    """Return the figures of each kind of run of one number of sequences."""
    runner, end_id = SpeculationRunner(engine), engine.model_config.end_id
    count = job.output_tokens
    greedy = SamplingParams(max_tokens=count, min_tokens=count, end_id=end_id)
    sampled = replace(greedy, top_k=0)
    noisy = replace(sampled, temperature=_NOISE)
    prompts = random_prompts(batch, job.prompt_tokens, engine.model_config.vocab_size, job.seed)
    drafter, kinds = engine.drafter, {**KINDS, **(OWN if job.draft else {})}
    assert drafter is not None
    answers = runner.run(prompts, noisy, False).tokens  # also the warm-up
    runs: dict[str, list[Ran]] = {kind: [] for kind in kinds}
    for number in range(plan.repeats):
        say(f"{batch} sequences, run {number + 1} of {plan.repeats}")
        runs["plain"].append(runner.run(prompts, noisy, False))
        engine.drafter = ForcedDrafts(engine, drafter, plan.right, list(zip(prompts, answers)))
        try:
            runs["forced"].append(runner.run(prompts, noisy, True, plan.drafts))
        finally:
            engine.drafter = drafter
        if job.draft:
            runs["greedy"].append(runner.run(prompts, greedy, False))
            runs["own drafts"].append(runner.run(prompts, greedy, True))
        runs["sampled"].append(runner.run(prompts, sampled, False))
        runs["sampled, drafts"].append(runner.run(prompts, sampled, True))
    return [_figures(batch, kind, plain, runs) for kind, plain in kinds.items()]


def _figures(batch: int, kind: str, plain: str, runs: Mapping[str, Sequence[Ran]]) -> dict[str, Any]:
    """Return the medians of a kind of run, and their ratios to the medians of the kind `plain`."""

    def median(name: str, of: str) -> float:
        return statistics.median(getattr(run, name) for run in runs[of])

    one = runs[kind][0]
    return {
        "batch": batch,
        "kind": kind,
        "tokens_per_step": round(statistics.median(run.tokens_per_step for run in runs[kind]), 2),
        "step_ms": round(median("step_ms", kind), 4),
        "step_ratio": round(median("step_ms", kind) / median("step_ms", plain), 3),
        "tokens_per_s": round(median("tokens_per_s", kind), 1),
        "tokens_ratio": round(median("tokens_per_s", kind) / median("tokens_per_s", plain), 3),
        "drafted": one.drafted,
        "accepted": one.accepted,
        "same_text": one.tokens == runs[plain][0].tokens,
    }
