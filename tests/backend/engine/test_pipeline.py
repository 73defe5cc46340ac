"""Pipeline stages with several plans in flight run at the same time and give the answers of one stage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.backend.engine import thread_ranks
from tests.backend.engine.loop_in_thread import run_loop
from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.engine.toy_device import Run, expected, limits
from tests.checkpoints import FAMILIES, save
from tests.waiting import wait_until
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.pending import Pending
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

WAIT_S = 60.0
NEW = 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    model = FAMILIES["gpt2"](**{**FAMILIES["gpt2"].shared, "n_layer": 4})
    plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
    return folder / "w"


class Stages:
    """Delays step n of the last stage until the first stage has begun step n + 1."""

    def __init__(self) -> None:
        self.begun = threading.Condition()
        self.steps = 0
        self.late = 0

    def watch(self, engine: Engine) -> None:
        forward, own = engine.state.model.forward, [0]

        def watched(*arguments) -> None:
            own[0] += 1
            with self.begun:
                if engine.ranks.stage == 0:
                    self.steps = own[0]
                    self.begun.notify_all()
                elif not self.begun.wait_for(lambda: self.steps > own[0], 2.0):
                    self.late += 1
            forward(*arguments)

        engine.state.model.forward = watched  # type: ignore[method-assign]


def test_the_first_stage_has_begun_the_next_step_before_the_last_begins_this_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams keep one step in each stage, except for the last steps."""
    stages, load = Stages(), thread_ranks.load_engine

    def watched(*arguments) -> Engine:
        engine = load(*arguments)
        stages.watch(engine)
        return engine

    monkeypatch.setattr(thread_ranks, "load_engine", watched)

    def use(offline: OfflineEngine) -> int:
        offline.submit([1, 2, 3], SamplingParams(max_tokens=NEW))
        offline.step()
        offline.submit([4, 5], SamplingParams(max_tokens=NEW))
        offline.run()
        return offline.scheduler.counters.output_tokens

    tokens, _ = on_ranks(directory, 1, 2, use, pipelined=True)
    assert tokens == 2 * NEW and stages.steps == 2 * NEW
    assert stages.late <= 2


EVERY = [
    SamplingParams(max_tokens=NEW),
    SamplingParams(max_tokens=NEW, top_k=0, top_p=0.9, temperature=1.5, seed=5, return_log_probs=True),
    SamplingParams(max_tokens=NEW, repetition_penalty=1.3, top_log_probs=2),
    SamplingParams(max_tokens=NEW, num_return_sequences=3, top_k=9, seed=8),
    SamplingParams(max_tokens=NEW, beam_width=2, len_penalty=1.0, beam_pool=True),
    SamplingParams(max_tokens=NEW, return_generation_logits=True, return_context_log_prob=True),
    SamplingParams(max_tokens=0, return_context_embedding=True),
    SamplingParams(max_tokens=1, return_context_logits=True),
]


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize(("stages", "blocks"), [(2, 40), (4, 40), (2, 12)])
def test_answers_do_not_depend_on_the_number_of_stages(
    directory: Path, stages: int, blocks: int, pipelined: bool
) -> None:
    """With 12 blocks, sequences are preempted while one of their tokens is in flight."""
    vocab = 96
    prompts = prompts_of([9, 3, 17, 5, 6, 20, 30, 4], vocab)

    def use(offline: OfflineEngine) -> tuple[list, int]:
        assert offline.engine.state.num_blocks == blocks
        numbers = [offline.submit(prompt, params) for prompt, params in zip(prompts, EVERY)]
        offline.run()
        done = [offline.generations[number] for number in numbers]
        return done, offline.scheduler.counters.preemptions

    def on(stages: int):
        block = blocks * sizes[stages]
        sized = dict(max_sequences=8, max_step_tokens=24, cache_bytes=block)
        return on_ranks(directory, 1, stages, use, pipelined, **sized)[0]

    sizes = {stages: _block_bytes(directory, stages) for stages in (1, stages)}
    (wanted, _), (found, preemptions) = on(1), on(stages)
    for one, other in zip(found, wanted, strict=True):
        assert [sample.tokens for sample in one.sequences] == [sample.tokens for sample in other.sequences]
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert [top.ids for top in one.top_log_probs] == [top.ids for top in other.top_log_probs]
        assert one.context_log_prob == pytest.approx(other.context_log_prob, abs=1e-3)
        assert len(one.context_logits) == len(other.context_logits)
        assert len(one.generation_logits) == len(other.generation_logits)
        assert (one.embedding is None) == (other.embedding is None)
        if one.embedding is not None:
            assert one.embedding == pytest.approx(other.embedding, abs=1e-3)
    assert (preemptions > 0) == (blocks == 12)


def _block_bytes(directory: Path, stages: int) -> int:
    return on_ranks(directory, 1, stages, lambda offline: offline.engine.state.block_bytes())[0]


def test_the_loop_ends_with_steps_in_flight(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(offline: OfflineEngine) -> tuple[list[int], dict[int, str]]:
        with run_loop(offline.engine, offline.scheduler) as running:
            doors = running.doors
            doors.submit(1, [1, 2, 3], max_tokens=5)
            wait_until(lambda: doors.ends)
            launch, steps = offline.engine.launch, running.status.steps

            def ending(plan: StepPlan) -> Pending:
                if running.status.steps > steps + 2:
                    running.loop.stop()
                return launch(plan)

            monkeypatch.setattr(offline.engine, "launch", ending)
            doors.submit(2, [1, 2, 3], max_tokens=50)
            running.thread.join(WAIT_S)
        return doors.tokens[1], doors.ends

    (tokens, ends), _ = on_ranks(directory, 1, 2, use, pipelined=True)
    alone, _ = on_ranks(directory, 1, 1, lambda offline: offline.generate([[1, 2, 3]], EVERY[0])[0].tokens)
    assert tokens == alone[:5]
    assert ends == {1: "length"}  # the doors continue the other request on the next engine


def test_sequences_spread_over_the_plans_in_flight() -> None:
    run = Run(limits(num_blocks=60, max_sequences=8, max_step_tokens=64, micro_batches=4))
    for request in range(8):
        run.submit(request, [request], max_tokens=12)
    for _ in range(16):
        run.step()
    sizes = [plan.num_rows for plan, _ in run.pending]
    assert sizes == [2, 2, 2]  # and the next plan
    run.finish()
    assert all(run.tokens[request, 0] == expected([request], 12) for request in range(8))
