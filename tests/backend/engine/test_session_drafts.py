"""Drafts in rounds of sessions: the tokens of transformers on the whole history, in fewer steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backend.engine.offline_models import drafting_engine, hf_greedy, prompts_of, run_in_flight
from tests.backend.engine.test_draft_model import like
from tests.backend.engine.test_lookup import LONGER, counted, learning_of
from tests.backend.hf_models import gpt2, llama
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams, SessionRound

COUNT = 11


def rounds(offline: OfflineEngine, model, depth: int, memory: int = 0, count: int = COUNT, **params) -> None:
    """Talk in two conversations at once, and compare each answer with transformers."""
    new = prompts_of([9, 2, 5, 1], model.config.vocab_size)
    histories: dict[int, list[int]] = {1: [], 2: []}
    for prompt in new:
        requests = {}
        for number, history in histories.items():
            own = [(token + number) % model.config.vocab_size for token in prompt]
            wanted = SessionRound(number, 64, [len(history)] if history else [], memory)
            requests[number] = offline.submit(own, SamplingParams(max_tokens=count, **params), session=wanted)
            history += own
        run_in_flight(offline, depth)
        for number, history in histories.items():
            tokens = offline.generations[requests[number]].tokens
            answer = hf_greedy(model, history, count)[0]
            end = params.get("end_id", -1)
            assert tokens == (answer[: answer.index(end) + 1] if end in answer else answer)
            history += tokens
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_rounds_are_drafted_and_give_the_tokens_of_transformers(make, depth: int) -> None:
    model = make()
    offline = drafting_engine(model, "draft", draft=model, **LONGER)
    steps = counted(offline)
    rounds(offline, model, depth)
    learning = learning_of(offline)
    assert learning.accepted["draft"] >= 0.95 * learning.drafted["draft"] > 40
    assert len(steps) < 0.6 * 4 * COUNT


@pytest.mark.parametrize("speculation", ["draft", "lookup", "lookup+draft"])
def test_an_answer_that_ends_within_a_row_leaves_only_written_tokens(speculation: str) -> None:
    """An end id ends a round within the drafts that a row keeps, or while the next row is in flight."""
    model = llama()
    draft = None if speculation == "lookup" else like(model)
    for depth in (1, 2):
        ends = hf_greedy(model, [5, 6, 7], 30)[0]
        for end in sorted(set(ends))[:3]:
            rounds(drafting_engine(model, speculation, draft=draft, **LONGER), model, depth, end_id=end)


def test_a_ring_has_no_drafts() -> None:
    model = llama()
    offline = drafting_engine(model, "draft", draft=model, **LONGER)
    ids = np.arange(9).tolist()
    offline.submit(ids, SamplingParams(max_tokens=COUNT), session=SessionRound(1, 60, [], 16))
    run_in_flight(offline, 2)
    assert learning_of(offline).drafted["draft"] == 0
