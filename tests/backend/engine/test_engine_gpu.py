"""The engine on a GPU against transformers in fp32: tokens, logits, graphs, company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import (
    first_logits,
    hf_greedy,
    offline_engine,
    prompts_of,
    rounding_bound,
    run_ahead,
)
from tests.backend.hf_models import bloom, gpt2, gptneox, llama
from tests.checkpoints import save
from tests.converters.sources.quantized_checkpoints import Case, fp8, save_quantized
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.resolved_settings import MORE_SLOTS
from tridecode.backend.engine.offline import Generation, OfflineEngine, run_greedy
from tridecode.backend.weights.quantization import Quantization
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.kept_quantized import keep_quantized
from tridecode.kernels.formats.quantized import QuantizedWeight

pytestmark = pytest.mark.gpu

MODELS = {
    "gpt2": lambda: gpt2(head_size=64, heads=3, vocab=331),
    "bloom": lambda: bloom(head_size=64, heads=6, vocab=500),
    "gptneox": lambda: gptneox(head_size=64, heads=4, vocab=397),
    "llama": lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, vocab=512),
    "llama, head 128": lambda: llama(
        seed=3, head_size=128, heads=4, kv_heads=1, inner=520, vocab=640, hidden=512
    ),
}
LENGTHS = [1, 2, 7, 30, 33, 9, 40, 5, 17, 12, 3, 21]
NEW = 16
DEVICE = "cuda"
#: as DeepSeek-V3's and Qwen3's FP8 checkpoints
FP8_BLOCKS = Case(
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    lambda weight: fp8(weight, (128, 128), "weight_scale_inv"),
)
FP32_BOUND = 2e-3  # of the standard deviation of the logits: the order of the additions, over two layers


def gpu_engine(model, **settings):
    defaults = dict(max_sequences=8, block_tokens=16, max_step_tokens=64, cache_bytes=64 << 20)
    return offline_engine(model, device=DEVICE, **{**defaults, **settings})


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_first_logits_of_every_prompt_are_those_of_transformers(make, dtype: str) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    done = gpu_engine(model, data_type=dtype).generate(prompts, SamplingParams(max_tokens=2))
    wanted = first_logits(model, prompts)
    error = np.abs(np.stack([generation.logits[0] for generation in done]) - wanted).max()
    if dtype == "fp32":
        assert error < FP32_BOUND * wanted.std()
    else:
        assert error <= rounding_bound(model, prompts, dtype, DEVICE)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_fp32_greedy_tokens_equal_transformers_in_any_company(make) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    offline = gpu_engine(model, keep_logits=False)
    together = [generation.tokens for generation in offline.generate(prompts, SamplingParams(max_tokens=NEW))]
    wanted = [hf_greedy(model, prompt, NEW)[0] for prompt in prompts]
    assert together == wanted
    assert offline.generate(prompts[3:4], SamplingParams(max_tokens=NEW))[0].tokens == wanted[3]
    assert offline.engine.prompt_graphs is not None and offline.engine.prompt_graphs.replayed > 0


def steps_of_transformers(model, prompt: list[int], generation: Generation, bound: float) -> int:
    """Tokens up to the first that differs from transformers' fp32 run. Asserts that logits differ by rounding
    alone, and that a token differs only where transformers' two candidates are as close."""
    tokens, logits = hf_greedy(model, prompt, NEW)
    for step, (token, wanted) in enumerate(zip(generation.tokens, tokens)):
        assert np.abs(generation.logits[step] - logits[step]).max() <= 2 * bound
        assert token == generation.logits[step].argmax()
        if token != wanted:
            assert logits[step][wanted] - logits[step][token] <= 4 * bound
            return step
    return NEW


@pytest.mark.parametrize(
    "make, at_once",
    [
        (lambda: llama(head_size=64, heads=8, kv_heads=2, inner=344, vocab=512), False),
        (lambda: bloom(head_size=64, heads=6, vocab=500), True),
    ],
    ids=["single products", "chained products when alone"],
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_alone_and_in_a_full_batch_a_request_follows_transformers(
    monkeypatch: pytest.MonkeyPatch, dtype: str, make, at_once: bool
) -> None:
    """Other batch sizes run other kernels, which round differently."""
    model = make()
    prompts = prompts_of([9, 30, 5, 17, 12, 3, 21, 8], model.config.vocab_size)
    bound = rounding_bound(model, prompts, dtype, DEVICE)
    params = SamplingParams(max_tokens=NEW)
    full = gpu_engine(model, data_type=dtype).generate(prompts, params)
    single = gpu_engine(model, data_type=dtype)
    taken = []
    linears = single.engine.state.ops.linears
    monkeypatch.setattr(
        single.engine.state.ops, "linears", lambda *args: taken.append(linears(*args)) or taken[-1]
    )
    alone = [single.generate([prompt], params)[0] for prompt in prompts]
    if torch.cuda.get_device_capability() == (9, 0):
        assert any(taken) == at_once
    for generations in (alone, full):
        steps = [steps_of_transformers(model, *pair, bound) for pair in zip(prompts, generations)]
        least = len(prompts) * NEW // (2 if dtype == "fp16" else 4)
        assert sum(steps) >= least, f"tokens before the first difference: {steps}"


def test_sampling_is_the_same_alone_and_in_company() -> None:
    model = gpt2(head_size=64, heads=3, vocab=331)
    prompts = prompts_of([9, 12, 7, 10], model.config.vocab_size)
    params = [
        SamplingParams(max_tokens=NEW, top_k=0, top_p=0.9, temperature=1.5, seed=seed, repetition_penalty=1.1)
        for seed in range(4)
    ]
    alone = [gpu_engine(model).generate([prompt], p)[0].tokens for prompt, p in zip(prompts, params)]
    offline = gpu_engine(model, cache_bytes=64 << 20)
    numbers = [offline.submit(prompt, p) for prompt, p in zip(prompts, params)]
    offline.run()
    assert [offline.generations[number].tokens for number in numbers] == alone
    again = gpu_engine(model).generate(prompts[:1], params[1])[0].tokens
    assert again != alone[0]


def test_a_slot_given_back_with_its_last_token_in_flight_serves_the_next_request() -> None:
    """More requests than slots, some of a single token, planned one step ahead as in the loop."""
    model = gpt2(head_size=64, heads=3, vocab=331)
    prompts = prompts_of([9, 1, 30, 7, 40, 2, 17, 33, 5, 12], model.config.vocab_size) * 2
    lengths = [1, 2, 5, 1, 3, 8, 1, 4, 2, 6] * 2
    offline = gpu_engine(model, keep_logits=False, max_sequences=3)
    numbers = [
        offline.submit(prompt, SamplingParams(max_tokens=new)) for prompt, new in zip(prompts, lengths)
    ]
    drawn = SamplingParams(max_tokens=7, top_k=0, temperature=1.5, seed=3, repetition_penalty=1.2)
    samples = [offline.submit(prompt, drawn) for prompt in prompts[:6]]
    run_ahead(offline)
    for number, prompt, new in zip(numbers, prompts, lengths):
        assert offline.generations[number].tokens == hf_greedy(model, prompt, new)[0]
    for number, prompt in zip(samples, prompts):
        assert offline.generations[number].tokens == gpu_engine(model).generate([prompt], drawn)[0].tokens


def test_the_slots_that_an_engine_chooses_itself_decode_together() -> None:
    model = gpt2(head_size=64, heads=3, vocab=331)
    offline = gpu_engine(
        model, keep_logits=False, max_sequences=None, max_step_tokens=None, cache_bytes=1 << 30
    )
    slots = offline.engine.config.slots
    prompts = prompts_of([3 + i % 9 for i in range(slots + 10)], model.config.vocab_size)
    done = offline.generate(prompts, SamplingParams(max_tokens=3))
    assert slots == MORE_SLOTS[0]
    for prompt, generation in list(zip(prompts, done))[::29]:
        assert generation.tokens == hf_greedy(model, prompt, 3)[0]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("format", ["int8", "fp8", "fp8 blocks"])
def test_w8a8_on_a_gpu_is_that_of_the_cpu(tmp_path: Path, format: str, dtype: str) -> None:
    """First logits lie as close to the CPU's in fp32 as 16 bits allow, which also turn single activations to
    the next value: at most what rounding them at all does."""
    model = llama(head_size=64, heads=8, kv_heads=2, inner=384, vocab=512)
    if format == "fp8 blocks":
        source = save_quantized(model, tmp_path / "hf", FP8_BLOCKS)
        plan = keep_quantized(plan_conversion(open_checkpoint(source)))
    else:
        source = open_checkpoint(str(save(model, tmp_path / "hf")))
        plan = plan_conversion(source, "fp32", None, Quantization(format, activations=format))
    rounding = plan.config.quantization
    assert rounding is not None and rounding.activations == format.split()[0]
    prompts = prompts_of(LENGTHS, 512)

    def logits(activations: str, device: str, data_type: str) -> np.ndarray:
        directory = tmp_path / f"w{activations}"
        if not directory.exists():
            quantization = replace(rounding, activations=activations)
            replace(plan, config=replace(plan.config, quantization=quantization)).write(directory)
        config = EngineConfig(
            device=device, data_type=data_type, max_sequences=8, max_step_tokens=64, cache_bytes=64 << 20
        )
        return np.stack([found[0] for found in run_greedy(directory, prompts, NEW, config)[1]])

    wanted = logits(rounding.activations, "cpu", "fp32")
    moved = np.abs(logits("", "cpu", "fp32") - wanted).max()
    bound = moved + rounding_bound(model, prompts, dtype, DEVICE)
    assert np.abs(logits(rounding.activations, DEVICE, dtype) - wanted).max() <= bound


def test_fp8_blocks_stay_in_8_bit(tmp_path: Path) -> None:
    model = llama(head_size=64, heads=8, kv_heads=2, inner=384, vocab=512)
    source = save_quantized(model, tmp_path / "hf", FP8_BLOCKS)
    keep_quantized(plan_conversion(open_checkpoint(source))).write(tmp_path / "w")
    config = EngineConfig(device=DEVICE, data_type="bf16", max_sequences=4, cache_bytes=16 << 20)
    layer = OfflineEngine.load(tmp_path / "w", config).engine.state.model.layers[0]
    for linear in (layer.qkv, layer.dense, layer.up, layer.down):
        assert isinstance(linear.weight, QuantizedWeight) and linear.weight.block_rows == 128
