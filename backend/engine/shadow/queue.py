"""Which ended requests are run in 16 bit too, when, and what has been found. Host only.

A sequence is chosen by a hash of its number and a seed, not by its content. Those that are chosen wait in a
short queue; what does not fit is dropped and counted. The loop calls `step` between its own steps: one slice
of one job, whenever no live request can step, and while some can for a small share of the time.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter, deque
from typing import Callable, Protocol

from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.schedule.sequence import Finish, Sequence
from tridecode.backend.engine.shadow.run import Job

log = logging.getLogger("tridecode.engine")

#: upper bounds of the histograms' buckets: mean KL of a request in nats, and its greedy agreement
KL_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
AGREEMENT_BOUNDS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
#: ends of a request whose tokens are an answer
_ANSWERED = (Finish.END_ID, Finish.STOP_WORD, Finish.LENGTH)
REASONS = ("unfinished", "beams", "session", "adapter", "prompt_learning", "empty", "long_rope")


class Scores(Protocol):
    """engine.shadow.Scorer."""

    def advance(self, job: Job) -> None: ...


class ShadowWork:
    """Used by the loop's thread only. long_rope: longer prompts and outputs are not compared; 0: no limit."""

    def __init__(
        self,
        config: EngineConfig,
        scorer: Scores,
        long_rope: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._scorer, self._long_rope, self._clock = config, scorer, long_rope, clock
        self._jobs: deque[Job] = deque()
        self._next = 0.0  # when the next slice may run beside live requests
        self.ended = self.dropped = self.failed = 0
        self.skipped: Counter[str] = Counter({reason: 0 for reason in REASONS})
        self.seconds = 0.0
        self.tokens = self.agreeing = 0
        self.kl = 0.0
        self._kl = Histogram("shadow_kl", KL_BOUNDS)
        self._agreement = Histogram("shadow_agreement", AGREEMENT_BOUNDS)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def offer(self, sequence: Sequence, finish: Finish | None) -> None:
        """A sequence, or a whole beam search, has ended: queue it if its number is chosen."""
        self.ended += 1
        group = sequence.group
        number = f"{group.arrival}.{sequence.index}"
        if not is_chosen(number, self._config.shadow_seed, self._config.shadow_share):
            return
        if reason := self._skipped(sequence, finish):
            self.skipped[reason] += 1
        elif len(self._jobs) >= self._config.shadow_queue:
            self.dropped += 1
        else:
            self._jobs.append(Job(number, sequence.known_tokens()[:-1], len(sequence.output)))

    def _skipped(self, sequence: Sequence, finish: Finish | None) -> str:
        """Why a sequence cannot be compared, one of REASONS; "" where it can."""
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
        return "long_rope" if 0 < self._long_rope < sequence.num_known else ""

    def may_run(self, live: bool) -> bool:
        """Whether `step` would compute something now. live: other requests can step."""
        if not self._jobs or not live:
            return bool(self._jobs)
        return self._config.shadow_time_share > 0 and self._clock() >= self._next

    def step(self) -> None:
        """Compute a slice of the oldest job. A job that fails is counted and logged, and nothing else."""
        job, begin = self._jobs[0], self._clock()
        try:
            self._scorer.advance(job)
        except Exception:  # a device that is lost shows in the next live step, or in the check of an idle one
            log.exception("shadow run of request %s failed after %d tokens", job.name, job.done)
            self.failed += 1
            self._jobs.popleft()
        else:
            if job.is_done:
                self._jobs.popleft()
                self._take(job)
        took = self._clock() - begin
        self.seconds += took
        if share := self._config.shadow_time_share:
            self._next = begin + took / share

    def _take(self, job: Job) -> None:
        kl, agreement = job.kl / job.targets, job.agreeing / job.targets
        self.tokens, self.agreeing, self.kl = (
            self.tokens + job.targets,
            self.agreeing + job.agreeing,
            self.kl + job.kl,
        )
        self._kl.add(kl)
        self._agreement.add(agreement)
        text = "shadow run of request %s: KL %.3g nats a token, %.1f %% of %d greedy tokens agree"
        log.info(text, job.name, kl, 100 * agreement, job.targets)

    def metrics(self) -> dict[str, float]:
        """For the heartbeat, by name. A label is part of the name, as in `shadow_skipped{reason="beams"}`."""
        return {
            "shadow_ended": self.ended,
            "shadow_queued": len(self._jobs),
            "shadow_dropped": self.dropped,
            "shadow_failed": self.failed,
            **{f'shadow_skipped{{reason="{reason}"}}': count for reason, count in self.skipped.items()},
            "shadow_seconds": self.seconds,
            "shadow_tokens": self.tokens,
            "shadow_tokens_agreeing": self.agreeing,
            "shadow_tokens_kl": self.kl,
            **self._kl.metrics(),
            **self._agreement.metrics(),
        }


class Histogram:
    """Of Prometheus: cumulative counts at upper bounds, the sum and the count of the values."""

    def __init__(self, name: str, bounds: tuple[float, ...]):
        self._name, self._bounds = name, bounds
        self._counts = [0] * len(bounds)
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        for index, bound in enumerate(self._bounds):
            self._counts[index] += value <= bound

    def metrics(self) -> dict[str, float]:
        name = self._name
        buckets = {f'{name}_bucket{{le="{b:g}"}}': n for b, n in zip(self._bounds, self._counts)}
        last = {f'{name}_bucket{{le="+Inf"}}': self._count, f"{name}_sum": self._sum}
        return {**buckets, **last, f"{name}_count": self._count}


def is_chosen(number: str, seed: int, share: float) -> bool:
    """Return whether the sequence with this number is in the sampled share. The same seed chooses the same
    numbers."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
