"""Blocks that lack the drafter's keys and values: it never drafts behind tokens that it has not read, and it
reads them when drafts are worth it again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.backend.engine.host_device import HostMemory, HostRun
from tests.backend.engine.test_drafts import DeviceDrafter
from tests.backend.engine.test_host_tier import HostMachine
from tests.backend.engine.toy_device import Run, expected, limits
from tests.backend.engine.toy_draft_cache import ToyDraftCache
from tridecode.backend.base.errors import CapacityError, TridecodeError
from tridecode.backend.engine.parts.draft_reads import DraftReads
from tridecode.backend.engine.speculation import draft_reads
from tridecode.backend.engine.speculation.depth import DepthPolicy
from tridecode.backend.engine.speculation.device_ids import DeviceIds
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.records import DRAFT_MODEL
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.wire.messages import SamplingParams

SIZES = limits(num_blocks=60, max_sequences=8, max_step_tokens=16)


class Drafted:
    """A drafter with a cache of its own for a toy run. is_worth: whether steps may have drafts."""

    def __init__(
        self,
        run: Run,
        seed: int = 0,
        is_worth: bool = True,
        host: dict | None = None,
        some: bool = False,
        most: int = 7,
    ):
        random = np.random.default_rng(seed)
        policy = DepthPolicy(None, most)
        self.learning = Learning(policy, None, planned=DRAFT_MODEL, keeps_cache=True)
        self.is_worth = is_worth
        self.learning.may_draft = lambda rows: self.is_worth  # type: ignore[method-assign]
        if some:  # any number of drafts, mostly few, so that answers take many steps

            def choose(records, mosts: list[int]) -> list[int]:
                return [min(most, int(random.choice([0, 1, 1, 1, 7]))) for most in mosts]

            policy.choose = choose  # type: ignore[method-assign]
        run.scheduler.planner.use_drafter(DeviceIds(), self.learning)
        run.device.propose = DeviceDrafter(random).propose
        self.host: dict[int, np.ndarray] = {} if host is None else host
        self.cache = ToyDraftCache(run.device, self.host)


class DraftMachine(HostMachine):
    """The load of the host tier's tests, while steps are and are not worth drafts."""

    @initialize(
        blocks=st.integers(8, 24),
        slots=st.integers(1, 40),
        step=st.integers(8, 14),
        most=st.integers(1, 4),
        overlap=st.booleans(),
        seed=st.integers(0, 999),
    )
    def start(self, blocks: int, slots: int, step: int, most: int, overlap: bool, seed: int) -> None:
        self.sizes = limits(num_blocks=blocks, max_sequences=8, max_step_tokens=step, max_sequence_tokens=32)
        self.overlap, self.most, self.seed, self.layering = overlap, most, seed, False
        self.run = HostRun(self.sizes, HostMemory(slots), overlap, most)
        self.drafted = Drafted(self.run, seed, some=True)
        self.number = 0
        self.wanted: dict[int, tuple[list[int], SamplingParams]] = {}

    @rule(is_worth=st.booleans())
    def load(self, is_worth: bool) -> None:
        self.drafted.is_worth = is_worth

    @rule(shared=st.sampled_from([[], [1, 2, 3, 4, 5, 6]]), count=st.integers(8, 16))
    def ask_long(self, shared: list[int], count: int) -> None:
        self.submit([*shared, 7], max_tokens=count)

    @rule(resumes=st.booleans())
    def kill(self, resumes: bool) -> None:
        super().kill(resumes)
        self.drafted = Drafted(self.run, self.seed, self.drafted.is_worth, self.drafted.host, True)

    @rule(data=st.data())
    def continue_answer(self, data: st.DataObject) -> None:
        ended = [n for n, (_, params) in self.wanted.items() if params.num_slots == 1 and self.run.ends[n, 0]]
        if ended:
            number = data.draw(st.sampled_from(ended))
            tokens = [*self.wanted[number][0], *self.run.tokens[number, 0]]
            self.submit([*tokens, 8], max_tokens=max(1, 31 - len(tokens)))


TestDraftKeys = DraftMachine.TestCase
TestDraftKeys.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def ask(run: Run, number: int, prompt: list[int], count: int, **params) -> list[int]:
    """The prompt and its answer, which is that of one token a step."""
    run.submit(number, prompt, max_tokens=count, **params)
    run.finish()
    assert run.tokens[number, 0] == expected(prompt, count)
    return [*prompt, *run.tokens[number, 0]]


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_of_an_answer_without_drafts_are_read_where_a_prompt_begins_with_them(overlap: bool) -> None:
    run = Run(SIZES, overlap)
    drafted = Drafted(run, is_worth=False)
    first = ask(run, 1, [5, 6, 7], 20)
    assert drafted.cache.rows <= 2 * 8, "those of the steps in which load may end"
    drafted.is_worth = True
    cached = run.scheduler.cache.cached_tokens
    second = ask(run, 2, [*first, 9], 12)
    assert run.scheduler.cache.cached_tokens - cached >= 20, "the target computes nothing again"
    assert drafted.cache.reads >= 12 and drafted.learning.drafted["draft"] > 0
    reads = drafted.cache.reads
    ask(run, 3, [*first, 9, 9], 12)
    assert drafted.cache.reads - reads < 8, "the blocks are complete now"
    assert second[: len(first)] == first


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_is_drafted_again_when_load_falls(overlap: bool) -> None:
    run = Run(SIZES, overlap)
    drafted = Drafted(run, is_worth=False)
    run.submit(1, [3, 1], max_tokens=38)
    for _ in range(22):
        run.step()
    assert drafted.learning.drafted["draft"] == 0
    drafted.is_worth = True
    run.finish()
    assert run.tokens[1, 0] == expected([3, 1], 38)
    assert drafted.cache.reads >= 8 and drafted.learning.drafted["draft"] > 0


def test_missing_tokens_are_not_read_for_an_answer_that_ends_soon() -> None:
    run = Run(SIZES, True)
    drafted = Drafted(run, is_worth=False)
    first = ask(run, 1, [5, 6, 7], 25)
    drafted.is_worth = True
    ask(run, 2, [*first, 9], 2)
    assert drafted.cache.reads == 0


def test_a_sequence_that_declines_leaves_blocks_that_are_read() -> None:
    run = Run(SIZES, True)
    drafted = Drafted(run)
    first = ask(run, 1, [5, 6, 7], 20, speculate=False)
    assert drafted.cache.rows == drafted.cache.reads == 0
    ask(run, 2, [*first, 9], 12)
    assert drafted.cache.reads >= 12 and drafted.cache.rows > 0


def test_a_block_that_takes_the_place_of_an_equal_one_may_lack_keys() -> None:
    """Both sequences compute the same tokens. Those of the first, which declines, are indexed first."""
    run = HostRun(SIZES, HostMemory(100), True)
    drafted = Drafted(run, most=1)
    run.submit(1, [5, 6, 7], max_tokens=24, speculate=False)
    for _ in range(20):
        run.step()
    run.submit(2, [5, 6, 7], max_tokens=36)
    run.finish()
    assert run.tokens[2, 0] == expected([5, 6, 7], 36)
    assert drafted.cache.reads > 0


@pytest.mark.parametrize("read_first", [False, True])
def test_blocks_from_the_host_tier_lack_what_they_lacked(read_first: bool) -> None:
    sizes = limits(num_blocks=12, max_sequences=8, max_step_tokens=16)
    run = HostRun(sizes, HostMemory(100), True)
    drafted = Drafted(run, is_worth=read_first)
    first = ask(run, 1, [5, 6, 7], 20)
    drafted.is_worth = True
    for number in range(2, 6):
        ask(run, number, [number + 30] * 36, 1)
    reads = drafted.cache.reads
    ask(run, 9, [*first, 9], 12)
    assert run.tier.tokens >= 16, "they came from the tier"
    assert (drafted.cache.reads - reads < 8) if read_first else (drafted.cache.reads - reads >= 12)


def test_a_step_that_did_not_run_has_read_nothing() -> None:
    run = Run(SIZES, False)
    drafted = Drafted(run, is_worth=False)
    run.submit(1, [3, 1], max_tokens=38)
    for _ in range(20):
        run.step()
    drafted.is_worth = True
    for _ in range(20):
        plan = run.scheduler.plan()
        assert plan is not None
        if plan.part(DraftReads) is not None:
            break
        run.take(run.scheduler.commit(plan, run.device.run(plan)))
    else:
        raise AssertionError("no step reads what was missed")
    run.scheduler.abandon(plan, CapacityError("no memory"))
    run.take(run.scheduler.take_events())
    run.finish()
    assert run.tokens[1, 0] == expected([3, 1], 38)
    assert drafted.cache.reads >= 12


@pytest.mark.parametrize("most", [4, 7])
def test_many_missing_tokens_are_read_over_several_steps(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_reads, "MOST_TOKENS", most)
    run = Run(SIZES, True)
    drafted = Drafted(run, is_worth=False)
    first = ask(run, 1, [5, 6, 7], 17)
    drafted.is_worth = True
    ask(run, 2, [*first, 9], 19)
    assert drafted.cache.reads >= 14 and drafted.learning.drafted["draft"] > 0


def test_a_damaged_part_is_refused_by_name() -> None:
    plan = decode_plan(4)
    plan.slots[:] = [3, 0, -1, 2]

    def part(rows, firsts, counts, ids) -> DraftReads:
        return DraftReads(*(np.array(one, np.int32) for one in (rows, firsts, counts, ids)))

    def decoded(one: DraftReads) -> DraftReads:
        return DraftReads.decode(msgspec.Raw(msgspec.msgpack.encode(one.encode())), plan, "draft_reads")

    assert decoded(part([0, 3], [4, 0], [2, 1], [5, 6, 7])).token_ids.tolist() == [5, 6, 7]
    for wrong, text in (
        (part([], [], [], []), "1 to 8 of 4"),
        (part([1, 0], [0, 0], [1, 1], [5, 5]), "ascending"),
        (part([4], [0], [1], [5]), "ascending"),
        (part([2], [0], [1], [5]), "with a slot"),
        (part([0], [-1], [1], [5]), "from position 0"),
        (part([0], [0], [0], []), "0 tokens of 1 rows"),
        (part([0], [0], [257], [5] * 257), "257 tokens"),
        (part([0], [0], [2], [5]), "bytes"),
        (part([0], [0], [1], [-1]), "token id -1"),
    ):
        with pytest.raises(TridecodeError, match=text):
            decoded(wrong)
