"""Sums over tensor ranks that are fused with the next norm: every form of residual gives transformers' tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.thread_ranks import on_ranks
from tests.checkpoints import FAMILIES, save
from tridecode.backend.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

NEW = 6
#: of each form of residual: sequential, parallel with one norm and with two, post-norm, sandwich
FORMS = ["llama", "gpt2", "bloom", "gptj", "gptneox", "opt-350m", "gemma2"]


@pytest.mark.parametrize("family", [name for name in FORMS if name in FAMILIES])
def test_fused_sums_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family](**FAMILIES[family].shared)
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([5, 1, 20], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    params = SamplingParams(max_tokens=NEW)
    done, engines = on_ranks(
        tmp_path / "w", 2, 1, lambda offline: offline.generate(prompts, params), fuses=True
    )
    assert [generation.tokens for generation in done] == wanted
    for engine in engines:
        assert engine.ranks.sums.launched[True] > 0
