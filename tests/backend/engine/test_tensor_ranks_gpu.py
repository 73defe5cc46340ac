"""Two tensor ranks on GPUs, or on one: sums over peer memory, in prompts and in decode graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.rank_process import NEW_TOKENS, RankPool
from tests.backend.hf_models import bloom, gptneox, llama
from tests.checkpoints import save
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

pytestmark = pytest.mark.gpu

MODELS = {
    "bloom": lambda: bloom(head_size=64, heads=6, vocab=500),
    "gptneox": lambda: gptneox(head_size=64, heads=4, vocab=397),
    "llama": lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, vocab=512),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    held = RankPool(2)
    yield held
    held.close()


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_two_ranks_give_the_fp32_tokens_of_transformers(make, pool: RankPool, tmp_path: Path) -> None:
    model = make()
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([5, 1, 20, 9, 13], model.config.vocab_size)
    settings = dict(device="cuda", cache_bytes=16 << 20, peers=True)
    answers = pool.run(tmp_path / "w", 2, 1, tmp_path / "meeting", prompts, **settings)
    wanted = [hf_greedy(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    assert [tokens for tokens, _ in answers] == wanted


def test_without_custom_all_reduce_a_library_sums_and_the_tokens_are_the_same(
    pool: RankPool, tmp_path: Path
) -> None:
    """NCCL, or gloo where the ranks share a GPU."""
    model = MODELS["llama"]()
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(tmp_path / "w")
    prompts = prompts_of([5, 1, 20], model.config.vocab_size)
    settings = dict(device="cuda", cache_bytes=16 << 20, peers=False, enable_custom_all_reduce=False)
    answers = pool.run(tmp_path / "w", 2, 1, tmp_path / "meeting", prompts, **settings)
    wanted = [hf_greedy(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    assert [tokens for tokens, _ in answers] == wanted
