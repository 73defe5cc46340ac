"""A trained model, SmolLM2-135M-Instruct from its package, with an 8-bit cache against its own fp32 cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tridecode.backend.configuration.engine_config import CACHE_FORMATS, EngineConfig
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.tokenizers.files import load_tokenizer
from tridecode.tools.demo import packaged_model

TEXT = (
    "The history of the city begins with a small harbour. Fishermen mended their nets there in the evening, "
    "and in the morning the boats went out again. When the railway came, the harbour was forgotten, but the"
)
#: mean KL divergence in nats over the text's tokens; docs/guides/kv_cache.md has that of longer texts
DIVERGENCE = {"int8": 0.01, "fp8": 0.05}


@pytest.mark.nightly  # test_kv_cache.py bounds the error of tiny models
@pytest.mark.slow
def test_a_trained_model_says_nearly_the_same(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(packaged_model())
    plan_conversion(checkpoint, "fp32").write(tmp_path / "w")
    prompt = load_tokenizer(checkpoint).encode(TEXT)
    found = {}
    for dtype in ("auto", *CACHE_FORMATS):
        sizes = {"max_sequences": 1, "max_sequence_tokens": 64, "cache_bytes": 1 << 24}
        config = EngineConfig(device="cpu", kv_cache_dtype=dtype, verify_weights="sizes", **sizes)
        offline = OfflineEngine.load(tmp_path / "w", config)
        wanted = SamplingParams(max_tokens=1, return_context_logits=True)
        logits = offline.generate([prompt], wanted)[0].context_logits
        shaped = np.frombuffer(logits, np.float32).reshape(len(prompt), -1).copy()
        found[dtype] = torch.from_numpy(shaped).double().log_softmax(-1)
    exact = found["auto"]
    for dtype, bound in DIVERGENCE.items():
        divergence = (exact.exp() * (exact - found[dtype])).sum(-1).mean()
        assert 0 < divergence < bound, dtype
        assert (exact.argmax(-1) == found[dtype].argmax(-1)).double().mean() > 0.9, dtype
