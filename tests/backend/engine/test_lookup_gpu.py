"""Drafts from earlier text on a GPU, in CUDA graphs, one step ahead of the host."""

from __future__ import annotations

import pytest

from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_draft_steps import SAMPLED, generate
from tests.backend.engine.test_engine_gpu import MODELS, gpu_engine
from tests.backend.engine.test_lookup import learning_of
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = [1, 7, 30, 33, 9]
NEW = 40
SIZES = dict(max_sequences=64, max_step_tokens=128, max_sequence_tokens=128, data_type="fp32")


@pytest.mark.parametrize("name", ["bloom", "llama", "llama, head 128"])
@pytest.mark.parametrize("sampled", [False, True])
def test_repeated_prompts_take_few_steps_and_keep_their_tokens(name: str, sampled: bool) -> None:
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = SAMPLED if sampled else SamplingParams(max_tokens=NEW)
    plain = generate(gpu_engine(model, keep_logits=False, **SIZES), prompts, params)
    offline = gpu_engine(model, keep_logits=False, speculation="lookup", **SIZES)
    learning = learning_of(offline)
    assert learning.policy.costs is not None and learning.policy.costs.several
    learning.policy.costs = None  # every draft, whatever the steps of this machine cost
    for run in range(2):
        begun = learning.accepted["lookup"]
        done = generate(offline, prompts, params, depth=2)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
        for one, other in zip(done, plain, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)
        if run:
            assert learning.accepted["lookup"] - begun > sum(len(one.tokens) for one in plain) / 2
    graphs = offline.engine.query_graphs
    assert graphs is not None and graphs.replayed > 3


def test_a_client_sees_its_drafts_accepted() -> None:
    model = MODELS["llama"]()
    (prompt,) = prompts_of([12], model.config.vocab_size)
    (plain,) = generate(gpu_engine(model, **SIZES), [prompt], SamplingParams(max_tokens=NEW))
    offline = gpu_engine(model, keep_logits=False, speculation="lookup", **SIZES)
    learning_of(offline).policy.costs = None
    params = SamplingParams(max_tokens=NEW, draft_tokens=plain.tokens, return_perf_metrics=True)
    (done,) = generate(offline, [prompt], params, depth=2)
    assert done.tokens == plain.tokens
    assert done.perf is not None and done.perf.accepted_draft_tokens > NEW / 2
