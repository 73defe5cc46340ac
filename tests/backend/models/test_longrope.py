"""LongRoPE at the length where its factors change, against transformers: prompts on both sides of it, chunks
of prompts, sequences that grow beyond it, and sequences that are preempted and computed again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.checkpoints import FAMILIES
from tests.families.fam_c import longrope
from tridecode.backend.models.rope import rope_table
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.hf_config import rope_config

LIMIT = 24
FAMILY_NAMES = ["llama", "phi3"]


def tiny(family: str) -> PreTrainedModel:
    return FAMILIES[family](original_max_position_embeddings=LIMIT, rope_parameters=longrope(8, LIMIT))


def test_the_second_half_of_the_table_is_that_of_a_long_prompt():
    config = FAMILIES["llama"].hf_config(rope_parameters=longrope(8, LIMIT))
    rope, device = rope_config(config, 8, "LLaMA"), torch.device("cpu")
    table = rope_table(rope, 60, device, LIMIT)
    theirs = LlamaRotaryEmbedding(config)
    short, long = (theirs(torch.zeros(1), torch.arange(n)[None]) for n in (LIMIT, 60))
    assert table.cos.shape == (120, 4)
    for ours, at in ((table.cos, 0), (table.sin, 1)):
        torch.testing.assert_close(ours[:LIMIT], short[at][0, :, :4])
        torch.testing.assert_close(ours[LIMIT:60], long[at][0, LIMIT:, :4])
        torch.testing.assert_close(ours[60:], long[at][0, :, :4])
    assert (
        rope_table(rope_config(config, 8, "LLaMA"), LIMIT, torch.device("cpu"), LIMIT).cos.shape[0] == LIMIT
    )


@pytest.mark.parametrize("scarce", [False, True], ids=["", "preempted"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_prompts_and_sequences_around_the_limit(family: str, scarce: bool):
    model = tiny(family)
    lengths = [LIMIT - 12, LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT + 3]
    prompts, new = prompts_of(lengths, model.config.vocab_size), 16
    block_bytes = 2 * 2 * 2 * 8 * 8 * 4  # layers, keys and values, heads, tokens, head size, float32
    few = {"cache_bytes": 13 * block_bytes, "max_sequence_tokens": 80} if scarce else {}
    offline = offline_engine(model, max_step_tokens=10, **few)
    answers = offline.generate(prompts, SamplingParams(max_tokens=new))
    grown = family == "phi3"  # sequences beyond the limit are computed again
    assert (offline.scheduler.counters.preemptions > 0) == (scarce or grown)
    for prompt, answer in zip(prompts, answers):
        tokens, logits = hf_greedy(model, prompt, new)
        assert answer.tokens == tokens, len(prompt)
        assert np.abs(np.stack(answer.logits) - logits).max() < fp32_bound(logits)
