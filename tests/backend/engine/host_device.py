"""A toy device with a host tier: copies move token ids, and a damaged slot is noticed as a checksum would."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from tests.backend.engine.toy_device import Run, ToyDevice
from tridecode.backend.engine.host_tier.layering import Layering
from tridecode.backend.engine.host_tier.readiness import SHARES
from tridecode.backend.engine.host_tier.region import Entry
from tridecode.backend.engine.host_tier.tier import HostTier
from tridecode.backend.engine.parts.host_copies import Copied, HostCopies, empty_plan
from tridecode.backend.engine.parts.prompt_tables import PromptTables
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.step import plan_frame
from tridecode.backend.engine.step.plan import StepPlan, StepResult

SECRET = bytes(range(32))


class HostMemory:
    """The memory that outlives an engine: by slot its entry, token ids and their shifts."""

    def __init__(self, num_slots: int):
        self.num_slots, self.serial = num_slots, 0
        self.filled: dict[int, tuple[Entry, np.ndarray, np.ndarray]] = {}
        self.damaged: set[int] = set()

    def entries(self) -> list[Entry]:
        return sorted((entry for entry, _, _ in self.filled.values()), key=lambda entry: entry.serial)


class HostDevice(ToyDevice):
    """Copies in run at once with their plan, and a slot becomes valid when the plan's result is taken."""

    def __init__(self, limits: SchedulerLimits, memory: HostMemory):
        super().__init__(limits)
        self.memory, self.shares = memory, SHARES  # shares pinned by the slowest rank

    def run(self, plan: StepPlan) -> StepResult:
        part = plan.part(HostCopies)
        if part is not None:
            frame = plan_frame.decode(plan_frame.encode(empty_plan(plan.step, part)))
            assert frame.parts == [part], "another rank gets other copies"
        tables = plan.part(PromptTables)
        if tables is not None:
            self.cache[tables.tables.cleared] = self.shifts[tables.tables.cleared] = -3
        copied = None if part is None else self._copies(part)
        rest = replace(plan, parts=[one for one in plan.parts if one is not part])
        result = StepResult(np.zeros(0, np.int32), np.zeros(0, np.float32))
        if plan.num_tokens:
            result = super().run(rest)
        if part is not None:
            found = dict(zip(map(id, rest.parts), result.parts or [None] * len(rest.parts)))
            result.parts = [copied if one is part else found[id(one)] for one in plan.parts]
        return result

    def _copies(self, part: HostCopies) -> Copied:
        memory, intact = self.memory, []
        for slot in [*part.drops, *(out.slot for out in part.outs)]:
            memory.filled.pop(slot, None)
            memory.damaged.discard(slot)
        for slot, block in part.ins:
            found = memory.filled.get(slot)
            intact.append(found is not None and slot not in memory.damaged)
            self.cache[block], self.shifts[block] = (-5, -5) if found is None else found[1:]
            if not intact[-1]:
                self.cache[block] = -5
        for block, slot, key, parent in part.outs:
            memory.serial += 1
            entry = Entry(slot, key, parent, memory.serial)
            memory.filled[slot] = entry, self.cache[block].copy(), self.shifts[block].copy()
        return Copied(intact, 0.001 * len(part.ins), self.shares if part.asks else 0)


class HostRun(Run):
    """A run with a tier; `kill` replaces the engine by a new one that finds the memory."""

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: HostMemory,
        overlap: bool | str = False,
        most_blocks: int = 3,
        layered: bool = False,
    ):
        """layered: prompts are computed with the plan that copies their blocks in, if they may be."""
        self.now = 0.0
        tier = HostTier(
            memory.num_slots, SECRET, memory.entries(), limits.block_tokens, most_blocks, lambda: self.now
        )
        tier.cost.pays = lambda: True  # type: ignore[method-assign]
        tier.layering = Layering(layered, least_tokens=0, least_copy_s=0.0)
        tier.cost.note_copy(1, 0.001)
        super().__init__(limits, overlap, tier)
        self.tier, self.memory = tier, memory
        self.device: HostDevice = HostDevice(self.scheduler.limits, memory)

    def step(self) -> None:
        self.now += 0.01
        super().step()

    def flush(self, steps: int = 500) -> None:
        """Step until the tier has nothing left to copy."""
        for _ in range(steps):
            if not (self.tier.has_work or self.tier._flights or self.pending):
                return
            self.step()
        raise AssertionError("the tier copies without an end")

    def finish(self, steps: int = 2000) -> None:
        for _ in range(steps):
            if not (self.scheduler.has_work or self.pending):
                break
            self.step()
        self.flush()
        super().finish(1)
        self.check_tier()
        assert not self.tier._fetches and not self.tier._coming and not self.tier._outgoing
        assert self.tier.slots.num_available == self.memory.num_slots, "slots leaked"

    def holders(self) -> Counter[int]:
        """Blocks that copies in flight hold, each as often as it is held."""
        outs = [out.block for flight in self.tier._flights.values() for out in flight.part.outs]
        ins = [block for fetch in self.tier._fetches for block in [*fetch.blocks, *fetch.held]]
        return Counter(outs + ins)

    def check_holders(self) -> None:
        """Count also what the copies hold."""
        index, held = self.scheduler.cache.index, self.holders()
        index.release(held.elements())
        try:
            super().check_holders()
        finally:
            for block in held.elements():
                self._hold(block)

    def _hold(self, block: int) -> None:
        """Make the tier a user again, also of a block that became free meanwhile."""
        index = self.scheduler.cache.index
        if index.users(block) == 0 and index._keys[block] is None:
            index._free.remove(block)
            index._users[block] = 1
        else:
            index.share([block])

    def check_tier(self) -> None:
        """Every slot that can be found holds the tokens of its identity; copies hold their slots."""
        tier = self.tier
        holders = Counter(out.slot for flight in tier._flights.values() for out in flight.part.outs)
        holders += Counter(slot for fetch in tier._fetches for slot in fetch.slots)
        slots = range(self.memory.num_slots)
        assert [tier.slots.users(slot) for slot in slots] == [holders[slot] for slot in slots]
        for key, slot in tier.slots._blocks.items():
            if key not in tier._bad and holders[slot] == 0:
                assert self.memory.filled[slot][0].key == key, f"slot {slot} holds another block"
