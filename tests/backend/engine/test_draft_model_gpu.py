"""Drafts of a draft model on a GPU, in CUDA graphs, one step ahead of the host."""

from __future__ import annotations

import pytest

from tests.backend.engine.gpu_drafting import LENGTHS, NEW, SIZES, check_repeated, drafting
from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_draft_model import like
from tests.backend.engine.test_draft_reads import RULES, second_round
from tests.backend.engine.test_draft_steps import SAMPLED, generate
from tests.backend.engine.test_engine_gpu import MODELS, gpu_engine
from tests.backend.engine.test_lookup import learning_of
from tridecode.backend.engine.device.drafters.model_drafter import ModelDrafter
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["bloom", "llama", "llama, head 128"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("is_equal", [False, True])
def test_answers_keep_their_tokens(name: str, sampled: bool, is_equal: bool) -> None:
    """A draft model that equals its target is always right, up to the order of additions: its cache and its
    noise are those of the target."""
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = SAMPLED if sampled else SamplingParams(max_tokens=NEW)
    plain = generate(gpu_engine(model, keep_logits=False, **SIZES), prompts, params)
    offline = drafting(model, "draft", draft=model if is_equal else like(model))
    learning = learning_of(offline)
    check_repeated(offline, prompts, params, plain)
    drafted, accepted = learning.drafted["draft"], learning.accepted["draft"]
    assert drafted > 60
    assert accepted >= (0.95 if is_equal else 0.1) * drafted
    assert isinstance(offline.engine.drafter, ModelDrafter) and offline.engine.drafter.replayed > 20


@pytest.mark.parametrize("graphs", [False, True])
def test_an_eight_bit_cache_has_the_draft_models_layers_too(graphs: bool) -> None:
    model = MODELS["llama, head 128"]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params, settings = SamplingParams(max_tokens=NEW), dict(kv_cache_dtype="fp8", cuda_graphs=graphs)
    offline = drafting(model, "draft", draft=model, data_type="bf16", **{**settings, "max_sequences": 32})
    done = generate(offline, prompts, params, depth=2)
    assert all(len(one.tokens) == NEW for one in done)
    learning = learning_of(offline)
    assert learning.accepted["draft"] > 0.6 * learning.drafted["draft"] > 20


def test_a_preempted_sequence_is_drafted_again() -> None:
    model = MODELS["llama"]()
    prompts = prompts_of([30, 33, 9, 28], model.config.vocab_size)
    params = SamplingParams(max_tokens=60)
    plain = generate(gpu_engine(model, keep_logits=False, **SIZES), prompts, params)
    block = drafting(model, "draft", draft=model).engine.state.block_bytes()
    offline = drafting(model, "draft", draft=model, cache_bytes=18 * block)
    assert [one.tokens for one in generate(offline, prompts, params, depth=2)] == [
        one.tokens for one in plain
    ]
    assert offline.scheduler.counters.preemptions > 0
    learning = learning_of(offline)
    assert learning.accepted["draft"] >= 0.95 * learning.drafted["draft"] > 60


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", ["bloom", "llama, head 128"])
def test_missed_tokens_are_read_behind_steps_in_graphs(name: str, rules: str) -> None:
    """The first answers are decoded without the draft model; the second prompts begin with their blocks."""
    model = MODELS[name]()
    prompts = prompts_of([30, 33, 40], model.config.vocab_size)
    params = SamplingParams(max_tokens=40, **RULES[rules])
    done, drafted, accepted = second_round(drafting(model, "draft", draft=model), prompts, params, False)
    assert all(len(one.tokens) == 40 for one in done)
    assert accepted >= 0.95 * drafted > 30
