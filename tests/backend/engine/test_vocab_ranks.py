"""A model whose vocabulary is cut over ranks: what a rank holds, and one rank's answers for every setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.rank_process import RankPool
from tests.backend.engine.thread_ranks import on_ranks
from tests.checkpoints import FAMILIES, save
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

NEW = 8
#: of one step together: every kind of row
MIXED = [
    SamplingParams(max_tokens=NEW),
    SamplingParams(max_tokens=NEW, top_k=0, top_p=0.8, temperature=1.5, seed=3, return_log_probs=True),
    SamplingParams(max_tokens=NEW, top_k=7, temperature=2.0, seed=2**63 + 5, top_log_probs=3),
    SamplingParams(max_tokens=NEW, repetition_penalty=1.4, presence_penalty=0.0, return_log_probs=True),
    SamplingParams(max_tokens=NEW, bad_words=[[3], [5, 9]], min_tokens=4, end_id=2, top_log_probs=0),
    SamplingParams(max_tokens=NEW, return_generation_logits=True, return_context_logits=True),
    SamplingParams(max_tokens=NEW, top_k=0, seed=9, return_context_log_prob=True, frequency_penalty=0.3),
    SamplingParams(max_tokens=NEW, beam_width=2, len_penalty=1.0, beam_pool=True),
    SamplingParams(max_tokens=NEW, no_repeat_ngram_size=1, logit_bias={3: 4.0, 150: 5.0, 202: 6.0}),
    SamplingParams(max_tokens=NEW, top_k=0, typical_p=0.6, temperature=2.0, seed=8, return_log_probs=True),
    SamplingParams(max_tokens=NEW, top_k=0, allowed_token_ids=[1, 99, 102, 200, 202], seed=5),
    SamplingParams(max_tokens=NEW, beam_width=2, no_repeat_ngram_size=1, logit_bias={150: 9.0, 9: 8.0}),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    held = RankPool(4)
    yield held
    held.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """family -> (model, directory): a tied and an untied head over a vocabulary that 2 does not divide."""
    made = {}
    for family, size in {"gpt2": {}, "llama": {"tie_word_embeddings": False}}.items():
        folder = tmp_path_factory.mktemp(family)
        model = FAMILIES[family](**{**FAMILIES[family].shared, "vocab_size": 203, **size})
        plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
        made[family] = model, folder / "w"
    return made


def alone(directory: Path, prompts: list[list[int]], params: list[SamplingParams]) -> list[Generation]:
    def use(offline: OfflineEngine) -> list[Generation]:
        numbers = [offline.submit(prompt, one) for prompt, one in zip(prompts, params)]
        offline.run()
        return [offline.generations[number] for number in numbers]

    return on_ranks(directory, 1, 1, use)[0]


def same(found: Generation, wanted: Generation) -> None:
    assert [one.tokens for one in found.sequences] == [one.tokens for one in wanted.sequences]
    assert found.finish == wanted.finish
    for one, other in zip(found.sequences, wanted.sequences):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    for one, other in zip(found.top_log_probs, wanted.top_log_probs, strict=True):
        assert (one.rank, one.ids) == (other.rank, other.ids)
        np.testing.assert_allclose(
            [one.log_prob, *one.log_probs], [other.log_prob, *other.log_probs], atol=1e-4
        )
    for name in ("context_logits", "generation_logits"):
        logits, others = (np.frombuffer(getattr(one, name), np.float32) for one in (found, wanted))
        np.testing.assert_allclose(logits, others, atol=1e-4)
    assert abs(found.context_log_prob - wanted.context_log_prob) < 1e-4


@pytest.mark.parametrize(
    ("family", "tensor", "stages"), [("gpt2", 4, 1), ("gpt2", 1, 2), ("llama", 2, 1), ("llama", 2, 2)]
)
def test_every_kind_of_row_gets_the_answer_of_one_rank(
    converted: dict[str, tuple], family: str, tensor: int, stages: int, pool: RankPool, tmp_path: Path
) -> None:
    model, directory = converted[family]
    prompts = prompts_of([9, 3, 1, 14, 5, 7, 20, 4, 6, 8, 2, 11], 203)
    wanted = alone(directory, prompts, MIXED)
    assert wanted[0].tokens == hf_greedy(model, prompts[0], NEW)[0]
    found = pool.run(directory, tensor, stages, tmp_path / "meeting", prompts, params=MIXED)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


def test_a_rank_holds_and_computes_its_share_alone(converted: dict[str, tuple]) -> None:
    """203 ids on 4 ranks: ceil(203 / 4) = 51, so 56 of 16-bit loads; the last rank has 35 of them."""
    _, engines = on_ranks(converted["llama"][1], 4, 1, lambda offline: None)
    shares = [engine.state.vocab for engine in engines]
    assert [(share.first, share.stop) for share in shares] == [(0, 56), (56, 112), (112, 168), (168, 203)]
    for engine in engines:
        assert engine.state.model.embedding.shape[0] == engine.state.model.head.weight.shape[0] == 56
        assert engine.state.work.logits.shape[1] == engine.state.sampling.counts.shape[1] == 56
        padding = engine.state.model.embedding[engine.state.vocab.count :]
        assert not padding.any()
