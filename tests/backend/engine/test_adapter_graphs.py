"""Decode steps with adapters leave neither their graphs nor the operations of a layer, on any device.

Graphs are stand-ins on a CPU (graph_stand_ins.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.backend.engine.graph_stand_ins import add_graphs
from tests.backend.engine.offline_models import prompts_of
from tests.checkpoints import FAMILIES, greedy, save
from tests.lora_adapters import make_adapter
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device import device_state
from tridecode.backend.engine.device.parts import adapters as part_of_adapters
from tridecode.backend.engine.device.parts.adapters import SPREAD, TOGETHER
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.step_buffers import StepShape
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.adapters import write_targets
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.kernels.cpu import Cpu

TOKENS, SLOTS = 6, 4
#: of a layer; each is followed by one launch that adds the adapters
LINEARS = 4


def count_calls(names: list[str], monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Return a counter of the calls of these operations, without those from within another of them."""
    calls: Counter = Counter()
    within: list[str] = []

    def counted(name: str, operation, *arguments, **named):
        calls[name] += not within
        within.append(name)
        try:
            return operation(*arguments, **named)
        finally:
            within.pop()

    for name in names:
        operation = getattr(Cpu, name)
        monkeypatch.setattr(Cpu, name, lambda *a, _of=(name, operation), **named: counted(*_of, *a, **named))
    return calls


@pytest.fixture(params=["llama", "bloom"])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine with stand-ins of graphs, and its models by the name of the adapter."""
    monkeypatch.setattr(Cpu, "fuses_adapters", True)
    monkeypatch.setattr(device_state, "fits", lambda linears: True)
    model = FAMILIES[request.param]()
    models = {"": model, "all": make_adapter(model, tmp_path / "adapters" / "all", seed=1)}
    planned = plan_conversion(open_checkpoint(save(model, tmp_path / "hf", tokenizer=False)))
    planned.write(tmp_path / "weights")
    write_targets(tmp_path / "weights", planned)
    config = EngineConfig(
        max_sequences=SLOTS, block_tokens=8, cache_bytes=1 << 20, lora_path=str(tmp_path / "adapters")
    )
    offline = OfflineEngine.load(tmp_path / "weights", config)
    shapes = [
        StepShape(decodes, tokens, min(2, SLOTS - decodes)) for decodes in range(SLOTS) for tokens in (8, 64)
    ]
    add_graphs(offline.engine, SLOTS, shapes)
    yield offline, models
    offline.engine.close()


@pytest.mark.parametrize("spread_rows", [12, -2])  # of two rows with one adapter both are spread, or none
def test_every_decode_step_with_adapters_is_replayed_with_few_operations(
    served, spread_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_of_adapters, "_SPREAD_ROWS", spread_rows)
    offline, models = served
    engine = offline.engine
    assert {form for kind, form in engine.part_graphs if kind is AdapterRows} == {SPREAD, TOGETHER}
    calls = count_calls(["linear", "add_adapters", "norm", "finish_qkv", "adapter_sums"], monkeypatch)
    steps: list[tuple[bool, bool, Counter]] = []
    replay = engine._replay

    def watched(plan: StepPlan, parts) -> bool:
        calls.clear()
        done = replay(plan, parts)
        part = plan.part(AdapterRows)
        if plan.num_decodes == plan.num_tokens and not plan.starts:
            steps.append((done, part is not None and part.numbers is not None, Counter(calls)))
        return done

    monkeypatch.setattr(engine, "_replay", watched)
    prompts = prompts_of([7, 1, 13], models[""].config.vocab_size)
    asked = list(zip(["all", "", "all"], prompts))
    numbers = [offline.submit(prompt, SamplingParams(max_tokens=TOKENS), name) for name, prompt in asked]
    offline.run()
    for (name, prompt), number in zip(asked, numbers):
        assert offline.generations[number].tokens == greedy(models[name], prompt, TOKENS)[0]
    assert len(steps) >= TOKENS - 2 and all(done for done, _, _ in steps)
    adapted = [found for _, has_adapters, found in steps if has_adapters]
    assert len(adapted) >= TOKENS - 2
    layers = engine.model_config.num_layers
    for found in adapted:
        assert 0 < found["add_adapters"] <= LINEARS * layers
        assert found["linear"] <= LINEARS * layers + 1  # and the head
        # the sums of a step compute the norms, too
        assert found["norm"] <= 2 + found["adapter_sums"] and found["finish_qkv"] <= layers
        assert found["adapter_sums"] == (0 if spread_rows > 0 else LINEARS * layers)


def test_prompts_beside_rows_with_adapters_are_replayed(served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts arrive while rows with and without an adapter decode; only a long prompt with an adapter is
    launched operation by operation."""
    offline, models = served
    engine = offline.engine
    graphs = engine.part_prompt_graphs[AdapterRows, SPREAD]
    steps: list[tuple[bool, bool]] = []  # of those with prompts: replayed, with a segment
    replay = engine._replay

    def watched(plan: StepPlan, parts) -> bool:
        done = replay(plan, parts)
        part = plan.part(AdapterRows)
        if plan.num_decodes < plan.num_tokens and part is not None and part.numbers is not None:
            lengths = np.diff(plan.query_starts)
            steps.append((done, bool(((part.numbers >= 0) & (lengths >= 32)).any())))
        return done

    prompts = prompts_of([7, 20, 5, 40, 33], models[""].config.vocab_size)
    offline.submit(prompts[0], SamplingParams(max_tokens=1), "all")
    offline.run()  # from here on no prompt waits for its adapter
    monkeypatch.setattr(engine, "_replay", watched)
    asked = list(zip(["all", "", "all", "", "all"], prompts))
    numbers = []
    for name, prompt in asked:
        numbers.append(offline.submit(prompt, SamplingParams(max_tokens=TOKENS), name))
        offline.step()
    offline.run()
    for (name, prompt), number in zip(asked, numbers):
        assert offline.generations[number].tokens == greedy(models[name], prompt, TOKENS)[0], name
    assert graphs.replayed >= 2
    assert all(done is not segment for done, segment in steps) and len(steps) >= 3
