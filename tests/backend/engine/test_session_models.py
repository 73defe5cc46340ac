"""Sessions on whole models, compared with transformers on the whole history."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend import hf_models
from tests.backend.engine.offline_models import fp32_bound, hf_greedy, offline_engine, prompts_of
from tests.backend.engine.thread_ranks import on_ranks
from tests.checkpoints import save
from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams, SessionRound
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

MODELS = {"gpt2": hf_models.gpt2, "bloom": hf_models.bloom, "llama": hf_models.llama}
COUNT = 5
NEW = [[7, 11, 13, 17, 19, 23, 29], [31, 37], [41, 43, 47, 53, 59, 61, 67, 71, 73]]


class Talk:
    """One conversation with an offline engine."""

    def __init__(self, offline: OfflineEngine, number: int, memory: int = 0):
        self.offline, self.number, self.memory = offline, number, memory
        self.history: list[int] = []

    def submit(self, new: list[int]) -> int:
        self.whole = [*self.history, *new]
        retained = [len(self.history)] if self.history else []
        wanted = SessionRound(self.number, 60, retained, self.memory)
        self.request = self.offline.submit(new, SamplingParams(max_tokens=COUNT), session=wanted)
        return self.request

    def take(self) -> list[int]:
        """Return the answer of the ended round."""
        tokens = self.offline.generations[self.request].tokens
        self.history = [*self.whole, *tokens]
        return tokens


def count_prompt_tokens(offline: OfflineEngine) -> list[int]:
    """Return a list that gets the number of prompt tokens of each later step."""
    counts: list[int] = []
    launch = offline.engine.launch

    def counted(plan):
        counts.append(plan.num_tokens - plan.num_decodes)
        return launch(plan)

    offline.engine.launch = counted
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_rounds_give_the_tokens_and_logits_of_transformers_on_the_whole_history(name):
    model = MODELS[name]()
    offline = offline_engine(model)
    talks = [Talk(offline, 1), Talk(offline, 2)]
    computed = count_prompt_tokens(offline)
    for turn, new in enumerate(NEW):
        for talk in talks:
            talk.submit([token + talk.number for token in new])
        beside = prompts_of([9], model.config.vocab_size, seed=turn)[0]
        plain = offline.submit(beside, SamplingParams(max_tokens=COUNT))
        computed.clear()
        offline.run()
        fed_again = 1 if turn else 0  # the last token of an answer was not fed
        assert sum(computed) == len(talks) * (len(new) + fed_again) + len(beside)
        assert offline.generations[plain].tokens == hf_greedy(model, beside, COUNT)[0]
        for talk in talks:
            tokens, logits = hf_greedy(model, talk.whole, COUNT)
            assert talk.take() == tokens
            found = np.stack(offline.generations[talk.request].logits)
            assert np.abs(found - logits).max() < fp32_bound(logits)


@torch.inference_mode()
def banded_greedy(model: torch.nn.Module, prompt: list[int], memory: int) -> list[int]:
    """Return transformers' tokens if every token attends only to the last `memory` tokens, itself
    included."""
    known = list(prompt)
    for _ in range(COUNT):
        index = torch.arange(len(known))
        distance = index[:, None] - index[None, :]
        hidden = (distance < 0) | (distance >= memory)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        known.append(int(model(torch.tensor([known]), attention_mask=mask).logits[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_ring_gives_the_tokens_of_transformers_with_a_band_of_attention(name):
    model = MODELS[name]()
    offline = offline_engine(model)
    talk = Talk(offline, 1, memory=10)
    for new in NEW:
        talk.submit(new)
        beside = offline.submit([3, 5], SamplingParams(max_tokens=COUNT))
        offline.run()
        assert talk.take() == banded_greedy(model, talk.whole, 10)
        assert offline.generations[beside].tokens == hf_greedy(model, [3, 5], COUNT)[0]
    assert len(talk.history) == 33
    assert offline.scheduler.sessions.num_blocks == 2  # blocks of 8 tokens
    offline.scheduler.cache.index.evict(10**6)
    talk.submit([2])
    offline.run()
    assert talk.take() == banded_greedy(model, talk.whole, 10), "from kept tokens alone"


def test_a_session_that_lost_blocks_gives_the_same_answer():
    model = hf_models.llama()
    offline = offline_engine(model)
    talk = Talk(offline, 1)
    for lost, new in zip((0, 1, 10**6), NEW):
        offline.scheduler.cache.index.evict(lost)
        talk.submit(new)
        offline.run()
        assert talk.take() == hf_greedy(model, talk.whole, COUNT)[0]


def test_models_whose_attention_orders_its_keys_refuse_a_ring():
    talk = Talk(offline_engine(hf_models.bloom()), 1, memory=10)
    with pytest.raises(UnsupportedError, match="memory_len is 10 and session_len 60.*ALiBi"):
        talk.submit([3])


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_ranks_go_on_with_a_session(name, tmp_path: Path):
    sizes = {"heads": 4} if name != "llama" else {"heads": 6, "kv_heads": 2}
    model = MODELS[name](**sizes)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)

    def talk_twice(offline: OfflineEngine) -> list[tuple[list[int], list[int]]]:
        talk, rounds = Talk(offline, 1, 0 if name == "bloom" else 12), []
        for new in NEW[:2]:
            talk.submit(new)
            offline.run()
            rounds.append((talk.whole, talk.take()))
        return rounds

    rounds, _ = on_ranks(directory, 2, 1, talk_twice)
    for whole, tokens in rounds:
        wanted = hf_greedy(model, whole, COUNT)[0] if name == "bloom" else banded_greedy(model, whole, 12)
        assert tokens == wanted
