"""Quantised directories on a GPU against transformers' models whose weights the test itself has rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.backend.engine.offline_models import hf_greedy
from tests.backend.models.test_quantized import FORMATS, NEW, PROMPTS, planned
from tests.checkpoints import FAMILIES, save
from tests.quantized import rounded_model
from tridecode.backend.config import EngineConfig
from tridecode.backend.engine.offline import run_greedy

pytestmark = pytest.mark.gpu

FP32_BOUND = 2e-4  # of the largest logit: the order of the additions, over two layers


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_logits_are_those_of_transformers_with_rounded_weights(
    family: str, format: str, tmp_path: Path
) -> None:
    case = FAMILIES[family]
    model = case(**case.shared)
    save(model, tmp_path / "hf", tokenizer=False)
    plan = planned(tmp_path / "hf", FORMATS[format])
    plan.write(tmp_path / "w")
    rounded = rounded_model(model, plan, case.turned)
    config = EngineConfig(
        device="cuda", data_type="fp32", max_sequences=4, max_sequence_tokens=64, cache_bytes=64 << 20
    )
    tokens, logits = run_greedy(tmp_path / "w", PROMPTS, NEW, config)
    for prompt, ours, our_logits in zip(PROMPTS, tokens, logits):
        wanted, their_logits = hf_greedy(rounded, prompt, NEW)
        assert ours == wanted
        assert np.abs(our_logits - their_logits).max() < FP32_BOUND * np.abs(their_logits).max()
