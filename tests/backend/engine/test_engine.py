"""The engine on the CPU against transformers: positions, preemption, 16 bit, log-probabilities, context
embeddings. Greedy tokens and logits of each family: tests/backend/models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import (
    context_embedding,
    first_logits,
    hf_greedy,
    offline_engine,
    prompts_of,
    rounding_bound,
)
from tests.backend.hf_models import bloom, gpt2, gptneox, llama
from tests.checkpoints import FAMILIES
from tridecode.backend.base.errors import DeadlineError
from tridecode.backend.wire.messages import SamplingParams
from tridecode.kernels.gemm.chain import reads_in_order
from tridecode.kernels.operands import Product
from tridecode.kernels.reference import Reference

LENGTHS = [1, 2, 7, 8, 9, 23, 30, 5, 17]


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_the_last_position_is_served(make) -> None:
    model = make(positions=48)
    for length in (47, 40, 1):
        prompt = prompts_of([length], model.config.vocab_size, seed=length)[0]
        tokens, _ = hf_greedy(model, prompt, 48 - length)
        assert (
            offline_engine(model).generate([prompt], SamplingParams(max_tokens=48 - length))[0].tokens
            == tokens
        )


@pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
def test_preempted_sequences_equal_undisturbed_ones(make) -> None:
    model = make()
    prompts = prompts_of([9, 12, 7, 10], model.config.vocab_size)
    offline = offline_engine(model, cache_bytes=_bytes_of_blocks(model, 8))
    done = offline.generate(prompts, SamplingParams(max_tokens=20))
    assert offline.scheduler.counters.preemptions > 0
    assert [generation.tokens for generation in done] == [
        hf_greedy(model, prompt, 20)[0] for prompt in prompts
    ]


#: families by the form of their residuals: one after the other, parallel, with norms around attention and MLP
FORMS = {
    **{"gpt2": gpt2, "bloom": bloom, "llama": llama, "gptneox": gptneox},
    **{name: FAMILIES[name] for name in ("falcon", "gptj", "gemma2", "gemma3_text")},
}


@pytest.mark.parametrize("name", FORMS)
def test_operations_may_compute_what_is_behind_attention_at_once(name: str, monkeypatch) -> None:
    asked: list[int] = []

    def linears(self: Reference, products: list[Product]) -> bool:
        asked.append(len(products))
        assert reads_in_order(products)
        for product in products:
            product.compute(self)
        return True

    monkeypatch.setattr(Reference, "linears", linears)
    monkeypatch.setattr(Reference, "most_linears_rows", 64)
    model = FORMS[name]()
    prompts = prompts_of([9, 12, 7], model.config.vocab_size)
    done = offline_engine(model).generate(prompts, SamplingParams(max_tokens=12))
    assert [generation.tokens for generation in done] == [
        hf_greedy(model, prompt, 12)[0] for prompt in prompts
    ]
    # the last layer has no next one
    assert set(asked) == ({4} if name.startswith("gemma") else {3, 4})


def _bytes_of_blocks(model: torch.nn.Module, count: int) -> int:
    engine = offline_engine(model).engine
    return count * engine.state.block_bytes()


@pytest.mark.parametrize("make", [gpt2, bloom, llama], ids=["gpt2", "bloom", "llama"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bit_logits_are_as_exact_as_transformers(make, dtype: str) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    done = offline_engine(model, data_type=dtype).generate(prompts, SamplingParams(max_tokens=1))
    errors = np.stack([generation.logits[0] for generation in done]) - first_logits(model, prompts)
    assert np.abs(errors).max() <= rounding_bound(model, prompts, dtype)


def test_log_probs_are_transformers_log_softmax_of_the_chosen_token() -> None:
    model = llama()
    prompt = prompts_of([11], model.config.vocab_size)[0]
    tokens, logits = hf_greedy(model, prompt, 6)
    done = offline_engine(model).generate([prompt], SamplingParams(max_tokens=6, return_log_probs=True))[0]
    wanted = torch.from_numpy(logits).log_softmax(-1)[torch.arange(6), torch.tensor(tokens)]
    assert done.tokens == tokens and np.allclose(done.log_probs, wanted, atol=1e-4)


@pytest.mark.parametrize("length", [1, 13, 30])
def test_the_context_embedding_is_the_sum_of_the_last_layers_output(length: int) -> None:
    model = bloom()
    prompt = prompts_of([length], model.config.vocab_size)[0]
    offline = offline_engine(model)
    others = prompts_of([5, 9], model.config.vocab_size, seed=3)
    for other in others:
        offline.submit(other, SamplingParams(max_tokens=4))
    number = offline.submit(prompt, SamplingParams(max_tokens=3, return_context_embedding=True))
    offline.run()
    embedding = offline.generations[number].embedding
    assert embedding is not None and np.allclose(embedding, context_embedding(model, prompt), atol=2e-3)


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, beam_width=2)])
def test_an_overdue_request_of_an_offline_engine_is_an_error_and_no_answer(params: SamplingParams) -> None:
    model = llama()
    offline = offline_engine(model, request_timeout_s=1e-6)
    with pytest.raises(DeadlineError, match="deadline passed when it had 0 of 3 tokens"):
        offline.generate(prompts_of([5, 7], model.config.vocab_size), params)
    assert [generation.finish for generation in offline.generations] == ["", ""]
