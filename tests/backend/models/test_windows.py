"""Windows and soft caps over sequences many times as long as the window, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.checkpoints import FAMILIES
from tridecode.backend.wire.messages import SamplingParams


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_long_sequence_sees_its_windows(family: str):
    """Window and blocks of 8, chunks of up to 16 tokens: prompts of 3 and 59 tokens grow to 60 and 100."""
    model = FAMILIES[family]()
    prompts, counts = prompts_of([3, 59], model.config.vocab_size), [57, 41]
    offline = offline_engine(model)
    numbers = [offline.submit(p, SamplingParams(max_tokens=n)) for p, n in zip(prompts, counts)]
    offline.run()
    for prompt, count, number in zip(prompts, counts, numbers):
        tokens, logits = hf_greedy(model, prompt, count)
        answer = offline.generations[number]
        assert answer.tokens == tokens and len(set(tokens)) > 20
        assert np.abs(np.stack(answer.logits) - logits).max() < fp32_bound(logits)
