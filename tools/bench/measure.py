"""One procedure for every engine: the same prompts, forced lengths, and the time of a step from two runs.

first_token_ms is the time until every sequence of a batch has its first token; step_ms is (time for N tokens
- time for 1) / (N - 1). An engine is measured through a `Generate`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Callable

from tridecode.backend.config import ModelConfig
from tridecode.tools.bench.presets import preset, random_prompts

#: (prompts, n) -> seconds until each prompt has exactly n new tokens, chosen greedily
Generate = Callable[[Sequence[Sequence[int]], int], float]
Say = Callable[[str], None]

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Job:
    """What to measure: random weights of a preset's shape, or the checkpoint in `directory`.

    dtype: fp32, fp16 or bf16; empty: the preset's. prompts: token ids, at most `batches[0]` sequences in
    flight, instead of the table of batches; workload: their name in titles and file names.
    """

    preset: str = ""
    directory: str = ""
    dtype: str = ""
    device: str = "auto"
    batches: tuple[int, ...] = (1, 8, 64, 256)
    prompt_tokens: int = 512
    output_tokens: int = 128
    repeats: int = 3
    seed: int = 0
    tensor_para_size: int = 1
    prompts: tuple[tuple[int, ...], ...] = ()
    workload: str = ""

    @property
    def at_a_time(self) -> int:
        """Most sequences in flight."""
        return self.batches[0] if self.prompts else max(self.batches)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        prompt = max(map(len, self.prompts)) if self.prompts else self.prompt_tokens
        return prompt + self.output_tokens

    @property
    def shape(self) -> ModelConfig:
        return preset(self.preset).model

    @property
    def chosen_dtype(self) -> str:
        return self.dtype or preset(self.preset).dtype


@dataclass(frozen=True)
class Timing:
    """Figures of one batch size: medians over the repeats, and the seconds of each repeat.

    tokens_per_s: of decoding, batch / step. total_tokens_per_s: output tokens over the whole time, prompts
    included.
    """

    batch: int
    first_token_ms: float
    step_ms: float
    tokens_per_s: float
    total_tokens_per_s: float
    one_token_s: tuple[float, ...]
    all_tokens_s: tuple[float, ...]


def silent(_text: str) -> None:
    """A Say that shows nothing."""


def measure(generate: Generate, job: Job, vocab_size: int, say: Say = silent) -> dict[str, Any]:
    """Run a job: {"batches": [Timing as dict]} or, for a job with prompts, {"workload": {...}}."""
    if job.prompts:
        return {"workload": _measure_workload(generate, job, say)}
    return {
        "batches": [asdict(_measure_batch(generate, job, batch, vocab_size, say)) for batch in job.batches]
    }


def _measure_batch(generate: Generate, job: Job, batch: int, vocab_size: int, say: Say) -> Timing:
    def prompts(run: int) -> list[list[int]]:
        return random_prompts(batch, job.prompt_tokens, vocab_size, job.seed + run)

    say(f"batch {batch}: warming up")
    for tokens in (1, _WARM_UP_TOKENS):
        generate(prompts(0), tokens)
    one, whole = [], []
    for run in range(1, job.repeats + 1):
        say(f"batch {batch}: run {run} of {job.repeats}")
        one.append(generate(prompts(run), 1))
        whole.append(generate(prompts(run), job.output_tokens))
    return timing(batch, job.output_tokens, one, whole)


def timing(batch: int, output_tokens: int, one: Sequence[float], whole: Sequence[float]) -> Timing:
    """Figures from seconds of runs with 1 and with output_tokens (2 or more) new tokens."""
    first, full = statistics.median(one), statistics.median(whole)
    step = (full - first) / (output_tokens - 1)
    return Timing(
        batch=batch,
        first_token_ms=round(first * 1000, 4),
        step_ms=round(step * 1000, 4),
        tokens_per_s=round(batch / step, 2),
        total_tokens_per_s=round(batch * output_tokens / full, 2),
        one_token_s=tuple(round(seconds, 6) for seconds in one),
        all_tokens_s=tuple(round(seconds, 6) for seconds in whole),
    )


def _measure_workload(generate: Generate, job: Job, say: Say) -> dict[str, Any]:
    say("warming up")
    generate(job.prompts[: job.at_a_time], _WARM_UP_TOKENS)
    runs = []
    for run in range(1, job.repeats + 1):
        say(f"{len(job.prompts)} prompts, {job.at_a_time} at a time: run {run} of {job.repeats}")
        runs.append(generate(job.prompts, job.output_tokens))
    seconds = statistics.median(runs)
    tokens = len(job.prompts) * job.output_tokens
    return {
        "requests": len(job.prompts),
        "at_a_time": job.at_a_time,
        "prompt_tokens": sum(map(len, job.prompts)),
        "output_tokens": tokens,
        "seconds": round(seconds, 4),
        "all_seconds": [round(one, 4) for one in runs],
        "tokens_per_s": round(tokens / seconds, 2),
        "requests_per_s": round(len(job.prompts) / seconds, 3),
    }
