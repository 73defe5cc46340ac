"""Penalties that count new tokens only (count_prompt is false), against numpy on transformers' logits."""

from __future__ import annotations

import numpy as np
import torch

from tests.backend.engine.offline_models import offline_engine, prompts_of
from tests.backend.hf_models import llama
from tridecode.backend.wire.messages import SamplingParams

PRESENCE, FREQUENCY, TEMPERATURE = 3.0, 1.5, 0.5


@torch.inference_mode()
def _logits(model, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids])).logits[0, -1].double().numpy()


def _penalised(model, prompt: list[int], output: list[int]) -> np.ndarray:
    """(V,) logits by vLLM's rules: the penalties of the new tokens, then the temperature."""
    logits = _logits(model, prompt + output)
    counts = np.bincount(np.array(output, int), minlength=len(logits))
    return (logits - PRESENCE * (counts > 0) - FREQUENCY * counts) / TEMPERATURE


def test_only_new_tokens_are_penalised() -> None:
    model = llama()
    prompt = prompts_of([9], model.config.vocab_size)[0] * 2
    greedy: list[int] = []
    while len(greedy) < 20:
        greedy.append(int(_penalised(model, prompt, greedy).argmax()))
    params = SamplingParams(
        max_tokens=20,
        temperature=TEMPERATURE,
        presence_penalty=PRESENCE / TEMPERATURE,  # as vLLM's door: the engine divides first
        frequency_penalty=FREQUENCY / TEMPERATURE,
        count_prompt=False,
        cache="off",  # equal prompts would share their blocks, and nothing would be preempted
        return_log_probs=True,
    )
    block = offline_engine(model)
    blocks = offline_engine(model, cache_bytes=12 * block.engine.state.block_bytes())
    done = blocks.generate([prompt, prompt, prompt], params)
    assert blocks.scheduler.counters.preemptions > 0  # the counts are made again from the output
    for generation in done:
        assert generation.tokens == greedy
        for at, log_prob in enumerate(generation.log_probs):
            wanted = torch.from_numpy(_penalised(model, prompt, greedy[:at])).log_softmax(0)
            assert abs(log_prob - wanted[greedy[at]].item()) < 1e-3
