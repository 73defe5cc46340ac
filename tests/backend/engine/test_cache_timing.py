"""The time to the first token reveals nothing about prompts that were sent with another salt."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import prompts_of
from tests.backend.engine.test_host_models import flush, small_engine, tier_of
from tests.backend.hf_models import llama
from tridecode.backend.base.memory_file import create_file
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams

TRIALS, TOKENS = 40, 120


def first_token_s(offline: OfflineEngine, prompt: list[int], salt: str) -> float:
    began = time.perf_counter()
    offline.generate([prompt], SamplingParams(max_tokens=1, cache_salt=salt))
    return time.perf_counter() - began


def share_of_right_guesses(shorter: list[float], longer: list[float]) -> float:
    """Return the probability that a member of `shorter` is below one of `longer`: 0.5 for equal
    distributions."""
    wins = np.array(shorter)[:, None] < np.array(longer)[None]
    return float(wins.mean())


@pytest.mark.parametrize("blocks", [400, 20], ids=["in the cache", "in the host tier"])
@torch.inference_mode()
def test_prompts_of_another_salt_cannot_be_seen_in_the_time_to_the_first_token(blocks: int) -> None:
    """A client alternates between prompts that others have sent, new prompts, and repeated prompts of its
    own, which show that hits can be measured. They alternate because the load of the machine changes. With 40
    prompts each, the share of right guesses has a standard deviation of 0.065."""
    model = llama()
    fd = create_file(64 << 20)
    try:
        offline = small_engine(model, fd, blocks=blocks, max_sequence_tokens=128)
        tier_of(offline)
        offline.engine.on_logits = None
        prompts = prompts_of([TOKENS] * (3 * TRIALS + 1), model.config.vocab_size)
        others, new, own = prompts[:TRIALS], prompts[TRIALS : 2 * TRIALS], prompts[2 * TRIALS : -1]
        for _ in range(3):
            first_token_s(offline, prompts[-1], "attacker")
        times: dict[str, list[float]] = {"others": [], "new": [], "own": []}
        random = np.random.default_rng(0)
        for trial in range(TRIALS):
            first_token_s(offline, others[trial], "victim")
            first_token_s(offline, own[trial], "attacker")
            flush(offline)
            wanted = {"others": others[trial], "new": new[trial], "own": own[trial]}
            for name in random.permutation(list(wanted)).tolist():
                times[name].append(first_token_s(offline, wanted[name], "attacker"))
                flush(offline)
    finally:
        os.close(fd)
    assert share_of_right_guesses(times["own"], times["new"]) > 0.9, "the clock sees a client's own hits"
    guesses = share_of_right_guesses(times["others"], times["new"])
    assert 0.25 < guesses < 0.75, f"{guesses:.0%} of the guesses are right"
