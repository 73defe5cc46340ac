"""Pipeline stages and tensor ranks on GPUs, or all on one: several plans in flight, decode graphs, and the
answers of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import fp32_bound, hf_greedy, prompts_of, rounding_bound
from tests.backend.engine.rank_process import NEW_TOKENS, RankPool
from tests.backend.engine.test_pipeline import EVERY, NEW
from tests.backend.hf_models import bloom, gpt2, gptneox, llama
from tests.checkpoints import save
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

pytestmark = pytest.mark.gpu

MODELS = {
    "bloom": lambda: bloom(head_size=64, heads=6, layers=4, vocab=500),
    "gptneox": lambda: gptneox(head_size=64, heads=4, layers=4, vocab=397),
    "llama": lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, layers=4, vocab=512),
    "gpt2": lambda: gpt2(head_size=64, heads=4, layers=4, vocab=384),
}
LENGTHS = [5, 1, 20, 9, 13]
DEGREES = [(1, 2), (1, 4), (2, 2)]
ON_GPU = dict(device="cuda", cache_bytes=16 << 20)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    held = RankPool(4)
    yield held
    held.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.nn.Module, Path]]:
    """The models, and their weight directories."""
    made = {}
    for name, make in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        model = make()
        plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
        made[name] = model, folder / "w"
    return made


@pytest.mark.parametrize(("tensor", "stages"), DEGREES)
@pytest.mark.parametrize("name", MODELS)
def test_stages_give_the_fp32_tokens_of_transformers(
    name: str, tensor: int, stages: int, models, pool: RankPool, tmp_path: Path
) -> None:
    model, directory = models[name]
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    answers = pool.run(directory, tensor, stages, tmp_path / "meeting", prompts, **ON_GPU)
    wanted = [hf_greedy(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    assert [tokens for tokens, _ in answers] == wanted
    assert pool.notes[0]["in_flight"] == stages
    assert all(note["replays"] > 4 for note in pool.notes)


def logits_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.float32)


@pytest.mark.parametrize(("tensor", "stages"), DEGREES)
def test_every_kind_of_result_is_that_of_one_rank(
    tensor: int, stages: int, models, pool: RankPool, tmp_path: Path
) -> None:
    model, directory = models["llama"]
    prompts = prompts_of([9, 3, 17, 5, 6, 20, 30, 4], model.config.vocab_size)
    settings = dict(**ON_GPU, params=EVERY, max_sequences=8, max_step_tokens=24)
    alone = pool.run(directory, 1, 1, tmp_path / "one", prompts, **settings)
    found = pool.run(directory, tensor, stages, tmp_path / "meeting", prompts, **settings)
    assert pool.notes[0]["in_flight"] == stages
    bound = fp32_bound(logits_of(alone[-1].context_logits))
    for one, other in zip(found, alone, strict=True):
        assert [each.tokens for each in one.sequences] == [each.tokens for each in other.sequences]
        assert one.log_probs == pytest.approx(other.log_probs, abs=2 * bound)
        assert [top.ids for top in one.top_log_probs] == [top.ids for top in other.top_log_probs]
        assert one.context_log_prob == pytest.approx(other.context_log_prob, abs=20 * bound)
        for name in ("context_logits", "generation_logits"):
            mine, wanted = logits_of(getattr(one, name)), logits_of(getattr(other, name))
            np.testing.assert_allclose(mine, wanted, atol=bound)
        assert (one.embedding is None) == (other.embedding is None)
        if one.embedding is not None:
            np.testing.assert_allclose(one.embedding, other.embedding, atol=fp32_bound(other.embedding))


@pytest.mark.parametrize("data_type", ["bf16", "fp16"])
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_in_16_bit_ranks_are_as_near_as_rounding_and_equal_from_run_to_run(
    data_type: str, tensor: int, stages: int, models, pool: RankPool, tmp_path: Path
) -> None:
    """Twice the bound: one rank and several may each lie that far from fp32."""
    model, directory = models["llama"]
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = SamplingParams(max_tokens=NEW, return_context_logits=True, return_log_probs=True)
    settings = dict(**ON_GPU, params=[params] * len(prompts), data_type=data_type)
    degrees = [(1, 1), (tensor, stages), (tensor, stages)]
    alone, found, again = [
        pool.run(directory, *degree, tmp_path / f"run-{number}", prompts, **settings)
        for number, degree in enumerate(degrees)
    ]
    bound = 2 * rounding_bound(model, prompts, data_type)
    for one, same, other in zip(found, again, alone, strict=True):
        difference = np.abs(logits_of(one.context_logits) - logits_of(other.context_logits)).max()
        print(f"{data_type} tp {tensor} pp {stages}: logits differ by {difference:.3g}, bound {bound:.3g}")
        assert difference <= bound
        assert one.context_logits == same.context_logits
        assert one.tokens == same.tokens and one.log_probs == same.log_probs


@pytest.mark.parametrize("stages", [2, 4])
def test_a_stage_that_is_killed_in_a_step_ends_the_others_with_peer_lost(
    stages: int, models, pool: RankPool, tmp_path: Path
) -> None:
    model, directory = models["gpt2"]
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    with pytest.raises(AssertionError) as failed:
        last = stages - 1
        pool.run(directory, 1, stages, tmp_path / "meeting", prompts, dies=(last, 4), **ON_GPU)
    text = str(failed.value)
    assert f"rank {last} died" in text
    assert (
        "rank 0: PeerLost: the receipt of the results broke" in text
        or "rank 0: PeerLost: the sending" in text
    )
