"""Pooled hidden states of prompts against transformers' last_hidden_state: chunks, mixed batches, ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import (
    context_embedding,
    fp32_bound,
    hf_greedy,
    offline_engine,
    prompts_of,
    run_ahead,
)
from tests.backend.engine.thread_ranks import on_ranks
from tests.backend.engine.toy_device import Run, limits
from tests.checkpoints import FAMILIES, save
from tests.prompt_adapters import prefix, soft
from tridecode.backend.base.errors import RequestError, TridecodeError
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.wire.messages import SamplingParams, Sent, SequenceRequest, SessionRound, Submit
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

LENGTHS = [1, 2, 7, 30, 23, 9, 16, 17]
NEW = 5
LAST, MEAN = (SamplingParams(max_tokens=0, pooling=pooling) for pooling in ("last", "mean"))
GREEDY = SamplingParams(max_tokens=NEW)


@torch.inference_mode()
def hidden_states(model: torch.nn.Module, prompt: list[int]) -> np.ndarray:
    """(T, C): transformers' hidden states after the final norm."""
    out = model.base_model(torch.tensor([prompt]))
    return getattr(out, "last_hidden_state", out)[0].numpy()  # Baichuan's reference returns a tensor


def wanted_of(model: torch.nn.Module, prompt: list[int], params: SamplingParams) -> np.ndarray:
    states = hidden_states(model, prompt)
    return states[-1] if params.pooling == "last" else states.astype(np.float64).mean(0)


def agree(found: np.ndarray | None, wanted: np.ndarray) -> None:
    assert found is not None and found.dtype == np.float32 and found.shape == wanted.shape
    assert np.abs(found - wanted).max() < fp32_bound(wanted)


def watch_samples(offline: OfflineEngine) -> list[int]:
    """The number of samples of each step that is launched from now on."""
    launch, samples = offline.engine.launch, []

    def watched(plan):
        samples.append(plan.num_samples)
        return launch(plan)

    offline.engine.launch = watched  # type: ignore[method-assign]
    return samples


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vectors_of_a_mixed_batch_are_transformers(family: str) -> None:
    """Prompts longer and shorter than a step of 16 tokens, with sequences that decode."""
    model = FAMILIES[family]()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    offline = offline_engine(model, keep_logits=False)
    asked = [
        (params, prompt, offline.submit(prompt, params))
        for prompt in prompts
        for params in (LAST, GREEDY, MEAN)
    ]
    offline.run()
    for params, prompt, number in asked:
        found = offline.generations[number]
        assert found.finish == "length"
        if params is GREEDY:
            assert found.tokens == hf_greedy(model, prompt, NEW)[0] and found.embedding is None
        else:
            assert found.tokens == []
            agree(found.embedding, wanted_of(model, prompt, params))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "opt", "falcon", "gptj", "gemma2"])
def test_the_reference_is_the_last_of_transformers_hidden_states(family: str) -> None:
    model = FAMILIES[family]()
    prompt = prompts_of([9], model.config.vocab_size)[0]
    with torch.inference_mode():
        last = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].numpy()
    assert np.array_equal(last, hidden_states(model, prompt))


def test_a_model_without_a_final_norm_gives_its_last_layers_output() -> None:
    """OPT-350m: norms after the residual sums, and a projection behind the last layer, which is left out."""
    name, settings = next(
        (name, settings)
        for name, settings in FAMILIES["opt"].variants.items()
        if settings.get("do_layer_norm_before") is False
    )
    model = FAMILIES["opt"](**settings)
    decoder = model.base_model.decoder
    assert decoder.final_layer_norm is None, name
    prompt = prompts_of([20], model.config.vocab_size)[0]
    seen: list[torch.Tensor] = []
    hook = decoder.layers[-1].register_forward_hook(
        lambda _module, _inputs, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        model(torch.tensor([prompt]))
    hook.remove()
    states = seen[0].reshape(len(prompt), -1).numpy()
    last, mean = (done.embedding for done in _generate(offline_engine(model), [prompt] * 2, [LAST, MEAN]))
    agree(last, states[-1])
    agree(mean, states.mean(0))


def _generate(offline: OfflineEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list:
    numbers = [offline.submit(prompt, one) for prompt, one in zip(prompts, params)]
    offline.run()
    return [offline.generations[number] for number in numbers]


def test_nothing_is_sampled_for_a_request_without_tokens() -> None:
    model = FAMILIES["llama"]()
    offline = offline_engine(model, keep_logits=False)
    samples = watch_samples(offline)
    prompts = prompts_of([30, 3, 5], model.config.vocab_size)
    _generate(offline, prompts, [LAST, MEAN, LAST])
    assert len(samples) > 1 and sum(samples) == 0
    assert offline.scheduler.counters.output_tokens == 0
    assert offline.scheduler.cache.num_free_slots == offline.scheduler.limits.max_sequences
    assert offline.scheduler.planner.num_without_slot == 0


def test_more_prompts_than_slots_and_rows_of_scratch_memory_in_one_step() -> None:
    model = FAMILIES["gpt2"]()
    prompts = prompts_of([3, 1, 2, 2, 4, 1, 2, 1, 3], model.config.vocab_size)
    offline = offline_engine(model, keep_logits=False, max_sequences=3, max_step_tokens=64)
    params = [LAST, LAST, MEAN] * 3
    for prompt, one, done in zip(prompts, params, _generate(offline, prompts, params)):
        agree(done.embedding, wanted_of(model, prompt, one))


def test_a_request_that_also_generates_gets_its_vector_with_the_first_token() -> None:
    model = FAMILIES["bloom"]()
    prompt = prompts_of([20], model.config.vocab_size)[0]
    offline = offline_engine(model)
    number = offline.submit(prompt, SamplingParams(max_tokens=NEW, pooling="mean"))
    done = offline.generations[number]
    while not done.tokens:
        offline.step()
    assert len(done.tokens) == 1
    agree(done.embedding, wanted_of(model, prompt, MEAN))
    offline.run()
    assert done.tokens == hf_greedy(model, prompt, NEW)[0]


@pytest.mark.parametrize(
    "params",
    [LAST, MEAN, SamplingParams(max_tokens=1, return_context_embedding=True)],
    ids=lambda p: p.pooling,
)
def test_a_prompt_that_is_preempted_with_a_chunk_in_flight_is_summed_once(params: SamplingParams) -> None:
    """The older request grows into its next block while two chunks of the younger one are computed."""
    model = FAMILIES["gpt2"]()
    block = offline_engine(model).engine.state.block_bytes()
    offline = offline_engine(model, keep_logits=False, cache_bytes=5 * block)
    older, younger = prompts_of([7, 30], model.config.vocab_size)
    first = offline.submit(older, SamplingParams(max_tokens=12))
    second = offline.submit(younger, params)
    run_ahead(offline)
    assert offline.scheduler.counters.preemptions > 0
    assert offline.generations[first].tokens == hf_greedy(model, older, 12)[0]
    pooled = params.pooling
    wanted = wanted_of(model, younger, params) if pooled else context_embedding(model, younger)
    agree(offline.generations[second].embedding, wanted)


def test_a_request_that_an_engine_had_begun_is_computed_again() -> None:
    model = FAMILIES["gpt2"]()
    prompt = prompts_of([20], model.config.vocab_size)[0]
    offline = offline_engine(model)
    request = SequenceRequest(np.asarray(prompt, np.int32).tobytes(), MEAN)
    offline.scheduler.submit(b"door", Submit(1, [request], sent=[Sent()]))
    events = []
    while offline.scheduler.has_work:
        plan = offline.scheduler.plan()
        events += offline.scheduler.commit(plan, offline.engine.launch(plan).wait())
    ((_, event),) = events
    assert event.finish == "length"
    agree(np.frombuffer(event.context_embedding, np.float32), wanted_of(model, prompt, MEAN))


def test_virtual_tokens_count_and_a_prefix_does_not() -> None:
    """Rows of the model's own embedding stand for tokens; a prefix of zeros changes what attends to it."""
    model = FAMILIES["llama"]()
    offline, vocab = offline_engine(model), model.config.vocab_size
    prompt = prompts_of([20], vocab)[0]
    rows = model.get_input_embeddings().weight[prompt[:3]].detach()
    virtual = [vocab, vocab + 1, vocab + 2, *prompt[3:]]
    shape = (4, offline.model_config.num_layers, 2, offline.model_config.num_kv_heads)
    cached = torch.randn(*shape, offline.model_config.head_size) * 0.5
    behind = [*range(vocab, vocab + 4), *prompt]
    numbers = [offline.submit(virtual, one, "", soft(rows)) for one in (LAST, MEAN)]
    numbers += [offline.submit(behind, one, "", prefix(cached)) for one in (LAST, MEAN)]
    offline.run()
    found = [offline.generations[number].embedding for number in numbers]
    agree(found[0], wanted_of(model, prompt, LAST))
    agree(found[1], wanted_of(model, prompt, MEAN))
    states = _states_behind(model, prompt, cached)
    agree(found[2], states[-1])
    agree(found[3], states.mean(0))


@torch.inference_mode()
def _states_behind(model: torch.nn.Module, prompt: list[int], cached: torch.Tensor) -> np.ndarray:
    """(T, C): transformers' hidden states of a prompt behind a prefix (rows, layers, 2, kv heads, head)."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(cached.shape[1]):
        keys, values = (cached[:, layer, i].transpose(0, 1)[None] for i in (0, 1))
        cache.update(keys, values, layer)
    out = model.base_model(torch.tensor([prompt]), past_key_values=cache, use_cache=True)
    return out.last_hidden_state[0].numpy()


def test_hidden_states_that_are_not_numbers_are_an_error() -> None:
    model = FAMILIES["gpt2"]()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("inf")
    for params in (LAST, MEAN):
        offline = offline_engine(model)
        offline.submit([1, 2, 5], params)
        with pytest.raises(TridecodeError, match="hidden states are not numbers .* prompt of 3 tokens"):
            offline.run()
        assert not offline.scheduler.has_work


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"pooling": "cls"}, "pooling is 'cls'; wanted 'last' or 'mean', or '' for none"),
        ({"pooling": "last", "beam_width": 2}, "pooling is 'last' and the prompt has 2 beams or samples"),
        ({"pooling": "mean", "num_return_sequences": 3}, "pooling is 'mean' and the prompt has 3"),
        ({"pooling": "mean", "return_context_embedding": True}, "return_context_embedding is true"),
    ],
)
def test_what_has_no_pooled_state_is_refused(wanted: dict, text: str) -> None:
    run = Run(limits())
    request = SequenceRequest(np.array([1, 2], "<i4").tobytes(), SamplingParams(**wanted))
    with pytest.raises(RequestError) as caught:
        run.scheduler.submit(b"door", Submit(1, [request]))
    assert text in str(caught.value)
    assert not run.scheduler.has_work


def test_a_session_has_no_pooled_state() -> None:
    run = Run(limits())
    request = SequenceRequest(np.array([1, 2], "<i4").tobytes(), LAST)
    with pytest.raises(RequestError, match="pooling is set in a session"):
        run.scheduler.submit(b"door", Submit(1, [request], session=SessionRound(1, 20)))


# ---------------------------------------------------------------- ranks


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """family -> (transformers' model, its weight directory), made once."""
    held: dict[str, tuple[torch.nn.Module, Path]] = {}

    def make(family: str) -> tuple[torch.nn.Module, Path]:
        if family not in held:
            folder, model = tmp_path_factory.mktemp(family), FAMILIES[family](**FAMILIES[family].shared)
            plan_conversion(open_checkpoint(str(save(model, folder / "hf")))).write(folder / "weights")
            held[family] = model, folder / "weights"
        return held[family]

    return make


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["one plan", "a plan for each stage"])
def test_ranks_together_give_transformers_vectors(
    written, family: str, tensor: int, stages: int, pipelined: bool
) -> None:
    model, directory = written(family)
    prompts = prompts_of([30, 1, 5, 17, 2, 9], model.config.vocab_size)
    params = [MEAN, LAST, GREEDY, LAST, MEAN, GREEDY]

    def use(offline: OfflineEngine) -> list:
        return _generate(offline, prompts, params)

    for prompt, one, done in zip(prompts, params, on_ranks(directory, tensor, stages, use, pipelined)[0]):
        if one is GREEDY:
            assert done.tokens == hf_greedy(model, prompt, NEW)[0]
        else:
            agree(done.embedding, wanted_of(model, prompt, one))
