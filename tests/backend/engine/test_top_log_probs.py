"""The most likely tokens of each step, as the engine returns them, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy, offline_engine, prompts_of
from tests.backend.engine.thread_ranks import generations_on_ranks
from tests.backend.engine.toy_device import limits
from tests.backend.hf_models import bloom, gpt2, llama
from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import RequestError
from tridecode.backend.engine.device.parts.table import RUNS
from tridecode.backend.engine.offline import Generation
from tridecode.backend.engine.parts.beams import BeamRows
from tridecode.backend.engine.parts.drafting import Drafting
from tridecode.backend.engine.parts.embeddings import PromptVectors, SummedRow
from tridecode.backend.engine.parts.returned_logits import LogitRows, ReturnedLogits
from tridecode.backend.engine.parts.top_tokens import TopTokens
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.step.decode_graphs import decode_plan
from tridecode.backend.wire.messages import SamplingParams, SequenceRequest, Submit
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.kernels.top_log_probs import best_tokens, raw_log_probs


def check(generation: Generation, tokens: list[int], logits: np.ndarray, count: int) -> None:
    """generation's tops are those of transformers' (T, V) logits for these tokens."""
    assert generation.tokens == tokens and len(generation.top_log_probs) == len(tokens)
    for token, row, top in zip(
        tokens, torch.from_numpy(logits).double().log_softmax(-1), generation.top_log_probs
    ):
        best = row.argsort(descending=True, stable=True)[:count]
        assert top.ids == best.tolist()
        assert np.allclose(top.log_probs, row[best], atol=1e-4)
        assert abs(top.log_prob - row[token].item()) < 1e-4
        assert top.rank == 1 + int((row > row[token]).sum())


@pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
def test_top_log_probs_are_those_of_transformers_logits(make) -> None:
    """Rows that want none, one and many are in one step; the log probs are before temperature."""
    model = make()
    prompts = prompts_of([9, 3, 14, 6], model.config.vocab_size)
    offline = offline_engine(model)
    counts = [5, -1, 0, 20]
    changes = {"temperature": 0.7, "repetition_penalty": 1.0}
    numbers = [
        offline.submit(prompt, SamplingParams(max_tokens=7, top_log_probs=count, **changes))
        for prompt, count in zip(prompts, counts)
    ]
    offline.run()
    for number, prompt, count in zip(numbers, prompts, counts):
        tokens, logits = hf_greedy(model, prompt, 7)
        if count < 0:
            assert offline.generations[number].tokens == tokens
            assert not offline.generations[number].top_log_probs
        else:
            check(offline.generations[number], tokens, logits, count)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)], ids=["tp 2", "pp 2"])
def test_ranks_return_them_to_rank_0(tensor: int, stages: int, tmp_path: Path) -> None:
    model = FAMILIES["llama"](**FAMILIES["llama"].shared)
    plan_conversion(open_checkpoint(save(model, tmp_path / "hf", tokenizer=False)), "fp32").write(
        tmp_path / "w"
    )
    prompts = prompts_of([5, 1, 20], model.config.vocab_size)
    params = SamplingParams(max_tokens=4, top_log_probs=3)
    done, _ = generations_on_ranks(tmp_path / "w", tensor, stages, prompts, params)
    for prompt, generation in zip(prompts, done):
        check(generation, *hf_greedy(model, prompt, 4), 3)


def test_a_sampled_token_has_its_own_rank_and_log_prob() -> None:
    model = llama()
    prompt = prompts_of([8], model.config.vocab_size)[0]
    params = SamplingParams(
        max_tokens=12, top_k=0, temperature=3.0, seed=5, top_log_probs=2, presence_penalty=0.5
    )
    done = offline_engine(model).generate([prompt], params)[0]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + done.tokens])).logits[0, len(prompt) - 1 : -1].numpy()
    check(done, done.tokens, logits, 2)
    assert max(top.rank for top in done.top_log_probs) > 2  # a token that is not among the best


def test_preempted_sequences_report_each_token_once() -> None:
    model = llama()
    prompts = prompts_of([9, 12, 7, 10], model.config.vocab_size)
    offline = offline_engine(model)
    block = offline.engine.state.block_bytes()
    offline = offline_engine(model, cache_bytes=8 * block)
    done = offline.generate(prompts, SamplingParams(max_tokens=20, top_log_probs=1))
    assert offline.scheduler.counters.preemptions > 0
    for prompt, generation in zip(prompts, done):
        check(generation, *hf_greedy(model, prompt, 20), 1)


def test_a_step_in_flight_brings_its_own() -> None:
    """Two steps are planned before the first is committed, as on a GPU."""
    scheduler = Scheduler(limits(), lambda: 0.0)
    prompt = np.array([1, 2], "<i4").tobytes()
    wanting = SamplingParams(max_tokens=4, top_log_probs=2)
    scheduler.submit(b"door", Submit(1, [SequenceRequest(prompt, wanting)]))
    scheduler.submit(b"door", Submit(2, [SequenceRequest(prompt, SamplingParams(max_tokens=2))]))
    plans = [scheduler.plan(), scheduler.plan(), scheduler.plan()]
    assert [plan.part(TopTokens).counts.tolist() for plan in plans] == [[2, -1], [2, -1], [2]]
    scheduler.cancel(b"door", 1)
    scheduler.submit(b"door", Submit(3, [SequenceRequest(prompt, SamplingParams(max_tokens=2))]))
    assert scheduler.plan().part(TopTokens) is None


@pytest.mark.parametrize("count", [-2, 21, 10**9])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    scheduler = Scheduler(limits(), lambda: 0.0)
    request = SequenceRequest(np.array([1], "<i4").tobytes(), SamplingParams(top_log_probs=count))
    with pytest.raises(RequestError, match=f"top_log_probs is {count}; wanted 0 to 20"):
        scheduler.submit(b"door", Submit(1, [request]))
    assert not scheduler.has_work


def test_equally_likely_tokens_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 5.0, 5.0]])
    raw = raw_log_probs(logits, torch.tensor([1, 0]))
    ids, values = best_tokens(raw, torch.tensor([1, 3]), 1)
    assert ids[:, 0].tolist() == [4, 3] and ids[0, 1].item() in (2, 3)
    assert torch.allclose(
        values[:, 0], torch.stack([logits[1].log_softmax(0)[1], logits[0].log_softmax(0)[3]])
    )


def test_parts_after_a_graph_do_not_overwrite_logits_that_others_read() -> None:
    """Beams, drafts and late masks need the samples' logits or hidden states after the graph."""
    state = offline_engine(llama()).engine.state
    plan, none = decode_plan(2), np.zeros(0, np.int32)
    others = [BeamRows(none, 1, none, none), Drafting(1, np.zeros(1, np.int32))]
    for part in (ReturnedLogits([LogitRows(1, 0, 1)]), PromptVectors([SummedRow(1, 0, 1, True, True, True)])):
        for parts, late, captures in [
            ([part], [], True),
            ([part], [1], False),
            *(([part, other], [], False) for other in others),
        ]:
            run = RUNS[type(part)](state, replace(plan, parts=parts, late=late), part)
            assert run.captures == captures
    samples = ReturnedLogits(samples=[0])
    assert not RUNS[ReturnedLogits](state, replace(plan, parts=[samples]), samples).captures


def test_each_sample_of_a_prompt_reports_its_own() -> None:
    model = llama()
    prompt = prompts_of([11], model.config.vocab_size)[0]
    params = SamplingParams(
        max_tokens=5, top_k=0, temperature=2.0, seed=3, num_return_sequences=3, top_log_probs=2
    )
    done = offline_engine(model).generate([prompt], params)[0].sequences
    assert len({tuple(one.tokens) for one in done}) == 3
    for one in done:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + one.tokens])).logits[0, len(prompt) - 1 : -1].numpy()
        check(one, one.tokens, logits, 2)


def test_a_token_that_is_no_id_is_no_fault() -> None:
    """Logits that are not numbers give the token -1."""
    raw = raw_log_probs(torch.tensor([[1.0, float("nan")]]), torch.tensor([0]))
    ids, _ = best_tokens(raw, torch.tensor([-1]), 1)
    assert ids.shape == (1, 2)
