"""Whole models in fp32 over a cache that is too small, with the host tier and without it: equal tokens, also
after the engine was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import fp32_bound, offline_engine, prompts_of
from tests.backend.engine.test_prefix_models import GREEDY, USUAL, beginnings, computed, in_any_company
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.hf_models import gpt2, llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.memory_file import create_file
from tridecode.backend.configuration.engine_config import CACHE_FORMATS
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.host_tier.opening import open_store
from tridecode.backend.engine.host_tier.tier import HostTier
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import SamplingParams, Sent, SequenceRequest, Submit
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

SIZE = 8 << 20
#: families with several ranks
RANKED = ("gpt2", "llama", "bloom")


@pytest.fixture
def memory() -> Iterator[int]:
    fd = create_file(SIZE)
    yield fd
    os.close(fd)


def tier_of(offline: OfflineEngine) -> HostTier:
    tier = offline.scheduler.cache.tier
    assert tier is not None
    tier.cost.pays = lambda: True  # type: ignore[method-assign]
    return tier


def flush(offline: OfflineEngine) -> None:
    """Copy what waits to be copied, as the loop of an idle engine does."""
    while offline.step() or offline._pending:
        pass


def small_engine(model: torch.nn.Module, memory: int | None, blocks: int = 12, **settings) -> OfflineEngine:
    """An engine whose cache has this number of blocks."""
    settings = {"max_sequence_tokens": 64, **settings}
    wide = offline_engine(model, cache_bytes=1 << 20, **settings)
    size = blocks * wide.engine.state.block_bytes()
    return offline_engine(model, cache_bytes=size, host_fd=memory, **settings)


def assert_same(found: list[list[Generation]], wanted: list[list[Generation]]) -> None:
    for mine, theirs in zip(found, wanted):
        assert [one.tokens for one in mine] == [one.tokens for one in theirs]


@torch.inference_mode()
@pytest.mark.parametrize(
    "family",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
)
def test_answers_are_the_same_with_the_tier_and_after_a_kill(family: str, memory: int) -> None:
    model = FAMILIES[family]()
    prompts = beginnings(model.config.vocab_size)
    offline, without = small_engine(model, memory), small_engine(model, None, cache_scope="none")
    tier = tier_of(offline)
    found, wanted = in_any_company(offline, prompts), in_any_company(without, prompts)
    assert_same(found, wanted)
    for mine, theirs in zip(found, wanted):
        for one, other in zip(mine, theirs):
            logits = np.stack(other.logits)
            assert np.abs(np.stack(one.logits) - logits).max() < 2 * fp32_bound(logits)
    assert tier.tokens > 0 and tier.faults == 0 and offline.scheduler.cache.index.evictions > 0
    swapped = SamplingParams(max_tokens=24)  # together they need more blocks than there are
    assert_same([offline.generate(prompts, swapped)], [without.generate(prompts, swapped)])
    assert offline.scheduler.counters.preemptions > 0 and tier.faults == 0
    flush(offline)
    assert tier.slots.num_available == tier.slots.num_blocks
    blocks = {key: slot for key, slot in tier.slots._blocks.items()}
    del offline, tier  # nothing is saved: this is what a kill leaves
    after = small_engine(model, memory)
    assert tier_of(after).slots._blocks == blocks
    before = [after.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert_same([before], [wanted[0]])
    full = sum((len(prompt) - 1) // 8 for prompt in prompts)
    assert after.scheduler.cache.cached_tokens == 8 * full, "every full block was there"
    assert tier_of(after).tokens > 0 and tier_of(after).faults == 0


@torch.inference_mode()
@pytest.mark.parametrize(
    "family",
    [name if name in RANKED else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
)
def test_requests_continue_on_the_next_engine_with_the_blocks_of_their_answers(
    family: str, memory: int
) -> None:
    """The engine is killed while four answers grow; the next one gets the prompts and the tokens sent so
    far."""
    model = FAMILIES[family]()
    prompts = prompts_of([17, 9, 24, 12], model.config.vocab_size)
    params = SamplingParams(max_tokens=36)
    wanted = [
        one.tokens
        for one in small_engine(model, None, blocks=40, cache_scope="none").generate(prompts, params)
    ]
    offline = small_engine(model, memory, blocks=40)
    tier_of(offline)
    numbers = [offline.submit(prompt, params) for prompt in prompts]
    while min(len(offline.generations[number].tokens) for number in numbers) < 30:
        offline.step()
    sent = [list(offline.generations[number].tokens) for number in numbers]
    assert all(offline.generations[number].finish == "" for number in numbers)
    del offline  # nothing is saved or copied any more
    after = small_engine(model, memory, blocks=40)
    tier = tier_of(after)
    for number, (prompt, tokens) in enumerate(zip(prompts, sent)):
        after.generations.append(Generation())
        request = SequenceRequest(np.array(prompt, np.int32).tobytes(), params)
        before = [Sent(np.array(tokens, "<i4").tobytes())]
        after.scheduler.submit(b"offline", Submit(number, [request], sent=before))
    after.run()
    assert [[*tokens, *one.tokens] for tokens, one in zip(sent, after.generations)] == wanted
    known = sum(map(len, prompts)) + sum(map(len, sent))
    assert tier.tokens >= 0.5 * known and computed(after) <= known - tier.tokens
    assert tier.faults == 0


@torch.inference_mode()
def test_answers_with_drafts_are_swapped_with_whole_blocks(memory: int) -> None:
    """Lengths of drafted rows in flight are upper bounds: only whole blocks may enter the tier."""
    model = llama()
    (base,) = prompts_of([6], model.config.vocab_size)
    prompts = [base * 3, base * 2 + [5, 6], base * 4, [7, 8] * 6]
    params = SamplingParams(max_tokens=30)
    without = small_engine(model, None, blocks=40, cache_scope="none")
    wanted = [one.tokens for one in without.generate(prompts, params)]
    settings = {"blocks": 14, "speculation": "lookup", "max_draft_tokens": 3, "keep_logits": False}
    offline = small_engine(model, memory, **settings)
    tier = tier_of(offline)
    for _ in range(2):
        assert [one.tokens for one in offline.generate(prompts, params)] == wanted
    assert offline.scheduler.counters.preemptions > 0 and tier.tokens > 0 and tier.faults == 0
    flush(offline)
    after = small_engine(model, memory, **settings)
    assert [one.tokens for one in after.generate(prompts, params)] == wanted
    assert tier_of(after).tokens > 0


@torch.inference_mode()
@pytest.mark.parametrize("format", CACHE_FORMATS)
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_blocks_of_eight_bits_come_back_with_their_scales(make, format: str, memory: int) -> None:
    model = make()
    prompts = beginnings(model.config.vocab_size)
    offline = small_engine(model, memory, kv_cache_dtype=format)
    without = small_engine(model, None, kv_cache_dtype=format, cache_scope="none")
    tier = tier_of(offline)
    assert_same(in_any_company(offline, prompts), in_any_company(without, prompts))
    assert tier.tokens > 0 and tier.faults == 0


@torch.inference_mode()
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    "family",
    [name if name in RANKED else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
)
def test_all_ranks_keep_their_parts_of_the_same_blocks(
    family: str, tensor: int, stages: int, tmp_path: Path
) -> None:
    model = FAMILIES[family](**FAMILIES[family].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = beginnings(model.config.vocab_size)
    files = [create_file(SIZE) for _ in range(2)]

    def use(offline: OfflineEngine) -> tuple[list[list[Generation]], int, int]:
        tier = offline.scheduler.cache.tier
        if tier is not None:
            tier_of(offline)
        done = in_any_company(offline, prompts)
        if tier is not None:
            flush(offline)
        return done, computed(offline), 0 if tier is None else tier.tokens

    settings = {"pipelined": True, "host_cache_bytes": 2 * SIZE, "host_fds": files}
    try:
        (found, first, _), engines = on_ranks(directory, tensor, stages, use, **settings)
        (again, later, brought), _ = on_ranks(directory, tensor, stages, use, **settings)
        (wanted, _, _), _ = on_ranks(directory, tensor, stages, use, pipelined=True, cache_scope="none")
        keys = [engine.state.host.region.keys() for engine in engines if engine.state.host is not None]
        assert keys[0] == keys[1] and any(keys[0])
    finally:
        for fd in files:
            os.close(fd)
    assert_same(found, wanted)
    assert_same(again, wanted)
    assert brought > 0 and later < first


@torch.inference_mode()
def test_the_tier_is_off_on_all_ranks_if_one_cannot_pin_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pinning thread ends with a fault; no block is copied, and the requests are answered."""
    model = FAMILIES["llama"](**FAMILIES["llama"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = beginnings(model.config.vocab_size)
    usual = Engine.pin_host_memory

    def pin(engine: Engine) -> None:
        if engine.state.host is not None:
            engine.state.host.pinning.fault = "the driver pinned 0 of 8 bytes"
        usual(engine)

    monkeypatch.setattr(Engine, "pin_host_memory", pin)  # rank 0 of an offline engine does not call it

    def use(offline: OfflineEngine) -> tuple[list[list[Generation]], HostTier]:
        tier = tier_of(offline)
        done = in_any_company(offline, prompts)
        flush(offline)
        return done, tier

    with caplog.at_level("WARNING", logger="tridecode.engine"):
        (found, tier), engines = on_ranks(directory, 2, 1, use, host_cache_bytes=2 * SIZE)
    (wanted, _), _ = on_ranks(directory, 2, 1, lambda offline: (in_any_company(offline, prompts), 0))
    assert_same(found, wanted)
    assert tier.memory.is_off and tier.tokens == 0 and not tier.has_work
    assert all(engine.state.host is not None for engine in engines)
    assert not any(any(engine.state.host.region.keys()) for engine in engines)
    assert sum("host tier is off" in record.getMessage() for record in caplog.records) == 1


@torch.inference_mode()
def test_ranks_of_a_node_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory suffices for either rank's part, but not for both."""
    monkeypatch.setattr("tridecode.backend.engine.host_tier.opening.available_memory", lambda: SIZE * 3 // 2)
    model = FAMILIES["llama"](**FAMILIES["llama"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)

    def use(offline: OfflineEngine) -> HostTier | None:
        return offline.scheduler.cache.tier

    with caplog.at_level("WARNING", logger="tridecode.engine"):
        tier, engines = on_ranks(directory, 2, 1, use, host_cache_bytes=2 * SIZE)
    assert tier is None and all(engine.state.host is None for engine in engines)
    (said,) = [record.getMessage() for record in caplog.records if "host tier" in record.getMessage()]
    assert "bytes of host memory" in said and f"{SIZE * 3 // 2:,} are available" in said


@torch.inference_mode()
def test_a_block_that_one_rank_lost_is_found_on_none(tmp_path: Path) -> None:
    model = FAMILIES["llama"](**FAMILIES["llama"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompt = beginnings(model.config.vocab_size)[0]
    files = [create_file(SIZE) for _ in range(2)]

    def use(offline: OfflineEngine) -> tuple[list[int], int, int]:
        tier = tier_of(offline)
        known = tier.slots.num_blocks - tier.slots.num_free
        tokens = offline.generate([prompt], GREEDY)[0].tokens
        flush(offline)
        return tokens, known, tier.tokens

    try:
        settings = {"host_cache_bytes": 2 * SIZE, "host_fds": files}
        (first, _, _), engines = on_ranks(directory, 2, 1, use, **settings)
        store = engines[1].state.host
        assert store is not None
        whole = len(store.region.entries())
        store.region.clear([store.region.entries()[1].slot])  # the kill came before rank 1 had filled it
        (again, known, brought), _ = on_ranks(directory, 2, 1, use, **settings)
    finally:
        for fd in files:
            os.close(fd)
    assert first == again and known == whole - 1 and brought == 8


@torch.inference_mode()
def test_log_probabilities_are_the_same_bits_where_the_engine_is_batch_invariant(memory: int) -> None:
    """Blocks of 32 tokens, as such an engine needs them; sequences preempt each other and get blocks back."""
    model = llama()
    common, *rest = prompts_of([64, 4, 40, 9, 70, 99], model.config.vocab_size)
    prompts = [common + rest[0], common + rest[1], common[:33] + rest[2], *rest[3:]]
    wants = SamplingParams(max_tokens=40, return_log_probs=True)
    sizes = {"batch_invariant": True, "block_tokens": 32, "max_step_tokens": 48, "max_sequence_tokens": 160}
    without = offline_engine(model, **sizes, cache_scope="none")
    alone = [without.generate([prompt], wants)[0].log_probs for prompt in prompts]
    offline = small_engine(model, memory, blocks=6, **sizes)
    tier = tier_of(offline)
    for _ in range(3):
        assert [one.log_probs for one in offline.generate(prompts, wants)] == alone
    assert tier.tokens > 0 and tier.faults == 0 and offline.scheduler.cache.index.evictions > 0
    assert offline.scheduler.counters.preemptions > 0
    flush(offline)
    after = small_engine(model, memory, blocks=6, **sizes)
    tier = tier_of(after)
    assert [one.log_probs for one in after.generate(prompts, wants)] == alone
    assert tier.tokens > 0


@torch.inference_mode()
def test_a_changed_byte_is_noticed_and_the_block_computed(memory: int) -> None:
    model = llama()
    prompt = beginnings(model.config.vocab_size)[0]
    offline = small_engine(model, memory)
    wanted = offline.generate([prompt], GREEDY)[0].tokens
    flush(offline)
    store = offline.engine.state.host
    assert store is not None
    third = store.region.entries()[2].slot
    store._slots[third, 17] ^= 4
    after = small_engine(model, memory)
    tier = tier_of(after)
    assert after.generate([prompt], GREEDY)[0].tokens == wanted
    assert tier.faults == 1 and tier.tokens == 16
    flush(after)
    last = small_engine(model, memory)
    assert last.generate([prompt], GREEDY)[0].tokens == wanted
    assert tier_of(last).faults == 0 and tier_of(last).tokens == 24, "the block was written again"


@torch.inference_mode()
def test_damaged_values_that_are_not_numbers_reach_no_other_sequence(memory: int) -> None:
    """A prompt ends while it waits for its blocks. Another one gets the block that they came into, and fills
    only a part of it."""
    model = llama()
    prompt = beginnings(model.config.vocab_size)[0]
    first = small_engine(model, memory)
    first.generate([prompt], GREEDY)
    flush(first)
    store = first.engine.state.host
    assert store is not None
    store._slots[[entry.slot for entry in store.region.entries()]] = 255
    wanted = small_engine(model, None).generate([prompt[:3]], GREEDY)[0].tokens
    after = small_engine(model, memory)
    tier = tier_of(after)
    number = after.submit(prompt, GREEDY)
    while not tier.faults:
        after.step()
    after.scheduler.cancel(b"offline", number)
    after.scheduler.take_events()
    assert after.generate([prompt[:3]], GREEDY)[0].tokens == wanted
    assert tier.tokens == 0


@torch.inference_mode()
def test_a_block_half_written_at_a_kill_is_not_seen(memory: int) -> None:
    model = llama()
    prompt = beginnings(model.config.vocab_size)[0]
    offline = small_engine(model, memory)
    number = offline.submit(prompt, GREEDY)
    store, tier = offline.engine.state.host, tier_of(offline)
    assert store is not None
    store.end = lambda transfer: []  # type: ignore[method-assign]  # the kill comes before it
    offline.run()
    flush(offline)
    assert offline.generations[number].finish == "length" and tier.slots.num_free < tier.slots.num_blocks
    assert store._slots.any() and not store.region.entries()
    assert small_engine(model, memory).scheduler.cache.tier.slots.num_free == tier.slots.num_blocks


@torch.inference_mode()
def test_blocks_of_other_weights_settings_or_sizes_are_forgotten(memory: int) -> None:
    model = llama()
    prompt = beginnings(model.config.vocab_size)[0]
    offline = small_engine(model, memory)
    offline.generate([prompt], GREEDY)
    flush(offline)
    assert offline.engine.state.host.region.entries()
    other = small_engine(model, memory, block_tokens=4, blocks=24)
    assert not other.engine.state.host.region.entries()


@torch.inference_mode()
def test_an_engine_with_a_tier_that_holds_no_block_runs_without_it() -> None:
    fd = create_file(4096)
    try:
        offline = small_engine(llama(), fd)
    finally:
        os.close(fd)
    assert offline.scheduler.cache.tier is None


@torch.inference_mode()
def test_memory_that_is_not_there_turns_the_tier_off_and_is_said_once(
    memory: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tridecode.backend.engine.host_tier.opening.available_memory", lambda: 1000)
    model = llama()
    prompt = beginnings(model.config.vocab_size)[0]
    with caplog.at_level("WARNING", logger="tridecode.engine"):
        offline = small_engine(model, memory)
    offline.generate([prompt], GREEDY)
    flush(offline)
    (said,) = [record.getMessage() for record in caplog.records if "host tier" in record.getMessage()]
    assert "8,384,512 bytes" in said and "1,000 are available" in said and "host_cache_bytes" in said
    assert offline.engine.state.host is None and offline.scheduler.cache.tier is None


@pytest.mark.parametrize("fails", ["create_file", "HostRegion"])
def test_a_memory_file_that_cannot_be_made_or_mapped_turns_the_tier_off(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(f"tridecode.backend.engine.host_tier.opening.{fails}", fail)
    offline = offline_engine(llama(), host_cache_bytes=SIZE)
    with caplog.at_level("WARNING", logger="tridecode.engine"):
        assert open_store(offline.engine.state, Path("no files"), None) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "host_cache_bytes" in said and "8,388,608 bytes" in said and "File too large" in said
