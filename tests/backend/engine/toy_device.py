"""A device without a model: it executes plans on a cache of token ids, so that a stale, foreign or wrongly
shared block, or a wrong slot, shows as a wrong token."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from tridecode.backend.engine.admission import SchedulerLimits
from tridecode.backend.engine.plan import StepPlan, StepResult
from tridecode.backend.engine.scheduler import Scheduler
from tridecode.backend.engine.sequence import Sequence, Stage
from tridecode.backend.messages import Event, SamplingParams, SequenceRequest, Submit

DOOR = b"door"
VOCAB = 50


def limits(**changes) -> SchedulerLimits:
    defaults = dict(
        num_blocks=12, block_tokens=4, max_sequences=4, max_sequence_tokens=40, max_step_tokens=8,
        max_queued_requests=100, vocab_size=VOCAB, request_timeout_s=1000.0,
    )  # fmt: skip
    return SchedulerLimits(**{**defaults, **changes})


def next_token(tokens: list[int], seed: int, generated: int) -> int:
    """The toy model and its sampler: depends on all tokens before, their order and the slot's state."""
    value = 7 + 1009 * seed + 9176 * generated
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def expected(
    prompt: list[int], count: int, end_id: int = -1, seed: int = 0, output: list[int] | None = None
) -> list[int]:
    """All output of a run on its own, which continues from `output`."""
    found = list(output or [])
    while len(found) < count and (not found or found[-1] != end_id):
        found.append(next_token([*prompt, *found], seed, len(found)))
    return found


class ToyDevice:
    """A cache of token ids and of the shifts of their rotary positions; for each slot its last token, seed,
    number of generated tokens and length of its prompt."""

    def __init__(self, limits: SchedulerLimits):
        self.limits = limits
        self.cache = np.full((limits.num_blocks, limits.block_tokens), -1)
        self.shifts = np.full((limits.num_blocks, limits.block_tokens), -1)
        self.last: dict[int, int] = {}
        self.state: dict[int, tuple[int, int, int]] = {}  # seed, generated, prompt

    def run(self, plan: StepPlan) -> StepResult:
        assert 0 < plan.num_tokens <= self.limits.max_step_tokens
        assert len(set(plan.slots.tolist())) == plan.num_rows, "a slot twice in a plan"
        written = plan.kv_slots.tolist()
        assert len(set(written)) == len(written), "two tokens are written to one place"
        self._copy(plan)
        for start in plan.starts:
            self.last.pop(start.slot, None)
            prompt = len(start.history) - start.generated
            self.state[start.slot] = start.params.seed, start.generated, prompt
        tokens = []
        for row in range(plan.num_rows):
            first, last = plan.query_starts[row], plan.query_starts[row + 1]
            slot = int(plan.slots[row])
            ids = [self.last[slot] if token < 0 else int(token) for token in plan.token_ids[first:last]]
            if row < plan.num_decodes:
                assert last - first == 1
            length = int(plan.context_lens[row])
            shift = int(plan.positions[first]) - (length - len(ids))
            assert (plan.positions[first:last] - shift).tolist() == list(range(length - len(ids), length))
            self.cache.reshape(-1)[plan.kv_slots[first:last]] = ids
            self.shifts.reshape(-1)[plan.kv_slots[first:last]] = shift
            if plan.samples[row]:
                seed, generated, prompt = self.state[slot]
                context = self.cache[plan.block_tables[row]].reshape(-1)[:length].tolist()
                shifts = self.shifts[plan.block_tables[row]].reshape(-1)[:length]
                assert (shifts == self.wanted_shift(prompt, length)).all()
                self.last[slot] = next_token(context, seed, generated)
                self.state[slot] = seed, generated + 1, prompt
                tokens.append(self.last[slot])
        return StepResult(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))

    def wanted_shift(self, prompt: int, length: int) -> int:
        """Of all tokens of a sequence of `length` tokens."""
        tokens = length if self.limits.recompute_long else prompt
        return self.limits.max_sequence_tokens if 0 < self.limits.long_prompt_tokens < tokens else 0

    def _copy(self, plan: StepPlan) -> None:
        blocks = {
            to: (self.cache[source].copy(), self.shifts[source].copy()) for source, to in plan.block_copies
        }
        slots = {to: (self.last[source], self.state[source]) for source, to in plan.slot_copies}
        assert len(blocks) == len(plan.block_copies), "a block is the destination of two copies"
        assert len(slots) == len(plan.slot_copies), "a slot is the destination of two copies"
        assert set(slots) <= set(plan.slots.tolist()), "state is copied to a slot that is not in the plan"
        for to, content in blocks.items():
            self.cache[to], self.shifts[to] = content
        for to, (token, state) in slots.items():
            self.last[to], self.state[to] = token, state


class Run:
    """A scheduler, the toy device and what came of every request."""

    def __init__(self, limits: SchedulerLimits, overlap: bool = False):
        self.now = 0.0
        self.scheduler = Scheduler(limits, lambda: self.now)
        self.device, self.overlap = ToyDevice(limits), overlap
        self.pending: tuple[StepPlan, StepResult] | None = None
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[int, int], list[Event]] = defaultdict(list)

    def submit(self, request: int, *prompts: list[int], **params) -> None:
        sequences = [
            SequenceRequest(np.array(prompt, np.int32).tobytes(), SamplingParams(**params))
            for prompt in prompts
        ]
        self.scheduler.submit(DOOR, Submit(request, sequences))
        self.take(self.scheduler.take_events())

    def step(self) -> None:
        """As the engine's loop does it, one step ahead of the results where overlap is set."""
        plan = self.scheduler.plan()
        self.take(self.scheduler.take_events())
        launched = None
        if plan is not None:
            self._check_written(plan)
            launched = plan, self.device.run(plan)
        self.settle()
        self.pending = launched
        if not self.overlap:
            self.settle()

    def settle(self) -> None:
        """Commit the step in flight."""
        if self.pending is not None:
            self.take(self.scheduler.commit(*self.pending))
            self.pending = None

    def open(self) -> list[Sequence]:
        """The sequences that have not ended."""
        groups = [group for groups in self.scheduler._requests.values() for group in groups]
        return [sequence for group in groups for sequence in group.sequences]

    def take(self, events: list[tuple[bytes, Event]]) -> None:
        for door, event in events:
            assert door == DOOR
            key = (event.request, event.sequence)
            assert not self.ends[key], f"an event after the end of {key}"
            self.tokens[key] += event.tokens
            if event.finish:
                self.ends[key].append(event)

    def finish(self, steps: int = 2000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work and self.pending is None:
                break
            self.step()
        assert not self.scheduler.has_work
        assert self.scheduler.cache.pool.num_free == self.scheduler.limits.num_blocks, "blocks leaked"
        assert self.scheduler.num_running == 0, "slots leaked"

    def check_holders(self) -> None:
        """Every block's user count equals its holders; slots and tables agree with the sequences."""
        cache, running = self.scheduler.cache, [s for s in self.open() if s.stage is not Stage.WAITING]
        holders = Counter(block for sequence in running for block in sequence.blocks)
        blocks = range(cache.pool.num_blocks)
        assert [cache.pool.users(block) for block in blocks] == [holders[block] for block in blocks]
        assert cache.pool.num_free == len(blocks) - len(holders)
        assert len({sequence.slot for sequence in running}) == len(running) == self.scheduler.num_running
        for sequence in running:
            assert cache.tables[sequence.slot, : len(sequence.blocks)].tolist() == sequence.blocks

    def _check_written(self, plan: StepPlan) -> None:
        pool, size = self.scheduler.cache.pool, self.scheduler.limits.block_tokens
        for block in {slot // size for slot in plan.kv_slots.tolist()} | {to for _, to in plan.block_copies}:
            assert pool.users(block) == 1, f"block {block} is written while {pool.users(block)} hold it"
