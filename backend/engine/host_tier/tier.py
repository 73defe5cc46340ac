"""The scheduler's side of the host tier: which blocks are copied to it, and which come back for a prompt.

Blocks are copied out once they have an identity, not when they are evicted: eviction then costs nothing, and
what an engine has computed outlives it. A prompt that waits for admission and whose next blocks are in the
tier stays in the queue until they are in the cache, where its admission finds them; others may overtake it.
Plans carry the copies to all ranks, whose parts of the tier have the same slots. Host only: no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from tridecode.backend.engine.cache.block_index import BlockIndex
from tridecode.backend.engine.cache.block_keys import BlockHasher
from tridecode.backend.engine.cache.draft_keys import DraftKeys
from tridecode.backend.engine.host_tier.cost import CopyCost
from tridecode.backend.engine.host_tier.fetch import Arrivals, Fetch, Flight
from tridecode.backend.engine.host_tier.layering import Layering
from tridecode.backend.engine.host_tier.readiness import SHARES, Readiness
from tridecode.backend.engine.host_tier.region import Entry
from tridecode.backend.engine.host_tier.restoring import restore
from tridecode.backend.engine.parts.host_copies import BlockOut, Copied, HostCopies
from tridecode.backend.engine.schedule.sequence import Sequence
from tridecode.backend.engine.step.plan import StepPlan

#: times that one sequence waits for blocks of the tier; then it is computed
MOST_FETCHES = 3
#: parent of the first block of a chain
FIRST = bytes(16)
#: blocks that wait to be copied out until one plan takes them: a copy costs the loop two launches per layer
_BATCH = 16
#: plans after which fewer blocks are taken
_PATIENCE = 32


class HostTier:
    """The blocks in the tier by identity, and the copies in flight. Used by the scheduler's thread only.

    secret: key of the hashes, which outlives the engine like the blocks. entries: the slots that are already
    filled. most_blocks: maximum copies in one direction for a plan with few tokens. pinned: see Readiness.
    """

    def __init__(
        self,
        num_slots: int,
        secret: bytes,
        entries: Items[Entry],
        block_tokens: int,
        most_blocks: int,
        clock: Callable[[], float],
        pinned: Callable[[], int] = lambda: SHARES,
    ):
        self.hasher = BlockHasher(secret)
        self.slots = BlockIndex(num_slots, self.hasher)
        self.cost, self.layering = CopyCost(block_tokens), Layering()
        self.index, self._cleared = BlockIndex(0), set[int]()  # of the cache, see `bind`
        self.draft_keys: DraftKeys | None = None  # of an engine whose drafter has a cache of its own
        self.tokens = 0  # total that admitted sequences have found because they were copied in
        self.faults = 0  # total of blocks with a wrong checksum
        self.is_used = True  # False: no further copies in either direction (bench prefix)
        self._block_tokens, self._most_blocks, self._clock = block_tokens, most_blocks, clock
        self.memory = Readiness(num_slots, clock, pinned)
        self._queued: dict[bytes, tuple[bytes, int]] = {}  # key -> parent, block of the cache
        self._outgoing: set[bytes] = set()
        self._bad: dict[bytes, int] = {}  # key -> slot that holds wrong values, until it is filled again
        self._drops: list[int] = []
        self._fetches: list[Fetch] = []
        self._coming: set[bytes] = set()
        self._flights: dict[int, Flight] = {}  # id of the part -> its copies in flight
        self._waited = 0  # plans since blocks were copied out
        self._began: dict[int, float] = {}  # steps in flight with prompts that are long enough to be timed
        self._ended = 0.0
        restore(self.slots, entries)

    def bind(self, index: BlockIndex, cleared: set[int]) -> None:
        """Use the index of the cache. cleared: the blocks that the next plan with rows sets to zero."""
        self.index, self._cleared = index, cleared

    @property
    def has_work(self) -> bool:
        """Return whether a plan without rows would have copies."""
        if (self._queued and self.memory.is_complete) or self._drops or self.memory.asks:
            return True
        return any(fetch.waits for fetch in self._fetches)

    # ------------------------------------------------------------ what the scheduler reports

    def offer(self, parent: bytes, keys: Items[bytes], blocks: Items[int]) -> None:
        """Queue consecutive blocks, which have just got their identities, to be copied to the tier.

        The plans that write them are launched before the next `take`, or are in the making.
        """
        if self.memory.is_off or not self.is_used:
            return
        parent = parent or FIRST
        for key, block in zip(keys, blocks):
            if key not in self._outgoing and (key in self._bad or not self.slots.is_indexed(key)):
                self._queued[key] = parent, block
            parent = key

    def forget(self, keys: Items[bytes]) -> None:
        """Note that blocks may hold wrong values: those without an identity in the cache lose it here."""
        for key in keys:
            if not self.index.is_indexed(key) and (slot := self.slots.block_of(key)) is not None:
                self._bad[key] = slot
                self._drops.append(slot)

    def brings(
        self, sequence: Sequence, parent: bytes, keys: list[bytes], found: list[int], needed: int
    ) -> bool:
        """Return whether the next block of a waiting sequence is being copied into the cache; begin that if
        the tier has it, it pays, and the sequence could be admitted afterwards.

        keys: identities of the blocks behind `found`, its blocks in the cache; parent: of the last of these.
        needed: blocks of the whole sequence.
        """
        if not keys:
            return False
        if keys[0] in self._coming:
            return True
        if sequence.fetches >= MOST_FETCHES or self.memory.is_off or not self.is_used:
            return False
        slots, index = self._find(keys), self.index
        usable = next((n for n, slot in enumerate(slots) if slot >= self.memory.usable), len(slots))
        if usable < len(slots) and self.memory.may_wait:
            return True
        slots = slots[:usable]
        if not slots or not self.cost.pays():
            return False
        index.share(found)
        if needed - len(found) <= index.num_available:
            index.evict(len(slots) - index.num_free)
        # a block that is being copied out keeps those before it from eviction
        if needed - len(found) > index.num_available or len(slots) > index.num_free:
            index.release(found)
            return False
        blocks = index.allocate(len(slots))
        self._cleared.difference_update(blocks)  # a plan without rows may fill them first
        fetch = Fetch(sequence, parent, keys[: len(slots)], slots, blocks, found)
        self.slots.share(slots)  # neither evicted nor overwritten until they are read
        self._fetches.append(fetch)
        self._coming.update(fetch.keys)
        sequence.fetches += 1
        return True

    def joinable(self, sequence: Sequence, found: list[int]) -> list[int]:
        """Return the blocks that are about to be copied in for a sequence, behind `found`, if it may be
        computed by the plan that copies them; [] if it has to wait for them. `join` decides it.
        """
        fetch = self._fetches[-1] if self._fetches else None
        if fetch is None or fetch.sequence is not sequence or fetch.issued or fetch.held != found:
            return []
        blocks = len(found) + len(fetch.blocks)
        own, copy_s = sequence.num_known - blocks * self._block_tokens, self.cost.copy_s
        suits = self.layering.suits(sequence, own, len(fetch.blocks), copy_s)
        return fetch.blocks if suits and self.draft_keys is None else []

    def join(self, sequence: Sequence) -> None:
        """Copy the blocks of `joinable` with the plan in the making, which computes the sequence."""
        fetch = self._fetches[-1]
        fetch.is_joined = sequence.arriving = True
        sequence.fetched += len(fetch.blocks)

    def admitted(self, sequence: Sequence, length: int) -> None:
        """Count the tokens that came from the tier, for an admitted sequence with `length` cached tokens."""
        self.tokens += min(sequence.fetched * self._block_tokens, length)
        sequence.fetched = sequence.fetches = 0

    def _find(self, keys: list[bytes]) -> list[int]:
        """Return the slots of the longest prefix of a chain."""
        found = self.slots.find(keys)
        for number, key in enumerate(keys[: len(found)] if self._bad else ()):
            if key in self._bad:
                return found[:number]
        return found

    # ------------------------------------------------------------ plans

    def take(self, num_tokens: int, idle: bool = False) -> HostCopies | None:
        """Return the copies of the next plan, of num_tokens tokens. idle: the plan has nothing else."""
        limit = max(self._most_blocks, num_tokens // self._block_tokens)
        part, flight_ins = HostCopies(drops=self._drops, asks=self.memory.begin()), []
        self._drops = []
        for fetch in sorted(self._fetches, key=lambda fetch: not fetch.is_joined):
            if not fetch.waits:
                continue
            count = len(fetch.slots) - fetch.issued
            if fetch.is_joined:
                part.layered += count
            else:
                count = max(min(count, limit - len(part.ins)), 0)
            chosen = slice(fetch.issued, fetch.issued + count)
            part.ins += zip(fetch.slots[chosen], fetch.blocks[chosen])
            flight_ins += [fetch] * count
            fetch.issued += count
        self._waited += bool(self._queued)
        if self._queued and self.memory.is_complete and (idle or self._copies_now()):
            part.outs, self._waited = self._next_outs(limit), 0
        if not (part.outs or part.ins or part.drops or part.asks):
            return None
        self._flights[id(part)] = Flight(part, flight_ins)
        return part

    def _copies_now(self) -> bool:
        """Return whether a plan with rows copies blocks to the tier: enough of them wait, or have waited for
        long, or they could be evicted soon.
        """
        waiting = len(self._queued)
        is_short = self.index.num_available < waiting + 2 * _BATCH
        return is_short or waiting >= _BATCH or self._waited >= _PATIENCE

    def _next_outs(self, limit: int) -> list[BlockOut]:
        """Take blocks from the queue and give them slots."""
        outs: list[BlockOut] = []
        while self._queued and len(outs) < limit:
            key = next(iter(self._queued))
            parent, block = self._queued.pop(key)
            if self.index.block_of(key) != block:  # evicted, or damaged
                continue
            slot = self._slot_for(key)
            if slot is not None:
                self.index.share([block])
                self._outgoing.add(key)
                outs.append(BlockOut(block, slot, key, parent))
                if self.draft_keys is not None:
                    self.draft_keys.copy_out(key, block, self.slots.num_blocks)
        return outs

    def _slot_for(self, key: bytes) -> int | None:
        """Return a slot with a user for a block; None if all others are being copied, or it has one."""
        slots, slot = self.slots, self.slots.block_of(key)
        if slot is not None:
            if key not in self._bad or slots.users(slot):
                return None
            slots.share([slot])
            return slot
        if not slots.num_free:
            slots.evict(1)
        return slots.allocate(1)[0] if slots.num_free else None

    def commit(self, part: HostCopies, copied: Copied) -> Arrivals:
        """Take the result of copies: blocks that came out are found from now on, and those that came in are
        in the index of the cache. Return the sequences that the same plan has computed."""
        flight = self._flights.pop(id(part))
        if part.asks:
            self.memory.answer(copied.shares)
            if self.memory.is_off:
                self._give_up()
        for out in part.outs:
            self._end_out(out, self.index.block_of(out.key) == out.block)
        if part.ins:
            self.cost.note_copy(len(part.ins), copied.seconds)
        for fetch, intact in zip(flight.ins, copied.intact):
            self._land(fetch, intact, fault=not intact)
        joined = dict.fromkeys(fetch for fetch in flight.ins if fetch.is_joined)
        whole = [fetch.sequence for fetch in joined if not fetch.is_wrong]
        return Arrivals(whole, [fetch.sequence for fetch in joined if fetch.is_wrong])

    def abandon(self, plan: StepPlan) -> None:
        """Note that a plan could not run."""
        part = plan.part(HostCopies)
        flight = None if part is None else self._flights.pop(id(part), None)
        if flight is not None:
            if flight.part.asks:
                self.memory.abandon()
            for out in flight.part.outs:
                self._end_out(out, False)
            for fetch in flight.ins:
                self._land(fetch, False, fault=False)
                fetch.sequence.arriving &= not fetch.is_joined

    def _end_out(self, out: BlockOut, intact: bool) -> None:
        """Finish a copy to the tier. intact: whether the slot holds what its key says."""
        self._outgoing.discard(out.key)
        known = self.slots.block_of(out.key) == out.slot
        if intact:
            self._bad.pop(out.key, None)
            if not known:
                self.slots.insert(out.parent, [out.key], [out.slot])
        else:
            self._drops.append(out.slot)
        self.slots.release([out.slot])
        self.index.release([out.block])

    def _land(self, fetch: Fetch, intact: bool, fault: bool) -> None:
        """Finish the next copy of a fetch. fault: its checksum was wrong."""
        number, fetch.landed = fetch.landed, fetch.landed + 1
        key = fetch.keys[number]
        if fault:
            self.faults, fetch.is_wrong = self.faults + 1, True
            self._bad[key] = fetch.slots[number]
            self._drops.append(fetch.slots[number])
        if intact and not fetch.failed:
            parent = fetch.keys[number - 1] if number else fetch.parent
            self.index.insert(parent, [key], [fetch.blocks[number]])
            if self.draft_keys is not None:
                self.draft_keys.copy_in(key, fetch.blocks[number])
            fetch.intact += 1
        if not intact:
            self._cleared.add(fetch.blocks[number])
            fetch.failed = True
        if fetch.landed == fetch.issued and (fetch.failed or fetch.issued == len(fetch.slots)):
            self._end(fetch)

    def _give_up(self) -> None:
        """Stop issuing copies."""
        self._queued.clear()
        for fetch in list(self._fetches):
            fetch.failed = True
            if fetch.landed == fetch.issued:
                self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        """Give back what a fetch holds: its blocks stay cached, or become free if they did not arrive."""
        self._fetches.remove(fetch)
        self._coming.difference_update(fetch.keys)
        self.slots.release(fetch.slots)
        self.index.release([*reversed(fetch.blocks), *reversed(fetch.held)])
        if not fetch.is_joined:
            fetch.sequence.fetched += fetch.intact

    # ------------------------------------------------------------ times

    def begin_step(self, plan: StepPlan) -> None:
        """Note the launch of a step."""
        part = plan.part(HostCopies)
        waits = part is not None and part.layered > 0
        if plan.num_tokens > plan.num_decodes and not waits:
            self._began[plan.step] = self._clock()

    def end_step(self, plan: StepPlan) -> None:
        """Note that the result of a step is there."""
        now, began = self._clock(), self._began.pop(plan.step, None)
        if began is not None:
            self.cost.note_prompt(plan.num_tokens - plan.num_decodes, now - max(began, self._ended))
        self._ended = now

    def metrics(self) -> dict[str, float]:
        """Return values for the heartbeat by name."""
        slots, exists = self.slots, not self.memory.is_off
        return {
            'host_blocks{state="cached"}': exists * (slots.num_blocks - slots.num_free),
            'host_blocks{state="free"}': exists * slots.num_free,
            "host_evicted_blocks": slots.evictions,
            "host_faults": self.faults,
        }
