"""Shadow runs: what they measure against transformers in float64, and that they harm no live request."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.backend.engine.loop_in_thread import FakeDoorSocket, LoopInThread, run_loop
from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.test_memory import CONFIG, CPU, check
from tests.checkpoints import FAMILIES, save, tiny_llama
from tests.quantized import rounded_model
from tests.rounded_cache import transformers_rounds
from tests.waiting import wait_until
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.memory import check_background
from tridecode.backend.engine.device.parts.shadow import ShadowScorer
from tridecode.backend.engine.device.pending import Pending
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.engine.loop import DecodeLoop
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.shadow import Job, check_settings, needs_second_weights
from tridecode.backend.engine.ranks.parallel import SingleRank
from tridecode.backend.engine.step.plan import StepPlan
from tridecode.backend.models import read_model_config
from tridecode.backend.supervisor.rank_link import RankStatus
from tridecode.backend.weights.quantization import Quantization
from tridecode.backend.wire import messages as m
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion

SETTINGS = dict(
    device="cpu", data_type="fp32", max_sequences=4, block_tokens=8, max_step_tokens=16, cache_bytes=16 << 20,
    shadow_share=1.0, shadow_slice_tokens=5,
)  # fmt: skip
#: (tokens of a prompt, generated tokens): chunks of 5 that end before, at and behind the prompt's end
SHAPES = [(1, 1), (1, 12), (5, 4), (7, 23), (20, 2), (31, 17)]


@dataclass
class Checkpoint:
    """A tiny model as transformers has it, its directory in fp32 and one in int8."""

    model: torch.nn.Module
    turned: bool
    dense: Path
    int8: Path
    planned: PlannedConversion

    def rounded(self) -> torch.nn.Module:
        return rounded_model(self.model, self.planned, self.turned)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    folder, model = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]()
    source = open_checkpoint(save(model, folder / "hf"))
    plan_conversion(source, "fp32").write(folder / "dense")
    planned = plan_conversion(source, "fp32", None, Quantization("int8"))
    planned.write(folder / "int8")
    return Checkpoint(model, request.param == "llama", folder / "dense", folder / "int8", planned)


def load(directory: Path, **settings: Any) -> Engine:
    model = read_model_config(directory)
    config = resolve(EngineConfig(**{**SETTINGS, **settings}), model, CPU)
    return load_engine(directory, model, config, SingleRank(), CPU)


def scorer_of(engine: Engine) -> ShadowScorer:
    (scorer,) = engine.background
    assert isinstance(scorer, ShadowScorer)
    return scorer


@torch.inference_mode()
def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """(n, V) float64 of transformers."""
    return copy.deepcopy(model).double()(torch.tensor([tokens])).logits[0]


def compared(reference: torch.Tensor, served: torch.Tensor, targets: int) -> tuple[float, int]:
    """KL(reference || served) summed over the last `targets` positions, and equal arg maxima, by torch."""
    p, q = reference[-targets:].log_softmax(-1), served[-targets:].log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
    return float(kl), int((p.argmax(-1) == q.argmax(-1)).sum())


def jobs(vocab: int) -> list[Job]:
    generator = np.random.default_rng(7)
    return [
        Job(f"{prompt}+{count}", generator.integers(0, vocab, prompt + count - 1).astype(np.int32), count)
        for prompt, count in SHAPES
    ]


def score(engine: Engine, job: Job) -> int:
    """Run a job to its end; return the number of slices."""
    slices = 0
    while not job.is_done:
        scorer_of(engine).advance(job)
        slices += 1
    return slices


@pytest.mark.parametrize("how", ["directory", "int8_mode"])
def test_divergence_and_agreement_are_those_of_transformers(checkpoint: Checkpoint, how: str) -> None:
    """Random weights of this width round badly, so that the figures are far from 0 and from 1."""
    if how == "directory":
        engine = load(checkpoint.int8, shadow_weights=str(checkpoint.dense))
    else:
        engine = load(checkpoint.dense, int8_mode=1)
    rounded, agreeing, targets = checkpoint.rounded(), 0, 0
    for job in jobs(engine.model_config.vocab_size):
        slices = score(engine, job)
        prompt = job.first + 1
        assert slices == -(-prompt // 5) + -(-(len(job.tokens) - prompt) // 5)
        tokens = job.tokens.tolist()
        wanted = compared(logits_of(checkpoint.model, tokens), logits_of(rounded, tokens), job.targets)
        assert wanted[0] > 1e-4 * job.targets
        np.testing.assert_allclose(job.kl, wanted[0], rtol=2e-3)
        assert job.agreeing == wanted[1], job.name
        agreeing, targets = agreeing + job.agreeing, targets + job.targets
    assert 0 < agreeing < targets


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_rounded_cache_is_compared_over_the_same_weights(checkpoint: Checkpoint, format: str) -> None:
    """Values near the middle of two steps may be stored as the other one: near transformers, not equal."""
    engine = load(checkpoint.dense, kv_cache_dtype=format)
    assert scorer_of(engine).reference is engine.state.model
    found, wanted = [], []
    for job in jobs(engine.model_config.vocab_size):
        score(engine, job)
        tokens = job.tokens.tolist()
        with transformers_rounds(format), torch.inference_mode():
            served = checkpoint.model(torch.tensor([tokens])).logits[0].double()
        kl, _ = compared(logits_of(checkpoint.model, tokens), served, job.targets)
        found.append(job.kl)
        wanted.append(kl)
    assert min(found) > 1e-6
    np.testing.assert_allclose(found, wanted, rtol=0.1)


def test_a_model_that_is_its_own_reference_does_not_diverge(checkpoint: Checkpoint) -> None:
    engine = load(checkpoint.int8, shadow_weights=str(checkpoint.dense))
    scorer = scorer_of(engine)
    scorer.served = scorer.reference
    for job in jobs(engine.model_config.vocab_size):
        scorer._caches = (scorer._caches[1],) * 2
        score(engine, job)
        assert (abs(job.kl) < 1e-12, job.agreeing) == (True, job.targets)


@pytest.mark.parametrize(
    ("longest", "slice_tokens", "wanted"), [(1, 5, 1), (2, 5, 1), (9, 16, 8), (64, 5, 5)]
)
def test_the_warm_up_runs_the_largest_slice_behind_the_longest_context(
    checkpoint: Checkpoint, monkeypatch, longest: int, slice_tokens: int, wanted: int
) -> None:
    settings = dict(max_sequence_tokens=longest, shadow_slice_tokens=slice_tokens)
    engine = load(checkpoint.dense, int8_mode=1, **settings)
    scorer = scorer_of(engine)
    seen, load_plan = [], scorer.buffers.load
    monkeypatch.setattr(scorer.buffers, "load", lambda plan: seen.append(plan) or load_plan(plan))
    scorer.warm_up()
    (plan,) = seen
    assert (plan.num_tokens, plan.context_lens.tolist()) == (wanted, [longest])


# ---------------------------------------------------------------- next to live requests


class Running(LoopInThread):
    def metric(self, name: str) -> float:
        return self.status.metrics.get(f"shadow_{name}", -1.0)


@contextmanager
def running(engine: Engine) -> Iterator[Running]:
    with run_loop(engine, OfflineEngine(engine).scheduler) as loop:
        yield Running(**vars(loop))


@pytest.mark.parametrize("time_share", [0.0, 1.0])
def test_live_answers_are_unchanged_and_every_token_is_counted(
    checkpoint: Checkpoint, time_share: float
) -> None:
    """time_share 1: slices run between the steps of the other requests."""
    prompts = prompts_of([3, 17, 9, 24, 5, 1], 300)
    settings = dict(shadow_weights=str(checkpoint.dense), shadow_time_share=time_share)
    rounded = checkpoint.rounded()
    with running(load(checkpoint.int8, **settings)) as service:
        for number, prompt in enumerate(prompts):
            service.doors.submit(number, prompt, max_tokens=9)
        wait_until(lambda: service.metric("kl_count") == len(prompts), 30)
    assert service.doors.tokens == {
        number: hf_greedy(rounded, prompt, 9)[0] for number, prompt in enumerate(prompts)
    }
    kl, agreeing = 0.0, 0
    for number, prompt in enumerate(prompts):
        tokens = (prompt + service.doors.tokens[number])[:-1]
        one = compared(logits_of(checkpoint.model, tokens), logits_of(rounded, tokens), 9)
        kl, agreeing = kl + one[0], agreeing + one[1]
    assert (service.metric("tokens"), service.metric("tokens_agreeing")) == (9 * len(prompts), agreeing)
    np.testing.assert_allclose(service.metric("tokens_kl"), kl, rtol=2e-3)
    np.testing.assert_allclose(service.metric("kl_sum"), kl / 9, rtol=2e-3)
    np.testing.assert_allclose(service.metric("agreement_sum"), agreeing / 9)
    assert service.metric("seconds") > 0 and service.metric("queued") == 0
    assert service.metric('kl_bucket{le="+Inf"}') == service.metric("ended") == len(prompts)


class SteadyLoad(FakeDoorSocket):
    """Keeps eight requests open, and ends the loop after `steps` steps. clock: a step and a slice each take
    a fixed time, so that the load of the machine changes nothing."""

    STEP_S, SLICE_S = 1.0, 0.5

    def __init__(self, engine: Engine, steps: int):
        super().__init__()
        self.clock, self.asked, self.slices, self.steps_left = 0.0, 0, 0, steps
        self.loop = DecodeLoop(engine, OfflineEngine(engine).scheduler, self, RankStatus())  # type: ignore[arg-type]
        (self.background,) = self.loop.background
        self.background._clock = lambda: self.clock
        self.launch, self.advance = engine.launch, scorer_of(engine).advance
        engine.launch, scorer_of(engine).advance = self._launch, self._advance

    def _launch(self, plan: StepPlan) -> Pending:
        self.clock += self.STEP_S
        self.steps_left -= 1
        return self.launch(plan)

    def _advance(self, job: Job) -> None:
        self.clock += self.SLICE_S
        self.slices += 1
        self.advance(job)

    def drain(self) -> list[tuple[bytes, m.Submit | m.Cancel]]:
        while self.asked - len(self.ends) < 8:
            self.asked += 1
            self.submit(self.asked, [self.asked % 300, 5], max_tokens=30)
        if self.steps_left <= 0:
            self.loop.stop()
        return super().drain()


def test_under_a_steady_load_slices_take_their_share_of_the_time(checkpoint: Checkpoint) -> None:
    """Four sequences run at all times, of eight requests that are open."""
    engine = load(checkpoint.dense, int8_mode=1, shadow_time_share=0.1, shadow_slice_tokens=1)
    service = SteadyLoad(engine, steps=600)
    service.loop.run()
    found = service.background.metrics()
    assert found["shadow_seconds"] == service.slices * service.SLICE_S
    # a slice begins with the first step after its time, and the last slice may be the newest
    assert 0.08 * service.clock < found["shadow_seconds"] <= 0.1 * service.clock + service.SLICE_S
    assert found["shadow_kl_count"] > 0 and found["shadow_dropped"] > 0
    assert len(service.ends) > 40 and set(service.ends.values()) == {"length"}


def test_samples_are_compared_each_and_beams_are_skipped(checkpoint: Checkpoint) -> None:
    with running(load(checkpoint.dense, int8_mode=1)) as service:
        service.doors.submit(1, [5, 6, 7], max_tokens=4, num_return_sequences=3, top_k=5)
        service.doors.submit(2, [5, 6, 7], max_tokens=4, beam_width=3)
        service.doors.submit(3, [5, 6, 7], max_tokens=0)
        wait_until(lambda: service.metric("ended") == 5 and service.metric("kl_count") == 3, 30)
    assert service.metric("tokens") == 12
    assert service.metric('skipped{reason="beams"}') == service.metric('skipped{reason="empty"}') == 1


def test_a_shadow_run_that_fails_is_counted_and_harms_nothing(checkpoint: Checkpoint, monkeypatch) -> None:
    engine = load(checkpoint.dense, int8_mode=1)
    whole = scorer_of(engine).advance
    failures = [RuntimeError("a kernel failed"), torch.OutOfMemoryError("full")]

    def advance(job: Job) -> None:
        if job.done and failures:
            raise failures.pop()
        whole(job)

    monkeypatch.setattr(scorer_of(engine), "advance", advance)
    prompts = prompts_of([9, 9, 9, 9], 300)
    with running(engine) as service:
        for number, prompt in enumerate(prompts):
            service.doors.submit(number, prompt, max_tokens=5)
        wait_until(lambda: service.metric("kl_count") == 2, 30)
        assert (service.metric("failed"), service.metric("ended")) == (2, 4)
        service.doors.submit(9, prompts[0], max_tokens=5)
        wait_until(lambda: service.metric("kl_count") == 3, 30)
    assert set(service.doors.ends.values()) == {"length"}
    assert service.doors.tokens[9] == hf_greedy(checkpoint.rounded(), prompts[0], 5)[0]


def test_logits_that_are_not_numbers_fail_the_shadow_run(checkpoint: Checkpoint) -> None:
    engine = load(checkpoint.dense, int8_mode=1)
    assert scorer_of(engine).reference.final_norm is not None
    scorer_of(engine).reference.final_norm.weight.fill_(float("nan"))
    job = jobs(300)[1]
    with pytest.raises(ArithmeticError, match="not numbers"):
        score(engine, job)


def test_an_engine_stops_and_requests_are_cancelled_during_a_shadow_run(
    checkpoint: Checkpoint, monkeypatch
) -> None:
    """A slice is held: requests that arrive and are cancelled then are served after it, and `stop` waits for
    that one slice only, though more jobs are queued."""
    engine = load(checkpoint.dense, int8_mode=1)
    whole, held, go = scorer_of(engine).advance, threading.Event(), threading.Event()
    slices: list[str] = []

    def advance(job: Job) -> None:
        slices.append(job.name)
        held.set()
        assert go.wait(20)
        whole(job)

    monkeypatch.setattr(scorer_of(engine), "advance", advance)
    with running(engine) as service:
        service.doors.submit(1, [5, 6, 7], max_tokens=12)
        assert held.wait(20)
        service.doors.submit(2, [8], max_tokens=20)
        service.doors.submit(3, [9], max_tokens=20)
        service.doors.put(m.Cancel(3))
        go.set()
        wait_until(lambda: service.doors.ends.get(3) == "cancelled" and 2 in service.doors.ends, 20)
        wait_until(lambda: service.metric("kl_count") == 2, 20)
        assert service.metric('skipped{reason="unfinished"}') == 1
        held.clear()
        go.clear()
        service.doors.submit(4, [8, 9, 8, 9, 8, 9, 8, 9], max_tokens=20)
        assert held.wait(20)
        count = len(slices)
        service.loop.stop()
        go.set()
        service.thread.join(20)
        assert not service.thread.is_alive() and len(slices) == count
    assert service.doors.tokens[2] == hf_greedy(checkpoint.rounded(), [8], 20)[0]


# ---------------------------------------------------------------- memory and settings


@pytest.mark.parametrize(
    "settings",
    [
        {"int8_mode": 1},
        {"int8_mode": 2, "data_type": "bf16"},
        {"kv_cache_dtype": "int8", "shadow_slice_tokens": 7},
    ],
)
def test_every_byte_of_shadow_runs_is_planned(checkpoint: Checkpoint, settings: dict) -> None:
    with_shadow = check(checkpoint.dense, replace(CONFIG, **settings, shadow_share=0.5))
    without = check(checkpoint.dense, replace(CONFIG, **settings))
    assert with_shadow.background["shadow runs"] == with_shadow.fixed - without.fixed > 0
    if "int8_mode" in settings:
        matrices = (
            sum(file.stat().st_size for file in checkpoint.dense.glob("model.layers.*.weight.bin")) // 4
        )
        assert with_shadow.background["shadow runs"] > 2 * matrices


def test_a_reference_in_fp32_is_planned(tmp_path: Path) -> None:
    """oneDNN pads no matrix of these sizes."""
    sizes = dict(num_attention_heads=4, num_key_value_heads=4, hidden_size=64, intermediate_size=128)
    model = tiny_llama(vocab_size=384, **sizes)
    plan_conversion(open_checkpoint(save(model, tmp_path / "hf")), "fp32").write(tmp_path / "w")
    check(tmp_path / "w", replace(CONFIG, data_type="fp32", int8_mode=1, shadow_share=1.0))


def test_the_reference_of_a_quantised_directory_is_planned(checkpoint: Checkpoint) -> None:
    check(checkpoint.int8, replace(CONFIG, shadow_share=0.5, shadow_weights=str(checkpoint.dense)))


def test_a_reference_without_room_is_refused_with_both_sizes(checkpoint: Checkpoint, monkeypatch) -> None:
    model = read_model_config(checkpoint.dense)
    settings = EngineConfig(**{**SETTINGS, "int8_mode": 1, "data_type": "bf16"})
    planned = check(checkpoint.dense, settings)
    config = resolve(replace(settings, cache_bytes=1 << 30), model, CPU)
    served = planned.fixed - planned.background["shadow runs"] + planned.block
    need = served + planned.background["shadow runs"]
    check_background(model, config, CPU, need)
    with pytest.raises(ConfigError) as caught:
        check_background(model, config, CPU, need - 1)
    for size in (served, planned.background["shadow runs"], need - 1):
        assert f"{size:,}" in str(caught.value)
    monkeypatch.setattr("tridecode.backend.engine.device.memory.available_memory", lambda: need - 1)
    with pytest.raises(ConfigError, match="shadow_share is 1: the served model needs"):
        load(checkpoint.dense, int8_mode=1)


def test_every_setting_that_rounds_weights_gives_the_reference_its_own(checkpoint: Checkpoint) -> None:
    model, plain = read_model_config(checkpoint.dense), EngineConfig(shadow_share=1.0)
    assert not needs_second_weights(model, replace(plain, kv_cache_dtype="int8"))
    names = [row.name for row in fields(EngineConfig) if row.name.startswith("int8")]
    assert "int8_mode" in names
    for name in names:
        config = replace(plain, **{name: 1})
        check_settings(model, config)
        assert needs_second_weights(model, config), name


@pytest.mark.parametrize(
    ("which", "settings", "wanted"),
    [
        ("dense", {}, "nothing of .* is rounded; wanted a quantised weight directory"),
        ("int8", {}, "are int8; wanted the folder of the same model's 16-bit weights in shadow_weights"),
        ("int8", {"shadow_weights": "INT8"}, "whose weights are int8; wanted weights in fp16, bf16 or fp32"),
        ("int8", {"shadow_weights": "/absent/folder"}, "/absent/folder, without config.ini"),
        (
            "int8",
            {"shadow_weights": "OTHER"},
            "a model with .* = .*; wanted that of the model that is served",
        ),
        ("dense", {"int8_mode": 1, "tensor_para_size": 2}, "with tensor_para_size = 2; shadow runs want"),
        ("dense", {"int8_mode": 1, "pipeline_para_size": 2}, "with pipeline_para_size = 2; shadow runs want"),
        ("dense", {"int8_mode": 1, "weights": "random"}, "with weights = random; shadow runs want"),
    ],
)
def test_settings_that_cannot_be_compared_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, which: str, settings: dict, wanted: str
) -> None:
    other = tiny_llama(intermediate_size=64)
    plan_conversion(open_checkpoint(save(other, tmp_path / "hf")), "fp32").write(tmp_path / "other")
    folders = {"INT8": str(checkpoint.int8), "OTHER": str(tmp_path / "other")}
    settings = {name: folders.get(str(value), value) for name, value in settings.items()}
    with pytest.raises(ConfigError, match=wanted):
        load(getattr(checkpoint, which), **settings)
