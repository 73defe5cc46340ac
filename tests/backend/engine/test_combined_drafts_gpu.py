"""Lookup and a planned drafter in one engine on a GPU, in CUDA graphs, one step ahead of the host."""

from __future__ import annotations

import pytest

from tests.backend.engine.gpu_drafting import NEW, SIZES
from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_combined_drafts import mix
from tests.backend.engine.test_draft_model import like
from tests.backend.engine.test_draft_steps import SAMPLED, generate
from tests.backend.engine.test_engine_gpu import MODELS, gpu_engine
from tests.backend.engine.test_lookup import learning_of
from tridecode.backend.engine.device.drafters.combined import CombinedDrafter
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = [1, 7, 30, 33, 9, 6, 4, 12]


@pytest.mark.parametrize("name", ["bloom", "llama", "llama, head 128"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("is_equal", [False, True])
def test_rows_with_drafts_of_both_keep_their_tokens(name: str, sampled: bool, is_equal: bool) -> None:
    """A draft model that equals its target stays right after tokens of a match, up to the order of
    additions: steps that verify run it over their rows, within their graphs."""
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = SAMPLED[: len(prompts)] if sampled else [SamplingParams(max_tokens=NEW)] * len(prompts)
    prompts = prompts[: len(params)]
    plain = generate(gpu_engine(model, keep_logits=False, **SIZES), prompts, params)
    draft = model if is_equal else like(model)
    offline = gpu_engine(model, keep_logits=False, speculation="lookup+draft", draft=draft, **SIZES)
    learning = learning_of(offline)
    assert learning.policy.costs is not None and learning.policy.costs.searched
    learning.policy.costs = None
    mix(offline, least=4)
    for _ in range(2):
        done = generate(offline, prompts, params, depth=2)
        assert [one.tokens for one in done] == [one.tokens for one in plain]
    assert isinstance(offline.engine.drafter, CombinedDrafter)
    assert learning.accepted["lookup"] > 10 and learning.drafted["draft"] > 30
    assert learning.accepted["draft"] >= (0.95 if is_equal else 0.1) * learning.drafted["draft"]
