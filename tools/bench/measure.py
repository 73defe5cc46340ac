"""One procedure for every engine: the same prompts, forced lengths, and time a step from two runs.

first_token_ms is the time until every sequence of a batch has its first token; step_ms is (time for N tokens
- time for 1) / (N - 1). An engine takes part by giving a `Generate`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

from tridecode.backend.config import ModelConfig
from tridecode.backend.engine import SPIN
from tridecode.backend.errors import TridecodeError
from tridecode.tools.bench.presets import preset, random_prompts

#: (prompts, n) -> seconds until each prompt has exactly n new tokens, chosen greedily
Generate = Callable[[Sequence[Sequence[int]], int], float]
Say = Callable[[str], None]

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Job:
    """What to measure. Random weights of a preset's shape or, where `directory` is given, that checkpoint's.

    dtype: fp32, fp16 or bf16; empty: the preset's. prompts: token ids to answer, `batches[0]` at a time, in
    place of the table of batches; workload: what they are called in titles and file names.
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
        """Sequences that an engine has under way together, at most."""
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
    """Figures of one batch size; medians over the repeats, whose seconds are kept.

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


def measure(generate: Generate, job: Job, vocab_size: int, say: Say) -> dict[str, Any]:
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


def run_apart(module: str, job: Job) -> dict[str, Any]:
    """What `python -m module` says of a job: a process of its own, so that its GPU memory is free again.

    {"error": ...} with the end of its log where it fails: one engine's failure spares the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "job.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", module, str(asked), str(answered)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment(module)
        )
        if done.returncode == 0 and answered.exists():
            return json.loads(answered.read_text(encoding="utf-8"))
    return {"error": f"{module} ended with code {done.returncode}: {done.stdout[-2000:].strip()}"}


def _environment(module: str) -> dict[str, str]:
    """Other engines run as they come, without what ours asks of its threads."""
    environment = dict(os.environ)
    if not module.endswith("bench.engine") and (SPIN[0], environment.get(SPIN[0])) == SPIN:
        del environment[SPIN[0]]
    return environment


def answer(run: Callable[[Job], dict[str, Any]]) -> None:
    """The main program of a module that run_apart starts."""
    asked, answered = sys.argv[1:3]
    fields = json.loads(Path(asked).read_text(encoding="utf-8"))
    for key in ("batches", "prompts"):
        fields[key] = tuple(tuple(item) if isinstance(item, list) else item for item in fields[key])
    try:
        result = run(Job(**fields))
    except TridecodeError as error:
        result = {"error": str(error)}
    Path(answered).write_text(json.dumps(result), encoding="utf-8")
