"""A prompt that wants logits, their log probability or a vector leaves the decoding rows in their graph.

Graphs are stand-ins on a CPU (graph_stand_ins.py), on one rank and on two that share the vocabulary; all
results are compared with transformers.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine import thread_ranks
from tests.backend.engine.graph_stand_ins import add_graphs
from tests.backend.engine.offline_models import fp32_bound, hf_greedy, prompts_of, run_in_flight
from tests.backend.engine.test_pooling import LAST, MEAN, wanted_of
from tests.checkpoints import FAMILIES, save
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.embeddings import PromptVectors
from tridecode.backend.engine.parts.returned_logits import ReturnedLogits
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.engine.step.prefill_graphs import step_shapes
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

SLOTS, STEP, NEW = 20, 64, 24
#: of the sequences that decode, fewer than a graph has rows, and of the prompts that join them
DECODING, JOINING = [3, 9, 1], [7, 30, 1, 13, 26]
WANTED = [
    SamplingParams(max_tokens=2, return_context_logits=True),
    SamplingParams(max_tokens=3, return_context_log_prob=True),
    LAST,
    MEAN,
    SamplingParams(max_tokens=2, return_context_logits=True, return_context_log_prob=True),
]
SETTINGS = dict(max_sequences=SLOTS, max_step_tokens=STEP, max_sequence_tokens=64)


def watch(offline: OfflineEngine) -> list[tuple[int, bool, bool]]:
    """Return a list that gets of each step: its decode rows, whether a prompt in it wants something, and
    whether it was replayed."""
    engine, steps = offline.engine, []
    replay = engine._replay

    def watched(plan: StepPlan, parts) -> bool:
        done = replay(plan, parts)
        wants = plan.part(ReturnedLogits) is not None or plan.part(PromptVectors) is not None
        steps.append((plan.num_decodes, wants, done))
        return done

    engine._replay = watched  # type: ignore[method-assign]
    return steps


def join(offline: OfflineEngine, decoding: list[list[int]], joining: list[list[int]]):
    """Return the generations of both lists and the watched steps; the second list joins one by one, and each
    step is planned before the one before it is committed."""
    steps = watch(offline)
    numbers = [offline.submit(prompt, SamplingParams(max_tokens=NEW)) for prompt in decoding]
    waiting = deque(zip(joining, WANTED))

    def submit_next() -> bool:
        if waiting and len(steps) > 1:
            numbers.append(offline.submit(*waiting.popleft()))
        return bool(waiting)

    run_in_flight(offline, 2, submit_next)
    return [offline.generations[number] for number in numbers], steps


@torch.inference_mode()
def check(model: torch.nn.Module, prompt: list[int], params: SamplingParams, found) -> None:
    if params.pooling:
        wanted = wanted_of(model, prompt, params)
        assert np.abs(found.embedding - wanted).max() < fp32_bound(wanted)
        return
    assert found.tokens == hf_greedy(model, prompt, params.max_tokens)[0]
    theirs = model(torch.tensor([prompt])).logits[0].float()
    if params.return_context_logits:
        mine = np.frombuffer(found.context_logits, np.float32).reshape(len(prompt), -1)
        assert np.abs(mine - theirs.numpy()).max() < fp32_bound(theirs.numpy())
    if params.return_context_log_prob:
        log_probs = theirs[:-1].double().log_softmax(-1)
        total = float(log_probs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].sum())
        assert found.context_log_prob == pytest.approx(total, abs=1e-4 * len(prompt))


@pytest.mark.parametrize("tensor", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_results_of_prompts_are_computed_after_the_graph_of_the_step(
    family: str, tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES[family](**FAMILIES[family].shared)
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "weights")
    load = thread_ranks.load_engine

    def load_with_graphs(*given, **named):
        engine = load(*given, **named)
        add_graphs(engine, SLOTS, step_shapes(SLOTS, STEP))
        return engine

    monkeypatch.setattr(thread_ranks, "load_engine", load_with_graphs)
    decoding, joining = (prompts_of(lengths, model.config.vocab_size) for lengths in (DECODING, JOINING))
    (done, steps), _ = thread_ranks.on_ranks(
        tmp_path / "weights", tensor, 1, lambda offline: join(offline, decoding, joining), **SETTINGS
    )
    assert sum(wants and decodes > 0 for decodes, wants, _ in steps) >= len(JOINING)
    assert all(replayed for _, _, replayed in steps)
    for prompt, found in zip(decoding, done):
        assert found.tokens == hf_greedy(model, prompt, NEW)[0]
    for prompt, params, found in zip(joining, WANTED, done[len(decoding) :], strict=True):
        check(model, prompt, params, found)


def test_a_step_that_returns_logits_of_samples_runs_without_a_graph(tmp_path: Path) -> None:
    """They are read before sampling changes them."""
    model = FAMILIES["llama"]()
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "weights")
    (prompt,) = prompts_of([5], model.config.vocab_size)

    def use(offline: OfflineEngine):
        add_graphs(offline.engine, SLOTS, step_shapes(SLOTS, STEP))
        steps = watch(offline)
        offline.submit(prompt, SamplingParams(max_tokens=4, return_generation_logits=True))
        offline.run()
        return steps

    steps, _ = thread_ranks.on_ranks(tmp_path / "weights", 1, 1, use, **SETTINGS)
    assert len(steps) == 4 and not any(replayed for _, _, replayed in steps)
