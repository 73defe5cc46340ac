"""Tensor and pipeline ranks: processes over gloo give the tokens of transformers, from one and the same
directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.backend.engine.offline_models import context_embedding, hf_greedy, prompts_of
from tests.backend.engine.rank_process import NEW_TOKENS, RankPool
from tests.checkpoints import FAMILIES, save
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

RANKS = {"tp 2": (2, 1), "tp 4": (4, 1), "pp 2": (1, 2), "tp 2 x pp 2": (2, 2)}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    held = RankPool(max(tensor * stages for tensor, stages in RANKS.values()))
    yield held
    held.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_give_the_tokens_of_transformers(family: str, pool: RankPool, tmp_path: Path) -> None:
    model = FAMILIES[family](**FAMILIES[family].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = prompts_of([5, 1, 20, 9, 13], model.config.vocab_size)
    wanted = [
        (hf_greedy(model, prompt, NEW_TOKENS)[0], context_embedding(model, prompt)) for prompt in prompts
    ]
    for name, (tensor, stages) in RANKS.items():
        answers = pool.run(directory, tensor, stages, tmp_path / f"meeting {tensor} {stages}", prompts)
        for (tokens, embedding), (theirs, their_embedding) in zip(answers, wanted, strict=True):
            assert tokens == theirs, name
            assert np.allclose(embedding, their_embedding, atol=2e-3), name
