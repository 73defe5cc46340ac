"""Every family on a GPU, through our kernels and what torch computes next to them, against transformers."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.backend.engine.offline_models import (
    first_logits,
    hf_greedy,
    offline_engine,
    prompts_of,
    rounding_bound,
)
from tests.backend.models.sweep import compare
from tests.checkpoints import FAMILIES, variants
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = [1, 2, 7, 30, 9, 23, 20, 5, 17]
NEW = 12
VARIANTS = variants()
FP32_BOUND = 2e-4  # of the largest logit: the order of the additions, over two layers


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_greedy_tokens_and_logits_equal_transformers_alone_and_in_company(variant: str) -> None:
    model = VARIANTS[variant]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    offline = offline_engine(model, "cuda", max_sequences=8, block_tokens=16, max_step_tokens=64)
    params = SamplingParams(max_tokens=NEW)
    alone = offline.generate(prompts[3:4], params)[0].tokens
    for prompt, found in zip(prompts, offline.generate(prompts, params)):
        tokens, logits = hf_greedy(model, prompt, NEW)
        assert found.tokens == tokens
        assert np.abs(np.stack(found.logits) - logits).max() < FP32_BOUND * np.abs(logits).max()
        if prompt is prompts[3]:
            assert alone == tokens
    graphs = offline_engine(
        model, "cuda", keep_logits=False, max_sequences=8, block_tokens=16, max_step_tokens=64
    )
    assert [g.tokens for g in graphs.generate(prompts, params)] == [g.tokens for g in offline.generations[1:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_checkpoint_of_odd_shape_answers_as_transformers(family: str) -> None:
    result = compare(FAMILIES[family], Random(f"{family} gpu"), "cuda")
    assert result.distinct > 3 and result.agreeing == result.prompts
    assert result.error < FP32_BOUND


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_first_logits_in_16_bits_are_as_near_as_transformers_own(family: str, dtype: str) -> None:
    model = FAMILIES[family]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    offline = offline_engine(
        model, "cuda", data_type=dtype, max_sequences=8, block_tokens=16, max_step_tokens=64
    )
    done = offline.generate(prompts, SamplingParams(max_tokens=2))
    error = np.abs(np.stack([generation.logits[0] for generation in done]) - first_logits(model, prompts))
    assert error.max() <= 1.5 * rounding_bound(model, prompts, dtype, "cuda")
