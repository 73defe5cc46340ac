"""A device without a model: it executes plans on a cache of token ids, so that a stale, foreign or wrongly
shared block, or a wrong slot, shows as a wrong token."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.backend.engine.step_watch import StepWatch
from tridecode.backend.engine.host_tier.tier import HostTier
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.schedule.sequence import Sequence, Stage
from tridecode.backend.engine.step.plan import StepPlan, StepResult
from tridecode.backend.wire.messages import BeamStep, Event, SamplingParams, SequenceRequest, Submit

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


def toy_logits(tokens: list[int]) -> np.ndarray:
    """(VOCAB,) float64: the toy model for beam search, which depends on all tokens and their order."""
    return 2 * np.random.default_rng([len(tokens), *tokens]).normal(size=VOCAB)


def banned_tokens(params: SamplingParams, known: list[int], generated: int) -> list[int]:
    """The tokens that may not follow: the last of a bad word whose others are the newest tokens, and the end
    tokens before min_tokens."""
    banned = []
    for *before, last in params.bad_words:
        if not before or known[-len(before) :] == before:
            banned.append(last)
    return banned + (params.end_ids if generated < params.min_tokens else [])


class ToyDevice:
    """A cache of token ids and of the shifts of their rotary positions; for each slot its last token, seed,
    number of generated tokens and length of its prompt."""

    def __init__(self, limits: SchedulerLimits):
        self.limits = limits
        self.cache = np.full((limits.num_blocks, limits.block_tokens), -1)
        self.shifts = np.full((limits.num_blocks, limits.block_tokens), -1)
        self.last: dict[int, int] = {}
        self.state: dict[int, tuple[int, int, int]] = {}  # seed, generated, prompt
        self.lengths: dict[int, int] = {}  # kept by steps that verify
        #: by slot, what a drafter on the device proposes behind its last token; `propose` makes it
        self.drafts: dict[int, list[int]] = {}
        self.propose: Callable[[list[int], int, int], list[int]] | None = None
        #: for beams: parameters, all tokens and how many of them are output
        self.known: dict[int, tuple[SamplingParams, list[int], int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        assert 0 < plan.num_tokens <= self.limits.max_step_tokens
        beams = plan.part(BeamRows)
        beam_slots = [] if beams is None else beams.slots.tolist()
        sampled = plan.slots[plan.slots >= 0].tolist() + beam_slots
        assert len(set(sampled)) == len(sampled), "a slot twice in a plan"
        assert plan.num_samples <= self.limits.max_sequences
        assert plan.query_starts[0] == 0 and plan.query_starts[-1] == plan.num_tokens
        written = plan.kv_slots[plan.kv_slots >= 0].tolist()
        assert len(set(written)) == len(written), "two tokens are written to one place"
        self._copy(plan)
        for start in plan.starts:
            self.last.pop(start.slot, None)
            prompt = len(start.history) - start.generated
            self.state[start.slot] = start.params.seed, start.generated, prompt
            self.known[start.slot] = start.params, start.history.tolist(), start.generated
        tokens: list[int] = []
        contexts: list[list[int]] = []
        accepted: list[int] = []
        for row in range(plan.num_rows):
            first, last = plan.query_starts[row], plan.query_starts[row + 1]
            slot = int(plan.slots[row])
            if row < plan.num_decodes and self.limits.micro_batches > 1:
                assert (plan.token_ids[first:last] >= 0).all(), "a first stage does not know sampled tokens"
            if plan.queries and row < plan.num_decodes and slot >= 0:
                found = self._verify(plan, row, slot)
                accepted.append(found.index(-9) if -9 in found else len(found))
                tokens += found
                contexts += [[]] * len(found)
                continue
            if row < plan.num_decodes:
                accepted.append(0)
            ids = [self.last[slot] if token < 0 else int(token) for token in plan.token_ids[first:last]]
            if row < plan.num_decodes:
                assert last - first == 1
            length = int(plan.context_lens[row])
            shift = int(plan.positions[first]) - (length - len(ids))
            assert (plan.positions[first:last] - shift).tolist() == list(range(length - len(ids), length))
            self.cache.reshape(-1)[plan.kv_slots[first:last]] = ids
            self.shifts.reshape(-1)[plan.kv_slots[first:last]] = shift
            if plan.samples[row]:
                context = self.cache[plan.block_tables[row]].reshape(-1)[:length].tolist()
                shifts = self.shifts[plan.block_tables[row]].reshape(-1)[:length]
                contexts.append(context)
                if slot < 0:
                    prompt = len(plan.sequences[row].prompt)
                    assert (shifts == self.wanted_shift(prompt, length)).all()
                    tokens.append(-7)
                    continue
                seed, generated, prompt = self.state[slot]
                assert (shifts == self.wanted_shift(prompt, length)).all()
                self.last[slot] = next_token(context, seed, generated)
                self.state[slot] = seed, generated + 1, prompt
                tokens.append(self.last[slot])
                self._propose([*context, self.last[slot]], slot)
        result = StepResult(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))
        if plan.queries:
            result.accepted = np.array(accepted, np.int32)
        if beams is not None:
            assert [i for i, token in enumerate(tokens) if token == -7] == beams.rows.tolist()
            found = self.candidates(beams, contexts)
            result.parts = [found if part is beams else None for part in plan.parts]
        return result

    def _propose(self, known: list[int], slot: int) -> None:
        if self.propose is not None:
            seed, generated, _ = self.state[slot]
            self.drafts[slot] = self.propose(known, seed, generated)

    def _verify(self, plan: StepPlan, row: int, slot: int) -> list[int]:
        """The samples of a decode row that the step keeps, -9 instead of the others."""
        first, last = plan.query_starts[row], plan.query_starts[row + 1]
        given = plan.token_ids[first:last].tolist()
        assert 1 <= len(given) <= plan.queries and plan.samples[row] == len(given)
        newest = self.last[slot] if given[0] < 0 else given[0]
        ids = [newest] + [self.drafts[slot][i] if id < 0 else id for i, id in enumerate(given[1:])]
        is_known = plan.context_lens[row] >= 0
        length = int(plan.context_lens[row]) - len(ids) if is_known else self.lengths[slot]
        places = np.arange(length, length + len(ids))
        size, table = self.limits.block_tokens, plan.block_tables[row]
        kv_slots = table[places // size] * size + places % size
        shifts = plan.positions[first:last] - (places if is_known else 0)
        if is_known:
            assert plan.kv_slots[first:last].tolist() == kv_slots.tolist()
        else:
            assert (plan.kv_slots[first:last] < 0).all()
        assert (shifts == shifts[0]).all()
        self.cache.reshape(-1)[kv_slots] = ids
        self.shifts.reshape(-1)[kv_slots] = shifts
        seed, generated, prompt = self.state[slot]
        found: list[int] = []
        for i in range(len(ids)):
            context = self.cache[table].reshape(-1)[: length + i + 1].tolist()
            held = self.shifts[table].reshape(-1)[: length + i + 1]
            assert (held == self.wanted_shift(prompt, length + i + 1)).all()
            found.append(next_token(context, seed, generated + i))
            if i + 1 < len(ids) and found[-1] != ids[i + 1]:
                break
        self.last[slot], self.lengths[slot] = found[-1], length + len(found)
        self.state[slot] = seed, generated + len(found), prompt
        self._propose([*context, found[-1]], slot)
        return found + [-9] * (len(ids) - len(found))

    def candidates(self, beams: BeamRows, contexts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """The most likely tokens of each beam, whose slot knows the tokens of its context. Nothing here has
        penalties."""
        logits = np.array([toy_logits(contexts[row]) for row in beams.rows.tolist()])
        for index, (slot, token) in enumerate(zip(beams.slots.tolist(), beams.tokens.tolist())):
            params, tokens, generated = self.known[slot]
            if token >= 0:
                tokens, generated = [*tokens, token], generated + 1
                self.known[slot] = params, tokens, generated
            assert tokens == contexts[beams.rows[index]], "the slot of a beam has other tokens"
            logits[index, banned_tokens(params, tokens, generated)] = -np.inf
        total = np.exp(logits).sum(1, keepdims=True)
        log_probs = logits - np.log(np.where(total == 0, 1, total))  # 0: all are banned
        ids = np.argsort(-log_probs, axis=1)[:, : beams.width]
        return ids.astype(np.int32), np.take_along_axis(log_probs, ids, 1).astype(np.float32)

    def wanted_shift(self, prompt: int, length: int) -> int:
        """Return the shift of all tokens of a sequence of `length` tokens."""
        tokens = length if self.limits.recompute_long else prompt
        return self.limits.max_sequence_tokens if 0 < self.limits.long_prompt_tokens < tokens else 0

    def _copy(self, plan: StepPlan) -> None:
        forks, beams = plan.part(Forks) or Forks(), plan.part(BeamRows)
        blocks = {to: (self.cache[source].copy(), self.shifts[source].copy()) for source, to in forks.blocks}
        slots = {
            to: (self.last.get(source), self.state[source], self.known[source]) for source, to in forks.slots
        }
        assert len(blocks) == len(forks.blocks), "a block is the destination of two copies"
        assert len(slots) == len(forks.slots), "a slot is the destination of two copies"
        planned = {*plan.slots.tolist(), *([] if beams is None else beams.slots.tolist())}
        assert set(slots) <= planned, "state is copied to a slot that is not in the plan"
        for to, content in blocks.items():
            self.cache[to], self.shifts[to] = content
        for to, (token, state, known) in slots.items():
            self.state[to], self.known[to] = state, known
            if token is not None:
                self.last[to] = token


class Run:
    """A scheduler, the toy device and what came of every request. overlap: the next plan is made while a step
    is in flight; "stages": as for two pipeline stages, with micro-batches."""

    def __init__(self, limits: SchedulerLimits, overlap: bool | str = False, tier: HostTier | None = None):
        if overlap == "stages":
            overlap, limits = False, replace(limits, micro_batches=2)
        self.now = 0.0
        self.scheduler = Scheduler(limits, lambda: self.now, tier=tier)
        StepWatch(self.scheduler)
        self.device, self.overlap = ToyDevice(limits), overlap
        self.pending: deque[tuple[StepPlan, StepResult]] = deque()
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self.beam_steps: dict[tuple[int, int], list[BeamStep]] = defaultdict(list)

    def submit(self, request: int, *prompts: list[int], priority: int = 0, **params) -> None:
        sequences = [
            SequenceRequest(np.array(prompt, np.int32).tobytes(), SamplingParams(**params))
            for prompt in prompts
        ]
        self.scheduler.submit(DOOR, Submit(request, sequences, priority))
        self.take(self.scheduler.take_events())

    def step(self) -> None:
        """Run like the engine's loop: one step ahead of the results if overlap is set, and with
        micro-batches as many plans in flight."""
        depth = max(self.scheduler.limits.micro_batches, 2 if self.overlap else 1)
        index = self.scheduler.cache.index
        before, evictions = list(index._keys), index.evictions
        plan = self.scheduler.plan()
        self.take(self.scheduler.take_events())
        if plan is not None:
            self._check_written(plan, before if index.evictions == evictions else None)
            self._check_in_flight(plan)
            self.pending.append((plan, self.device.run(plan)))
        if plan is None or len(self.pending) >= depth:
            self.settle()

    def settle(self) -> None:
        """Commit the oldest step in flight."""
        if self.pending:
            self.take(self.scheduler.commit(*self.pending.popleft()))

    def _check_in_flight(self, plan: StepPlan) -> None:
        """Check that a decode row's sequence has no token in flight in another plan."""
        if self.scheduler.limits.micro_batches == 1:
            return
        others = {id(s) for held, _ in self.pending for s, n in zip(held.sequences, held.samples) if n}
        assert not others & {id(sequence) for sequence in plan.sequences[: plan.num_decodes]}

    def open(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [sequence for group in self.scheduler.requests.groups() for sequence in group.sequences]

    def take(self, events: list[tuple[bytes, Event]]) -> None:
        for door, event in events:
            assert door == DOOR
            key = (event.request, event.sequence)
            assert not self.ends[key], f"an event after the end of {key}"
            self.tokens[key] += event.tokens
            self.beam_steps[key] += [event.beams] if event.beams is not None else []
            if event.finish:
                self.ends[key].append(event)

    def finish(self, steps: int = 2000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work and not self.pending:
                break
            self.step()
        assert not self.scheduler.has_work
        index = self.scheduler.cache.index
        assert index.num_available == self.scheduler.limits.num_blocks, "blocks leaked"
        assert not self.scheduler.cache.prefixes._coming, "blocks are expected that nobody computes"
        assert self.scheduler.num_running == 0, "slots leaked"

    def check_holders(self) -> None:
        """Every block's user count equals its holders; slots and tables agree with the sequences."""
        cache, running = self.scheduler.cache, [s for s in self.open() if s.slot >= 0]
        without = [s for s in self.open() if s.slot < 0]
        assert all(s.stage in (Stage.WAITING, Stage.DRAINING) and not s.blocks for s in without)
        holders = Counter(block for sequence in running for block in sequence.blocks)
        blocks = range(cache.index.num_blocks)
        assert [cache.index.users(block) for block in blocks] == [holders[block] for block in blocks]
        assert cache.index.num_available == len(blocks) - len(holders)
        assert len({sequence.slot for sequence in running}) == len(running)
        assert len(running) + cache.reserved == self.scheduler.num_running
        for sequence in running:
            assert cache.tables[sequence.slot, : len(sequence.blocks)].tolist() == sequence.blocks

    def _check_written(self, plan: StepPlan, before: list[bytes | None] | None) -> None:
        """before: the identities of all blocks before the plan was made; None if that has evicted some."""
        pool, size = self.scheduler.cache.index, self.scheduler.limits.block_tokens
        for _, block in (plan.part(Forks) or Forks()).blocks:
            assert pool.users(block) < 2, f"block {block} is copied to while {pool.users(block)} hold it"
        for row, sequence in enumerate(plan.sequences):
            first, last = plan.query_starts[row], plan.query_starts[row + 1]
            beams = sequence.group.sequences
            written = plan.kv_slots[first:last]
            for block in {slot // size for slot in written[written >= 0].tolist()}:
                holders = 1
                if row >= plan.num_decodes and sequence is beams[0]:  # the others wait until it is written
                    holders = sum(block in beam.blocks for beam in beams)
                users, key = pool.users(block), pool._keys[block]
                if key is not None and before is not None:
                    assert key != before[block], f"the indexed block {block} is written again"
                if key is not None and users > 1:  # others of this plan have computed the same tokens
                    continue
                if users == 0:
                    assert block not in sequence.blocks, "a block is written that its sequence has given back"
                    continue
                assert users == holders, f"block {block} is written while {users} hold it"
