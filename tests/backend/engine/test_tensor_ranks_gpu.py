"""Two tensor ranks on GPUs, or on one: sums and sampling over peer memory, in prompts and decode graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.backend.engine.offline_models import hf_greedy, prompts_of
from tests.backend.engine.rank_process import NEW_TOKENS, RankPool, shared_vocabulary
from tests.backend.engine.test_vocab_ranks import MIXED, same
from tests.backend.hf_models import bloom, gpt2, gptneox, llama
from tests.checkpoints import save
from tests.kernels.peer_process import on_ranks
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

pytestmark = pytest.mark.gpu

MODELS = {
    "bloom": lambda: bloom(head_size=64, heads=6, vocab=500),
    "gptneox": lambda: gptneox(head_size=64, heads=4, vocab=397),
    "gpt2": lambda: gpt2(head_size=64, heads=4, vocab=331),
    "llama": lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, vocab=512),
}
#: with positions for long prompts
HALVED = {
    "bloom": MODELS["bloom"],
    "gpt2": lambda: gpt2(head_size=64, heads=4, vocab=331, positions=1024),
    "llama": lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, vocab=512, positions=1024),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    held = RankPool(2)
    yield held
    held.close()


def write(model: torch.nn.Module, folder: Path) -> Path:
    plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
    return folder / "w"


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_two_ranks_give_the_fp32_tokens_of_transformers(make, pool: RankPool, tmp_path: Path) -> None:
    """The vocabularies are cut: tied heads (bloom, gpt2), positions, an embedding norm, padding on rank 1."""
    model = make()
    write(model, tmp_path)
    prompts = prompts_of([5, 1, 20, 9, 13], model.config.vocab_size)
    settings = dict(device="cuda", cache_bytes=16 << 20, peers=True)
    answers = pool.run(tmp_path / "w", 2, 1, tmp_path / "meeting", prompts, **settings)
    wanted = [hf_greedy(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    assert [tokens for tokens, _ in answers] == wanted


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_long_steps_are_halved_and_give_the_fp32_tokens_of_transformers(
    family: str, pool: RankPool, tmp_path: Path
) -> None:
    """13 prompts of 9,130 tokens: the first step is halved, the second one is not."""
    model = HALVED[family]()
    write(model, tmp_path)
    lengths = [700, 650, 620, 510, 900, 800, 750, 640, 590, 720, 810, 560, 880]
    prompts = prompts_of(lengths, model.config.vocab_size)
    sizes = dict(max_step_tokens=8800, max_sequence_tokens=1000, max_sequences=16, cache_bytes=96 << 20)
    answers = pool.run(
        tmp_path / "w", 2, 1, tmp_path / "meeting", prompts, device="cuda", peers=True, **sizes
    )
    wanted = [hf_greedy(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    assert [tokens for tokens, _ in answers] == wanted
    assert all(notes["halved"] > 0 for notes in pool.notes)


def test_without_custom_all_reduce_a_library_sums_and_the_tokens_are_the_same(
    pool: RankPool, tmp_path: Path
) -> None:
    """NCCL, or gloo where the ranks share a GPU."""
    model = MODELS["llama"]()
    write(model, tmp_path)
    prompts = prompts_of([5, 1, 20], model.config.vocab_size)
    settings = dict(device="cuda", cache_bytes=16 << 20, peers=False, enable_custom_all_reduce=False)
    answers = pool.run(tmp_path / "w", 2, 1, tmp_path / "meeting", prompts, **settings)
    wanted = [hf_greedy(model, prompt, NEW_TOKENS)[0] for prompt in prompts]
    assert [tokens for tokens, _ in answers] == wanted


def sampled(vocab: int) -> list[SamplingParams]:
    """Every way to sample; all steps are graphs."""
    common = dict(max_tokens=NEW_TOKENS)
    return [
        SamplingParams(**common, return_log_probs=True),
        SamplingParams(**common, top_k=0, temperature=1.3, seed=4, return_log_probs=True),
        SamplingParams(**common, top_k=0, top_p=0.8, temperature=1.5, seed=3, return_log_probs=True),
        SamplingParams(**common, top_k=7, temperature=2.0, seed=2**63 + 5),
        SamplingParams(**common, top_k=200, top_p=0.9, temperature=3.0, seed=6, top_p_decay=0.9),
        SamplingParams(**common, repetition_penalty=1.4, presence_penalty=0.0, return_log_probs=True),
        SamplingParams(**common, top_k=0, seed=9, frequency_penalty=0.3),
        SamplingParams(**common, bad_words=[[3], [vocab - 1], [5, 9]], min_tokens=4, end_id=vocab - 2),
    ]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("settings", [{}, {"int8_head": True}, {"cuda_graphs": False}])
def test_two_ranks_sample_the_tokens_of_one(
    family: str, settings: dict, pool: RankPool, tmp_path: Path
) -> None:
    model = MODELS[family]()
    vocab = model.config.vocab_size
    prompts, params = prompts_of([9, 3, 1, 14, 5, 7, 20, 4], vocab), sampled(vocab)
    place = dict(params=params, device="cuda", cache_bytes=16 << 20, **settings)
    directory = write(model, tmp_path)
    wanted = pool.run(directory, 1, 1, tmp_path / "alone", prompts, **place)
    found = pool.run(directory, 2, 1, tmp_path / "meeting", prompts, **place)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


def test_logits_beams_and_top_tokens_come_from_the_shares(pool: RankPool, tmp_path: Path) -> None:
    directory = write(MODELS["gpt2"](), tmp_path)
    prompts = prompts_of([9, 3, 1, 14, 5, 7, 20, 4], 331)
    place = dict(params=MIXED, device="cuda", cache_bytes=16 << 20)
    wanted = pool.run(directory, 1, 1, tmp_path / "alone", prompts, **place)
    found = pool.run(directory, 2, 1, tmp_path / "meeting", prompts, **place)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


def test_results_of_prompts_are_computed_after_their_graphs(pool: RankPool, tmp_path: Path) -> None:
    """The number of steps with prompts that are graphs is that without such requests."""
    directory = write(MODELS["llama"](), tmp_path)
    prompts = prompts_of([9, 3, 1, 14, 5, 7, 20, 4], 512)
    wants = [
        dict(return_context_logits=True),
        dict(return_context_log_prob=True),
        dict(return_context_embedding=True),
    ]
    params = [SamplingParams(max_tokens=NEW_TOKENS + n, **wants[n % 3]) for n in range(len(prompts))]
    sizes = dict(device="cuda", cache_bytes=16 << 20, max_sequences=5, max_step_tokens=32)
    wanted = pool.run(directory, 1, 1, tmp_path / "alone", prompts, params=params, **sizes)
    found = pool.run(directory, 2, 1, tmp_path / "meeting", prompts, params=params, **sizes)
    replays = [note["prompt_replays"] for note in pool.notes]
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
        if other.embedding is not None:
            assert abs(one.embedding - other.embedding).max() < 2e-4 * abs(other.embedding).max()
    plain = [replace(one, **dict.fromkeys(wants[n % 3], False)) for n, one in enumerate(params)]
    pool.run(directory, 2, 1, tmp_path / "plain", prompts, params=plain, **sizes)
    assert [note["prompt_replays"] for note in pool.notes] == replays and min(replays) >= 3


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}])
def test_top_tokens_after_a_graph_are_those_of_one_rank(
    settings: dict, pool: RankPool, tmp_path: Path
) -> None:
    """No row has edited logits, so their steps remain graphs."""
    directory = write(MODELS["gptneox"](), tmp_path)
    prompts, common = prompts_of([9, 3, 1, 14], 397), dict(max_tokens=NEW_TOKENS)
    params = [
        SamplingParams(**common, top_log_probs=5),
        SamplingParams(**common, top_k=0, temperature=1.7, seed=2, top_log_probs=20, return_log_probs=True),
        SamplingParams(**common, top_k=0, top_p=0.8, seed=3),
        SamplingParams(**common, top_k=9, seed=4, frequency_penalty=0.5, top_log_probs=0),
    ]
    place = dict(params=params, device="cuda", cache_bytes=16 << 20, **settings)
    wanted = pool.run(directory, 1, 1, tmp_path / "alone", prompts, **place)
    found = pool.run(directory, 2, 1, tmp_path / "meeting", prompts, **place)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


def test_the_vocabulary_is_shared_and_steps_are_graphs(tmp_path: Path) -> None:
    """397 ids: ceil(397 / 2) = 199, so 200 of 16-bit loads; rank 1 has 197 of them."""
    directory = write(MODELS["gptneox"](), tmp_path)
    assert on_ranks(2, partial(shared_vocabulary, directory, tmp_path / "meeting")) == ["", ""]
