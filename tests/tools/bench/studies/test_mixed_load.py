"""The mixed load: its shares, and that it runs on a tiny model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.backend.engine.offline_models import prompts_of
from tests.checkpoints import FAMILIES, save
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device import device_state
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.converters.adapters import write_targets
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.kernels.cpu import Cpu
from tridecode.tools.bench.loop_runner import BatchDoors, LoopRunner
from tridecode.tools.bench.measure import Step
from tridecode.tools.bench.studies import mixed_load
from tridecode.tools.bench.studies.adapters import RandomAdapters
from tridecode.tools.bench.studies.pairs import Pairs


def test_the_shares_are_those_of_the_case() -> None:
    params, adapters = mixed_load.fields_of(4000, *mixed_load.CASES["both"])
    assert 0.015 < sum(one.top_log_probs == 20 for one in params) / 4000 < 0.025
    assert 0.08 < sum(map(bool, adapters)) / 4000 < 0.12
    assert set(adapters) == {"", *map(str, range(8))}
    params, adapters = mixed_load.fields_of(4000, 0.0, 0.0)
    assert not any(adapters) and all(one.top_log_probs == -1 for one in params)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopRunner]:
    """A runner of a tiny model whose adapters are random and held in the kernels' tables."""
    monkeypatch.setattr(Cpu, "fuses_adapters", True)
    monkeypatch.setattr(device_state, "fits", lambda linears: True)
    planned = plan_conversion(open_checkpoint(save(FAMILIES["llama"](), tmp_path / "hf", tokenizer=False)))
    planned.write(tmp_path / "weights")
    write_targets(tmp_path / "weights", planned)
    config = EngineConfig(max_sequences=4, block_tokens=8, cache_bytes=1 << 20, lora_path=str(tmp_path))
    engine = OfflineEngine.load(tmp_path / "weights", config).engine
    state = engine.state
    state.adapters = RandomAdapters(state.adapters.place, config.max_loras, 4, state.adapter_tables)
    yield LoopRunner(engine)
    engine.close()


def test_the_loop_sleeps_while_an_adapter_loads(runner: LoopRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its thread would keep the interpreter lock, for which the loader's thread waits."""
    store, polls = runner.engine.state.adapters, []
    read, drain = store.read, BatchDoors.drain
    monkeypatch.setattr(store, "read", lambda name: (time.sleep(0.3), read(name))[1])
    monkeypatch.setattr(BatchDoors, "drain", lambda doors: (polls.append(1), drain(doors))[1])
    runner.generate(prompts_of([5], 64), 2, adapters=["one"])
    assert len(polls) < 700  # 27,600 without sleep


def test_matrices_of_one_shape_share_a_pair_and_adapters_do_not(runner: LoopRunner) -> None:
    store = runner.engine.state.adapters
    one, again, other = store.read("one").pairs, store.read("one").pairs, store.read("other").pairs
    assert set(one) == {name for names in store.place.linears for name in names}
    for name, (a, b) in one.items():
        assert (a.shape[1], b.shape[0]) == store.place.specs[f"{name}.weight"].shape
        assert torch.equal(a, again[name][0]) and not torch.equal(a, other[name][0])
    assert len({id(a) for a, _ in one.values()}) == 4 < len(one)  # qkv, dense, up and down of every layer


def test_more_loads_run_than_there_are_slots_for_their_adapters(runner: LoopRunner) -> None:
    prompts = prompts_of([5, 9, 7, 3] * 8, runner.engine.model_config.vocab_size)
    names = mixed_load.fields_of(len(prompts), 0.5, 0.5)[1]
    assert len(set(names) - {""}) > runner.engine.config.max_loras / 2
    mixed_load.warm_up(runner, prompts)
    assert [len(times) for times in runner.take_run().token_times] == [8] * 16
    for shares in [(0.5, 0.5), (0.0, 0.0), (0.0, 0.5), (0.5, 0.5), (0.0, 0.5)]:
        assert math.isfinite(mixed_load.load_ms(runner, prompts, [3] * len(prompts), shares))


def test_steps_that_decode_are_timed_apart_from_those_with_prompts() -> None:
    steps = [Step(1.0, 0, 30), Step(1.5, 4, 0), Step(3.5, 4, 8), Step(4.25, 5, 0)]
    assert mixed_load.time_by_kind(steps) == {"decode": (2, 625.0), "with prompts": (1, 2000.0)}
    assert mixed_load.time_by_kind(steps[:2]) == {"decode": (1, 500.0)}


def test_a_comparison_has_the_steps_of_both_sides(
    runner: LoopRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompts_of([5, 9, 7, 3] * 8, runner.engine.model_config.vocab_size)
    found = Pairs(1)
    mixed_load.compare(found, runner, prompts, [3] * len(prompts), "10 % with an adapter")
    (one,) = found.found
    assert one["case"] == "10 % with an adapter"
    for side in ("plain", "fields"):
        assert one["steps"][side].keys() == {"decode", "with prompts"}
        assert (
            sum(count * ms for count, ms in one["steps"][side].values())
            < one["plain_ms" if side == "plain" else "ms"]
        )
    assert "with prompts" in capsys.readouterr().out
