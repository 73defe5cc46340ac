"""Prompts that are computed while their blocks come in from the host tier, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.host_device import HostMemory, HostRun
from tests.backend.engine.offline_models import fp32_bound, prompts_of
from tests.backend.engine.test_host_models import SIZE, assert_same, flush, small_engine, tier_of
from tests.backend.engine.test_host_tier import LONG
from tests.backend.engine.test_prefix_cache import computed
from tests.backend.engine.test_prefix_models import GREEDY, beginnings, in_any_company
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.engine.toy_device import DOOR, expected, limits
from tests.backend.hf_models import llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import CapacityError
from tridecode.backend.base.memory_file import create_file
from tridecode.backend.engine.host_tier.layering import Layering
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.host_copies import HostCopies
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

WIDE = limits(num_blocks=16, max_step_tokens=16)


def cold(layered: bool = True, overlap: bool | str = True, sizes=WIDE, **changes) -> HostRun:
    """An engine without cached blocks, whose tier has the six blocks of LONG."""
    run = HostRun(sizes, HostMemory(100), overlap, layered=layered)
    run.submit(1, LONG, max_tokens=1)
    run.finish()
    run.scheduler.cache.index.evict(100)
    return run


def launch(run: HostRun) -> tuple[StepPlan, HostCopies]:
    """Plan a step that also copies the blocks of its prompt, without running it."""
    plan = run.scheduler.plan()
    assert plan is not None
    part = plan.part(HostCopies)
    assert part is not None and part.layered == len(part.ins) and plan.num_rows and not part.captures
    return plan, part


def end(run: HostRun, plan: StepPlan) -> None:
    run.take(run.scheduler.commit(plan, run.device.run(plan)))


@pytest.mark.parametrize("overlap", [False, True, "stages"])
def test_a_prompt_is_computed_by_the_plan_that_copies_its_blocks(overlap: bool | str) -> None:
    """All blocks at once, although a plan without rows copies three of them."""
    run, before = cold(overlap=overlap), 0
    before = computed(run)
    run.submit(2, [*LONG, 1, 2], max_tokens=3)
    plan, part = launch(run)
    assert len(part.ins) == 6 and plan.num_tokens == 2 and plan.samples.tolist() == [1]
    assert run.scheduler.plan() is None, "its next token waits for the checksums"
    end(run, plan)
    run.finish()
    assert run.tokens[2, 0] == expected([*LONG, 1, 2], 3)
    assert computed(run) - before == 2 and run.tier.tokens == 24
    run.scheduler.cache.index.evict(100)
    run.submit(3, [*LONG, 1, 2], max_tokens=3)
    run.finish()
    assert run.tokens[3, 0] == expected([*LONG, 1, 2], 3)


@pytest.mark.parametrize("overlap", [False, True, "stages"])
@pytest.mark.parametrize("wrong", [0, 2, 5])
@pytest.mark.parametrize("count", [1, 4])
def test_a_step_over_a_wrong_block_is_repeated(overlap: bool | str, wrong: int, count: int) -> None:
    run = cold(overlap=overlap)
    entries = run.memory.entries()
    run.memory.damaged.add(entries[wrong].slot)
    before, prompt = computed(run), [*LONG, 1, 2]
    run.submit(2, [3, 3], max_tokens=9)  # a neighbour
    run.step()
    run.submit(3, prompt, max_tokens=count)
    run.finish()
    assert run.tokens[3, 0] == expected(prompt, count) and run.tokens[2, 0] == expected([3, 3], 9)
    assert run.tier.faults == 1
    assert computed(run) - before == 2 + 2 + (len(prompt) - 4 * wrong), "from the first wrong block on"
    run.scheduler.cache.index.evict(100)
    run.submit(4, prompt, max_tokens=count)
    run.finish()
    assert run.tokens[4, 0] == expected(prompt, count) and run.tier.faults == 1, "the slot was filled again"


def test_nobody_finds_blocks_of_a_step_before_its_copies_are_checked() -> None:
    """A second request with the same prompt waits, and is not computed over the first one's wrong blocks."""
    run, prompt = cold(), [*LONG, 1, 2, 3, 4, 5, 6]
    run.memory.damaged.add(run.memory.entries()[5].slot)
    run.submit(2, prompt, max_tokens=2)
    plan, _ = launch(run)
    run.submit(3, prompt, max_tokens=2)
    assert run.scheduler.plan() is None and not run.scheduler.cache.index.num_cached
    end(run, plan)
    run.finish()
    assert run.tokens[2, 0] == run.tokens[3, 0] == expected(prompt, 2)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_prompt_longer_than_a_step_continues_after_its_copies(damaged: bool) -> None:
    run, prompt = cold(sizes=limits(num_blocks=16, max_step_tokens=8)), [*LONG, *range(10)]
    if damaged:
        run.memory.damaged.add(run.memory.entries()[1].slot)
    run.submit(2, prompt, max_tokens=2)
    plan, _ = launch(run)
    assert plan.num_tokens == 8 and not plan.num_samples and run.scheduler.plan() is None
    end(run, plan)
    run.finish()
    assert run.tokens[2, 0] == expected(prompt, 2) and run.tier.faults == damaged


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("way", ["cancel", "preempt", "abandon"])
def test_a_request_leaves_while_its_blocks_come_in(way: str, damaged: bool) -> None:
    """Its own blocks may hold anything then, so they are set to zero before their next use."""
    run, prompt = cold(), [*LONG, *range(6)]
    if damaged:
        run.memory.damaged.add(run.memory.entries()[3].slot)
    run.submit(2, prompt, max_tokens=2)
    plan, _ = launch(run)
    (sequence,) = plan.sequences
    own = sequence.blocks[6:]
    if way == "cancel":
        run.scheduler.cancel(DOOR, 2)
    elif way == "preempt":
        run.scheduler.planner.preempt(sequence)
    else:
        run.scheduler.abandon(plan, CapacityError("no memory"))
    if way != "abandon":
        assert set(own) <= run.scheduler.cache._cleared
        assert run.scheduler.plan() is None
        end(run, plan)
    run.take(run.scheduler.take_events())
    run.finish()
    assert run.tier.faults == (damaged and way != "abandon")
    if way == "preempt":
        assert run.tokens[2, 0] == expected(prompt, 2)
    run.submit(3, prompt, max_tokens=2)
    run.finish()
    assert run.tokens[3, 0] == expected(prompt, 2)


def test_an_engine_that_is_killed_during_the_copies_leaves_the_tier_whole() -> None:
    run, prompt = cold(), [*LONG, 1, 2]
    run.submit(2, prompt, max_tokens=2)
    launch(run)
    after = HostRun(WIDE, run.memory, True, layered=True)
    after.submit(2, prompt, max_tokens=2)
    after.finish()
    assert after.tokens[2, 0] == expected(prompt, 2) and after.tier.tokens == 24 and computed(after) == 2


@pytest.mark.parametrize(
    "params",
    [{"beam_width": 2}, {"num_return_sequences": 2}, {"top_log_probs": 1}, {"return_perf_metrics": True}],
)
def test_requests_whose_step_yields_more_than_a_token_wait_for_their_blocks(params: dict) -> None:
    run = cold()
    run.submit(2, [*LONG, 1, 2], max_tokens=2, **params)
    plan = run.scheduler.plan()
    assert plan is not None
    part = plan.part(HostCopies)
    assert part is not None and part.ins and not part.layered and not plan.num_rows
    end(run, plan)
    run.finish()


def test_short_prompts_and_short_copies_wait() -> None:
    run = cold()
    for layered, joins in (
        (Layering(least_tokens=3, least_copy_s=0), False),
        (Layering(least_tokens=2, least_copy_s=0.0061), False),
        (Layering(False, 0, 0), False),
        (Layering(least_tokens=2, least_copy_s=0.006), True),
    ):
        run.tier.layering = layered
        run.scheduler.cache.index.evict(100)
        run.submit(2, [*LONG, 1, 2], max_tokens=2)
        plan = run.scheduler.plan()
        assert plan is not None and bool(plan.num_rows) == joins
        end(run, plan)
        run.finish()
        assert run.tokens.pop((2, 0)) == expected([*LONG, 1, 2], 2)
        run.ends.pop((2, 0))


# ---------------------------------------------------------------- whole models


@pytest.fixture
def memory() -> Iterator[int]:
    fd = create_file(SIZE)
    yield fd
    os.close(fd)


def layered_of(offline: OfflineEngine) -> list[int]:
    """Compute prompts while their blocks come in wherever possible; return a list that gets the number of
    copies of each such plan."""
    tier, noted = tier_of(offline), []
    tier.layering, take = Layering(True, 0, 0.0), tier.take
    tier.cost.note_copy(1, 0.001)

    def take_noted(*args, **kwargs) -> HostCopies | None:
        part = take(*args, **kwargs)
        if part is not None and part.layered:
            noted.append(part.layered)
        return part

    tier.take = take_noted  # type: ignore[method-assign]
    return noted


@torch.inference_mode()
@pytest.mark.parametrize(
    "family",
    [n if n in ("gpt2", "llama", "bloom") else pytest.param(n, marks=pytest.mark.nightly) for n in FAMILIES],
)
def test_every_layer_waits_for_its_copies(family: str, memory: int) -> None:
    """The caches hold other numbers before, so a layer that reads a block too early shows in the logits."""
    model = FAMILIES[family]()
    prompts = beginnings(model.config.vocab_size)
    offline, without = small_engine(model, memory), small_engine(model, None, cache_scope="none")
    layered_of(offline)
    assert_same(in_any_company(offline, prompts), in_any_company(without, prompts))
    flush(offline)
    del offline
    after = small_engine(model, memory)
    noted = layered_of(after)
    for cache in after.engine.state.caches:
        for tensor in cache.tensors:
            tensor.normal_()
    longest = max(prompts, key=len)
    found, wanted = (one.generate([longest], GREEDY)[0] for one in (after, without))
    logits = np.stack(wanted.logits)
    assert found.tokens == wanted.tokens
    assert np.abs(np.stack(found.logits) - logits).max() < 2 * fp32_bound(logits)
    assert noted == [(len(longest) - 1) // 8] and tier_of(after).faults == 0


@torch.inference_mode()
@pytest.mark.parametrize("place", [0, -1], ids=["first layer", "last layer"])
def test_a_changed_byte_of_any_group_is_noticed(place: int, memory: int) -> None:
    model = llama()
    prompt = prompts_of([43], model.config.vocab_size)[0]
    offline = small_engine(model, memory)
    wanted = offline.generate([prompt], SamplingParams(max_tokens=12))[0].tokens
    flush(offline)
    store = offline.engine.state.host
    assert store is not None and len(store.groups) > 1
    group, slot = store.groups[place], store.region.entries()[3].slot
    store._slots[slot, group.first + 8 : group.first + 64] = 255  # NaN
    after = small_engine(model, memory)
    noted, tier = layered_of(after), tier_of(after)
    assert after.generate([prompt], SamplingParams(max_tokens=12))[0].tokens == wanted
    assert tier.faults == 1 and noted == [5] and tier.index.num_available == tier.index.num_blocks
    again = small_engine(model, memory)
    assert again.generate([prompt], SamplingParams(max_tokens=12))[0].tokens == wanted
    assert tier_of(again).faults == 0


@torch.inference_mode()
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_copy_their_layers_beside_the_same_step(
    tensor: int, stages: int, damaged: bool, tmp_path: Path
) -> None:
    """damaged: a block of the last rank only."""
    model = FAMILIES["llama"](**FAMILIES["llama"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompt = max(beginnings(model.config.vocab_size), key=len)
    files = [create_file(SIZE) for _ in range(2)]

    def use(offline: OfflineEngine) -> tuple[list[int], list[int], int]:
        noted = layered_of(offline)
        tokens = offline.generate([prompt], GREEDY)[0].tokens
        flush(offline)
        return tokens, noted, tier_of(offline).faults

    settings = {"pipelined": True, "host_cache_bytes": 2 * SIZE, "host_fds": files}
    try:
        (first, none, _), engines = on_ranks(directory, tensor, stages, use, **settings)
        store = engines[1].state.host
        assert store is not None and none == []
        if damaged:
            store._slots[store.region.entries()[1].slot, store.groups[-1].first] ^= 1
        (again, noted, faults), _ = on_ranks(directory, tensor, stages, use, **settings)
    finally:
        for fd in files:
            os.close(fd)
    assert again == first and noted == [(len(prompt) - 1) // 8] and faults == damaged
