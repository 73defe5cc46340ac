"""Steps of an engine that verify forced drafts: any number of kept tokens, with the next step launched before
the counts are known, gives the tokens of transformers and of one token a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.backend.engine import thread_ranks
from tests.backend.engine.draft_source import ForcedDrafts
from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of, run_in_flight
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.hf_models import bloom, gpt2, llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

NEW = 18
SIZES = dict(max_sequences=24, max_step_tokens=48, max_sequence_tokens=64)
LENGTHS = [5, 11, 1, 8, 17]


def answers_of(prompts: list[list[int]], done: list[Generation]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): generation.tokens for prompt, generation in zip(prompts, done)}


def drafting(offline: OfflineEngine, answers, needs_token: bool, seed: int = 0) -> ForcedDrafts:
    source = ForcedDrafts(answers, offline.model_config.vocab_size, needs_token, seed)
    offline.scheduler.planner.use_drafter(source)
    offline.engine.drafter = None if needs_token else source
    return source


def generate(offline: OfflineEngine, prompts, params, depth: int = 1) -> list[Generation]:
    numbers = [
        offline.submit(prompt, one)
        for prompt, one in zip(prompts, params if isinstance(params, list) else [params] * len(prompts))
    ]
    run_in_flight(offline, depth)
    return [offline.generations[number] for number in numbers]


@pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
@pytest.mark.parametrize(("needs_token", "depth"), [(True, 2), (False, 1), (False, 2), (False, 3)])
def test_verified_rows_give_transformers_tokens(make, needs_token: bool, depth: int) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    offline = offline_engine(model, keep_logits=False, **SIZES)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted)}
    source = drafting(offline, answers, needs_token)
    steps = 0
    launch = offline.engine.launch

    def counted(plan):
        nonlocal steps
        steps += 1
        return launch(plan)

    offline.engine.launch = counted  # type: ignore[method-assign]
    done = generate(offline, prompts, SamplingParams(max_tokens=NEW), depth)
    assert [generation.tokens for generation in done] == wanted
    assert sum(source.counts) > 20 and steps < 3 * NEW
    assert (source.ahead > 5) == (depth > 1 and not needs_token)
    index = offline.scheduler.cache.index
    assert index.num_available == index.num_blocks, "blocks leaked"


#: rules that count the tokens before, so that a row's tokens change what follows them
SAMPLED = [
    SamplingParams(max_tokens=NEW, temperature=1.2, top_k=0, seed=3, return_log_probs=True),
    SamplingParams(max_tokens=NEW, temperature=0.9, top_k=20, top_p=0.8, top_p_decay=0.9, seed=4),
    SamplingParams(max_tokens=NEW, repetition_penalty=1.5, frequency_penalty=0.3, return_log_probs=True),
    SamplingParams(max_tokens=NEW, temperature=1.5, top_k=0, min_tokens=9, end_id=7, seed=5),
    SamplingParams(max_tokens=NEW, temperature=1.0, top_k=5, bad_words=[[3], [5, 6]], seed=6),
    SamplingParams(max_tokens=NEW, no_repeat_ngram_size=1, top_k=0, typical_p=0.8, seed=7),
    SamplingParams(
        max_tokens=NEW, no_repeat_ngram_size=2, logit_bias={3: 9.0, 8: 8.5}, return_log_probs=True
    ),
]


@pytest.mark.parametrize(("needs_token", "depth"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_every_sampling_rule_is_that_of_one_token_a_step(make, needs_token: bool, depth: int) -> None:
    model = make()
    prompts = prompts_of([*LENGTHS, 6, 4], model.config.vocab_size)
    plain = generate(offline_engine(model, keep_logits=False, **SIZES), prompts, SAMPLED)
    offline = offline_engine(model, keep_logits=False, **SIZES)
    source = drafting(offline, answers_of(prompts, plain), needs_token, seed=1)
    done = generate(offline, prompts, SAMPLED, depth)
    for one, other in zip(done, plain, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert sum(source.counts) > 20


@pytest.mark.parametrize("needs_token", [True, False])
def test_preempted_rows_equal_undisturbed_ones(needs_token: bool) -> None:
    model = llama()
    prompts = prompts_of([9, 12, 7, 10], model.config.vocab_size)
    wanted = [hf_greedy(model, prompt, 20)[0] for prompt in prompts]
    block = offline_engine(model, keep_logits=False, **SIZES).engine.state.block_bytes()
    offline = offline_engine(model, keep_logits=False, **{**SIZES, "cache_bytes": 9 * block})
    drafting(offline, {tuple(p): tokens for p, tokens in zip(prompts, wanted)}, needs_token)
    done = generate(offline, prompts, SamplingParams(max_tokens=20), 2)
    assert [generation.tokens for generation in done] == wanted
    assert offline.scheduler.counters.preemptions > 0


def test_an_eight_bit_cache_keeps_the_tokens_of_one_a_step() -> None:
    model = llama()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    params = SamplingParams(max_tokens=NEW)
    plain = generate(
        offline_engine(model, keep_logits=False, kv_cache_dtype="int8", **SIZES), prompts, params
    )
    offline = offline_engine(model, keep_logits=False, kv_cache_dtype="int8", **SIZES)
    drafting(offline, answers_of(prompts, plain), False)
    done = generate(offline, prompts, params, 2)
    assert [one.tokens for one in done] == [one.tokens for one in plain]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    model = FAMILIES["gpt2"](**{**FAMILIES["gpt2"].shared, "n_layer": 4})
    plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "w")
    return folder / "w"


def verified_on_ranks(
    directory: Path,
    monkeypatch,
    ranks: tuple[int, int, bool],
    needs_token: bool,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
) -> tuple[list[Generation], list[Generation], ForcedDrafts, list[Engine]]:
    """Return the answers of one rank without drafts, those of several ranks with forced ones, the drafter,
    and the engines. ranks: tensor size, stages, and whether these have micro-batches."""
    vocab = 96
    tensor, stages, pipelined = ranks
    (plain, _) = on_ranks(directory, 1, 1, lambda offline: generate(offline, prompts, params), **SIZES)
    answers = answers_of(prompts, plain)
    load = thread_ranks.load_engine

    def with_drafter(*arguments) -> Engine:
        engine = load(*arguments)
        engine.drafter = None if needs_token else ForcedDrafts(answers, vocab, needs_token)
        return engine

    monkeypatch.setattr(thread_ranks, "load_engine", with_drafter)

    def use(offline: OfflineEngine) -> tuple[list[Generation], ForcedDrafts]:
        source = offline.engine.drafter or ForcedDrafts(answers, vocab, needs_token)
        assert isinstance(source, ForcedDrafts)
        offline.scheduler.planner.use_drafter(source)
        depth = offline.engine.micro_batches if pipelined else 2
        return generate(offline, prompts, params, depth), source

    (done, source), engines = on_ranks(directory, tensor, stages, use, pipelined, **SIZES)
    return plain, done, source, engines


@pytest.mark.parametrize(
    ("tensor", "stages", "pipelined", "needs_token"),
    [(2, 1, False, False), (2, 1, False, True), (1, 2, False, False), (1, 2, True, True), (2, 2, True, True)],
)
@pytest.mark.parametrize("sampled", [False, True])
def test_ranks_verify_the_same_rows(
    directory: Path, monkeypatch, tensor: int, stages: int, pipelined: bool, needs_token: bool, sampled: bool
) -> None:
    """Ranks that share the vocabulary; stages that place rows themselves, and with micro-batches stages whose
    plans have all ids and lengths."""
    vocab = 96
    prompts = prompts_of([*LENGTHS, 6, 4], vocab)
    params = SAMPLED if sampled else SamplingParams(max_tokens=NEW)
    plain, done, source, engines = verified_on_ranks(
        directory, monkeypatch, (tensor, stages, pipelined), needs_token, prompts, params
    )
    for one, other in zip(done, plain, strict=True):
        assert one.tokens == other.tokens
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert sum(source.counts) > 20 and (source.ahead > 5) == (not needs_token)
    if not pipelined:
        lengths = [engine.state.sampling.lengths for engine in engines]
        assert all(torch.equal(lengths[0], other) for other in lengths[1:])
        last = [engine.state.sampling.last_tokens for engine in engines]
        assert all(torch.equal(last[0], other) for other in last[1:])
