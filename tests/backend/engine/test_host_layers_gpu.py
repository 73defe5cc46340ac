"""Prompts that are computed while their blocks come in from the host tier, on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.backend.engine.offline_models import prompts_of, run_ahead
from tests.backend.engine.test_host_layers import layered_of
from tests.backend.engine.test_host_models import flush
from tests.backend.engine.test_host_tier_gpu import SIZE, gpu_engine
from tests.backend.hf_models import llama
from tests.checkpoints import FAMILIES
from tridecode.backend.base.memory_file import create_file
from tridecode.backend.engine.host_tier.region import HostRegion
from tridecode.backend.engine.host_tier.slots import parts_of_slot
from tridecode.backend.engine.host_tier.store import HostStore
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.host_copies import BlockOut, HostCopies
from tridecode.backend.wire.messages import SamplingParams
from tridecode.kernels.block_copies import BlockCopies, Checksums, FastBlockCopies
from tridecode.kernels.library import Library
from tridecode.kernels.operands import CacheLayer

pytestmark = pytest.mark.gpu


@pytest.fixture
def memory() -> Iterator[int]:
    fd = create_file(SIZE)
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def library() -> Library:
    from tridecode.kernels.cuda import Cuda  # imported here: it loads the binding of the built library

    return Cuda(torch.device("cuda")).gpu.library


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [[4096] * 3, [4096, 32] * 4, [131072, 16, 1040], [528] * 5], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_the_kernel_places_blocks_and_adds_checksums_as_torch_does(
    library: Library, sizes: list[int], rows: int
) -> None:
    device, blocks = torch.device("cuda"), 256
    starts, slot_bytes = parts_of_slot(sizes)
    make = torch.Generator(device).manual_seed(len(sizes) * rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=make)

    before = [random(blocks, size) for size in sizes]
    tensors = [[one.clone().view(torch.int64) for one in before] for _ in range(2)]
    checksums = Checksums(slot_bytes, device)
    assert FastBlockCopies.fits(tensors[0], starts)
    fast = FastBlockCopies(library, tensors[0], starts, checksums)
    slow = BlockCopies(tensors[1], starts, checksums)
    staged, chosen = random(rows, slot_bytes), torch.randperm(blocks, device=device, generator=make)[:rows]
    sums = torch.zeros(2, rows, dtype=torch.int64, device=device)
    cut = next(start for start in [*starts, slot_bytes] if start % 512 == 0 and start > 0)
    for first, end in [(0, cut), (cut, slot_bytes)]:
        if end > first:
            part = staged[:, first:end].contiguous()
            fast.place(part, first, chosen, sums[0])
            slow.place(part, first, chosen, sums[1])
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], checksums.of(staged))
    for mine, theirs in zip(*tensors):
        assert torch.equal(mine, theirs)


@torch.inference_mode()
def test_columns_of_slots_come_in_whole(library: Library) -> None:
    """Runs of one and of several slots, of pinned memory, in any order."""
    device = torch.device("cuda")
    slots = torch.randint(0, 256, (40, 16384), dtype=torch.uint8).pin_memory()
    fast = FastBlockCopies(library, [torch.zeros(4, 8, dtype=torch.int64, device=device)], [0], None)  # type: ignore[arg-type]
    staged = torch.zeros(12, 4096, dtype=torch.uint8, device=device)
    fast.move(slots, [(0, 30, 4), (4, 7, 1), (5, 0, 7)], 8192, staged)
    wanted = slots[[*range(30, 34), 7, *range(7)], 8192:12288]
    assert torch.equal(staged.cpu(), wanted)


@torch.inference_mode()
@pytest.mark.parametrize("has_library", [True, False], ids=["kernels", "torch"])
def test_every_layer_is_complete_where_its_step_reads_it(library: Library, has_library: bool) -> None:
    """60 blocks of 12 layers into other blocks, five times, while kernels keep the device busy."""
    device, count, layers = torch.device("cuda"), 60, 12
    caches = [
        CacheLayer(torch.randn(2 * count, 2, 8, 32, 64, dtype=torch.bfloat16, device=device))
        for _ in range(layers)
    ]
    sizes = [cache.blocks[0].nbytes for cache in caches]
    _, slot_bytes = parts_of_slot(sizes)
    fd = create_file(slot_bytes * (count + 2) + (1 << 20))
    try:
        region = HostRegion(fd)
        region.lay_out(bytes(32), slot_bytes, count)
        store = HostStore(region, sizes, device, library if has_library else None)
        store.use(caches)
        assert isinstance(store._copies, FastBlockCopies) == has_library and len(store.groups) > 2
        store.pinning.start()
        store.pinning.join()
        outs = [BlockOut(n, count - 1 - n, n.to_bytes(16, "little"), bytes(16)) for n in range(count)]
        store.end(store.begin(HostCopies(outs=outs)))
        ins = [(count - 1 - n, count + (n * 7) % count) for n in range(count)]
        busy = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        for number in range(5):
            for cache in caches:
                cache.blocks[count:] = number
            busy = (busy @ busy).clamp(-1, 1)
            layered = count if number % 2 == 0 else count - 9
            transfer = store.begin(HostCopies(ins=ins, layered=layered))
            same = []
            for cache in transfer.caches(caches):
                same.append((cache.blocks[[b for _, b in ins[:layered]]] == cache.blocks[:layered]).all())
                busy = (busy @ busy).clamp(-1, 1)
            assert len(same) == layers and all(one.item() for one in same)
            assert store.end(transfer) == [True] * count and transfer.seconds > 0
            for cache in caches:
                assert torch.equal(cache.blocks[[block for _, block in ins]], cache.blocks[:count])
        store._slots[5, store.groups[-1].first + 100] ^= 1
        intact = store.end(store.begin(HostCopies(ins=ins, layered=count)))
        assert intact == [slot != 5 for slot, _ in ins]
    finally:
        os.close(fd)


def later(offline: OfflineEngine, prompts: list[list[int]]) -> list[list[int]]:
    """The answers of prompts whose blocks are only in the tier, with the next plan launched ahead."""
    found = []
    for prompt in prompts:
        flush(offline)
        index = offline.scheduler.cache.index
        index.evict(index.num_cached)
        number = offline.submit(prompt, SamplingParams(max_tokens=9))
        run_ahead(offline)
        found.append(offline.generations[number].tokens)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("format", ["auto", "fp8"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_answers_are_the_same_beside_their_copies(family: str, format: str, memory: int) -> None:
    model = FAMILIES[family]()
    prompts = prompts_of([100, 70, 90, 33], model.config.vocab_size)
    offline = gpu_engine(model, memory, 40, kv_cache_dtype=format, max_step_tokens=128)
    wanted = later(offline, prompts)
    assert later(offline, prompts) == wanted, "they wait for their blocks"
    noted = layered_of(offline)
    assert later(offline, prompts) == wanted
    assert noted == [(len(prompt) - 1) // 16 for prompt in prompts]
    assert offline.scheduler.cache.tier.faults == 0


@torch.inference_mode()
def test_a_wrong_byte_of_the_last_layers_is_noticed_after_the_step(memory: int) -> None:
    model = llama()
    prompt = [(7 * i) % 90 + 1 for i in range(100)]
    offline = gpu_engine(model, memory, 40, max_step_tokens=128)
    wanted = later(offline, [prompt, prompt])
    noted = layered_of(offline)
    store, tier = offline.engine.state.host, offline.scheduler.cache.tier
    slot = sorted(tier.slots._blocks.values())[3]
    store._slots[slot, store.groups[-1].first : store.groups[-1].end] = 255  # NaN
    assert later(offline, [prompt, prompt]) == wanted
    assert tier.faults == 1 and noted and tier.index.num_available == tier.index.num_blocks
