"""Pooled hidden states on a GPU against transformers and the CPU, with decode steps as CUDA graphs."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of, run_ahead
from tests.backend.engine.test_pooling import GREEDY, LAST, LENGTHS, MEAN, NEW, wanted_of
from tests.backend.engine.test_sessions_gpu import MODELS
from tests.checkpoints import FAMILIES
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

FP32_BOUND = 2e-4  # of the largest component: the order of the additions, over two layers


def _gpu_engine(model: torch.nn.Module, **settings) -> OfflineEngine:
    defaults = dict(keep_logits=False, max_sequences=8, block_tokens=16, max_step_tokens=64)
    return offline_engine(model, "cuda", **{**defaults, **settings})


def _embeddings(offline: OfflineEngine, prompts: list[list[int]]) -> list[np.ndarray]:
    """The vector of each prompt by the last token and by the mean; prompts between them generate."""
    numbers = [[offline.submit(prompt, one) for one in (LAST, GREEDY, MEAN)] for prompt in prompts]
    run_ahead(offline)
    done = [[offline.generations[number] for number in row] for row in numbers]
    assert all(row[1].tokens and row[1].embedding is None for row in done)
    return [one.embedding for row in done for one in (row[0], row[2])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gives_the_vectors_of_transformers_and_of_the_cpu(family: str) -> None:
    model = FAMILIES[family]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    found = _embeddings(_gpu_engine(model), prompts)
    on_cpu = _embeddings(offline_engine(model, "cpu", keep_logits=False), prompts)
    wanted = [wanted_of(model, prompt, one) for prompt in prompts for one in (LAST, MEAN)]
    for mine, cpu, theirs in zip(found, on_cpu, wanted, strict=True):
        bound = FP32_BOUND * np.abs(theirs).max()
        assert np.abs(mine - theirs).max() < bound
        assert np.abs(mine - cpu).max() < bound


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """1 minus the cosine."""
    return float(1 - found @ wanted / (np.linalg.norm(found) * np.linalg.norm(wanted)))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bits_point_in_the_direction_of_32_as_in_transformers(dtype: str) -> None:
    model = MODELS["llama"]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    found = _embeddings(_gpu_engine(model, data_type=dtype), prompts)
    wanted = [wanted_of(model, prompt, one) for prompt in prompts for one in (LAST, MEAN)]
    rounded_model = MODELS["llama"]().to("cuda", {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
    rounded = [_rounded(rounded_model, prompt, one) for prompt in prompts for one in (LAST, MEAN)]
    theirs = [_distance(*pair) for pair in zip(rounded, wanted, strict=True)]
    mine = [_distance(*pair) for pair in zip(found, wanted, strict=True)]
    # single prompts of a random model enlarge a rounding several times, in either implementation
    assert median(mine) <= 2 * median(theirs) and max(mine) < 0.02, (mine, theirs)


def _rounded(model: torch.nn.Module, prompt: list[int], params: SamplingParams) -> np.ndarray:
    """The vector of transformers on the GPU in the model's dtype."""
    with torch.no_grad():
        states = (
            model.base_model(torch.tensor([prompt], device="cuda")).last_hidden_state[0].float().cpu().numpy()
        )
    return states[-1] if params.pooling == "last" else states.astype(np.float64).mean(0)


def test_decoding_beside_it_goes_on_from_graphs() -> None:
    model = MODELS["gpt2"]()
    prompts = prompts_of([30, 9, 3], model.config.vocab_size)
    offline = _gpu_engine(model)
    assert offline.engine.graphs is not None
    numbers = [offline.submit(prompt, GREEDY) for prompt in prompts]
    offline.step()
    numbers += [offline.submit(prompts[0], MEAN)]
    run_ahead(offline)
    for prompt, number in zip(prompts, numbers):
        assert offline.generations[number].tokens == hf_greedy(model, prompt, NEW)[0]
    wanted = wanted_of(model, prompts[0], MEAN)
    assert (
        np.abs(offline.generations[numbers[-1]].embedding - wanted).max() < FP32_BOUND * np.abs(wanted).max()
    )
