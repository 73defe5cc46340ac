"""Many ranks: four pipeline stages, and four tensor ranks in each of two stages, give the tokens of
transformers for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.thread_ranks import generate_on_ranks
from tests.checkpoints import FAMILIES, save
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

NEW_TOKENS = 5
LAYERS = 4
DEGREES = {"pp 4": (1, 4), "tp 4 x pp 2": (4, 2)}


def deeper(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with LAYERS layers, whatever the family calls them."""
    (name,) = {"n_layer", "n_layers", "num_layers", "num_hidden_layers"} & set(settings)
    kinds = {"attention_types": [[["local"], LAYERS]]} if "attention_types" in settings else {}
    return {**settings, name: LAYERS, **kinds}


@pytest.mark.parametrize("family", FAMILIES)
def test_many_ranks_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family](**deeper(FAMILIES[family].shared))
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = prompts_of([5, 1, 20], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    for name, (tensor, stages) in DEGREES.items():
        tokens, engines = generate_on_ranks(directory, tensor, stages, prompts, NEW_TOKENS)
        assert len(engines) == tensor * stages
        assert tokens == wanted, name
