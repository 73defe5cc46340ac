"""Tensor and pipeline ranks: processes over gloo give the tokens of transformers, from one and the same
directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.multiprocessing as mp

from tests.backend.engine.offline_models import context_embedding, hf_greedy, prompts_of
from tests.backend.engine.rank_process import run_rank
from tests.checkpoints import CORE, FAMILIES, save
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion


#: the families of CORE alone at tp 2 and at pp 2, all at both
CASES = [(family, 2, 2) for family in FAMILIES]
CASES += [(family, *ranks) for family in CORE for ranks in ((2, 1), (1, 2))]


@pytest.mark.parametrize("family, tensor, stages", CASES)
def test_ranks_together_give_the_tokens_of_transformers(
    family: str, tensor: int, stages: int, tmp_path: Path
) -> None:
    model = FAMILIES[family](**FAMILIES[family].shared)
    checkpoint = save(model, tmp_path / "hf")
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(checkpoint))).write(directory)
    prompts = prompts_of([5, 1, 20, 9, 13], model.config.vocab_size)
    context = mp.get_context("spawn")
    queue = context.Queue()
    meeting = f"file://{tmp_path / 'meeting'}"
    processes = [
        context.Process(target=run_rank, args=(rank, tensor, stages, directory, meeting, prompts, queue))
        for rank in range(tensor * stages)
    ]
    for process in processes:
        process.start()
    try:
        answers = queue.get(timeout=60)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for prompt, (tokens, embedding) in zip(prompts, answers):
        assert tokens == hf_greedy(model, prompt, 8)[0]
        assert np.allclose(embedding, context_embedding(model, prompt), atol=2e-3)
