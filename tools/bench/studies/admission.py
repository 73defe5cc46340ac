"""Compares admission rules, alternating on one engine, to verify the predictions of step_model.py.

    python -m tridecode.tools.bench.studies.admission

Compares steps of 8,192 tokens with larger ones under a load of chats, the steps of a steady arrival with the
sum of their parts, and prompts of LAMBADA's lengths with and without spreading over steps (prompt_spread.py).
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.schedule import planner
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.jobs import make_job, with_mix, with_workload
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import Job, Run, Step, latencies
from tridecode.tools.bench.shapes.presets import random_prompts

_OUTPUT = 3  # new tokens per LAMBADA prompt
_SHOWN = ("token_gap_p50_ms", "token_gap_p95_ms", "token_gap_p99_ms", "mixed_steps", "mixed_step_ms")


def run(engine: Engine, job: Job, slots: int, rate: float = 0.0, **limits: Any) -> tuple[float, Run]:
    """Run the job's requests; return the seconds and the run. limits: scheduler settings that replace the
    engine's."""
    runner = LoopRunner(engine, rate, job.seed)
    changed = replace(runner.scheduler.limits, max_sequences=slots, **limits)
    runner.scheduler = Scheduler(changed, runner.scheduler.clock)
    seconds = runner.generate(job.prompts, job.outputs or _OUTPUT)
    return seconds, runner.take_run()


def over_parts(steps: Sequence[Step], token_s: float) -> tuple[float, float]:
    """Return (time of the middle 60 % of the steps divided by the sum of their parts, their mean decode
    rows).

    A step's parts are the median step with the same number of decode rows but no prompts, plus token_s
    seconds for each prefill token. Steps whose number of rows occurs in no step without prompts are skipped.
    Raises StatisticsError if none is left.
    """
    gaps = [(step.time - before.time, step) for before, step in zip(steps, steps[1:])]
    alone: dict[int, list[float]] = defaultdict(list)
    for seconds, step in gaps:
        if not step.prompt_tokens:
            alone[step.decodes].append(seconds)
    middle = [pair for pair in gaps[len(gaps) // 5 : 4 * len(gaps) // 5] if alone[pair[1].decodes]]
    parts = [statistics.median(alone[step.decodes]) + token_s * step.prompt_tokens for _, step in middle]
    rows = statistics.mean(step.decodes for _, step in middle)
    return sum(seconds for seconds, _ in middle) / sum(parts), rows


def _say(name: str, seconds: float, happened: Run, slots: int) -> None:
    found = latencies([happened], slots)
    figures = " ".join(str(found[key]) for key in _SHOWN)
    print(f"{name}: {seconds:.3f} s; {', '.join(_SHOWN)}: {figures}", flush=True)


def _chats(engine: Engine, job: Job, slots: int) -> None:
    most = engine.config.max_step_tokens or 0
    usual = planner.MIXED_TOKENS
    for tokens, mixed in ((usual, usual), (most, usual), (most, most), (usual, usual)):
        planner.MIXED_TOKENS = mixed
        found = run(engine, job, slots, max_step_tokens=min(tokens, most))
        _say(f"chats, steps of {min(tokens, most)}, while some decode {mixed}", *found, slots)
    planner.MIXED_TOKENS = usual


def _steady(engine: Engine, job: Job, rate: float, slots: int) -> None:
    prompts = random_prompts(64, min(512, job.longest // 2), engine.model_config.vocab_size, 0)
    alone = statistics.median(LoopRunner(engine).generate(prompts, 1) for _ in range(3))
    seconds, happened = run(engine, job, slots, rate)
    _say(f"{rate:g} chats a second", seconds, happened, slots)
    token_s = alone / sum(map(len, prompts))
    ratio, rows = over_parts(happened.steps, token_s)
    print(
        f"{rows:.0f} decode rows; steps take {ratio:.3f} of the sum of their parts "
        f"({1e6 * token_s:.1f} us per token)"
    )


def _lambada(engine: Engine, job: Job, slots: int) -> None:
    spread = LoopRunner(engine).scheduler.limits.spread_tokens
    for fewest in (0, spread) * 2:
        _say(f"lambada, spread_tokens {fewest}", *run(engine, job, slots, spread_tokens=fewest), slots)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", default="llama-3-8b", help="preset of the load of chats")
    parser.add_argument("--lambada", default="bloom-7b1", help="preset of LAMBADA's prompts")
    parser.add_argument(
        "--requests", type=int, default=1000, help="chats; LAMBADA's prompts are twice as many"
    )
    parser.add_argument("--rate", type=float, default=58.0, help="chats a second of the steady arrival")
    arguments = parser.parse_args()
    chats = with_mix(make_job(arguments.chats, None, None, batches=(256,)), arguments.requests)
    with open_engine(chats) as engine:
        _chats(engine, chats, 256)
        _steady(engine, with_mix(chats, arguments.requests // 3), arguments.rate, 256)
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    job = make_job(arguments.lambada, None, None, batches=(16,), output_tokens=_OUTPUT)
    job = with_workload(job, "lambada", 2 * arguments.requests)
    with open_engine(job) as engine:
        _lambada(engine, job, 16)


if __name__ == "__main__":
    main()
