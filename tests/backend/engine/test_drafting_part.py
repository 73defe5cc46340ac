"""The part of a plan for a planned drafter is sent to other ranks; a damaged one is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.step import plan_frame
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.engine.step.plan import StepPlan


def plan_of(*parts: Drafting) -> StepPlan:
    plan = decode_plan(4)
    plan.slots[:] = [3, 0, -1, 2]
    plan.samples[:] = [1, 1, 1, 0]
    plan.parts = list(parts)
    return plan


def test_rows_and_count_arrive() -> None:
    sent = Drafting(5, np.array([0, 1], np.int32), masked=np.array([1], np.int32))
    (part,) = plan_frame.decode(plan_frame.encode(plan_of(sent))).parts
    assert isinstance(part, Drafting) and part.count == 5 and part.rows.tolist() == [0, 1]
    assert part.captures and part.masked.tolist() == [1]


@pytest.mark.parametrize("masked", [[3], [1, 0], [0, 0], [-1]])
def test_damaged_masked_rows_are_refused_by_name(masked: list[int]) -> None:
    part = Drafting(2, np.array([0, 1], np.int32), masked=np.array(masked, np.int32))
    with pytest.raises(TridecodeError, match="has masked rows .*; wanted some of its rows"):
        Drafting.decode(msgspec.Raw(msgspec.msgpack.encode(part.encode())), plan_of(), "drafting")


@pytest.mark.parametrize(
    ("count", "rows", "text"),
    [
        (0, [0], "Expected `int` >= 1"),
        (16, [0], "Expected `int` <"),
        (2, [], "has rows"),
        (2, [1, 0], "ascending"),
        (2, [0, 4], "wanted some of 4"),
        (2, [2], "without a slot or without a sample"),
        (2, [3], "without a slot or without a sample"),
    ],
)
def test_a_damaged_part_is_refused_by_name(count: int, rows: list[int], text: str) -> None:
    part = Drafting(count, np.array(rows, np.int32))
    with pytest.raises(TridecodeError, match=text):
        Drafting.decode(msgspec.Raw(msgspec.msgpack.encode(part.encode())), plan_of(), "drafting")
