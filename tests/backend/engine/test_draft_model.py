"""Drafts of a draft model: the tokens of transformers and of one token a step, in fewer steps."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace as with_fields

from tests.backend.engine.offline_models import drafting_engine, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.test_adapters import ADAPTERS, engine_over, written
from tests.backend.engine.test_draft_steps import SAMPLED, SIZES, generate
from tests.backend.engine.test_lookup import check_sampling_rules, counted, learning_of
from tests.backend.engine.test_resumption import check_equal, finish, moved, step, submitted
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.engine.toy_device import DOOR
from tests.backend.hf_models import bloom, gpt2, llama
from tests.checkpoints import FAMILIES, greedy, save, tiny_tokenizer
from tests.lora_adapters import make_adapter
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device import measured_costs, preparation
from tridecode.backend.engine.device.drafters.draft_loading import check_draft_tokenizer
from tridecode.backend.engine.device.memory import plan_rank
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.models import read_model_config
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

NEW = 40
LONGER = {**SIZES, "max_sequence_tokens": 64}
CHUNKED = {**SIZES, "max_sequences": 12, "max_step_tokens": 12, "max_sequence_tokens": 64}
LENGTHS = [5, 11, 1, 8, 17]


def like(model: torch.nn.Module, share: float = 0.02) -> torch.nn.Module:
    """A draft model that often, but not always, agrees with `model`: its weights, changed a little."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(share * parameter.std().nan_to_num(0.0) * noise)
    return other


def drafting(model, draft, **settings) -> OfflineEngine:
    """An engine whose rows get every draft."""
    settings = {**LONGER, **settings}
    return drafting_engine(model, "draft", draft=draft, **settings)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
def test_answers_are_those_of_transformers_in_fewer_steps(make, depth: int) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    offline = drafting(model, like(model))
    steps = counted(offline)
    assert [one.tokens for one in generate(offline, prompts, SamplingParams(max_tokens=NEW), depth)] == wanted
    learning = learning_of(offline)
    assert 0.3 * learning.drafted["draft"] < learning.accepted["draft"] < learning.drafted["draft"]
    assert len(steps) < 0.7 * NEW
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_target_as_its_own_draft_model_is_always_right(depth: int, sampled: bool) -> None:
    """Its cache and its noise are then those of the target: no draft is wrong, behind any number of kept
    tokens, at any temperature and with every rule."""
    model = llama()
    prompts = prompts_of([*LENGTHS, 6, 4], model.config.vocab_size)
    params = SAMPLED if sampled else SamplingParams(max_tokens=NEW)
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    offline = drafting(model, model)
    done = generate(offline, prompts, params, depth)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    learning = learning_of(offline)
    assert learning.drafted["draft"] > 50
    assert learning.accepted["draft"] >= learning.drafted["draft"] - 2, "but for logits equal within rounding"


def test_a_prompt_of_several_steps_is_read_by_the_draft_model() -> None:
    model = llama()
    prompts = prompts_of([30, 17], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, 20)[0] for prompt in prompts]
    offline = drafting(model, model, **CHUNKED)
    assert [one.tokens for one in generate(offline, prompts, SamplingParams(max_tokens=20), 2)] == wanted
    learning = learning_of(offline)
    assert learning.accepted["draft"] >= learning.drafted["draft"] - 2 > 10


def test_rows_may_fill_a_step_though_a_first_draft_reads_two_tokens_of_each() -> None:
    model = llama()
    prompts = prompts_of([5] * 12, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, 20)[0] for prompt in prompts]
    offline = drafting(model, model, **CHUNKED)
    assert [one.tokens for one in generate(offline, prompts, SamplingParams(max_tokens=20), 2)] == wanted


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_every_sampling_rule_is_that_of_one_token_a_step(make, depth: int) -> None:
    model = make()
    offline = drafting(model, like(model))
    check_sampling_rules(model, offline, prompts_of(LENGTHS, model.config.vocab_size), depth)
    assert learning_of(offline).accepted["draft"] > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_of_a_prompt_and_preempted_sequences_keep_their_tokens(depth: int) -> None:
    model = gpt2()
    prompts = prompts_of([5, 9, 7, 11], model.config.vocab_size)
    params = SamplingParams(max_tokens=40, num_return_sequences=2, temperature=0.8, top_k=20, seed=5)
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    offline = drafting(model, model)
    block = offline.engine.state.block_bytes()
    offline = drafting(model, model, cache_bytes=24 * block)
    for _ in range(2):
        done = generate(offline, prompts, params, depth)
        for one, other in zip(done, plain, strict=True):
            assert [a.tokens for a in one.sequences] == [b.tokens for b in other.sequences]
    assert offline.scheduler.counters.preemptions > 0
    learning = learning_of(offline)
    assert learning.accepted["draft"] > 40
    assert learning.accepted["draft"] >= 0.98 * learning.drafted["draft"], "its cache is that of the target"
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


def test_cached_prefixes_have_the_draft_models_keys_and_values() -> None:
    """The second rounds begin with the first ones and their answers, whose blocks are found: drafts stay
    right."""
    model = llama()
    prompts = prompts_of([17, 20, 16], model.config.vocab_size)
    params = SamplingParams(max_tokens=20)
    offline = drafting(model, model)
    first = generate(offline, prompts, params, 2)
    longer = [[*prompt, *one.tokens, 3, 4] for prompt, one in zip(prompts, first)]
    wanted = [hf_greedy(model, prompt, 20)[0] for prompt in longer]
    cached = offline.scheduler.cache.cached_tokens
    assert [one.tokens for one in generate(offline, longer, params, 2)] == wanted
    assert offline.scheduler.cache.cached_tokens - cached >= 3 * 32
    learning = learning_of(offline)
    assert learning.drafted["draft"] > 60
    assert learning.accepted["draft"] >= learning.drafted["draft"] - 2


def test_rows_without_drafts_keep_their_tokens_next_to_rows_with_drafts() -> None:
    model = llama()
    prompts = prompts_of([5, 9, 7, 6], model.config.vocab_size)
    params = [
        SamplingParams(max_tokens=20, beam_width=2),
        SamplingParams(max_tokens=20, return_generation_logits=True),
        SamplingParams(max_tokens=20, speculate=False),
        SamplingParams(max_tokens=40, return_perf_metrics=True),
    ]
    plain = generate(offline_engine(model, keep_logits=False, **LONGER), prompts, params)
    offline = drafting(model, model)
    done = generate(offline, prompts, params)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    got = np.frombuffer(done[1].generation_logits, np.float32)
    assert got == pytest.approx(np.frombuffer(plain[1].generation_logits, np.float32), abs=1e-3)
    assert done[3].perf is not None and done[3].perf.draft_tokens >= done[3].perf.accepted_draft_tokens > 5


def test_a_batch_invariant_engine_keeps_its_bits() -> None:
    model = llama()
    prompts = prompts_of([5, 9, 7], model.config.vocab_size)
    params = SamplingParams(max_tokens=30, return_log_probs=True)
    settings = dict(batch_invariant=True, block_tokens=32)
    plain = generate(offline_engine(model, keep_logits=False, **{**LONGER, **settings}), prompts, params)
    offline = drafting(model, like(model), **settings)
    done = generate(offline, prompts, params)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    assert [one.log_probs for one in done] == [one.log_probs for one in plain]
    assert learning_of(offline).accepted["draft"] > 20


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_eight_bit_cache_has_the_draft_models_layers_too(kind: str) -> None:
    model = llama()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = SamplingParams(max_tokens=18)
    settings = {**LONGER, "kv_cache_dtype": kind}
    plain = generate(offline_engine(model, keep_logits=False, **settings), prompts, params)
    offline = drafting(model, model, kv_cache_dtype=kind)
    assert [one.tokens for one in generate(offline, prompts, params, 2)] == [one.tokens for one in plain]
    learning = learning_of(offline)
    assert learning.accepted["draft"] > 0.8 * learning.drafted["draft"] > 20


def test_drafts_that_cost_more_than_they_yield_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of this engine are those of a draft model as large as the target: none of them is worth it
    once the drafts of another model have been wrong for a while."""
    # by the time of the thread: other load changes what a step costs on the clock
    monkeypatch.setattr(measured_costs, "time", SimpleNamespace(perf_counter=time.thread_time))
    model, draft = llama(), like(llama(), 3.0)
    prompts = prompts_of([6], model.config.vocab_size)
    offline = offline_engine(model, keep_logits=False, draft=draft, speculation="draft", **LONGER)
    learning = learning_of(offline)
    assert learning.policy.costs is not None
    for (rows, queries), cost in learning.policy.costs.several.items():
        if queries > 1:
            assert cost > learning.policy.costs.plain[rows], "the drafts are part of the cost"
    wanted = hf_greedy(model, prompts[0], 50)[0]
    assert generate(offline, prompts, SamplingParams(max_tokens=50), 2)[0].tokens == wanted
    assert learning.drafted["draft"] < 40


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_another_engine_continues_with_drafts_and_the_same_tokens(steps: int, sampled: bool, monkeypatch):
    monkeypatch.setattr(preparation, "measured_costs", lambda engine, most_queries: None)
    model = gpt2()
    prompts = prompts_of([5, 9, 7], model.config.vocab_size)
    params = SamplingParams(max_tokens=20, return_log_probs=True, seed=3)
    if sampled:
        params = with_fields(params, temperature=1.1, top_k=0, presence_penalty=0.5)
    asked = [[SequenceRequest(np.asarray(prompt, np.int32).tobytes(), params)] for prompt in prompts]
    plain = finish(*submitted(model, asked, **SIZES))
    check_equal(moved(model, asked, steps, speculation="draft", draft=like(model), **SIZES), plain)


def test_draft_counts_of_a_resumed_request_continue_those_of_its_first_engine(monkeypatch) -> None:
    monkeypatch.setattr(preparation, "measured_costs", lambda engine, most_queries: None)
    model, engine = gpt2(), dict(speculation="draft", **SIZES)
    (prompt,) = prompts_of([9], model.config.vocab_size)
    params = SamplingParams(max_tokens=30, return_perf_metrics=True)
    asked = [[SequenceRequest(np.asarray(prompt, np.int32).tobytes(), params)]]
    offline, clients = submitted(model, asked, draft=like(model), **engine)
    for _ in range(4):
        step(offline, clients)
    first = clients[0].events[-1].extra.perf
    assert first.draft_tokens > first.accepted_draft_tokens > 0
    offline = offline_engine(model, keep_logits=False, draft=like(model), **engine)
    offline.scheduler.submit(DOOR, clients[0].again())
    finish(offline, clients)
    last, learning = clients[0].events[-1].extra.perf, learning_of(offline)
    assert learning.accepted["draft"] > 0
    assert last.draft_tokens == first.draft_tokens + learning.drafted["draft"]
    assert last.accepted_draft_tokens == first.accepted_draft_tokens + learning.accepted["draft"]


def test_adapters_change_the_target_alone(tmp_path: Path) -> None:
    model = FAMILIES["gpt2"]()
    folder = written(model, tmp_path)
    models = {"": model}
    for name, settings in ADAPTERS.items():
        models[name] = make_adapter(model, tmp_path / "adapters" / name, **settings)
    sizes = dict(max_sequences=24, max_step_tokens=48, speculation="draft", draft_path=str(folder))
    offline = engine_over(folder, tmp_path / "adapters", **sizes)
    offline.engine.on_logits = None
    learning_of(offline).policy.costs = None
    prompts = prompts_of([9, 4], model.config.vocab_size)
    asked = [(name, prompt) for prompt in prompts for name in models]
    numbers = [offline.submit(prompt, SamplingParams(max_tokens=20), name) for name, prompt in asked]
    offline.run()
    for (name, prompt), number in zip(asked, numbers):
        assert offline.generations[number].tokens == greedy(models[name], prompt, 20)[0], name
    offline.engine.close()
    assert learning_of(offline).accepted["draft"] > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_without_drafts_ends_those_of_its_sequences_and_not_of_later_ones(depth: int) -> None:
    model = llama()
    prompts = prompts_of([6, 9], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, 50)[0] for prompt in prompts]
    offline = drafting(model, model)
    learning, plans = learning_of(offline), []
    launch = offline.engine.launch

    def launch_and_note(plan):
        plans.append((plan.num_decodes == plan.num_rows, plan.part(Drafting) is not None))
        return launch(plan)

    offline.engine.launch = launch_and_note  # type: ignore[method-assign]
    learning.may_draft = lambda rows: False  # type: ignore[method-assign]
    assert generate(offline, prompts[:1], SamplingParams(max_tokens=50), depth)[0].tokens == wanted[0]
    assert learning.drafted["draft"] == 0
    assert 0 < sum(drafts for _, drafts in plans) < 10, "drafts of a few steps only"
    del learning.may_draft
    assert generate(offline, prompts[1:], SamplingParams(max_tokens=50), depth)[0].tokens == wanted[1]
    assert learning.accepted["draft"] == learning.drafted["draft"] > 30


def test_a_short_load_does_not_cost_a_sequence_its_drafts() -> None:
    model = llama()
    (prompt,) = prompts_of([6], model.config.vocab_size)
    offline = drafting(model, model)
    learning = learning_of(offline)
    steps = 0

    def sometimes(rows: int) -> bool:
        nonlocal steps
        steps += 1
        return steps % 9 > 4

    learning.may_draft = sometimes  # type: ignore[method-assign]
    done = generate(offline, [prompt], SamplingParams(max_tokens=50), 2)
    assert done[0].tokens == hf_greedy(model, prompt, 50)[0]
    assert learning.accepted["draft"] == learning.drafted["draft"] > 15


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weight folders of a target, a draft model that equals it, one of another family, and one of another
    vocabulary."""
    folder = tmp_path_factory.mktemp("drafts")
    target = FAMILIES["gpt2"](**{**FAMILIES["gpt2"].shared, "n_layer": 4})
    small = FAMILIES["llama"](**FAMILIES["llama"].shared)
    other = FAMILIES["llama"](**{**FAMILIES["llama"].shared, "vocab_size": 90})
    for name, model in {"target": target, "draft": target, "llama": small, "other": other}.items():
        plan_conversion(open_checkpoint(str(save(model, folder / f"{name}-hf")))).write(folder / name)
    return folder


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("draft", ["draft", "llama"])
def test_tensor_ranks_draft_the_same(folders: Path, draft: str, sampled: bool) -> None:
    prompts = prompts_of(LENGTHS, 96)
    params = SAMPLED if sampled else SamplingParams(max_tokens=NEW)
    (plain, _) = on_ranks(folders / "target", 1, 1, lambda one: generate(one, prompts, params), **LONGER)

    def use(offline: OfflineEngine):
        learning_of(offline).policy.costs = None
        return generate(offline, prompts, params, 2), learning_of(offline)

    settings = {**LONGER, "speculation": "draft", "draft_path": str(folders / draft)}
    (done, learning), engines = on_ranks(folders / "target", 2, 1, use, **settings)
    for one, other in zip(done, plain, strict=True):
        assert one.tokens == other.tokens
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert learning.drafted["draft"] > 50
    if draft == "draft":
        assert learning.accepted["draft"] >= 0.98 * learning.drafted["draft"]
    assert len(engines[1].state.caches) > len(engines[1].state.model.layers)


def test_the_memory_plan_counts_the_draft_model(folders: Path) -> None:
    model = read_model_config(folders / "target")
    config = EngineConfig(max_sequences=4, max_sequence_tokens=64, max_step_tokens=64)
    drafted = replace(config, speculation="draft", draft_path=str(folders / "draft"))
    plain, with_draft = (plan_rank(model, one, 0, 0, "cpu") for one in (config, drafted))
    assert with_draft.block == 2 * plain.block, "a draft model of the target's sizes"
    assert 1.9 * plain.weights < with_draft.weights <= 2 * plain.weights


@pytest.mark.parametrize(
    ("draft", "change", "text"),
    [
        ("missing", {}, "missing, which has no config.ini"),
        ("other", {}, "90 token ids; wanted those of the served model, 331"),
        ("draft", {"pipeline_para_size": 2}, "pipeline_para_size 2; wanted 1"),
        ("none", {}, "draft_path none; wanted the folder of a draft model"),
        ("draft", {"max_sequence_tokens": 1000}, "max_sequence_tokens is 1000"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused_by_name(folders: Path, draft, change, text) -> None:
    path = draft if draft == "none" else str(folders / draft)
    config = EngineConfig(
        **{"max_sequences": 4, "max_sequence_tokens": 64, "max_step_tokens": 64, **change},
        speculation="draft",
        draft_path=path,
    )
    with pytest.raises(ConfigError, match=text):
        plan_rank(read_model_config(folders / "target"), config, 0, 0, "cpu")


def test_a_draft_model_with_another_tokenizer_is_refused_by_the_first_difference(folders: Path, tmp_path):
    served, text = tmp_path / "served", tiny_tokenizer().backend_tokenizer.to_str()
    served.mkdir()
    (served / "tokenizer.json").write_text(text)
    config = EngineConfig(speculation="draft", draft_path=str(tmp_path / "draft"))
    check_draft_tokenizer(config, None)
    with pytest.raises(ConfigError, match="draft has no tokenizer.json"):
        check_draft_tokenizer(config, served)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "tokenizer.json").write_text(text)
    check_draft_tokenizer(config, served)
