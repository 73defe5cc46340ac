"""Drafts of one-pass heads on a GPU, in CUDA graphs, one step ahead of the host."""

from __future__ import annotations

import pytest

from tests.backend.engine.draft_heads import greedy_texts, trained_heads
from tests.backend.engine.gpu_drafting import LENGTHS, NEW, check_answers, drafting, own_texts
from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_draft_steps import generate
from tests.backend.engine.test_engine_gpu import MODELS
from tests.backend.engine.test_lookup import learning_of
from tridecode.backend.engine.device.drafters.heads import HeadsDrafter
from tridecode.backend.wire.messages import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["bloom", "llama", "llama, head 128"])
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_keep_their_tokens(name: str, graphs: bool) -> None:
    model = MODELS[name]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    _, trained = trained_heads(model, greedy_texts(model, prompts, NEW), epochs=60)
    check_answers(name, "heads", trained, graphs, HeadsDrafter)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bit_heads_draft(dtype: str) -> None:
    model = MODELS["llama, head 128"]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    texts = own_texts(MODELS["llama, head 128"](), prompts, data_type=dtype)
    _, trained = trained_heads(model, texts, epochs=60)
    offline = drafting(MODELS["llama, head 128"](), "heads", trained=trained, data_type=dtype)
    done = generate(offline, prompts, SamplingParams(max_tokens=NEW), depth=2)
    assert all(len(one.tokens) == NEW for one in done)
    learning = learning_of(offline)
    assert learning.accepted["heads"] > 0.2 * learning.drafted["heads"] > 10
