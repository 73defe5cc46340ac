"""The block pool against a model of it: no leak, no double free, counts equal to the users."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tridecode.backend.engine.cache.block_pool import BlockPool

_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share and release; the pool must agree with a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(_BLOCKS)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(MemoryError, match=f"{count} blocks wanted"):
                self.pool.allocate(count)
        else:
            taken = self.pool.allocate(count)
            held = {block for holder in self.holders for block in holder}
            assert not held & set(taken), "a block in use was handed out"
            self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.share(blocks)
        self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def users_are_counted(self) -> None:
        users = Counter(block for holder in self.holders for block in holder)
        assert [self.pool.users(block) for block in range(_BLOCKS)] == [
            users[block] for block in range(_BLOCKS)
        ]
        assert self.pool.num_free == _BLOCKS - len(users)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_block_is_not_released_twice() -> None:
    pool = BlockPool(2)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(taken)


def test_a_free_block_is_not_shared() -> None:
    with pytest.raises(AssertionError, match="cannot be shared"):
        BlockPool(2).share([0])
