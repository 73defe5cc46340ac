"""Loading of adapters and waiting of requests, with a loader that the test controls: no torch, no files."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from tests.backend.engine.toy_device import DOOR, Run, expected, limits
from tridecode.backend.base.errors import CheckpointError, RequestError, TridecodeError, UnsupportedError
from tridecode.backend.engine.adapters.table import Adapters, Loaded
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, Submit


class SteeredLoader:
    """Loads end when the test says so. loaded: what a rank would hold, by number."""

    adapters: Adapters

    def __init__(self, max_loras: int):
        self.max_loras = max_loras
        self.running: dict[str, int] = {}
        self.loaded: dict[int, str] = {}
        self.ended: list[Loaded] = []
        self.news: list[str] = []

    def start(self, number: int, name: str) -> None:
        assert number not in self.loaded
        held = set(self.loaded) - set(self.adapters._dropped)  # dropped ones go with the next plan
        assert len(held) + len(self.running) < self.max_loras, "more adapters than there is room for"
        self.running[name] = number

    def end(self, name: str, error: TridecodeError | None = None, digest: bytes = b"") -> None:
        number = self.running.pop(name)
        if error is None:
            self.loaded[number] = name
        self.ended.append(Loaded(number, error, digest or name.encode()))

    def finished(self) -> list[Loaded]:
        ended, self.ended = self.ended, []
        return ended

    def has_finished(self) -> bool:
        return bool(self.ended)

    def changed(self) -> Iterable[str]:
        news, self.news = self.news, []
        return news


class AdapterRun(Run):
    """A Run whose plans are checked against what the loader holds."""

    def __init__(self, max_loras: int = 2, **changes):
        super().__init__(limits(**changes))
        self.loader = SteeredLoader(max_loras)
        self.loader.adapters = Adapters(self.loader)
        self.scheduler = Scheduler(limits(**changes), lambda: self.now, self.loader.adapters)
        self.used: dict[tuple[int, int], set[str]] = {}
        plan = self.scheduler.plan

        def checked():
            made = plan()
            if made is not None:
                adapters = made.part(AdapterRows) or AdapterRows()
                for number in adapters.dropped:
                    self.loader.loaded.pop(number, None)
                names = adapters.numbers if adapters.numbers is not None else [-1] * made.num_rows
                assert adapters.numbers is None or (adapters.numbers >= 0).any()
                for sequence, number in zip(made.sequences, names):
                    key = (sequence.group.request, sequence.index)
                    held = self.loader.loaded[int(number)] if number >= 0 else ""
                    self.used.setdefault(key, set()).add(held)
            return made

        self.scheduler.plan = checked

    def ask(self, request: int, *names: str, tokens: int = 3, ids: Iterable[int] = (5,)) -> None:
        """A request with a sequence of these ids for each name."""
        prompt, params = np.array([*ids], np.int32).tobytes(), SamplingParams(max_tokens=tokens)
        sequences = [SequenceRequest(prompt, params, name) for name in names]
        self.scheduler.submit(DOOR, Submit(request, sequences))
        self.take(self.scheduler.take_events())

    def done(self, request: int, index: int = 0) -> bool:
        ends = self.ends[request, index]
        return len(ends) == 1 and ends[0].finish == "length"

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def test_a_request_waits_for_its_adapter_and_delays_nobody() -> None:
    run = AdapterRun()
    run.ask(1, "a")
    assert not run.scheduler.can_step
    run.ask(2, "")
    assert run.scheduler.can_step
    run.steps(4)
    assert run.done(2) and not run.tokens[1, 0] and not run.scheduler.can_step
    run.loader.end("a")
    assert run.scheduler.can_step
    run.finish()
    assert run.done(1) and run.tokens[1, 0] == expected([5], 3)
    assert run.used == {(1, 0): {"a"}, (2, 0): {""}}


@pytest.mark.parametrize(
    "several", [{"beam_width": 3}, {"num_return_sequences": 3}], ids=["beams", "samples"]
)
def test_beams_and_samples_wait_for_their_adapter_and_use_it(several) -> None:
    run = AdapterRun(num_blocks=40)
    prompt, params = np.array([5, 6], np.int32).tobytes(), SamplingParams(max_tokens=4, **several)
    run.scheduler.submit(DOOR, Submit(1, [SequenceRequest(prompt, params, "a")]))
    assert not run.scheduler.can_step
    run.loader.end("a")
    run.finish()
    assert all(run.done(1, i) for i in range(params.num_sequences))
    assert set.union(*run.used.values()) == {"a"} and not run.scheduler.can_step


def test_rows_of_one_request_may_have_several_adapters_and_none() -> None:
    run = AdapterRun()
    run.ask(1, "a", "", "b", "a")
    run.steps(2)
    run.loader.end("b")
    run.steps(1)
    run.loader.end("a")
    run.finish()
    assert [run.used[1, index] for index in range(4)] == [{"a"}, {""}, {"b"}, {"a"}]


def test_blocks_belong_to_the_matrices_of_an_adapter_not_to_its_place() -> None:
    """An adapter that was evicted and loaded again, or has the matrices of another one, finds their blocks;
    a name with new matrices does not."""
    run, found, ids = AdapterRun(max_loras=1, num_blocks=100), [], [7, 8, 9] * 5
    loads = [("a", b"A"), ("b", b"B"), ("a", b"A"), ("c", b"B"), ("a", b"new"), ("", b"")]
    for number, (name, digest) in enumerate(loads):
        before = run.scheduler.cache.cached_tokens
        run.ask(number, name, ids=ids)
        if name:
            run.loader.end(name, digest=digest)
        run.finish()
        assert run.tokens[number, 0] == expected(ids, 3)
        found.append(run.scheduler.cache.cached_tokens - before)
    assert found == [0, 0, 12, 12, 0, 0]


def test_a_failed_load_ends_its_requests_alone_and_is_tried_again() -> None:
    run = AdapterRun()
    run.ask(1, "a", "")
    run.ask(2, "a")
    run.ask(3, "b")
    run.loader.end("a", CheckpointError("a is damaged"))
    run.loader.end("b")
    run.finish()
    for request in (1, 2):
        assert [(e.finish, e.error) for e in run.ends[request, 0]] == [("error", "a is damaged")]
    assert run.done(1, 1) and run.done(3)
    run.ask(4, "a")
    run.loader.end("a")
    run.finish()
    assert run.done(4)


def test_the_least_recently_used_idle_adapter_gives_way() -> None:
    run = AdapterRun(max_loras=2)
    for request, name in enumerate("abab"):
        run.ask(request, name)
        if name in run.loader.running:
            run.loader.end(name)
        run.finish()
    run.ask(10, "a")  # b is now the one that was used longest ago
    run.finish()
    run.ask(11, "c")
    run.loader.end("c")
    run.finish()
    assert run.done(11)
    assert sorted(run.loader.loaded.values()) == ["a", "c"]


def test_an_adapter_in_use_never_gives_way() -> None:
    run = AdapterRun(max_loras=1)
    run.ask(1, "a", tokens=6)
    run.loader.end("a")
    run.steps(2)
    run.ask(2, "b")
    run.steps(2)
    assert not run.loader.running and list(run.loader.loaded.values()) == ["a"]
    run.steps(4)
    assert run.done(1)
    run.loader.end("b")
    run.finish()
    assert run.done(2) and run.used == {(1, 0): {"a"}, (2, 0): {"b"}}


def test_an_adapter_that_is_always_in_use_does_not_keep_others_out() -> None:
    run = AdapterRun(max_loras=1)
    run.ask(1, "a", tokens=6)
    run.loader.end("a")
    run.steps(2)
    run.ask(2, "b")
    for request in range(3, 8):
        run.ask(request, "a", tokens=6)  # each joins the line behind b
        run.steps(1)
    while not run.done(1):
        run.step()
    run.loader.end("b")
    while not run.done(2):
        assert not run.tokens[3, 0]
        run.step()
    run.step()
    run.loader.end("a")
    run.finish()
    assert all(run.done(request) for request in range(1, 8))


def test_a_changed_directory_is_read_again_and_running_requests_keep_theirs() -> None:
    run = AdapterRun(max_loras=2)
    run.ask(1, "a", tokens=8)
    run.loader.end("a")
    run.steps(2)
    run.loader.news.append("a")
    run.steps(1)
    run.ask(2, "a")
    run.loader.end("a")
    run.steps(1)
    assert len(run.loader.loaded) == 2
    run.finish()
    assert run.done(1) and run.done(2)
    run.ask(3, "")
    run.finish()
    assert list(run.loader.loaded) == [1], "the state that nobody has any more is dropped"


def test_a_directory_that_changes_while_it_is_read_is_read_again() -> None:
    run = AdapterRun()
    run.ask(1, "a")
    run.loader.news.append("a")
    run.steps(1)
    run.loader.end("a")
    run.finish()
    run.ask(2, "a")
    assert "a" in run.loader.running
    run.loader.end("a")
    run.finish()


def test_a_request_that_is_cancelled_or_overdue_leaves_the_line() -> None:
    run = AdapterRun(max_loras=1, request_timeout_s=100.0)
    run.ask(1, "a", tokens=6)
    run.loader.end("a")
    run.steps(1)
    run.ask(2, "b")
    run.ask(3, "c")
    run.ask(4, "b")
    run.scheduler.cancel(DOOR, 2)
    run.scheduler.cancel(DOOR, 4)
    run.take(run.scheduler.take_events())
    run.steps(6)
    assert "b" not in run.loader.running and "c" in run.loader.running
    run.now = 101.0
    run.step()
    (end,) = run.ends[3, 0]
    assert end.finish == "deadline" and "waiting for the adapter 'c'" in end.error
    run.loader.end("c")
    run.ask(5, "c")
    run.finish()
    assert run.done(5)


def test_a_request_that_ends_while_its_adapter_is_loaded_is_not_planned() -> None:
    run = AdapterRun()
    run.ask(1, "a")
    run.loader.end("a")
    run.scheduler.cancel(DOOR, 1)
    run.take(run.scheduler.take_events())
    run.step()
    assert not run.scheduler.has_work and not run.tokens[1, 0]
    run.ask(2, "a")
    run.finish()
    assert run.done(2)


def test_names_are_checked_before_a_request_is_kept() -> None:
    run = AdapterRun()
    with pytest.raises(RequestError, match="lora_name is '../a'"):
        run.ask(1, "", "../a")
    assert not run.scheduler.has_work
    plain = Scheduler(limits(), lambda: 0.0)
    sequence = SequenceRequest(np.array([5], np.int32).tobytes(), SamplingParams(), "a")
    with pytest.raises(UnsupportedError, match="lora_name is 'a'; wanted none: this engine serves"):
        plain.submit(DOOR, Submit(1, [sequence]))
    assert not plain.has_work


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_with_its_own_adapter_in_any_order_of_events(seed: int) -> None:
    random = np.random.default_rng(seed)
    run = AdapterRun(max_loras=int(random.integers(1, 4)), num_blocks=6)
    wanted: dict[tuple[int, int], str] = {}
    cancelled = set()
    for request in range(60):
        names = [str(random.choice(["", "a", "b", "c", "d"])) for _ in range(random.integers(1, 4))]
        run.ask(request, *names, tokens=int(random.integers(1, 9)))
        wanted.update({(request, index): name for index, name in enumerate(names)})
        if random.random() < 0.1:
            cancelled.add(victim := int(random.integers(0, request + 1)))
            run.scheduler.cancel(DOOR, victim)
        if run.loader.running and random.random() < 0.6:
            name = str(random.choice(list(run.loader.running)))
            run.loader.end(name, CheckpointError("bad") if random.random() < 0.2 else None)
        if random.random() < 0.1:
            run.loader.news.append(str(random.choice(["a", "b"])))
        run.steps(int(random.integers(0, 3)))
    for _ in range(500):
        for name in list(run.loader.running):
            run.loader.end(name)
        if not run.scheduler.has_work:
            break
        run.steps(1)
    run.finish()
    for key, name in wanted.items():
        (end,) = run.ends[key]
        assert end.finish in ("length", "error") or key[0] in cancelled
        assert run.used.get(key, {name}) == {name}, "a sequence ran with another adapter than its own"
