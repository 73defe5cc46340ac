"""The block index against a model: users are counted, no block is lost, eviction keeps its order."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tridecode.backend.engine.cache.block_index import BlockIndex
from tridecode.backend.engine.cache.block_keys import BlockHasher, Context

_BLOCKS = 12
_SIZE = 2  # bytes of ids that a block has in these tests

ids = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(bytes)
contexts = st.sampled_from([Context(), Context(adapter=b"1")])


class IndexMachine(RuleBasedStateMachine):
    """Holders take, share, index and release blocks. The model knows who holds what, and for each identity
    its block, its parent and the time of its last release."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(_BLOCKS)
        self.holders: list[list[int]] = []
        self.indexed: dict[tuple, int] = {}  # (context, ids up to the end of the block) -> block
        self.released: dict[int, int] = {}  # by block
        self.now = 0

    def keys(self, context: Context, tokens: bytes) -> tuple[list[tuple], list[bytes]]:
        named = [(context, tokens[: end + _SIZE]) for end in range(0, len(tokens), _SIZE)]
        return named, self.index.hasher.chain(self.index.hasher.root(context), tokens, _SIZE)

    def used(self) -> Counter:
        return Counter(block for holder in self.holders for block in holder)

    def children(self, name: tuple) -> list[tuple]:
        context, tokens = name
        return [
            other
            for other in self.indexed
            if other[0] == context and len(tokens) % _SIZE == 0 and _parent(other) == name
        ]

    def leaves(self) -> dict[tuple, int]:
        """The identities that may be evicted now, with the times of their last release."""
        used = self.used()
        return {
            name: self.released[block]
            for name, block in self.indexed.items()
            if not used[block] and not self.children(name)
        }

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count > self.index.num_free:
            with pytest.raises(MemoryError, match=f"{count} blocks wanted"):
                self.index.allocate(count)
        else:
            taken = self.index.allocate(count)
            assert not set(self.used()) & set(taken), "a block in use was handed out"
            assert not set(self.indexed.values()) & set(taken), "a cached block was handed out"
            self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.index.share(blocks)
        self.holders.append(list(blocks))

    @rule(context=contexts, tokens=ids, release=st.booleans())
    def compute(self, context: Context, tokens: bytes, release: bool) -> None:
        """A sequence uses what the index has of its tokens, computes the rest and indexes all."""
        names, keys = self.keys(context, tokens)
        found = self.index.find(keys)
        known = 0
        while known < len(names) and names[known] in self.indexed:
            known += 1
        assert found == [self.indexed[name] for name in names[:known]]
        if len(names) - known > self.index.num_free:
            return
        self.index.share(found)
        blocks = found + self.index.allocate(len(names) - known)
        self.index.insert(self.index.hasher.root(context), keys, blocks)
        self.indexed.update(zip(names, blocks))
        self.holders.append(blocks)
        if release:
            self.release_holder(len(self.holders) - 1)

    @rule(context=contexts, tokens=ids)
    def compute_again(self, context: Context, tokens: bytes) -> None:
        """A sequence that found nothing indexes what it computed: known identities stay with their blocks."""
        names, keys = self.keys(context, tokens)
        if len(names) > self.index.num_free:
            return
        blocks = self.index.allocate(len(names))
        self.index.insert(self.index.hasher.root(context), keys, blocks)
        for name, block in zip(names, blocks):
            self.indexed.setdefault(name, block)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_holder(data.draw(st.integers(0, len(self.holders) - 1)))

    def release_holder(self, number: int) -> None:
        blocks = self.holders.pop(number)
        self.index.release(blocks)
        self.now += 1
        self.released.update((block, self.now) for block in blocks if not self.used()[block])

    @rule(context=contexts, tokens=ids)
    def forget(self, context: Context, tokens: bytes) -> None:
        names, keys = self.keys(context, tokens)
        self.index.forget(self.index.find(keys))
        for name in reversed(names):
            if name in self.indexed and not self.children(name):
                del self.indexed[name]

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        for _ in range(count):
            leaves, before = self.leaves(), self.index.num_free
            self.index.evict(1)
            if not leaves:
                assert self.index.num_free == before
                return
            assert self.index.num_free == before + 1
            gone = [name for name in self.indexed if not self.is_indexed(name)]
            assert len(gone) == 1 and gone[0] in leaves, "a block went before those that follow it"
            assert leaves[gone[0]] == min(leaves.values()), "a block went before one that was used earlier"
            del self.indexed[gone[0]]

    def is_indexed(self, name: tuple) -> bool:
        keys = self.keys(*name)[1]
        return self.index.find(keys[-1:]) == [self.indexed[name]]

    @invariant()
    def users_are_counted(self) -> None:
        used = self.used()
        blocks = range(_BLOCKS)
        assert [self.index.users(block) for block in blocks] == [used[block] for block in blocks]
        cached = set(self.indexed.values()) - set(used)
        assert self.index.num_cached == len(cached)
        assert self.index.num_free == _BLOCKS - len(used) - len(cached)

    @invariant()
    def chains_are_whole(self) -> None:
        for name, block in self.indexed.items():
            found = self.index.find(self.keys(*name)[1])
            assert found and found[-1] == block and len(found) == -(-len(name[1]) // _SIZE)

    @invariant()
    def a_block_may_be_overwritten_by_its_only_user(self) -> None:
        used = self.used()
        follows = {self.indexed[name] for name in self.indexed if self.children(name)}
        for block in range(_BLOCKS):
            assert self.index.is_exclusive(block) == (used[block] == 1 and block not in follows)


def _parent(name: tuple) -> tuple:
    context, tokens = name
    return context, tokens[: (len(tokens) - 1) // _SIZE * _SIZE]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_block_is_not_released_twice() -> None:
    index = BlockIndex(2)
    taken = index.allocate(1)
    index.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        index.release(taken)


def test_a_free_block_is_not_shared() -> None:
    with pytest.raises(AssertionError, match="cannot be shared"):
        BlockIndex(2).share([0])


def test_a_free_block_is_not_indexed() -> None:
    index = BlockIndex(2)
    with pytest.raises(AssertionError, match="is not in use"):
        index.insert(index.hasher.root(Context()), [b"key"], [0])


context_values = st.builds(
    Context,
    st.integers(-1, 3),
    st.integers(-1, 3),
    st.sampled_from([0, 40]),
    st.sampled_from([0, 7]),
    st.sampled_from(["", "a", "b", "', 1"]),
)


@given(context_values, context_values, ids, ids)
def test_an_identity_separates_all_that_the_values_depend_on(
    first: Context, second: Context, some: bytes, other: bytes
) -> None:
    """Adapters, tables, shifts, rings and salts; and tokens, which all of the chain before a block has."""
    index = BlockIndex(1)
    keys = index.hasher.chain(index.hasher.root(first), some, _SIZE)
    others = index.hasher.chain(index.hasher.root(second), other, _SIZE)
    common = 0
    if first == second:
        ends = range(_SIZE, len(some) + _SIZE, _SIZE)
        common = sum(some[:end] == other[:end] for end in ends)
    assert keys[:common] == others[:common]
    assert not set(keys[common:]) & set(others)
    assert {len(key) for key in keys} == {16}


@given(st.binary(min_size=32, max_size=32), ids)
def test_identities_are_keyed_hashes_of_the_parent_and_the_ids(secret: bytes, some: bytes) -> None:
    """The identities must not change: later engines find the blocks of a host tier by them."""
    parent, wanted = b"p" * 16, []
    for first in range(0, len(some), _SIZE):
        data = (wanted[-1] if wanted else parent) + some[first : first + _SIZE]
        wanted.append(hashlib.blake2b(data, digest_size=16, key=secret).digest())
    assert BlockHasher(secret).chain(parent, some, _SIZE) == wanted


def test_the_hash_is_another_one_in_every_index() -> None:
    """So that no request can be made to meet the identity of another's block."""
    assert BlockIndex(1).hasher.root(Context()) != BlockIndex(1).hasher.root(Context())


def test_the_order_of_eviction_does_not_grow_with_use() -> None:
    index = BlockIndex(4)
    root = index.hasher.root(Context())
    blocks = index.allocate(2)
    index.insert(root, index.hasher.chain(root, b"abc", _SIZE), blocks)
    for _ in range(5000):
        index.release(blocks)
        index.share(blocks)
    assert len(index._leaves) < 2000
