"""Quantised directories on a GPU against transformers' models whose weights the test itself has rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import first_logits, hf_greedy, rounding_bound
from tests.backend.models.test_quantized import FORMATS, NEW, PROMPTS, planned
from tests.checkpoints import FAMILIES, save
from tests.converters.sources.quantized_checkpoints import gptq_case, save_quantized
from tests.quantized import rounded_model
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.offline import OfflineEngine, run_greedy
from tridecode.backend.weights.quantization import Quantization
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.kept_quantized import keep_quantized
from tridecode.kernels.formats.packed_weight import PackedWeight
from tridecode.kernels.formats.quantized import QuantizedWeight

pytestmark = pytest.mark.gpu

FP32_BOUND = 2e-4  # of the largest logit: the order of the additions, over two layers


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_logits_are_those_of_transformers_with_rounded_weights(
    family: str, format: str, tmp_path: Path
) -> None:
    case = FAMILIES[family]
    model = case(**case.shared)
    save(model, tmp_path / "hf", tokenizer=False)
    plan = planned(tmp_path / "hf", FORMATS[format])
    plan.write(tmp_path / "w")
    rounded = rounded_model(model, plan, case.turned)
    config = EngineConfig(
        device="cuda", data_type="fp32", max_sequences=4, max_sequence_tokens=64, cache_bytes=64 << 20
    )
    tokens, logits = run_greedy(tmp_path / "w", PROMPTS, NEW, config)
    for prompt, ours, our_logits in zip(PROMPTS, tokens, logits):
        wanted, their_logits = hf_greedy(rounded, prompt, NEW)
        assert ours == wanted
        assert np.abs(our_logits - their_logits).max() < FP32_BOUND * np.abs(their_logits).max()


PACKED = {
    "int8": Quantization("int8"),
    "fp8": Quantization("fp8"),
    "int4": Quantization("int4", group=32, zeros=True),
    "int4, groups of 64": Quantization("int4", group=64, zeros=True),
}


def _takes_two_parts(format: str) -> bool:
    return format == "int8" and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_packed_weights_in_16_bits_are_as_near_as_transformers_own_run(
    family: str, format: str, dtype: str, tmp_path: Path
) -> None:
    """The kernels that read 8 and 4 bit, in prompts, in steps, and in CUDA graphs."""
    case = FAMILIES[family]
    model = case(**case.shared)
    save(model, tmp_path / "hf", tokenizer=False)
    plan = planned(tmp_path / "hf", PACKED[format])
    plan.write(tmp_path / "w")
    rounded = rounded_model(model, plan, case.turned)
    config = EngineConfig(
        device="cuda", data_type=dtype, max_sequences=4, max_sequence_tokens=64, cache_bytes=64 << 20
    )
    offline = OfflineEngine.load(tmp_path / "w", config, keep_logits=True)
    weight = offline.engine.state.model.layers[0].qkv.weight  # int8 stays in rows on Hopper
    assert isinstance(weight, QuantizedWeight if _takes_two_parts(format) else PackedWeight)
    done = offline.generate(PROMPTS, SamplingParams(max_tokens=2))
    error = np.abs(np.stack([each.logits[0] for each in done]) - first_logits(rounded, PROMPTS))
    assert error.max() <= 2 * rounding_bound(rounded, PROMPTS, dtype, "cuda")
    graphs = OfflineEngine.load(tmp_path / "w", config)
    assert [each.tokens for each in graphs.generate(PROMPTS, SamplingParams(max_tokens=2))] == [
        each.tokens for each in done
    ]


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_gptq_in_act_order_stays_in_4_bit(dtype: str, group: int, tmp_path: Path) -> None:
    """A checkpoint as GPTQ's tools write it, against transformers' model with the matrices it stands for."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    model = FAMILIES["llama"](num_key_value_heads=2, num_hidden_layers=2, **sizes)
    case = gptq_case(symmetric=False, act_order=True, group=group)
    kept = keep_quantized(plan_conversion(open_checkpoint(save_quantized(model, tmp_path / "hf", case))))
    kept.write(tmp_path / "w")
    config = EngineConfig(
        device="cuda", data_type=dtype, max_sequences=4, max_sequence_tokens=64, cache_bytes=64 << 20
    )
    offline = OfflineEngine.load(tmp_path / "w", config, keep_logits=True)
    layer = offline.engine.state.model.layers[0]
    for linear in (layer.qkv, layer.dense, layer.up, layer.down):
        assert isinstance(linear.weight, PackedWeight) and linear.weight.order is not None
    done = offline.generate(PROMPTS, SamplingParams(max_tokens=3))
    error = np.abs(np.stack([each.logits[0] for each in done]) - first_logits(model, PROMPTS))
    assert error.max() <= 2 * rounding_bound(model, PROMPTS, dtype, "cuda")
    graphs = OfflineEngine.load(tmp_path / "w", config)
    assert [each.tokens for each in graphs.generate(PROMPTS, SamplingParams(max_tokens=3))] == [
        each.tokens for each in done
    ]
