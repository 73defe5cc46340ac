"""Drafts of one-pass heads on a GPU, in CUDA graphs, one step ahead of the host."""

from __future__ import annotations

import pytest

from tests.backend.engine.draft_heads import greedy_texts, trained_heads
from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_draft_steps import SAMPLED, generate
from tests.backend.engine.test_engine_gpu import MODELS, gpu_engine
from tests.backend.engine.test_lookup import learning_of
from tridecode.backend.engine.device.drafters.heads import HeadsDrafter
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = [1, 7, 30, 33, 9]
NEW = 40
SIZES = dict(max_sequences=64, max_step_tokens=128, max_sequence_tokens=128, data_type="fp32")


def drafting(model, trained, **settings):
    settings = {**SIZES, **settings}
    offline = gpu_engine(model, keep_logits=False, speculation="heads", trained=trained, **settings)
    learning = learning_of(offline)
    assert learning.policy.costs is not None and learning.policy.costs.several
    learning.policy.costs = None  # every draft, whatever the steps of this machine cost
    return offline


@pytest.mark.parametrize("name", ["bloom", "llama", "llama, head 128"])
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_keep_their_tokens(name: str, graphs: bool) -> None:
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    _, trained = trained_heads(model, greedy_texts(model, prompts, NEW), epochs=60)
    model = MODELS[name]()
    for params in (SamplingParams(max_tokens=NEW), SAMPLED):
        plain = generate(gpu_engine(model, keep_logits=False, **SIZES), prompts, params)
        offline = drafting(model, trained, cuda_graphs=graphs)
        learning = learning_of(offline)
        for _ in range(2):  # the second time behind cached prefixes
            done = generate(offline, prompts, params, depth=2)
            assert [one.tokens for one in done] == [one.tokens for one in plain]
            for one, other in zip(done, plain, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)
        assert learning.drafted["heads"] > 60
        if isinstance(params, SamplingParams):
            assert learning.accepted["heads"] > 0.3 * learning.drafted["heads"]
        drafter = offline.engine.drafter
        assert isinstance(drafter, HeadsDrafter) and (drafter.replayed > 20) == graphs


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bit_heads_draft(dtype: str) -> None:
    model = MODELS["llama, head 128"]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    _, trained = trained_heads(model, greedy_texts(model, prompts, NEW), epochs=60)
    offline = drafting(MODELS["llama, head 128"](), trained, data_type=dtype)
    done = generate(offline, prompts, SamplingParams(max_tokens=NEW), depth=2)
    assert all(len(one.tokens) == NEW for one in done)
    learning = learning_of(offline)
    assert learning.accepted["heads"] > 0.2 * learning.drafted["heads"] > 10
