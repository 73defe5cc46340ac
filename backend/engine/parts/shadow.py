"""Shadow runs: recomputes a sample of the ended requests in 16 bit and counts the differences. No torch.

A hash of a seed and the sequence's number, not of its content, selects the sample. Selected sequences wait in
a short queue; if it is full they are dropped and counted. device/parts/shadow.py computes the comparison.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.histogram import Histogram
from tridecode.backend.configuration.engine_config import CACHE_FORMATS, EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.parts.background import Background
from tridecode.backend.engine.schedule.sequence import Finish, Sequence

log = logging.getLogger("tridecode.engine")

#: default tokens of a slice by device type; a slice is short compared with a prefill step
SLICE_TOKENS = {"cpu": 32, "cuda": 256}
#: upper bounds of the histogram buckets: mean KL of a request in nats, share of equal greedy tokens
KL_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
AGREEMENT_BOUNDS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
#: finish reasons of requests with a complete answer
_ANSWERED = (Finish.END_ID, Finish.STOP_WORD, Finish.LENGTH)
REASONS = ("unfinished", "beams", "session", "adapter", "prompt_learning", "empty", "long_rope")


@dataclass
class Job:
    """One sequence to score, and its progress.

    tokens: (n,) int32, the prompt and the output without its last token, whose own logits are not compared.
    targets: number of generated tokens: the last `targets` positions are compared. done: positions computed.
    kl: sum over the compared positions, in nats. agreeing: positions where both models have the same argmax.
    """

    name: str
    tokens: np.ndarray
    targets: int
    done: int = 0
    kl: float = 0.0
    agreeing: int = 0

    @property
    def first(self) -> int:
        """Return the first position that is compared: the last token of the prompt."""
        return len(self.tokens) - self.targets

    @property
    def is_done(self) -> bool:
        return self.done == len(self.tokens)


class Scorer(Protocol):
    """The device side: device.parts.shadow.ShadowScorer."""

    def advance(self, job: Job) -> None: ...


class ShadowRuns(Background):
    """Selects sequences, queues them and counts the results. Slices take a share of the time while
    requests run, and run back to back while no request can step."""

    switch, name, memory = "shadow_share", "shadow runs", "the 16-bit reference of shadow runs"

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        scorer: Scorer,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._scorer, self._clock = config, scorer, clock
        self._longest = model.long_prompt_tokens  # 0: no limit
        self._jobs: deque[Job] = deque()
        self._next = 0.0  # when the next slice may run while requests are live
        self._ended = self._dropped = self._failed = 0
        self._skipped: Counter[str] = Counter({reason: 0 for reason in REASONS})
        self._seconds = 0.0
        self._tokens = self._agreeing = 0
        self._kl = 0.0
        self._kls = Histogram(KL_BOUNDS)
        self._agreements = Histogram(AGREEMENT_BOUNDS)

    @classmethod
    def resolve(cls, model: ModelConfig, config: EngineConfig, device_type: str) -> EngineConfig:
        """Resolve shadow_slice_tokens: at most max_step_tokens, which must be resolved already."""
        check_settings(model, config)
        assert config.max_step_tokens is not None
        chosen = config.shadow_slice_tokens or SLICE_TOKENS[device_type]
        return replace(config, shadow_slice_tokens=min(chosen, config.max_step_tokens))

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def offer(self, sequence: Sequence, finish: Finish | None) -> None:
        self._ended += 1
        number = f"{sequence.group.arrival}.{sequence.index}"
        if not is_chosen(number, self._config.shadow_seed, self._config.shadow_share):
            return
        if reason := self._why_skipped(sequence, finish):
            self._skipped[reason] += 1
        elif len(self._jobs) >= self._config.shadow_queue:
            self._dropped += 1
        else:
            self._jobs.append(Job(number, sequence.known_tokens()[:-1], len(sequence.output)))

    def _why_skipped(self, sequence: Sequence, finish: Finish | None) -> str:
        """Return one of REASONS, or "" for a sequence that can be compared."""
        group = sequence.group
        if group.search is not None:
            return "beams"
        if finish not in _ANSWERED:
            return "unfinished"
        if group.session >= 0:
            return "session"
        if group.lora_name:
            return "adapter"
        if group.learned is not None:
            return "prompt_learning"
        if not sequence.output:
            return "empty"
        return "long_rope" if 0 < self._longest < sequence.num_known else ""

    def may_run(self, live: bool) -> bool:
        if not self._jobs or not live:
            return bool(self._jobs)
        return self._config.shadow_time_share > 0 and self._clock() >= self._next

    def run(self) -> None:
        """Compute a slice of the oldest job. A job that fails is counted and logged, and dropped."""
        job, begin = self._jobs[0], self._clock()
        try:
            self._scorer.advance(job)
        except Exception:  # a lost device is noticed by the next live step, or by the check of an idle engine
            log.exception("shadow run of request %s failed after %d tokens", job.name, job.done)
            self._failed += 1
            self._jobs.popleft()
        else:
            if job.is_done:
                self._file(self._jobs.popleft())
        took = self._clock() - begin
        self._seconds += took
        if share := self._config.shadow_time_share:
            self._next = begin + took / share

    def _file(self, job: Job) -> None:
        kl, agreement = job.kl / job.targets, job.agreeing / job.targets
        self._tokens += job.targets
        self._agreeing += job.agreeing
        self._kl += job.kl
        self._kls.add(kl)
        self._agreements.add(agreement)
        text = "shadow run of request %s: KL %.3g nats a token, %.1f %% of %d greedy tokens agree"
        log.info(text, job.name, kl, 100 * agreement, job.targets)

    def metrics(self) -> dict[str, float]:
        return {
            "shadow_ended": self._ended,
            "shadow_queued": len(self._jobs),
            "shadow_dropped": self._dropped,
            "shadow_failed": self._failed,
            **{f'shadow_skipped{{reason="{reason}"}}': count for reason, count in self._skipped.items()},
            "shadow_seconds": self._seconds,
            "shadow_tokens": self._tokens,
            "shadow_tokens_agreeing": self._agreeing,
            "shadow_tokens_kl": self._kl,
            **beat_values("shadow_kl", self._kls),
            **beat_values("shadow_agreement", self._agreements),
        }


def beat_values(name: str, histogram: Histogram) -> dict[str, float]:
    """Return a histogram as values of EngineBeat.metrics."""
    buckets = {f'{name}_bucket{{le="{label}"}}': count for label, count in histogram.buckets().items()}
    return {**buckets, f"{name}_sum": histogram.sum, f"{name}_count": sum(histogram.counts)}


def is_chosen(number: str, seed: int, share: float) -> bool:
    """Return whether the sequence with this number is in the sampled share, the same for the same seed."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def check_settings(model: ModelConfig, config: EngineConfig) -> None:
    """Raise ConfigError if the engine has shadow_share but cannot compare its answers."""
    asked = f"parameter shadow_share is {config.shadow_share:g}"
    for name in ("tensor_para_size", "pipeline_para_size"):
        if getattr(config, name) != 1:
            raise ConfigError(f"{asked} with {name} = {getattr(config, name)}; shadow runs want {name} = 1")
    if config.weights == "random":
        raise ConfigError(f"{asked} with weights = random; shadow runs want weights = files")
    if model.quantization is not None and config.shadow_weights == "none":
        raise ConfigError(
            f"{asked} and the weights of {model.model_name} are {model.quantization.weights}; wanted the "
            "folder of the same model's 16-bit weights in shadow_weights"
        )
    if not rounds_weights(model, config) and config.kv_cache_dtype not in CACHE_FORMATS:
        raise ConfigError(
            f"{asked}, but nothing of {model.model_name} is rounded; wanted a quantised weight directory, "
            "int8_mode = 1 or 2, or kv_cache_dtype = int8 or fp8"
        )


def needs_second_weights(model: ModelConfig, config: EngineConfig) -> bool:
    """Return whether the reference needs weights of its own, that is unless only the cache is quantised."""
    return rounds_weights(model, config) or config.shadow_weights != "none"


def rounds_weights(model: ModelConfig, config: EngineConfig) -> bool:
    """Return whether the served model's weights are quantised, in the files or while loading."""
    return model.quantization is not None or config.int8_mode != 0 or config.head_mode != 0
