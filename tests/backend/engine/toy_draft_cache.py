"""The cache of a drafter for the toy device: drafts are made only where it has every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.backend.engine.toy_device import ToyDevice
from tridecode.backend.engine.parts.draft_reads import DraftReads
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.parts.forks import Forks
from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.backend.engine.step import plan_frame
from tridecode.backend.engine.step.plan import StepPlan, StepResult

WRONG = -1
#: tokens that the first draft of a row reads
NEWEST = 2


class ToyDraftCache:
    """Wraps ToyDevice.run. A key of the drafter is a hash of all tokens up to its own, and WRONG where one
    before it was missing or belonged to other tokens.

    rows, reads: rows that were drafted for, and tokens that were read behind steps. host: keys by slot of the
    host tier.
    """

    def __init__(self, device: ToyDevice, host: dict[int, np.ndarray]):
        self.device, self.host = device, host
        self.keys = np.full(device.cache.shape, WRONG)
        self.rows = self.reads = 0
        self._run = device.run
        device.run = self.run  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> StepResult:
        copies, forks = plan.part(HostCopies), plan.part(Forks) or Forks()
        if copies is not None:
            came = {block: self.host.get(slot, WRONG) for slot, block in copies.ins}
            for out in copies.outs:
                self.host[out.slot] = self.keys[out.block].copy()
            for block, keys in came.items():
                self.keys[block] = keys
        for block, keys in {to: self.keys[source].copy() for source, to in forks.blocks}.items():
            self.keys[block] = keys
        lengths = dict(self.device.lengths)
        result = self._run(plan)
        if plan.num_decodes < plan.num_rows:
            self._follow(plan, lengths)
        reads, part = plan.part(DraftReads), plan.part(Drafting)
        if reads is not None:
            self._read(plan, reads)
        if part is not None:
            self._draft(plan, part)
        return result

    def _follow(self, plan: StepPlan, lengths: dict[int, int]) -> None:
        """Read all tokens of a step with prompts."""
        for row in range(plan.num_rows):
            length = int(plan.context_lens[row])
            count = int(plan.query_starts[row + 1] - plan.query_starts[row])
            if length < 0:
                length = lengths[int(plan.slots[row])] + count
            self._write(plan.block_tables[row], length - count, self._tokens(plan, row, length))

    def _read(self, plan: StepPlan, part: DraftReads) -> None:
        (other,) = plan_frame.decode(plan_frame.encode(plan_of(plan, part))).parts
        assert isinstance(other, DraftReads)
        first = 0
        for row, start, count in zip(other.rows.tolist(), other.firsts.tolist(), other.counts.tolist()):
            ids = other.token_ids[first : first + count].tolist()
            tokens = self._tokens(plan, row, start + count)
            assert tokens[start:] == ids, "other tokens are read than the row has"
            self._write(plan.block_tables[row], start, tokens)
            first += count
            self.reads += count

    def _draft(self, plan: StepPlan, part: Drafting) -> None:
        for row in part.rows.tolist():
            slot, is_prompt = int(plan.slots[row]), row >= plan.num_decodes
            if plan.queries and not is_prompt:
                length = self.device.lengths[slot]
            else:
                length = int(plan.context_lens[row])
            tokens = [*self._tokens(plan, row, length), self.device.last[slot]]
            wanted = [hash_of(tokens[: place + 1]) for place in range(length + 1 - NEWEST)]
            held = self.keys[plan.block_tables[row]].reshape(-1)[: len(wanted)].tolist()
            assert held == wanted, "drafts behind tokens that the drafter lacks"
            drafts = self.device.drafts[slot][: part.count - 1]
            self._write(plan.block_tables[row], max(length + 1 - NEWEST, 0), [*tokens, *drafts])
            self.rows += 1

    def _tokens(self, plan: StepPlan, row: int, length: int) -> list[int]:
        return self.device.cache[plan.block_tables[row]].reshape(-1)[:length].tolist()

    def _write(self, table: np.ndarray, first: int, tokens: list[int]) -> None:
        """Write the keys of tokens[first:]; one is right if all before it are."""
        size = self.keys.shape[1]
        for place in range(len(tokens)):
            block, offset = table[place // size], place % size
            wanted = hash_of(tokens[: place + 1])
            if place >= first:
                self.keys[block, offset] = wanted
            elif self.keys[block, offset] != wanted:
                break
        else:
            return
        for place in range(first, len(tokens)):
            self.keys[table[place // size], place % size] = WRONG


def hash_of(tokens: list[int]) -> int:
    return hash(tuple(tokens)) & 0x7FFFFFFFFFFF


def plan_of(plan: StepPlan, part: DraftReads) -> StepPlan:
    """The plan with this part alone, as it crosses to other ranks."""
    return replace(plan, parts=[part])
