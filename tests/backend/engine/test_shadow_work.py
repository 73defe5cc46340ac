"""Selection of requests for shadow runs, their queue, and their share of the time, without a model."""

from __future__ import annotations

import bisect
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tridecode.backend.base.histogram import Histogram
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.parts.shadow import Job, ShadowRuns, beat_values, is_chosen
from tridecode.backend.engine.schedule.sequence import Finish, Sequence, SequenceGroup
from tridecode.backend.wire.sampling_params import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scorer:
    """Computes 10 positions per slice in `slice_s`; each has a KL of 0.25, and every second one agrees."""

    def __init__(self, clock: Clock, slice_s: float = 0.01):
        self.clock, self.slice_s = clock, slice_s

    def advance(self, job: Job) -> None:
        self.clock.now += self.slice_s
        job.done = min(job.done + 10, len(job.tokens))
        if job.is_done:
            job.kl, job.agreeing = 0.25 * job.targets, job.targets // 2


def ended(arrival: int, prompt: int = 5, output: int = 4, **group) -> Sequence:
    made = SequenceGroup(b"door", 1, np.arange(prompt, dtype=np.int32), 0, arrival, 0.0, **group)
    sequence = Sequence(made, 0, SamplingParams(max_tokens=output))
    sequence.output = list(range(output))
    return sequence


def work(clock: Clock | None = None, slice_s: float = 0.01, long_rope: int = 0, **settings) -> ShadowRuns:
    clock = clock or Clock()
    config = EngineConfig(**{"shadow_share": 1.0, **settings})
    model = SimpleNamespace(long_prompt_tokens=long_rope)
    return ShadowRuns(model, config, Scorer(clock, slice_s), clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_share_is_honoured_and_the_same_numbers_are_chosen_again(share: float) -> None:
    count = 20000
    chosen = [[is_chosen(f"{n}.0", seed, share) for n in range(count)] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    both = sum(a and b for a, b in zip(chosen[0], chosen[2]))
    for found, expected in ((sum(chosen[0]), share), (sum(chosen[2]), share), (both, share**2)):
        assert abs(found - count * expected) < 5 * (count * expected * (1 - expected)) ** 0.5
    assert all(is_chosen(f"{n}.0", 0, 1.0) for n in range(1000))
    assert not any(is_chosen(f"{n}.0", 0, 0.0) for n in range(1000))


def test_only_chosen_sequences_are_queued() -> None:
    shadow = work(shadow_share=0.2, shadow_queue=1000)
    for number in range(1000):
        shadow.offer(ended(number), Finish.LENGTH)
    expected = sum(is_chosen(f"{number}.0", 0, 0.2) for number in range(1000))
    found = shadow.metrics()
    assert found["shadow_ended"] == 1000 and found["shadow_queued"] == expected > 100
    assert found["shadow_dropped"] == 0


def test_a_full_queue_drops_and_counts() -> None:
    shadow = work(shadow_queue=3)
    for number in range(8):
        shadow.offer(ended(number), Finish.END_ID)
    assert (shadow.metrics()["shadow_queued"], shadow.metrics()["shadow_dropped"]) == (3, 5)
    while shadow.has_work:
        shadow.run()
    assert shadow.metrics()["shadow_kl_count"] == 3
    shadow.offer(ended(9), Finish.STOP_WORD)
    assert shadow.metrics()["shadow_queued"] == 1


@pytest.mark.parametrize(
    ("sequence", "finish", "reason"),
    [
        (ended(1), Finish.CANCELLED, "unfinished"),
        (ended(1), Finish.DEADLINE, "unfinished"),
        (ended(1), Finish.ERROR, "unfinished"),
        (ended(1, session=4), Finish.LENGTH, "session"),
        (ended(1, lora_name="a"), Finish.LENGTH, "adapter"),
        (ended(1, learned=object()), Finish.LENGTH, "prompt_learning"),
        (ended(1, search=object()), None, "beams"),
        (ended(1, output=0), Finish.LENGTH, "empty"),
        (ended(1, prompt=30, output=3), Finish.LENGTH, "long_rope"),
    ],
)
def test_what_cannot_be_compared_is_counted_by_reason(sequence, finish, reason) -> None:
    shadow = work(long_rope=32)
    shadow.offer(sequence, finish)
    counts = {name: n for name, n in shadow.metrics().items() if name.startswith("shadow_skipped") and n}
    assert counts == {f'shadow_skipped{{reason="{reason}"}}': 1} and not shadow.has_work


def test_a_job_has_the_tokens_before_each_generated_one() -> None:
    shadow = work(long_rope=9)
    shadow.offer(ended(1, prompt=5, output=4), Finish.LENGTH)
    (job,) = shadow._jobs
    assert job.tokens.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert (job.targets, job.first) == (4, 4)


def test_beside_live_requests_it_takes_its_share_of_the_time() -> None:
    clock = Clock()
    shadow = work(clock, slice_s=0.01, shadow_time_share=0.05, shadow_queue=1000)
    for number in range(200):
        shadow.offer(ended(number, prompt=100), Finish.LENGTH)
    begin, spent = clock.now, 0.0
    while clock.now < begin + 20:
        if shadow.may_run(live=True):
            before = clock.now
            shadow.run()
            spent += clock.now - before
        clock.now += 0.004  # a live step
    assert 0.04 < spent / (clock.now - begin) <= 0.0505
    assert shadow.metrics()["shadow_seconds"] == pytest.approx(spent)
    assert shadow.may_run(live=False)  # an idle engine always may


def test_a_time_share_of_nothing_waits_for_an_idle_engine() -> None:
    shadow = work(shadow_time_share=0.0)
    assert not shadow.may_run(live=False)  # nothing is queued
    shadow.offer(ended(1), Finish.LENGTH)
    assert not shadow.may_run(live=True) and shadow.may_run(live=False)
    shadow.run()
    assert shadow.metrics()["shadow_tokens_kl"] == 1.0 and shadow.metrics()["shadow_tokens_agreeing"] == 2


def test_histograms_are_those_of_prometheus() -> None:
    bounds, values = (0.1, 0.5, 1.0), [0.05, 0.1, 0.3, 0.5, 0.7, 1.0, 3.0]
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    ordered = sorted(values)
    wanted = {f'h_bucket{{le="{bound:g}"}}': bisect.bisect_right(ordered, bound) for bound in bounds}
    wanted |= {'h_bucket{le="+Inf"}': 7, "h_sum": pytest.approx(sum(values)), "h_count": 7}
    assert beat_values("h", histogram) == wanted


#: files that may name shadow runs besides their own two: the tables of parts, settings, metrics and GPU tests
TABLES = {
    "backend/configuration/engine_config.py",
    "backend/service/monitoring/metric_table.py",
    "backend/engine/device/parts/table.py",
    "backend/engine/parts/table.py",
    "model_repo_templates/fastertransformer.pbtxt.jinja",
    "tools/bench/gpu_report.py",
}
OWN = {"backend/engine/device/parts/shadow.py", "backend/engine/parts/shadow.py"}


def test_only_tables_name_shadow_runs_outside_their_own_two_files() -> None:
    root = Path(__file__).parents[3]
    files = [
        path
        for folder in ("backend", "converters", "kernels", "model_repo_templates", "tools")
        for path in (root / folder).rglob("*.*")
        if path.suffix in (".py", ".jinja")
    ]
    naming = re.compile(r"shadow[_ ]?(run|share|weight|slice|time|queue|seed|gpu)|parts\.shadow", re.I)
    named = {path.relative_to(root).as_posix() for path in files if naming.search(path.read_text())}
    assert named - OWN <= TABLES and named >= OWN
    assert sum(len((root / path).read_text().splitlines()) for path in OWN) <= 500
