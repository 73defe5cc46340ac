"""Tensor and pipeline ranks: processes over gloo give the tokens of transformers, from one and the same
directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.backend.engine.offline_models import context_embedding, fp32_bound, hf_greedy, prompts_of
from tests.backend.engine.rank_process import NEW_TOKENS, RankPool
from tests.backend.engine.test_beams import hf_beams
from tests.backend.engine.test_logits import WANTED, check
from tests.backend.engine.test_pooling import wanted_of
from tests.checkpoints import FAMILIES, save
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

RANKS = {"tp 2": (2, 1), "tp 4": (4, 1), "pp 2": (1, 2), "tp 2 x pp 2": (2, 2)}
in_flight = pytest.mark.parametrize("pipelined", [False, True], ids=["one plan", "a plan for each stage"])


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
            bound = 2e-3 + 1e-5 * np.abs(their_embedding).max()  # float32 sums in other orders
            assert np.abs(embedding - their_embedding).max() < bound, name


@in_flight
@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (2, 2)])
def test_the_last_stage_sends_its_logits_to_rank_0(
    pool: RankPool, tmp_path: Path, tensor: int, stages: int, pipelined: bool
) -> None:
    model = FAMILIES["gpt2"](**FAMILIES["gpt2"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = prompts_of([20, 1, 5], model.config.vocab_size)
    meeting = tmp_path / "meeting"
    done = pool.run(directory, tensor, stages, meeting, prompts, params=WANTED, pipelined=pipelined)
    for prompt, generation in zip(prompts, done, strict=True):
        check(model, prompt, generation)


@in_flight
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_the_last_stage_sends_pooled_states_to_rank_0(
    pool: RankPool, tmp_path: Path, tensor: int, stages: int, pipelined: bool
) -> None:
    model = FAMILIES["llama"](**FAMILIES["llama"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = prompts_of([20, 1, 5, 7], model.config.vocab_size)
    poolings = ["mean", "last", "", "mean"]
    every = [SamplingParams(max_tokens=0 if pooling else NEW_TOKENS, pooling=pooling) for pooling in poolings]
    done = pool.run(
        directory, tensor, stages, tmp_path / "meeting", prompts, params=every, pipelined=pipelined
    )
    for prompt, params, generation in zip(prompts, every, done, strict=True):
        if params.pooling:
            bound = fp32_bound(wanted := wanted_of(model, prompt, params))
            assert np.abs(generation.embedding - wanted).max() < bound
        else:
            assert generation.tokens == hf_greedy(model, prompt, NEW_TOKENS)[0]


@in_flight
def test_beams_and_other_rows_of_a_step_are_the_same_on_all_ranks(
    pool: RankPool, tmp_path: Path, pipelined: bool
) -> None:
    """Rank 0 gets the candidates from the last stage; the other rows of the step continue from their
    tokens."""
    model = FAMILIES["gpt2"](**FAMILIES["gpt2"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = prompts_of([20, 1, 5, 7], model.config.vocab_size)
    beams = SamplingParams(max_tokens=NEW_TOKENS, beam_width=3, beam_pool=True, len_penalty=1.0, end_id=5)
    greedy = SamplingParams(max_tokens=NEW_TOKENS)
    every = [beams, greedy, beams, greedy]
    meeting, options = tmp_path / "meeting", {"max_sequences": 8, "pipelined": pipelined}
    done = pool.run(directory, 2, 2, meeting, prompts, params=every, **options)
    for prompt, params, generation in zip(prompts, every, done, strict=True):
        found = [one.tokens for one in generation.sequences]
        wanted = (
            [hf_greedy(model, prompt, NEW_TOKENS)[0]]
            if params == greedy
            else hf_beams(model, prompt, params)[0]
        )
        assert found == wanted


def test_a_degree_gives_the_same_bits_in_each_run(pool: RankPool, tmp_path: Path) -> None:
    """The order of a sum does not depend on which rank comes first."""
    model = FAMILIES["gpt2"](**FAMILIES["gpt2"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = prompts_of([20, 1, 5], model.config.vocab_size)
    for tensor, stages in ((4, 1), (2, 2)):
        runs = [
            pool.run(directory, tensor, stages, tmp_path / f"{tensor} {run}", prompts, params=WANTED)
            for run in range(2)
        ]
        for one, other in zip(*runs, strict=True):
            assert one.tokens == other.tokens
            for logits in ("context_logits", "generation_logits"):
                bits = [np.frombuffer(getattr(each, logits), np.uint32) for each in (one, other)]
                assert len(bits[0]) and np.array_equal(*bits), logits
