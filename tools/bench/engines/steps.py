"""Our engine without a server, with a breakdown of the time of its steps; used only by
bench/studies/ranks.py.
"""

from __future__ import annotations

from typing import Any

from tridecode.tools.bench.breakdown import break_down
from tridecode.tools.bench.engines import BenchEngine
from tridecode.tools.bench.engines.ours import described, open_engine
from tridecode.tools.bench.loop_runner import LoopRunner
from tridecode.tools.bench.measure import Job, measure
from tridecode.tools.bench.shapes.presets import random_prompts

_STEPS = 16  # decode steps in the timeline


def bench_steps(job: Job) -> dict[str, Any]:
    """Return bench_engine's figures and, on a GPU, "steps": rank 0's time by kernel class for each batch."""
    with open_engine(job) as engine:
        runner, vocab = LoopRunner(engine), engine.model_config.vocab_size
        found = measure(runner.generate, job, vocab, last_run=runner.take_run)
        if engine.device.type == "cuda":
            rows = []
            for batch in job.batches:
                prompts = random_prompts(batch, job.prompt_tokens, vocab, job.seed)
                chunks = -(-batch * job.prompt_tokens // (engine.config.max_step_tokens or 1))
                try:
                    rows.append(break_down(runner, prompts, min(_STEPS + 2 * chunks, job.output_tokens)))
                except ValueError as error:  # too few tokens for this batch: keep the other figures
                    rows.append({"batch": batch, "error": str(error)})
            found["steps"] = rows
    return {
        **described(engine, job),
        "enable_custom_all_reduce": job.enable_custom_all_reduce,
        **found,
    }


ENGINE = BenchEngine("tridecode, by step", (), bench_steps, ours=True)
