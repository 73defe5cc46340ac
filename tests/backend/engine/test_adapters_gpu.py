"""Rows with LoRA adapters in the CUDA graphs of decode steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import prompts_of, run_ahead
from tests.backend.engine.test_sessions_gpu import MODELS
from tests.checkpoints import greedy, save
from tests.merged_adapters import save_merged
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.adapters.adapted_ops import AdaptedOps
from tridecode.backend.engine.device.parts.adapters import SPREAD, TOGETHER
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.adapters import AdapterRows
from tridecode.backend.engine.step.decode_graphs import DecodeGraphs, decode_plan
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.adapters import write_targets
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.studies.adapters import RandomAdapters

pytestmark = pytest.mark.gpu

TOKENS = 12


def engine_of(model, directory: Path, **settings) -> OfflineEngine:
    """Return an engine that serves the model with the adapters in directory / "adapters"."""
    planned = plan_conversion(open_checkpoint(save(model, directory / "hf", tokenizer=False)))
    planned.write(directory / "weights")
    write_targets(directory / "weights", planned)
    defaults = dict(device="cuda", max_sequences=8, block_tokens=16, cache_bytes=64 << 20, max_step_tokens=64)
    config = EngineConfig(**{**defaults, **settings}, lora_path=str(directory / "adapters"))
    return OfflineEngine.load(directory / "weights", config)


def count_replays(graphs: DecodeGraphs, monkeypatch) -> list[int]:
    """Return a list to which each replayed step appends its padded rows."""
    seen: list[int] = []
    replay = graphs.replay

    def counted(plan):
        size = replay(plan)
        if size is not None:
            seen.append(size)
        return size

    monkeypatch.setattr(graphs, "replay", counted)
    return seen


@pytest.mark.parametrize("family", MODELS)
def test_mixed_batches_in_graphs_give_the_tokens_of_merged_weights(
    family: str, tmp_path: Path, monkeypatch
) -> None:
    model = MODELS[family]()
    models = {"": model}
    for name, rank in (("small", 3), ("large", 16)):
        models[name] = save_merged(model, tmp_path / "adapters" / name, rank, seed=rank)
    offline = engine_of(model, tmp_path)
    engine = offline.engine
    assert (AdapterRows, SPREAD) in engine.part_graphs and engine.graphs is not None
    adapted = count_replays(engine.part_graphs[AdapterRows, SPREAD], monkeypatch)
    plain = count_replays(engine.graphs, monkeypatch)
    prompts = prompts_of([40, 1, 7, 13], model.config.vocab_size)
    asked = [(name, prompt) for prompt in prompts for name in models]
    numbers = [offline.submit(prompt, SamplingParams(max_tokens=TOKENS), name) for name, prompt in asked]
    run_ahead(offline)
    for (name, prompt), number in zip(asked, numbers):
        assert offline.generations[number].tokens == greedy(models[name], prompt, TOKENS)[0], (name, prompt)
    assert len(adapted) > TOKENS // 2
    adapted.clear(), plain.clear()
    number = offline.submit(prompts[0], SamplingParams(max_tokens=TOKENS))
    run_ahead(offline)
    assert offline.generations[number].tokens == greedy(model, prompts[0], TOKENS)[0]
    assert not adapted and len(plain) >= TOKENS - 2
    engine.close()


def test_an_adapter_that_replaces_another_changes_the_rows_of_the_same_graph(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    names = [f"adapter{number}" for number in range(5)]
    models = {
        name: save_merged(model, tmp_path / "adapters" / name, 4, seed=i) for i, name in enumerate(names)
    }
    offline = engine_of(model, tmp_path, max_loras=1)
    for name in [*names, *reversed(names)]:
        number = offline.submit([5, 6, 7], SamplingParams(max_tokens=TOKENS), name)
        offline.run()
        assert offline.generations[number].tokens == greedy(models[name], [5, 6, 7], TOKENS)[0]
    offline.engine.close()


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_graph_computes_the_rows_of_torch_for_any_weight_format(quantization: str, rows: int) -> None:
    job = make_job(
        "smollm2-135m", None, "bf16", batches=(64,), prompt_tokens=32, output_tokens=8, cache_bytes=64 << 20,
        quantization=quantization,
    )  # fmt: skip
    with open_engine(replace(job, lora_path=".")) as engine:
        state = engine.state
        opened, tables = state.adapters, state.adapter_tables
        assert opened is not None and tables is not None
        store = state.adapters = RandomAdapters(opened.place, 8, 16, tables)
        numbers = np.array([row % 4 - 1 for row in range(rows)], np.int32)
        if rows == 1:
            numbers[0] = 0
        for number in range(3):
            store.load_now(number, str(number))
        draw = np.random.default_rng(rows)
        block = engine.config.block_tokens
        plan = replace(
            decode_plan(rows),
            token_ids=draw.integers(0, 1000, rows).astype(np.int32),
            block_tables=np.arange(rows, dtype=np.int32)[:, None],
            kv_slots=np.arange(rows, dtype=np.int32) * block,
            context_lens=np.ones(rows, np.int32),
        )
        hidden = state.work.hidden[:rows]

        def after(run) -> torch.Tensor:
            run()
            torch.cuda.synchronize()
            return hidden.double().cpu().clone()

        plain = after(lambda: engine.graphs.replay(plan))
        torch_ops = AdaptedOps(
            state.ops, numbers, plan.query_starts, {i: store.table(i) for i in range(3)}, state.device
        )
        wanted = after(lambda: engine.run(engine.buffers.load(plan), ops=torch_ops))
        tables.load(np.array([tables.slot(one) if one >= 0 else -1 for one in numbers], np.int32))
        size = wanted.norm(dim=1)
        for form in (SPREAD, TOGETHER):
            found = after(lambda form=form: engine.part_graphs[AdapterRows, form].replay(plan))
            assert ((found - wanted).norm(dim=1) < 0.03 * size).all(), form
        changed = (plain - wanted).norm(dim=1) / size
        assert (changed[torch.from_numpy(numbers >= 0)] > 0.1).all()
        engine.close()
