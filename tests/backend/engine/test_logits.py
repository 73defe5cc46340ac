"""Logits that a request wants, against transformers: of the prompt and of each new token, in chunks, after a
preemption, on several ranks, with a step in flight; their limits; and logits that are not numbers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import offline_engine, prompts_of
from tests.backend.engine.thread_ranks import generations_on_ranks
from tests.backend.engine.toy_device import DOOR, Run, limits
from tests.backend.hf_models import gpt2, llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import CapacityError, RequestError, TridecodeError
from tridecode.backend.engine.offline import Generation, OfflineEngine
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, SessionRound, Submit
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

BOUND = 2e-4  # of logits, rounding in fp32
WANTED = SamplingParams(
    max_tokens=6,
    top_k=0,
    temperature=3.0,
    repetition_penalty=1.4,
    bad_words=[[7]],
    seed=5,
    return_context_logits=True,
    return_generation_logits=True,
    return_context_log_prob=True,
)


@torch.inference_mode()
def check(model: torch.nn.Module, prompt: list[int], done: Generation) -> None:
    """All logits of a generation against one forward of transformers over prompt and output."""
    vocab = model.config.vocab_size
    theirs = model(torch.tensor([prompt + done.tokens])).logits[0].float()
    context = np.frombuffer(done.context_logits, np.float32).reshape(-1, vocab)
    generation = np.frombuffer(done.generation_logits, np.float32).reshape(-1, vocab)
    assert context.shape[0] == len(prompt) and generation.shape[0] == len(done.tokens)
    assert np.abs(context - theirs[: len(prompt)].numpy()).max() < BOUND
    assert np.abs(generation - theirs[len(prompt) - 1 : -1].numpy()).max() < BOUND
    log_probs = theirs[: len(prompt) - 1].double().log_softmax(-1)
    total = float(log_probs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.long)].sum())
    assert done.context_log_prob == pytest.approx(total, abs=1e-4 * len(prompt))


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_logits_are_those_of_transformers_before_temperature_and_penalties(make) -> None:
    model = make()
    prompts = prompts_of([37, 1, 16, 5, 2], model.config.vocab_size)  # 37: three chunks of 16
    offline = offline_engine(model, keep_logits=False)
    others = [offline.submit(prompt, SamplingParams(max_tokens=9)) for prompt in prompts[::-1]]
    for prompt, done in zip(prompts, offline.generate(prompts, WANTED)):
        assert len(done.tokens) == 6
        check(model, prompt, done)
    for number in others:
        assert not offline.generations[number].context_logits + offline.generations[number].generation_logits


def test_logits_come_once_also_after_a_preemption() -> None:
    model = gpt2()
    prompts = prompts_of([9, 12, 7, 10], model.config.vocab_size)
    blocks = 8 * offline_engine(model).engine.state.block_bytes()
    offline = offline_engine(model, keep_logits=False, cache_bytes=blocks)
    params = SamplingParams(
        max_tokens=20,
        return_context_logits=True,
        return_generation_logits=True,
        return_context_log_prob=True,
    )
    done = offline.generate(prompts, params)
    assert offline.scheduler.counters.preemptions > 0
    for prompt, generation in zip(prompts, done):
        check(model, prompt, generation)


def test_logits_belong_to_their_tokens_with_a_step_in_flight() -> None:
    """Each step is planned before the one before it is committed, as on a GPU."""
    model = gpt2()
    prompts = prompts_of([20, 3, 9], model.config.vocab_size)
    offline = offline_engine(model, keep_logits=False)
    numbers = [offline.submit(prompt, WANTED) for prompt in prompts]
    pending = None
    while offline.scheduler.has_work:
        plan = offline.scheduler.plan()
        launched = None if plan is None else (plan, offline.engine.launch(plan).wait())
        if pending is not None:
            offline._take(offline.scheduler.commit(*pending))
        pending = launched
    for prompt, number in zip(prompts, numbers):
        check(model, prompt, offline.generations[number])


def test_no_new_tokens_give_the_prompts_logits_alone() -> None:
    model = gpt2()
    prompt = prompts_of([19], model.config.vocab_size)[0]
    params = SamplingParams(max_tokens=0, return_context_logits=True, return_generation_logits=True)
    done = offline_engine(model, keep_logits=False).generate([prompt], params)[0]
    assert done.tokens == [] and done.finish == "length" and done.generation_logits == b""
    assert len(done.context_logits) == 4 * 19 * model.config.vocab_size


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)], ids=["tp 2", "pp 2", "tp 2 x pp 2"])
def test_ranks_give_the_same_logits(ranks: tuple[int, int], tmp_path: Path) -> None:
    model = FAMILIES["llama"](**FAMILIES["llama"].shared)
    directory = tmp_path / "weights"
    plan_conversion(open_checkpoint(str(save(model, tmp_path / "hf")))).write(directory)
    prompts = prompts_of([21, 4], model.config.vocab_size)
    done, _ = generations_on_ranks(directory, *ranks, prompts, WANTED)
    for prompt, generation in zip(prompts, done):
        check(model, prompt, generation)


# ---------------------------------------------------------------- limits


def submit(run: Run, request: int, prompt: int, **params) -> None:
    """A request of two sequences."""
    one = SequenceRequest(np.zeros(prompt, np.int32).tobytes(), SamplingParams(**params))
    run.scheduler.submit(DOOR, Submit(request, [one, one]))


def test_logits_are_refused_beyond_the_limit_of_a_request_and_of_all_open_ones() -> None:
    row = 4 * 50  # bytes, the vocabulary has 50 ids
    run = Run(limits(max_logits_bytes=2 * 10 * row))
    with pytest.raises(RequestError, match="wants 4,400 bytes of logits; this model accepts 4,000"):
        submit(run, 1, 8, max_tokens=3, return_context_logits=True, return_generation_logits=True)
    submit(run, 1, 20, max_tokens=3)  # wants none
    for request in range(2, 6):
        submit(run, request, 10, max_tokens=3, return_context_logits=True)
    with pytest.raises(CapacityError, match="want 16,000 bytes of logits and this one 400 more"):
        submit(run, 6, 1, max_tokens=3, return_context_logits=True)
    run.scheduler.cancel(DOOR, 3)
    submit(run, 6, 1, max_tokens=3, return_context_logits=True)
    with pytest.raises(RequestError, match="prompt has token id"):  # a refused request holds nothing
        bad = SequenceRequest(np.full(10, 70, np.int32).tobytes(), SamplingParams(return_context_logits=True))
        run.scheduler.submit(DOOR, Submit(7, [bad]))
    submit(run, 7, 9, max_tokens=3, return_context_logits=True)


def test_a_step_without_such_requests_wants_no_logits() -> None:
    run = Run(limits())
    run.submit(1, [3, 4, 5], max_tokens=4)
    plan = run.scheduler.plan()
    assert plan is not None and plan.parts == []
    assert run.scheduler.requests.num_extra_outputs == 0


# ---------------------------------------------------------------- metrics


def test_metrics_are_in_order_and_count_the_blocks_of_the_cache() -> None:
    model = gpt2()
    offline = offline_engine(model, keep_logits=False, max_sequences=1)
    prompts = prompts_of([20, 3], model.config.vocab_size)
    before = time.time_ns()
    done = offline.generate(prompts, SamplingParams(max_tokens=6, return_perf_metrics=True))
    after = time.time_ns()
    for generation, blocks in zip(done, (4, 1)):  # 25 and 8 tokens in the cache, 8 in a block
        perf = generation.perf
        assert perf is not None and (perf.new_blocks, perf.reused_blocks) == (blocks, 0)
        times = [perf.arrival_ns, perf.first_scheduled_ns, perf.first_token_ns, perf.last_token_ns]
        assert [before, *times, after] == sorted([before, *times, after])
        assert perf.first_token_ns < perf.last_token_ns
    first, second = done[0].perf, done[1].perf
    assert first is not None and second is not None
    assert second.arrival_ns < first.first_token_ns < first.last_token_ns <= second.first_scheduled_ns
    assert offline.generate(prompts, SamplingParams(max_tokens=2))[0].perf is None


# ---------------------------------------------------------------- not a number


def broken_at(offline: OfflineEngine, wrong: float, request: int, generated: int) -> None:
    """One logit of a request's token number `generated` becomes `wrong`, or all, if that is NaN: those of a
    hidden state with NaN are."""

    def spoil(plan, logits: torch.Tensor) -> None:
        rows = [sequence for sequence, count in zip(plan.sequences, plan.samples) if count]
        for row, sequence in enumerate(rows):
            if sequence.group.request == request and len(sequence.output) == generated:
                logits[row, ... if wrong != wrong else 3] = wrong

    offline.engine.on_logits = spoil


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")], ids=["NaN", "infinite"])
@pytest.mark.parametrize("params", [{}, {"top_k": 0, "repetition_penalty": 1.2}], ids=["greedy", "drawn"])
def test_logits_that_are_not_numbers_end_their_request_alone(wrong: float, params: dict) -> None:
    model = gpt2()
    prompts = prompts_of([5, 9, 7], model.config.vocab_size)
    alone = [offline_engine(model).generate([p], SamplingParams(max_tokens=8))[0].tokens for p in prompts]
    offline = offline_engine(model, keep_logits=False)
    broken_at(offline, wrong, request=1, generated=2)
    others = {number: offline.submit(prompts[number], SamplingParams(max_tokens=8)) for number in (0,)}
    offline.submit(prompts[1], SamplingParams(max_tokens=8, **params))
    others[2] = offline.submit(prompts[2], SamplingParams(max_tokens=8))
    with pytest.raises(TridecodeError, match="not numbers .* after 9 tokens of prompt and 2 of output"):
        offline.run()
    offline.run()
    assert len(offline.generations[1].tokens) == 2
    for number in others:
        assert offline.generations[number].tokens == alone[number]


@pytest.mark.parametrize(
    "name", ["return_context_logits", "return_context_log_prob", "return_context_embedding"]
)
def test_a_round_of_a_session_has_no_results_of_its_prompt(name: str) -> None:
    run = Run(limits())
    one = SequenceRequest(np.zeros(3, np.int32).tobytes(), SamplingParams(max_tokens=2, **{name: True}))
    message = f"{name} is set in a session, which does not compute its earlier tokens again"
    with pytest.raises(RequestError, match=message):
        run.scheduler.submit(DOOR, Submit(1, [one], session=SessionRound(7, 20)))
    assert not run.scheduler.has_work


def test_each_of_several_samples_has_its_own_logits() -> None:
    model = gpt2()
    (prompt,) = prompts_of([11], model.config.vocab_size)
    vocab = model.config.vocab_size
    params = SamplingParams(
        max_tokens=5, top_k=0, temperature=4.0, seed=3, num_return_sequences=3, return_generation_logits=True
    )
    offline = offline_engine(model, keep_logits=False)
    request = SequenceRequest(np.array(prompt, np.int32).tobytes(), params)
    offline.scheduler.submit(DOOR, Submit(0, [request]))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    logits = {0: b"", 1: b"", 2: b""}
    while (plan := offline.scheduler.plan()) is not None:
        for _, event in offline.scheduler.commit(plan, offline.engine.launch(plan).wait()):
            tokens[event.sequence] += event.tokens
            logits[event.sequence] += event.extra.generation_logits if event.extra else b""
    assert len({tuple(sample) for sample in tokens.values()}) > 1
    for sample in range(3):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt + tokens[sample]])).logits[0, len(prompt) - 1 : -1]
        found = np.frombuffer(logits[sample], np.float32).reshape(-1, vocab)
        assert np.abs(found - theirs.numpy()).max() < BOUND


@pytest.mark.parametrize("wanted", [{"return_context_logits": True}, {"return_context_log_prob": True}])
def test_a_beam_search_gives_its_prompts_logits_once(wanted: dict) -> None:
    model = gpt2()
    (prompt,) = prompts_of([20], model.config.vocab_size)  # two chunks
    beams = SamplingParams(max_tokens=4, beam_width=3, **wanted)
    alone = SamplingParams(max_tokens=1, **wanted)
    found, one = (
        offline_engine(model).generate([prompt], beams)[0],
        offline_engine(model).generate([prompt], alone)[0],
    )
    assert found.context_logits == one.context_logits and found.context_log_prob == one.context_log_prob
    assert len(found.context_logits) in (0, 4 * 20 * model.config.vocab_size)
