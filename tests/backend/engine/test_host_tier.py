"""The host tier under the scheduler: what comes back, what is held meanwhile, what outlives an engine. The
toy device shows a wrong block as a wrong token."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.backend.engine.host_device import SECRET, HostMemory, HostRun
from tests.backend.engine.request_rules import SHARED, RequestMachine
from tests.backend.engine.test_prefix_cache import computed
from tests.backend.engine.toy_device import DOOR, expected, limits
from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.engine.cache.block_keys import BlockHasher, Context
from tridecode.backend.engine.host_tier.cost import CopyCost
from tridecode.backend.engine.host_tier.readiness import SHARES
from tridecode.backend.engine.host_tier.region import Entry
from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.backend.engine.parts.prompt_tables import PromptTables
from tridecode.backend.wire.messages import Perf, SamplingParams, Sent, SequenceRequest, SessionRound, Submit

LONG = [(7 * i) % 50 for i in range(24)]
SMALL = limits(num_blocks=10, max_step_tokens=16)


class HostMachine(RequestMachine):
    """Requests with common beginnings over a small cache and a small tier: cancelled, preempted, abandoned,
    their slots damaged, their engine killed, at any time."""

    @initialize(
        blocks=st.integers(8, 20),
        slots=st.integers(1, 40),
        step=st.integers(4, 12),
        most=st.integers(1, 4),
        overlap=st.sampled_from([False, True, "stages"]),
        shares=st.sampled_from([0, SHARES // 2, SHARES, SHARES]),
        layered=st.booleans(),
    )
    def start(
        self, blocks: int, slots: int, step: int, most: int, overlap: bool | str, shares: int, layered: bool
    ) -> None:
        self.sizes = limits(num_blocks=blocks, max_step_tokens=step, max_sequence_tokens=32)
        self.overlap, self.most, self.layering = overlap, most, layered
        self.run = HostRun(self.sizes, HostMemory(slots), overlap, most, layered)
        self.run.device.shares = shares
        self.number = 0
        self.wanted: dict[int, tuple[list[int], SamplingParams]] = {}

    @rule(
        shared=st.sampled_from(SHARED),
        own=st.lists(st.integers(0, 2), max_size=6),
        count=st.integers(0, 8),
        samples=st.sampled_from([0, 0, 0, 3]),
        cache=st.sampled_from(["on", "on", "on", "write", "off"]),
        salt=st.sampled_from(["", "", "a"]),
    )
    def ask(self, shared, own, count, samples, cache, salt) -> None:
        self.submit(
            [*shared, *own], max_tokens=count, num_return_sequences=samples, cache=cache, cache_salt=salt
        )

    @rule(own=st.lists(st.integers(0, 1), max_size=5), count=st.integers(1, 3), others=st.integers(0, 3))
    def return_to(self, own: list[int], count: int, others: int) -> None:
        """A prompt whose beginning is in the tier and not in the cache, alone or with others in flight."""
        self.submit(SHARED[3], max_tokens=1)
        self.run.finish()
        self.run.scheduler.cache.index.evict(100)
        for _ in range(others):
            self.submit([3, 3], max_tokens=count)
            self.run.step()
        self.submit([*SHARED[3], *own], max_tokens=count)
        self.run.step()

    @rule(data=st.data(), new=st.lists(st.integers(0, 2), min_size=1, max_size=3), count=st.integers(1, 6))
    def ask_again(self, data: st.DataObject, new: list[int], count: int) -> None:
        earlier = [
            n for n, (_, params) in self.wanted.items() if params.num_slots == 1 and self.run.ends[n, 0]
        ]
        if earlier:
            number = data.draw(st.sampled_from(earlier))
            self.submit([*self.wanted[number][0], *self.run.tokens[number, 0], *new], max_tokens=count)

    @rule(new=st.lists(st.integers(0, 2), min_size=1, max_size=5), count=st.integers(1, 5))
    def talk(self, new: list[int], count: int) -> None:
        """The next round of a conversation, which ends with its engine or a round that was cut short."""
        number, prompt = getattr(self.run, "talk", (0, []))
        history: list[int] = []
        if number:
            ends = self.run.ends[number, 0]
            if not ends:
                return
            if ends[0].finish == "length" and len(prompt) < 20:
                history = [*prompt, *self.run.tokens[number, 0]]
        self.number += 1
        params = SamplingParams(max_tokens=count)
        ids = np.array(new if history else [*SHARED[2], *new], np.int32)
        wanted = SessionRound(1, 32, [len(history)] if history else [])
        with contextlib.suppress(RequestError, CapacityError):
            submit = Submit(self.number, [SequenceRequest(ids.tobytes(), params)], session=wanted)
            self.run.scheduler.submit(DOOR, submit)
            self.wanted[self.number] = [*history, *ids.tolist()], params
            self.run.talk = self.number, self.wanted[self.number][0]  # type: ignore[attr-defined]

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.run.step()

    @rule()
    def flush(self) -> None:
        self.run.finish()

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        memory = self.run.memory
        if memory.filled:
            memory.damaged.add(data.draw(st.sampled_from(sorted(memory.filled))))

    @rule(shares=st.sampled_from([-1, SHARES // 4, SHARES]))
    def pin(self, shares: int) -> None:
        """Let the slowest rank pin more of its memory, or fail to."""
        if not self.run.tier.memory.is_complete and (shares < 0 or shares > self.run.device.shares >= 0):
            self.run.device.shares = shares

    @rule(resumes=st.booleans())
    def kill(self, resumes: bool) -> None:
        """Start the next engine with the previous one's blocks, and resubmit the open requests. resumes:
        requests of one sequence continue after the tokens that they have sent."""
        self.check_ends()
        ended = self.run
        again = [n for n in self.wanted if not all(ended.ends[n, i] for i in self.sequences(n))]
        self.run = HostRun(self.sizes, ended.memory, self.overlap, self.most, self.layering)
        self.run.device.shares = abs(ended.device.shares)
        self.run.tier.faults = ended.tier.faults
        wanted, self.wanted = self.wanted, {}
        for number in again:
            prompt, params = wanted[number]
            output = ended.tokens[number, 0]
            if resumes and params.num_slots == 1 and len(output) < params.max_tokens:
                ids = SequenceRequest(np.array(prompt, np.int32).tobytes(), params)
                sent = [Sent(np.array(output, "<i4").tobytes())]
                self.run.scheduler.submit(DOOR, Submit(number, [ids], sent=sent))
                self.run.tokens[number, 0] = list(output)
                self.wanted[number] = prompt, params
                continue
            self.run.submit(
                number, prompt, **{name: getattr(params, name) for name in params.__struct_fields__}
            )
            self.wanted[number] = prompt, params

    def sequences(self, number: int) -> range:
        return range(self.wanted[number][1].num_sequences)

    @invariant()
    def users_are_counted(self) -> None:
        if hasattr(self, "run"):
            self.run.check_holders()
            self.run.check_tier()

    def check_ends(self) -> None:
        for number, (prompt, params) in self.wanted.items():
            for i in self.sequences(number):
                for end in self.run.ends[number, i]:
                    if params.beam_width == 1 and end.finish not in ("error", "cancelled"):
                        answer = expected(prompt, params.max_tokens, params.end_id, params.seed + i)
                        assert self.run.tokens[number, i] == answer

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        self.run.finish()
        self.check_ends()
        for number in self.wanted:
            assert all(len(self.run.ends[number, i]) == 1 for i in self.sequences(number))


TestHostTier = HostMachine.TestCase
TestHostTier.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def ask(run: HostRun, number: int, prompt: list[int], count: int = 2) -> list[int]:
    run.submit(number, prompt, max_tokens=count)
    run.finish()
    assert run.tokens[number, 0] == expected(prompt, count)
    return run.tokens[number, 0]


def fill_cache(run: HostRun) -> None:
    """Evict everything that earlier requests have left."""
    for number in range(4):
        ask(run, 100 + len(run.ends), [number + 40] * 30)


def test_evicted_blocks_come_back_from_the_tier() -> None:
    run = HostRun(SMALL, HostMemory(100))
    ask(run, 1, LONG)
    fill_cache(run)
    before = computed(run)
    ask(run, 2, LONG)
    assert computed(run) - before == 4, "only the last block of 4 tokens is computed"
    assert run.tier.tokens == 20 and run.tier.faults == 0


def test_an_engine_that_was_killed_leaves_its_blocks_to_the_next_one() -> None:
    run = HostRun(SMALL, HostMemory(100))
    ask(run, 1, LONG)
    after = HostRun(SMALL, run.memory)
    ask(after, 2, LONG)
    assert computed(after) == 4 and after.tier.tokens == 20


def test_a_resumed_request_reports_no_cached_tokens_of_its_own() -> None:
    """The killed engine computed the prompt and reported it; the new engine reports nothing as cached."""
    run, seen = HostRun(SMALL, HostMemory(100)), []
    ask(run, 1, LONG)
    after = HostRun(SMALL, run.memory)
    take = after.take
    after.take = lambda events: (seen.extend(event for _, event in events), take(events))[1]
    params = SamplingParams(max_tokens=5, return_perf_metrics=True)
    ids, sent = SequenceRequest(np.array(LONG, np.int32).tobytes(), params), expected(LONG, 2)
    perf = Perf(1, 2, 3, 4, new_blocks=6, reused_blocks=0, missed_blocks=6)
    after.scheduler.submit(DOOR, Submit(2, [ids], sent=[Sent(np.array(sent, "<i4").tobytes(), perf=perf)]))
    after.tokens[2, 0] = list(sent)
    after.finish()
    assert after.tokens[2, 0] == expected(LONG, 5) and after.tier.tokens == 24
    assert [event.cached_tokens for event in seen] == [0, 0, 0]
    last = seen[-1].extra.perf
    assert (last.reused_blocks, last.missed_blocks) == (0, 6)


def test_another_secret_finds_nothing() -> None:
    run = HostRun(SMALL, HostMemory(100))
    ask(run, 1, LONG)
    assert run.tier.hasher.root(Context()) == BlockHasher(SECRET).root(Context())
    run.memory.filled = {
        slot: (replace_key(entry), ids, shifts) for slot, (entry, ids, shifts) in run.memory.filled.items()
    }
    after = HostRun(SMALL, run.memory)
    ask(after, 2, LONG)
    assert computed(after) == len(LONG)


def test_a_table_that_was_damaged_keeps_no_engine_from_starting() -> None:
    """Two blocks are each other's parent."""
    memory = HostMemory(4)
    keys = [bytes([1] * 16), bytes([2] * 16)]
    ids = np.zeros(4, int)
    for slot in range(2):
        entry = Entry(slot, keys[slot], keys[1 - slot], slot)
        memory.filled[slot] = entry, ids, ids
    run = HostRun(SMALL, memory)
    ask(run, 1, LONG)
    assert run.tier.tokens == 0


def replace_key(entry):
    flipped = bytes(byte ^ 1 for byte in entry.key)
    return entry._replace(key=flipped)


def test_a_damaged_block_is_computed_and_counted_and_replaced() -> None:
    run = HostRun(SMALL, HostMemory(100))
    ask(run, 1, LONG)
    fill_cache(run)
    slot = run.memory.entries()[2].slot  # the third block of LONG
    run.memory.damaged.add(slot)
    before = computed(run)
    ask(run, 2, LONG)
    assert run.tier.faults == 1 and computed(run) - before == len(LONG) - 8
    fill_cache(run)
    before = computed(run)
    ask(run, 3, LONG)
    assert run.tier.faults == 1 and computed(run) - before == 4, "the slot was filled again"


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_block_with_damaged_values_is_set_to_zero_unless_others_have_filled_it(is_ended: bool) -> None:
    """Masked positions of a block must not be NaN. is_ended: the request ends before its copies, and the next
    plan, without rows, fills the same block for another request."""
    other = [9] * 24
    run = HostRun(limits(num_blocks=16, max_step_tokens=16), HostMemory(100), most_blocks=6)
    ask(run, 1, LONG)
    ask(run, 2, other)
    run.scheduler.cache.index.evict(16)
    run.memory.damaged.add(run.memory.entries()[0].slot)
    run.submit(3, LONG, max_tokens=2)
    plan = run.scheduler.plan()
    copies = None if plan is None else plan.part(HostCopies)
    assert plan is not None and copies is not None
    damaged = copies.ins[0][1]
    if is_ended:
        run.scheduler.cancel(DOOR, 3)
    run.take(run.scheduler.commit(plan, run.device.run(plan)))
    assert run.scheduler.cache._cleared == {damaged, *(block for _, block in copies.ins[:1])}
    run.submit(4, other, max_tokens=2)
    plan = run.scheduler.plan()
    assert plan is not None
    later, tables = plan.part(HostCopies), plan.part(PromptTables)
    if is_ended:
        assert later is not None and damaged in [block for _, block in later.ins] and tables is None
    else:
        assert tables is not None and tables.tables.cleared == [damaged] and plan.num_rows
    run.take(run.scheduler.commit(plan, run.device.run(plan)))
    run.finish()
    assert run.tokens[4, 0] == expected(other, 2)
    assert is_ended or run.tokens[3, 0] == expected(LONG, 2)


def test_a_damaged_block_is_not_found_by_the_next_engine() -> None:
    run = HostRun(SMALL, HostMemory(100))
    ask(run, 1, LONG)
    run.memory.damaged.add(run.memory.entries()[0].slot)
    after = HostRun(SMALL, run.memory)
    ask(after, 2, LONG)
    assert after.tier.faults == 1 and computed(after) == len(LONG)


def test_neighbours_run_while_blocks_come_back() -> None:
    """A prompt of six blocks comes back one block a plan; a request behind it is answered meanwhile."""
    run = HostRun(limits(num_blocks=16, max_step_tokens=16), HostMemory(100), most_blocks=1)
    ask(run, 1, LONG)
    for number in range(900, 906):
        ask(run, number, [number % 50] * 30)
    run.submit(2, LONG, max_tokens=2)
    run.submit(3, [3, 3], max_tokens=2)
    while not run.ends[3, 0]:
        run.step()
    assert not run.tokens[2, 0]
    run.finish()
    assert run.tokens[2, 0] == expected(LONG, 2) and run.tokens[3, 0] == expected([3, 3], 2)


def test_a_preempted_sequence_gets_its_blocks_back() -> None:
    """Two sequences that need 8 blocks each share 10: without the tier one computes its output again."""
    sizes = limits(num_blocks=10)
    counts = {}
    for slots in (1, 100):
        run = HostRun(sizes, HostMemory(slots))
        run.submit(1, [1] * 8, max_tokens=24)
        run.submit(2, [2] * 8, max_tokens=24)
        run.finish()
        assert run.scheduler.counters.preemptions > 0
        assert run.tokens[1, 0] == expected([1] * 8, 24) and run.tokens[2, 0] == expected([2] * 8, 24)
        counts[slots] = computed(run)
    assert counts[100] < counts[1]


def test_a_full_tier_evicts_what_was_used_longest_ago() -> None:
    run = HostRun(limits(num_blocks=8, max_step_tokens=16), HostMemory(8))
    ask(run, 1, LONG)
    for number in range(5):
        ask(run, 10 + number, [number] * 12)
    assert run.tier.slots.evictions > 0
    assert run.tier.slots.num_blocks == 8 and len(run.memory.filled) <= 8


def test_nothing_is_copied_before_the_memory_is_ready() -> None:
    run = HostRun(SMALL, HostMemory(100))
    run.tier.memory._pinned = lambda: 0
    ask(run, 1, LONG)
    assert not run.memory.filled and not run.tier.has_work
    run.tier.memory._pinned = lambda: SHARES
    ask(run, 2, [9] * 12)
    assert len(run.memory.filled) == 6 + 3, "also what was computed before"


def warm(shares: int) -> HostRun:
    """Return a new engine whose slowest rank has pinned `shares` of the slots; the first six hold LONG."""
    run = HostRun(SMALL, HostMemory(100))
    ask(run, 1, LONG)
    assert sorted(entry.slot for entry in run.memory.entries()) == [0, 1, 2, 3, 4, 5]
    after = HostRun(SMALL, run.memory)
    after.device.shares = shares
    return after


def test_a_prompt_waits_for_blocks_whose_memory_is_being_pinned() -> None:
    run = warm(1)  # slots 0 to 2
    run.submit(2, LONG, max_tokens=2)
    run.submit(3, [3, 3], max_tokens=2)
    for _ in range(8):
        run.step()
    assert run.ends[3, 0] and not run.tokens[2, 0] and run.tier.tokens == 0
    run.device.shares, run.now = SHARES, 0.1
    run.finish()
    assert run.tokens[2, 0] == expected(LONG, 2) and run.tier.tokens == 20 and computed(run) == 4 + 2


def test_a_prompt_does_not_wait_for_long() -> None:
    """Then the pinned blocks are copied back, and the rest is computed."""
    run = warm(1)
    run.step()
    run.now = 2.0
    ask(run, 2, LONG)
    assert run.tier.tokens == 12 and computed(run) == len(LONG) - 12


def test_ranks_are_queried_until_the_last_one_is_ready() -> None:
    run = warm(0)
    asked = []
    for number in range(8):
        run.device.shares, run.now = 4 * (number + 1), run.now + 0.03  # less than the interval
        plan = run.scheduler.plan()
        if plan is not None:
            asked.append(number)
            run.take(run.scheduler.commit(plan, run.device.run(plan)))
    assert asked == [0, 2, 4, 6] and run.tier.memory.usable == 87
    run.now += 1
    run.step()
    assert run.tier.memory.is_complete and not run.tier.has_work


def test_copies_end_where_a_rank_fails_to_pin_the_rest() -> None:
    """The failure is reported while copies are in flight."""
    run = warm(3)  # slots 0 to 8
    run.tier._most_blocks = 1
    run.step()
    run.submit(2, LONG, max_tokens=2)
    run.step()
    run.device.shares, run.now = -1, 0.1
    run.finish()
    assert run.tier.memory.is_off and not run.tier._fetches
    assert run.tokens[2, 0] == expected(LONG, 2) and computed(run) > 4
    assert (
        run.tier.metrics()['host_blocks{state="free"}']
        == 0
        == run.tier.metrics()['host_blocks{state="cached"}']
    )
    filled = dict(run.memory.filled)
    ask(run, 3, [9] * 12)
    assert run.memory.filled == filled, "nothing is copied any more"


def test_blocks_of_failed_logits_leave_the_tier() -> None:
    """Its prompt was copied to the tier before its logits turned out to be broken."""
    run = HostRun(limits(num_blocks=16, max_step_tokens=16), HostMemory(100), overlap=True)
    run.submit(1, LONG, max_tokens=8)
    while not run.memory.filled:
        run.step()
    plan, result = run.pending.pop()
    result.tokens[:] = -1
    run.pending.append((plan, result))
    run.finish()
    assert run.ends[1, 0][0].finish == "error"
    run.flush()
    assert not any(key not in run.tier._bad for key in run.tier.slots._blocks)
    ask(run, 2, LONG)


def test_a_bad_block_whose_slot_was_evicted_is_found_once_another_slot_has_it() -> None:
    run = HostRun(limits(num_blocks=16, max_step_tokens=16), HostMemory(8), overlap=True)
    run.submit(1, LONG, max_tokens=8)
    while not run.memory.filled:
        run.step()
    run.pending[-1][1].tokens[:] = -1
    run.finish()
    bad = set(run.tier._bad)
    assert bad
    fill_cache(run)
    assert not bad & set(run.tier.slots._blocks), "their slots hold other blocks"
    ask(run, 2, LONG)
    assert bad & set(run.tier.slots._blocks) and not run.tier._bad


def test_copies_stop_where_computing_is_faster() -> None:
    cost = CopyCost(block_tokens=32)
    assert cost.pays(), "nothing is measured yet"
    cost.note_copy(10, 1.0)
    cost.note_prompt(16, 100.0)  # too short to say what a token costs
    assert cost.pays()
    cost.note_prompt(1000, 1.0)
    refused = [cost.pays() for _ in range(64)]
    assert 0 < sum(refused) < 4, "it tries again from time to time"
    for _ in range(20):
        cost.note_copy(10, 0.01)
    assert cost.pays()


def test_single_slow_copies_do_not_stop_the_copies() -> None:
    """A busy machine sometimes makes a copy a hundred times slower than others."""
    cost = CopyCost(block_tokens=32)
    cost.note_prompt(1000, 1.0)
    for seconds in (0.05, 5.0, 5.0, 0.02, 5.0):
        cost.note_copy(10, seconds)
        assert cost.pays()


@pytest.mark.parametrize("scope", ["none", "all"])
def test_a_scope_of_none_leaves_the_tier_empty(scope: str) -> None:
    run = HostRun(replace(SMALL, cache_scope=scope), HostMemory(100))
    ask(run, 1, LONG)
    assert bool(run.memory.filled) == (scope == "all")


def test_a_round_of_a_conversation_gets_its_blocks_back() -> None:
    run = HostRun(SMALL, HostMemory(100))

    def round_of(number: int, new: list[int], history: list[int]) -> list[int]:
        ids = np.array(new, np.int32).tobytes()
        wanted = SessionRound(5, 40, [len(history)] if history else [])
        params = SamplingParams(max_tokens=2)
        run.scheduler.submit(DOOR, Submit(number, [SequenceRequest(ids, params)], session=wanted))
        run.finish()
        assert run.tokens[number, 0] == expected([*history, *new], 2)
        return [*history, *new, *run.tokens[number, 0]]

    history = round_of(1, LONG, [])
    fill_cache(run)
    before = computed(run)
    round_of(2, [1, 2], history)
    assert computed(run) - before == len(history) + 2 - 24, "all full blocks come back"


@pytest.mark.parametrize("overlap", [False, True, "stages"])
def test_a_request_that_is_resumed_after_a_kill_gets_its_blocks_back(overlap: bool | str) -> None:
    """Blocks of its prompt and of its answer: blocks of answers are copied to the tier as they become
    full."""
    run = HostRun(limits(num_blocks=16, max_step_tokens=16), HostMemory(100), overlap)
    run.submit(1, LONG, max_tokens=16)
    run.submit(2, [9] * 3, max_tokens=20)  # steps with rows, as under load
    while len(run.tokens[1, 0]) < 14:
        run.step()
    assert not run.ends[1, 0] and run.scheduler.counters.preemptions == 0
    before = list(run.tokens[1, 0])
    sent = [Sent(np.array(before, "<i4").tobytes())]
    after = HostRun(limits(num_blocks=16, max_step_tokens=16), run.memory, overlap)
    ids = SequenceRequest(np.array(LONG, np.int32).tobytes(), SamplingParams(max_tokens=16))
    after.scheduler.submit(DOOR, Submit(1, [ids], sent=sent))
    after.finish()
    assert [*before, *after.tokens[1, 0]] == expected(LONG, 16)
    assert after.tier.tokens >= 32, "the prompt and at least two of the three full blocks behind it"


def test_preempted_sequences_compute_little_again() -> None:
    """Less than a block each on average, because the other blocks were already in the tier."""
    run = HostRun(limits(num_blocks=24, max_step_tokens=16), HostMemory(200), overlap=True)
    for number in range(4):
        run.submit(number, [number] * 8, max_tokens=28)
    run.finish()
    for number in range(4):
        assert run.tokens[number, 0] == expected([number] * 8, 28)
    preempted = run.scheduler.counters.preemptions
    assert preempted > 0 and computed(run) <= 4 * 8 + 4 * preempted


def test_a_sequence_may_be_preempted_any_number_of_times() -> None:
    """The limit on waiting for the tier restarts at each admission."""
    run = HostRun(limits(num_blocks=16, max_step_tokens=16), HostMemory(100))
    run.submit(1, LONG, max_tokens=14)
    for number in range(5):
        while len(run.tokens[1, 0]) < 2 * number + 1:
            run.step()
        (sequence,) = run.open()
        run.scheduler.planner.preempt(sequence)
        index = run.scheduler.cache.index
        while run.tier._queued:
            run.tier.commit(part, run.device._copies(part)) if (part := run.tier.take(0, True)) else None
        index.evict(index.num_cached)
    run.finish()
    assert run.tokens[1, 0] == expected(LONG, 14) and computed(run) <= len(LONG) + 5 * 5
