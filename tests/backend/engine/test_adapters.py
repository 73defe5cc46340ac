"""Adapters that are served by name, over weight files and PEFT's directories, compared with PEFT itself."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.rank_process import RankPool
from tests.backend.engine.step_watch import WatchedEngine
from tests.checkpoints import FAMILIES, greedy, save
from tests.lora_adapters import make_adapter
from tests.waiting import wait_until
from tridecode.backend.base.errors import (
    CapacityError,
    RequestError,
    TridecodeError,
    UnsupportedError,
)
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.adapters import store as adapter_store
from tridecode.backend.engine.adapters.tables import AdapterTables, fits
from tridecode.backend.engine.device import device_state
from tridecode.backend.engine.device.parts import adapters as adapters_run
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.adapters import write_targets
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.kernels.cpu import Cpu
from tridecode.kernels.operands import Linear

TOKENS = 6
#: of every family one or more, in layer 1
SOME = r".*\.1\..*(c_attn|c_fc|query_key_value|dense_4h_to_h|Wqkv|W_pack|qkv_proj|q_proj|v_proj|down_proj)"
#: two adapters of every family, of different modules, ranks and scales
ADAPTERS = {
    "all": {"seed": 1},
    "some": {"seed": 2, "r": 3, "lora_alpha": 2, "use_rslora": True, "target_modules": SOME},
}


def written(model, directory: Path) -> Path:
    """The weight directory of a model."""
    planned = plan_conversion(open_checkpoint(save(model, directory / "hf", tokenizer=False)))
    planned.write(directory / "weights")
    write_targets(directory / "weights", planned)
    return directory / "weights"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """family -> (weights, folder of adapters, {name: transformers' or PEFT's model}), made once."""

    @cache
    def make(family: str, shared: bool = False):
        directory = tmp_path_factory.mktemp(family)
        model = FAMILIES[family](**(FAMILIES[family].shared if shared else {}))
        models = {"": model}
        for name, settings in ADAPTERS.items():
            models[name] = make_adapter(model, directory / "adapters" / name, **settings)
        return written(model, directory), directory / "adapters", models

    return make


def engine_over(weights: Path, folder: Path, **settings) -> OfflineEngine:
    """Small blocks, small steps and few slots, so that chunks, joins and reuse happen."""
    defaults = dict(max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=1 << 20)
    return WatchedEngine.load(
        weights, EngineConfig(**{**defaults, **settings}, lora_path=str(folder)), keep_logits=True
    )


def check(model, generation, prompt: list[int]) -> None:
    tokens, logits = greedy(model, prompt, TOKENS)
    assert generation.tokens == tokens
    assert np.allclose(np.stack(generation.logits), logits.numpy(), atol=1e-3)


def check_mixed(offline: OfflineEngine, models: dict[str, torch.nn.Module]) -> None:
    """Compare a batch of rows with and without adapters with peft's models; close the engine."""
    prompts = prompts_of([20, 1, 7, 13], models[""].config.vocab_size)
    asked = [(name, prompt) for prompt in prompts for name in models]
    numbers = [offline.submit(prompt, SamplingParams(max_tokens=TOKENS), name) for name, prompt in asked]
    offline.run()
    for (name, prompt), number in zip(asked, numbers):
        check(models[name], offline.generations[number], prompt)
    offline.engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_give_the_tokens_of_peft(served, family: str) -> None:
    """Chunks of prompts, decoding rows, waiting requests and preemption, with both adapters and without."""
    weights, folder, models = served(family)
    offline = engine_over(weights, folder, cache_bytes=8 * engine_block_bytes(weights))
    check_mixed(offline, models)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_added_after_each_gemm_give_the_tokens_of_peft(served, family: str, monkeypatch) -> None:
    """AdaptedRows, which a GPU's graphs capture, over the CPU's operations: rows of prompts and of decoding
    sequences, and prompts that are multiplied separately."""
    monkeypatch.setattr(Cpu, "fuses_adapters", True)
    monkeypatch.setattr(device_state, "fits", lambda linears: True)
    monkeypatch.setattr(adapters_run, "_SEGMENT", 5)
    weights, folder, models = served(family)
    offline = engine_over(weights, folder)
    assert offline.engine.state.adapter_tables is not None
    check_mixed(offline, models)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_pooled_state_of_a_prompt_is_that_of_its_adapter(served, family: str) -> None:
    weights, folder, models = served(family)
    offline = engine_over(weights, folder)
    prompt = prompts_of([20], models[""].config.vocab_size)[0]
    asked = [(name, pooling) for name in models for pooling in ("last", "mean")]
    numbers = [
        offline.submit(prompt, SamplingParams(max_tokens=0, pooling=pooling), name) for name, pooling in asked
    ]
    offline.run()
    for (name, pooling), number in zip(asked, numbers):
        with torch.inference_mode():
            out = models[name](torch.tensor([prompt]), output_hidden_states=True)
        states = out.hidden_states[-1][0].numpy()
        wanted = states[-1] if pooling == "last" else states.mean(0)
        assert np.allclose(offline.generations[number].embedding, wanted, atol=1e-3), (name, pooling)
    offline.engine.close()


def engine_block_bytes(weights: Path) -> int:
    """Return the bytes of one block of 8 tokens."""
    config = OfflineEngine.load(weights, EngineConfig(max_sequences=1, cache_bytes=1 << 20)).model_config
    return config.num_layers * 2 * config.num_kv_heads * 8 * config.head_size * 4


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_alone_an_adapter_gives_the_tokens_of_peft(served, family: str) -> None:
    weights, folder, models = served(family)
    offline = engine_over(weights, folder)
    prompt = prompts_of([11], models[""].config.vocab_size, seed=3)[0]
    for name in ("some", "", "all", "some"):
        number = offline.submit(prompt, SamplingParams(max_tokens=TOKENS), name)
        offline.run()
        check(models[name], offline.generations[number], prompt)
    offline.engine.close()


def test_16_bit_adapters_are_as_far_from_peft_as_16_bit_models(served) -> None:
    weights, folder, models = served("llama")
    offline = engine_over(weights, folder, data_type="bf16")
    prompt = prompts_of([9], models[""].config.vocab_size, seed=4)[0]
    number = offline.submit(prompt, SamplingParams(max_tokens=1), "all")
    offline.run()
    with torch.inference_mode():
        wanted = models["all"](torch.tensor([prompt])).logits[0, -1].numpy()
        plain = models[""](torch.tensor([prompt])).logits[0, -1].numpy()
    error = np.abs(offline.generations[number].logits[0] - wanted).max()
    assert error < 0.05 * np.abs(wanted).max() < 0.2 * np.abs(wanted - plain).max()
    offline.engine.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    held = RankPool(4)
    yield held
    held.close()


@pytest.mark.parametrize("family, tensor, stages", [("bloom", 2, 2), ("gpt2", 1, 2), ("llama", 4, 1)])
def test_ranks_have_their_share_of_adapters(
    served, pool: RankPool, family: str, tensor: int, stages: int, tmp_path
) -> None:
    """Two adapters where one has room, so that ranks drop and load while others run."""
    weights, folder, models = served(family, shared=True)
    prompts = prompts_of([5, 1, 20, 9], models[""].config.vocab_size)
    asked = [(prompt, name) for prompt in prompts for name in models]
    answers = pool.run(
        weights, tensor, stages, tmp_path / "meeting", *zip(*asked), lora_path=str(folder), max_loras=1
    )
    for (prompt, name), (tokens, _) in zip(asked, answers, strict=True):
        assert tokens[:TOKENS] == greedy(models[name], prompt, TOKENS)[0]


# ---------------------------------------------------------------- added, replaced, removed, damaged


@pytest.fixture
def folder(served, tmp_path: Path) -> Path:
    """A folder of one's own with the adapters of BLOOM."""
    return Path(shutil.copytree(served("bloom")[1], tmp_path / "adapters"))


def ask(offline: OfflineEngine, name: str, prompt: list[int]):
    number = offline.submit(prompt, SamplingParams(max_tokens=TOKENS), name)
    offline.run()
    return offline.generations[number]


def test_adapters_are_added_replaced_and_removed_while_the_engine_runs(served, folder: Path) -> None:
    weights, _, models = served("bloom")
    offline = engine_over(weights, folder)
    store, prompt = offline.engine.state.adapters, [5, 6, 7]
    check(models["all"], ask(offline, "all", prompt), prompt)
    with pytest.raises(RequestError, match="lora_name is 'new'; lora_path has all, some"):
        ask(offline, "new", prompt)
    offline.scheduler.take_events()
    added = make_adapter(models[""], folder / "new", seed=7)
    check(added, ask(offline, "new", prompt), prompt)
    replaced = make_adapter(models[""], folder / "all", seed=8)
    store._look()  # the loading thread does once a second
    check(replaced, ask(offline, "all", prompt), prompt)
    shutil.rmtree(folder / "some")
    with pytest.raises(RequestError, match="lora_path has all, new"):
        ask(offline, "some", prompt)
    offline.engine.close()


def test_the_loading_thread_notices_a_change_by_itself(served, folder: Path) -> None:
    weights, _, models = served("bloom")
    offline = engine_over(weights, folder)
    before = ask(offline, "some", [5]).tokens
    changed = make_adapter(models[""], folder / "some", seed=9)
    assert greedy(changed, [5], TOKENS)[0] != before
    wait_until(lambda: ask(offline, "some", [5]).tokens == greedy(changed, [5], TOKENS)[0], 20)
    offline.engine.close()


def test_evicted_adapters_leave_memory_and_come_back(served, folder: Path) -> None:
    weights, _, models = served("bloom")
    for number in range(3):
        shutil.copytree(folder / "all", folder / f"copy{number}")
    offline = engine_over(weights, folder, max_loras=2)
    store = offline.engine.state.adapters
    for name in ("copy0", "copy1", "copy2", "copy0", "some", "copy1"):
        check(models["some" if name == "some" else "all"], ask(offline, name, [5, 9]), [5, 9])
        ask(offline, "", [5])
        assert len(store._tables) <= 2
    assert offline.scheduler.adapters.names == ["copy1", "some"]
    offline.engine.close()


def test_a_damaged_adapter_fails_the_requests_that_name_it(served, folder: Path, caplog) -> None:
    weights, _, models = served("bloom")
    path = folder / "some" / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    offline = engine_over(weights, folder)
    good = [offline.submit([5], SamplingParams(max_tokens=TOKENS), name) for name in ("all", "")]
    offline.submit([5], SamplingParams(max_tokens=TOKENS), "some")
    with pytest.raises(TridecodeError, match="adapter_model.safetensors is cut short"):
        offline.run()
    offline.run()
    for number, name in zip(good, ("all", "")):
        check(models[name], offline.generations[number], [5])
    path.write_bytes(whole.replace(b"base_model", b"base_m\xffdel", 1))
    for _ in range(2):
        with pytest.raises(TridecodeError, match="safetensors has a damaged header: .*0xff in position"):
            ask(offline, "some", [5])
    assert not [record for record in caplog.records if record.exc_info]  # no traceback a request
    offline.engine.close()


def test_limits_and_missing_files_are_told(served, folder: Path) -> None:
    weights = served("bloom")[0]
    offline = engine_over(weights, folder, max_lora_rank=3)
    with pytest.raises(RequestError, match="rank 4; this model accepts 3"):
        ask(offline, "all", [5])
    (folder / "empty").mkdir()
    with pytest.raises(TridecodeError, match="adapter_config.json is missing"):
        ask(offline, "empty", [5])
    assert ask(offline, "some", [5]).tokens
    offline.engine.close()
    nowhere = engine_over(weights, folder / "nowhere")
    with pytest.raises(RequestError, match="has no adapters"):
        ask(nowhere, "some", [5])
    nowhere.engine.close()
    for settings in ({"lora_path": "none"}, {"batch_invariant": True, "lora_path": str(folder)}):
        config = EngineConfig(device="cpu", max_sequences=2, cache_bytes=1 << 20, **settings)
        plain = OfflineEngine.load(weights, config)
        with pytest.raises(UnsupportedError, match="lora_path|batch_invariant"):
            plain.submit([5], SamplingParams(), "some")


def test_what_does_not_fit_into_memory_fails_its_request_alone(served, folder: Path, monkeypatch) -> None:
    offline = engine_over(served("bloom")[0], folder)
    place, calls = adapter_store.Place.table, []

    def out_of_memory(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return place(*arguments)

    monkeypatch.setattr(adapter_store.Place, "table", out_of_memory)
    with pytest.raises(CapacityError, match="do not fit into the device's memory"):
        ask(offline, "all", [5])
    assert ask(offline, "all", [5]).tokens
    offline.engine.close()


def test_other_requests_run_while_an_adapter_is_read(served, folder: Path, monkeypatch) -> None:
    weights, _, models = served("bloom")
    offline, may_go_on, read = engine_over(weights, folder), threading.Event(), adapter_store.read_lora

    def slowly(*arguments):
        assert may_go_on.wait(30)
        return read(*arguments)

    monkeypatch.setattr(adapter_store, "read_lora", slowly)
    params = SamplingParams(max_tokens=TOKENS)
    slow, quick = offline.submit([5], params, "all"), offline.submit([5], params)
    while offline.generations[quick].finish == "":
        offline.step()
    assert offline.generations[slow].tokens == []
    may_go_on.set()
    offline.run()
    check(models["all"], offline.generations[slow], [5])
    offline.engine.close()


# ---------------------------------------------------------------- steps without adapters


class FakeGraphs:
    """Counts replays; runs nothing as a graph."""

    def __init__(self) -> None:
        self.plans: list = []

    def replay(self, plan):
        self.plans.append(plan)


def test_steps_without_adapters_keep_their_graphs_and_operations(served, folder: Path, monkeypatch) -> None:
    """Only a step that has a row with an adapter leaves the usual path."""
    offline = engine_over(served("bloom")[0], folder)
    engine, graphs, seen = offline.engine, FakeGraphs(), []
    engine.graphs, engine.on_logits = graphs, None
    step_ops = engine._step_ops
    monkeypatch.setattr(
        engine,
        "_step_ops",
        lambda parts, batch: seen.append((parts, step_ops(parts, batch))) or seen[-1][1],
    )
    ask(offline, "all", [5])
    assert graphs.plans == [] and all(ops is not engine.state.ops for _, ops in seen)
    seen.clear()
    ask(offline, "", [5])
    assert len(graphs.plans) == TOKENS == len(seen)
    assert all(ops is engine.state.ops for _, ops in seen)
    assert all(run.part.numbers is None for parts, _ in seen for run in parts)
    offline.engine.close()


def test_a_loop_that_waits_for_adapters_neither_spins_nor_looks_hung(served, folder, monkeypatch) -> None:
    from tests.backend.engine.loop_in_thread import run_loop

    offline = engine_over(served("bloom")[0], folder)
    offline.engine.on_logits = None
    read, may_go_on = adapter_store.read_lora, threading.Event()
    monkeypatch.setattr(
        adapter_store, "read_lora", lambda *arguments: may_go_on.wait(30) and read(*arguments)
    )
    with run_loop(offline.engine, offline.scheduler) as running:
        doors = running.doors
        doors.submit(1, [5], "all", max_tokens=TOKENS)
        time.sleep(0.6)
        assert doors.waits <= 6 and running.status.busy_since == 0.0, "it slept until something happened"
        started = time.monotonic()
        may_go_on.set()
        wait_until(lambda: doors.ends == {1: "length"}, 20)
        assert time.monotonic() - started < 5
    assert doors.tokens[1] == greedy(served("bloom")[2]["all"], [5], TOKENS)[0]
    offline.engine.close()


def test_kernels_add_adapters_to_matrices_of_whole_vectors_without_rounded_inputs() -> None:
    good = Linear(torch.empty(48, 24))
    assert fits([good])
    for other in (Linear(torch.empty(40, 24)), Linear(torch.empty(48, 20)), Linear(torch.empty(65552, 24))):
        assert not fits([good, other])
    assert not fits([good, Linear(torch.empty(48, 24), kind="fp8")])
    assert not fits([good, Linear(torch.empty(48, 24), activations="int8")])


def test_a_slot_is_filled_again_once_its_adapter_is_dropped() -> None:
    """There are two slots per adapter: an evicted adapter keeps its slot until a plan drops it."""
    linear = Linear(torch.empty(48, 24))
    tables = AdapterTables([linear], 1, 4, 8, 4, torch.device("cpu"))
    pair = torch.zeros(24, 2), torch.zeros(2, 48)

    def place(number: int) -> int:
        table = {id(linear.weight): pair}
        tables.place(number, table, {id(linear.weight): torch.zeros(1)}, lambda host, to: to.copy_(host))
        return tables.slot(number)

    first, second = place(0), place(1)
    assert first != second
    with pytest.raises(CapacityError, match="evicted adapters still hold every slot"):
        place(2)
    tables.release(0)
    assert place(3) == first
    held = tables.tables[id(linear.weight)]
    assert set(held.pairs) == {first, second} and held.entries[first, 3] == 2
    tables.load(np.array([-1, second, -1, first, second], np.int32))
    loaded = tables.rows(5)
    assert loaded.slots.tolist() == [-1, second, -1, first, second]
    assert [loaded.slots[row] for row in loaded.order.tolist()] == sorted(
        loaded.slots.tolist(), key=lambda slot: (slot < 0, slot)
    )
    tables.load(np.array([-1, second], np.int32))
    padded = tables.rows(4)
    assert padded.slots.tolist() == [-1, second, -1, -1] and padded.order.tolist() == [1, 0, 2, 3]
    assert tables.rows(3).order.tolist() == [1, 0, 2]
