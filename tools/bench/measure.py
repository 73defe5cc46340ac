"""One procedure for every engine: the same prompts, forced lengths, and the time of a step from two runs.

first_token_ms is the time until every sequence of a batch has its first token; step_ms is (time for N tokens
- time for 1) / (N - 1). An engine is measured through a `Generate`. For an engine that also reports when each
step ended, the steady-state time of a step is measured in addition.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.tools.bench.shapes.presets import QUANTIZATIONS, preset, random_prompts

#: (prompts, n, or one n for each) -> seconds until each prompt has exactly n new tokens, chosen greedily
Generate = Callable[[Sequence[Sequence[int]], int | Sequence[int]], float]
Say = Callable[[str], None]

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Step:
    """A step that ended at `time` (seconds), with its number of decode rows and of prefill tokens."""

    time: float
    decodes: int
    prompt_tokens: int


@dataclass(frozen=True)
class Run:
    """Record of one Generate. arrivals: (requests,) seconds. token_times: of each request, the time of
    each of its tokens. steps: in their order.
    """

    arrivals: list[float]
    token_times: list[list[float]]
    steps: list[Step]


@dataclass(frozen=True)
class Job:
    """A measurement: random weights of a preset's shape, or the checkpoint in `directory`.

    dtype: fp32, fp16 or bf16; empty: the preset's. prompts: token ids, at most `batches[0]` sequences in
    flight, instead of the table of batches; workload: their name in titles and file names. outputs: new
    tokens of each prompt, instead of output_tokens. rate: arriving prompts per second; 0: all at once.
    quantization: of the preset's matrices, a name of presets.QUANTIZATIONS; empty: none.
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
    pipeline_para_size: int = 1
    kv_cache_dtype: str = "auto"  # the engine's setting
    prompts: tuple[tuple[int, ...], ...] = ()
    workload: str = ""
    outputs: tuple[int, ...] = ()
    rate: float = 0.0
    quantization: str = ""
    int8_head: bool = False  # the engine's setting
    int8_head_inputs: bool = False  # the engine's setting
    enable_custom_all_reduce: bool = True  # the engine's setting
    prefix_cache: bool = False  # the engine's setting; off: rounds repeat their prompts, and compute them
    cache_bytes: int | None = None  # the engine's setting
    speculation: str = "off"  # the engine's setting
    draft: str = ""  # for speculation "draft" a preset, weight directory or repository; else a folder
    host_cache_bytes: int = 0  # the engine's setting
    lora_path: str = "none"  # as in config.pbtxt

    @property
    def at_a_time(self) -> int:
        """Maximum sequences in flight."""
        return self.batches[0] if self.prompts else max(self.batches)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        if not self.prompts:
            return self.prompt_tokens + self.output_tokens
        outputs = output_lengths(self.prompts, self.outputs or self.output_tokens)
        return max(len(prompt) + output for prompt, output in zip(self.prompts, outputs))

    @property
    def shape(self) -> ModelConfig:
        """The preset's model config, with the job's quantisation."""
        model = preset(self.preset).model
        return replace(model, quantization=QUANTIZATIONS[self.quantization]) if self.quantization else model

    @property
    def chosen_dtype(self) -> str:
        return self.dtype or preset(self.preset).dtype


@dataclass(frozen=True)
class Timing:
    """Figures of one batch size: medians over the repeats, and the seconds of each repeat.

    tokens_per_s: of decoding, batch / step. total_tokens_per_s: output tokens over the whole time, prompts
    included. steady_step_ms: between two steps in which every sequence decodes; None if not reported.
    """

    batch: int
    first_token_ms: float
    step_ms: float
    tokens_per_s: float
    total_tokens_per_s: float
    one_token_s: tuple[float, ...]
    all_tokens_s: tuple[float, ...]
    steady_step_ms: float | None = None


def output_lengths(prompts: Sequence[Sequence[int]], output_tokens: int | Sequence[int]) -> Sequence[int]:
    """New tokens of each prompt."""
    return [output_tokens] * len(prompts) if isinstance(output_tokens, int) else output_tokens


def one_length(output_tokens: int | Sequence[int]) -> int:
    """The new tokens of all prompts, for an engine that only knows one number of them."""
    assert isinstance(output_tokens, int), "a job with outputs is for engines of the command mix"
    return output_tokens


def silent(_text: str) -> None:
    """A Say that shows nothing."""


def measure(
    generate: Generate,
    job: Job,
    vocab_size: int,
    say: Say = silent,
    last_run: Callable[[], Run] | None = None,
) -> dict[str, Any]:
    """Run a job: {"batches": [Timing as dict]} or, for a job with prompts, {"workload": {...}}.

    last_run: what happened in the last call of `generate`, for an engine that can tell.
    """
    if job.prompts:
        return {"workload": _measure_workload(generate, job, say, last_run)}
    rows = [_measure_batch(generate, job, batch, vocab_size, say, last_run) for batch in job.batches]
    return {"batches": [asdict(row) for row in rows]}


def _measure_batch(
    generate: Generate, job: Job, batch: int, vocab_size: int, say: Say, last_run: Callable[[], Run] | None
) -> Timing:
    def prompts(run: int) -> list[list[int]]:
        return random_prompts(batch, job.prompt_tokens, vocab_size, job.seed + run)

    say(f"batch {batch}: warming up")
    for tokens in (1, _WARM_UP_TOKENS):
        generate(prompts(0), tokens)
    one, whole, gaps = [], [], []
    for run in range(1, job.repeats + 1):
        say(f"batch {batch}: run {run} of {job.repeats}")
        one.append(generate(prompts(run), 1))
        whole.append(generate(prompts(run), job.output_tokens))
        if last_run is not None:
            gaps += steady_gaps(last_run().steps, batch)
    return timing(batch, job.output_tokens, one, whole, gaps)


def steady_gaps(steps: Sequence[Step], batch: int) -> list[float]:
    """Return the seconds between consecutive steps of exactly `batch` decode rows."""
    full = [step.decodes == batch and step.prompt_tokens == 0 for step in steps]
    return [steps[i].time - steps[i - 1].time for i in range(1, len(steps)) if full[i - 1] and full[i]]


def timing(
    batch: int, output_tokens: int, one: Sequence[float], whole: Sequence[float], gaps: Sequence[float] = ()
) -> Timing:
    """Figures from seconds of runs with 1 and with output_tokens (2 or more) tokens. gaps: steady_gaps."""
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
        steady_step_ms=_ms(statistics.median(gaps)) if gaps else None,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


def _measure_workload(
    generate: Generate, job: Job, say: Say, last_run: Callable[[], Run] | None
) -> dict[str, Any]:
    outputs = job.outputs or job.output_tokens
    say("warming up")
    generate(job.prompts[: job.at_a_time], min(_WARM_UP_TOKENS, job.output_tokens))
    runs, happened = [], []
    for run in range(1, job.repeats + 1):
        say(f"{len(job.prompts)} prompts, {job.at_a_time} at a time: run {run} of {job.repeats}")
        runs.append(generate(job.prompts, outputs))
        happened += [last_run()] if last_run is not None else []
    seconds, tokens = statistics.median(runs), sum(output_lengths(job.prompts, outputs))
    return {
        "requests": len(job.prompts),
        "at_a_time": job.at_a_time,
        "prompt_tokens": sum(map(len, job.prompts)),
        "output_tokens": tokens,
        "seconds": round(seconds, 4),
        "all_seconds": [round(one, 4) for one in runs],
        "tokens_per_s": round(tokens / seconds, 2),
        "requests_per_s": round(len(job.prompts) / seconds, 3),
        **latencies(happened, job.at_a_time),
    }


def latencies(runs: Sequence[Run], slots: int) -> dict[str, Any]:
    """Summarise all runs together: percentiles of the time to first token and of the inter-token time, the
    median time of steps with and without prefill, their numbers, and the share of batch slots that
    decoded.
    """
    if not runs:
        return {}
    firsts = [times[0] - at for run in runs for at, times in zip(run.arrivals, run.token_times) if times]
    gaps = [gap for run in runs for times in run.token_times for gap in np.diff(times)]
    # whether a step has prompts -> seconds of such steps
    kinds: dict[bool, list[float]] = {False: [], True: []}
    for run in runs:
        for before, step in zip(run.steps, run.steps[1:]):
            kinds[step.prompt_tokens > 0].append(step.time - before.time)
    steps = [step for run in runs for step in run.steps]
    mixed = [step.prompt_tokens for step in steps if step.prompt_tokens]
    found: dict[str, Any] = {}
    for name, values in (("first_token", firsts), ("token_gap", gaps)):
        for percent in (50, 95, 99):
            found[f"{name}_p{percent}_ms"] = _ms(float(np.percentile(values, percent))) if values else None
    for name, values in (("decode_step", kinds[False]), ("mixed_step", kinds[True])):
        found[f"{name}s"] = round(len(values) / len(runs), 1)
        found[f"{name}_ms"] = _ms(statistics.median(values)) if values else None
    found["prompt_tokens_per_mixed_step"] = round(statistics.mean(mixed), 1) if mixed else None
    found["decoding_share"] = round(sum(step.decodes for step in steps) / (len(steps) * slots), 4)
    return found
