"""Float parameters at the edges of their ranges: an answer or a refusal, never "not a number"."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.thread_ranks import generations_on_ranks
from tests.backend.hf_models import llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.wire.messages import SamplingParams
from tridecode.backend.wire.sampling_params import check, parameters
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

NEW = 6
FLOATS = [row.name for row in parameters() if row.type is float]
SUBNORMAL, SMALLEST = float(np.float32(1e-40)), float(np.float32(1.2e-38))
#: with every other parameter neutral, and with those next to it whose products are the largest
SETTINGS = {
    "greedy": SamplingParams(max_tokens=NEW, return_log_probs=True),
    "sampled": SamplingParams(max_tokens=NEW, top_k=0, seed=3, return_log_probs=True),
    "nucleus": SamplingParams(max_tokens=NEW, top_k=0, top_p=0.7, top_p_decay=0.5, seed=3),
    "penalised": SamplingParams(max_tokens=NEW, top_k=5, temperature=1e-5, repetition_penalty=1e-6),
    "beams": SamplingParams(max_tokens=NEW, beam_width=3, return_log_probs=True, repetition_penalty=1.5),
    "pool": SamplingParams(max_tokens=NEW, beam_width=3, beam_pool=True, end_id=5, len_penalty=2.0),
}


def edges(name: str) -> list[float]:
    """Both ends of the range, the smallest float32 numbers, and what lies beyond."""
    (row,) = (row for row in parameters() if row.name == name)
    assert row.range is not None
    low, high = row.range.low, row.range.high
    inside = [low, math.nextafter(low, math.inf), high, 1e-5, 1e-300, SUBNORMAL, SMALLEST, -SUBNORMAL]
    return [*inside, math.inf, -math.inf, math.nan, math.nextafter(high, math.inf)]


@pytest.fixture(scope="module")
def loud():
    """A tiny Llama with logits of the order of 1,000."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(500)
    return model


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", FLOATS)
def test_a_value_within_the_range_gives_tokens(loud, name, setting):
    prompt, engine = prompts_of([7], loud.config.vocab_size)[0], offline_engine(loud)
    asked = [msgspec.structs.replace(SETTINGS[setting], **{name: value}) for value in edges(name)]
    accepted = [params for params in asked if check(params) is None]
    assert 2 < len(accepted) < len(asked)
    numbers = [engine.submit(prompt, params) for params in accepted]
    engine.run()
    for one in itertools.chain(*(engine.generations[number].sequences for number in numbers)):
        assert one.tokens and all(0 <= token < loud.config.vocab_size for token in one.tokens)
        assert all(math.isfinite(log_prob) for log_prob in one.log_probs)


TINY = [0.0, 1e-300, SUBNORMAL, 1e-38, SMALLEST, 1e-30, 9e-6]


@pytest.mark.parametrize("temperature", TINY)
def test_a_tiny_temperature_is_greedy(loud, temperature):
    prompt, engine = prompts_of([7], loud.config.vocab_size)[0], offline_engine(loud)
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=NEW, top_k=0, temperature=temperature))
    assert done.tokens == hf_greedy(loud, prompt, NEW)[0]
    beams = SamplingParams(max_tokens=NEW, beam_width=3)
    (plain,) = engine.generate([prompt], beams)
    (tiny,) = engine.generate([prompt], msgspec.structs.replace(beams, temperature=temperature))
    assert [one.tokens for one in tiny.sequences] == [one.tokens for one in plain.sequences]


def test_a_tiny_temperature_is_greedy_where_ranks_share_the_vocabulary(tmp_path):
    model = FAMILIES["llama"](**{**FAMILIES["llama"].shared, "tie_word_embeddings": False})
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([7], model.config.vocab_size)
    params = SamplingParams(max_tokens=NEW, top_k=0, temperature=1e-38)
    (done,), _ = generations_on_ranks(tmp_path / "w", 2, 1, prompts, params)
    assert done.tokens == hf_greedy(model, prompts[0], NEW)[0]
