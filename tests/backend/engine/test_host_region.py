"""The memory file of the host tier, its checksums, and the part of a plan that copies."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.base.memory_file import create_file
from tridecode.backend.engine.cache.block_keys import BlockHasher, Context
from tridecode.backend.engine.host_tier.region import HostRegion
from tridecode.backend.engine.host_tier.slots import parts_of_slot
from tridecode.backend.engine.host_tier.store import HostStore
from tridecode.backend.engine.parts.host_copies import BlockOut, HostCopies, empty_plan
from tridecode.backend.engine.step import plan_frame
from tridecode.kernels.block_copies import UNIT_BYTES, Checksums
from tridecode.kernels.operands import CacheLayer

MODEL, OTHER = bytes([1] * 32), bytes([2] * 32)
NONE = b"\0" * 16


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def file() -> Iterator[int]:
    fd = create_file(1 << 16)
    yield fd
    os.close(fd)


def region_of(fd: int, identity: bytes = MODEL, slot_bytes: int = 512, slots: int = 20) -> HostRegion:
    region = HostRegion(fd)
    region.lay_out(identity, slot_bytes, slots)
    return region


def test_filled_slots_are_found_by_the_next_process_in_their_order(file: int) -> None:
    first = region_of(file)
    for number, slot in enumerate((7, 3, 5)):
        first.fill(slot, key(slot), key(number), 100 - slot)
    first.clear([3])
    found = region_of(file)
    assert [(e.slot, e.key, e.parent) for e in found.entries()] == [(7, key(7), key(0)), (5, key(5), key(2))]
    assert [found.checksum(slot) for slot in (7, 3, 5)] == [93, None, 95]
    found.fill(1, key(1), NONE, 0)
    assert [e.slot for e in region_of(file).entries()] == [7, 5, 1], "the order continues"
    assert len(found.secret) == 32 and found.secret == first.secret != bytes(32)


@pytest.mark.parametrize(
    "change", [{"identity": OTHER}, {"slot_bytes": 1024}, {"slots": 19}], ids=["model", "size", "number"]
)
def test_another_layout_forgets_everything(file: int, change: dict) -> None:
    region_of(file).fill(1, key(1), NONE, 0)
    assert not region_of(file, **change).entries()
    assert not region_of(file).entries(), "and nothing comes back"


def test_slots_fit_into_the_file(file: int) -> None:
    region = HostRegion(file)
    for slot_bytes in (512, 1024, 60_000, 1 << 20):
        count = region.most_slots(slot_bytes)
        region.lay_out(MODEL, slot_bytes, count)
        assert region.start + count * slot_bytes <= region.size
        assert count >= (region.size - 12288) // (slot_bytes + 64)
    assert region.most_slots(1 << 20) == 0


def test_only_slots_that_are_the_same_on_all_ranks_are_kept(file: int) -> None:
    region = region_of(file)
    for slot in range(4):
        region.fill(slot, key(slot + 1), NONE, 0)
    other = np.frombuffer(bytearray(region.keys()), np.uint8).reshape(-1, 16)
    other[1], other[2, 3] = 0, 77
    region.keep([region.keys(), other.tobytes()])
    assert [entry.slot for entry in region.entries()] == [0, 3]


def test_a_context_has_one_root_under_one_secret() -> None:
    one, other = BlockHasher(bytes(32)), BlockHasher(bytes(32))
    contexts = [
        Context(),
        Context(b"a"),
        Context(b"b"),
        Context(prompt=3),
        Context(shift=64),
        Context(salt="a"),
    ]
    assert [one.root(context) for context in contexts] == [other.root(context) for context in contexts]
    assert len({one.root(context) for context in contexts}) == len(contexts)
    assert BlockHasher(bytes(31) + b"1").root(Context()) != one.root(Context())


# ---------------------------------------------------------------- checksums


def checksum(row: bytes) -> int:
    """The same sums with Python's integers."""
    odd, columns = 0x9E3779B97F4A7C15, UNIT_BYTES // 8
    words = [int.from_bytes(row[i : i + 8], "little", signed=True) for i in range(0, len(row), 8)]
    by_column = sum(word * (((i % columns + 1) * odd) | 1) for i, word in enumerate(words))
    by_row = sum(word * (((i // columns + 1) * odd) | 1) for i, word in enumerate(words))
    return (2 * by_column + by_row + 2**63) % 2**64 - 2**63


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), units=st.integers(1, 5))
@example(seed=118357569, rows=2, units=2)  # the highest bit of a word
@settings(deadline=None, max_examples=25)
def test_checksums_are_those_of_whole_numbers_and_notice_every_change(
    seed: int, rows: int, units: int
) -> None:
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, units * UNIT_BYTES), np.uint8)
    sums = Checksums(units * UNIT_BYTES, torch.device("cpu"))
    found = sums.of(torch.from_numpy(data)).tolist()
    assert found == [checksum(row.tobytes()) for row in data]
    place, bit = random.integers(0, data.shape[1]), 1 << random.integers(0, 8)
    data[0, place] ^= bit
    assert sums.of(torch.from_numpy(data)).tolist()[0] != found[0]
    data[0, place] ^= bit
    words = data.view(np.int64)
    a, b = random.choice(words.shape[1], 2, replace=False)
    if words[0, a] != words[0, b]:
        words[0, [a, b]] = words[0, [b, a]]
        assert sums.of(torch.from_numpy(data)).tolist()[0] != found[0], "exchanged words"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 4, 16), (2, 1, 3, 10), (2, 1, 1, 1)], ids=str)
def test_blocks_return_bit_by_bit_with_shapes_of_any_size(dtype: torch.dtype, shape: tuple) -> None:
    """More blocks than pass the buffer at once, to other places; 8-bit blocks with their scales."""
    generator = torch.Generator().manual_seed(0)

    def layer() -> CacheLayer:
        blocks = (100 * torch.randn(12, *shape, generator=generator)).to(dtype)
        scales = torch.randn(12, *shape[:-1], generator=generator) if dtype == torch.int8 else None
        return CacheLayer(blocks, scales)

    caches = [layer(), layer(), layer()]
    sizes = [tensor[0].nbytes for cache in caches for tensor in cache.tensors]
    _, slot_bytes = parts_of_slot(sizes)
    fd = create_file(1 << 18)
    try:
        store = HostStore(region_of(fd, MODEL, slot_bytes, 8), sizes, torch.device("cpu"))
    finally:
        os.close(fd)
    store.most_blocks, store._piece = 2, 3
    store.use(caches)
    wanted = [tensor[:5].clone() for cache in caches for tensor in cache.tensors]
    outs = [BlockOut(block, slot, key(block), NONE) for block, slot in enumerate((1, 2, 3, 7, 0))]
    store.end(store.begin(HostCopies(outs=outs)))
    ins = [(slot, 7 + number) for number, slot in enumerate((1, 2, 3, 7, 0))]
    assert store.end(store.begin(HostCopies(ins=ins))) == [True] * 5
    assert all(torch.equal(t[7:], w) for t, w in zip([t for c in caches for t in c.tensors], wanted))
    moved = store.begin(HostCopies(outs=[BlockOut(7, 4, key(8), NONE)]))
    back = store.begin(HostCopies(ins=[(4, 8)]))  # as a rank that is behind rank 0 may do
    assert store.end(moved) == [] and store.end(back) == [True]
    store.region.clear([4])
    store.begin(HostCopies(outs=[BlockOut(0, 3, key(9), NONE)]))  # a kill before its end
    assert store.region.checksum(3) is None and len(store.region.entries()) == 4


@pytest.mark.parametrize("count", [5, 6, 7])
def test_an_odd_number_of_blocks_passes_the_buffer(count: int) -> None:
    """The halves of the buffer are equal, also of a buffer for an odd number of blocks."""
    cache = CacheLayer(torch.randn(2 * count, 2, 1, 8, 64))
    size = cache.blocks[0].nbytes
    fd = create_file(1 << 20)
    try:
        store = HostStore(region_of(fd, MODEL, size, count), [size], torch.device("cpu"))
    finally:
        os.close(fd)
    assert store.most_blocks == count
    store.use([cache])
    store.end(store.begin(HostCopies(outs=[BlockOut(n, n, key(n), NONE) for n in range(count)])))
    assert store.end(store.begin(HostCopies(ins=[(n, count + n) for n in range(count)]))) == [True] * count
    assert torch.equal(cache.blocks[:count], cache.blocks[count:])


# ---------------------------------------------------------------- plans


PART = HostCopies([BlockOut(3, 1, key(5), key(4)), BlockOut(2, 0, key(6), key(5))], [(4, 7), (5, 6)], [2, 9])


def test_a_plan_of_copies_alone_arrives() -> None:
    found = plan_frame.decode(plan_frame.encode(empty_plan(12, PART)))
    assert (found.step, found.num_tokens, found.num_rows, found.num_samples) == (12, 0, 0, 0)
    assert found.parts == [PART]


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ([[[3, 1, key(5), key(4)], [3, 0, key(6), key(5)]], [], [], False], "a block twice"),
        ([[[3, 1, key(5), key(4)]], [[1, 7]], [], False], "a slot twice"),
        ([[], [[1, 7], [2, 7]], [], False], "a block twice"),
        ([[[-3, 1, key(5), key(4)]], [], [], False], "cannot be read"),
        ([[[3, 1, key(5)[1:], key(4)]], [], [], False], "cannot be read"),
        ([[], [[1, 7, 3]], [], False], "cannot be read"),
        ([[], [], [-1], False], "cannot be read"),
        ([[], [], []], "cannot be read"),
        ([[], [], [], 2], "cannot be read"),
    ],
)
def test_a_damaged_part_is_refused(frame: list, text: str) -> None:
    plan = empty_plan(1, HostCopies())
    with pytest.raises(TridecodeError, match=text):
        HostCopies.decode(msgspec.Raw(msgspec.msgpack.encode(frame)), plan, "plan 1 from rank 0: host_copies")


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_a_frame_with_any_changed_byte_is_read_or_refused(data: st.DataObject) -> None:
    frame = bytearray(plan_frame.encode(empty_plan(12, PART)))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        plan = plan_frame.decode(bytes(frame))
    except TridecodeError:
        return
    assert plan.part(HostCopies) is not None or not plan.parts
