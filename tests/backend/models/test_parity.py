"""Every family against transformers, in float32: greedy tokens and logits in any company."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.backend.models.sweep import compare
from tests.checkpoints import FAMILIES, variants
from tests.thinning import diagonal
from tridecode.backend.wire.messages import SamplingParams

LENGTHS = [1, 2, 7, 8, 9, 23, 30, 5, 17]
NEW = 12
VARIANTS = variants()


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_and_logits_equal_transformers_in_any_company(variant: str) -> None:
    model = VARIANTS[variant]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW) for prompt in prompts]
    distinct = {token for tokens, _ in wanted for token in tokens}
    assert len(distinct) > 8, "the model repeats itself: the test sees nothing"
    offline = offline_engine(model)
    params = SamplingParams(max_tokens=NEW)
    together = offline.generate(prompts, params)
    order = np.random.default_rng(1).permutation(len(prompts))
    late: dict[int, int] = {}
    for i in order:  # one by one into a running batch
        late[i] = offline.submit(prompts[i], params)
        offline.step()
    offline.run()
    for i, (tokens, logits) in enumerate(wanted):
        for generation in (together[i], offline.generations[late[i]]):
            assert generation.tokens == tokens
            assert np.abs(np.stack(generation.logits) - logits).max() < fp32_bound(logits)
    alone = offline.generate(prompts[5:6], params)[0]
    assert alone.tokens == wanted[5][0]


@pytest.mark.parametrize(("family", "seed"), diagonal(FAMILIES, range(3), 3))
def test_a_random_checkpoint_of_odd_shape_answers_as_transformers(family: str, seed: int) -> None:
    """A small part of `python -m tests.backend.models.sweep`."""
    result = compare(FAMILIES[family], Random(f"{family} {seed}"))
    assert result.distinct > 3 and result.agreeing == result.prompts
    assert result.error < 6e-5  # unscaled scores amplify rounding
