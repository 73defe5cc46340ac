"""Rules that the state machines of the prefix cache and of the host tier share."""

from __future__ import annotations

import contextlib

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.backend.engine.toy_device import DOOR, Run
from tridecode.backend.base.errors import CapacityError, RequestError
from tridecode.backend.wire.messages import SamplingParams

#: beginnings that requests share: 0 to 3 blocks of 4 tokens and a part of one
SHARED = [[], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9, 8, 8, 8, 8, 7]]


class RequestMachine(RuleBasedStateMachine):
    """Requests to `run`: submitted, as beams too, cancelled, or abandoned with their step."""

    run: Run
    number: int
    wanted: dict[int, tuple[list[int], SamplingParams]]

    def submit(self, prompt: list[int], **params) -> None:
        self.number += 1
        with contextlib.suppress(RequestError, CapacityError):
            self.run.submit(self.number, prompt, **params)
            self.wanted[self.number] = prompt, SamplingParams(**params)

    @rule(shared=st.sampled_from(SHARED), width=st.integers(2, 3), count=st.integers(1, 5))
    def search(self, shared: list[int], width: int, count: int) -> None:
        self.submit([*shared, 5], max_tokens=count, beam_width=width)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.run.scheduler.cancel(DOOR, data.draw(st.integers(1, self.number + 1)))
        self.run.take(self.run.scheduler.take_events())

    @rule()
    def run_out_of_memory(self) -> None:
        if self.run.scheduler.limits.micro_batches > 1:  # ranks that wait for each other end instead
            return
        plan = self.run.scheduler.plan()
        if plan is not None:
            self.run.scheduler.abandon(plan, CapacityError("no memory"))
        self.run.take(self.run.scheduler.take_events())
