"""The memory of a model on a machine, to the byte, and the advice if it does not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.tools.doctor.doctors import GIB
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.backend.weights.quantization import Quantization
from tridecode.tools.doctor.fit import Place, fit, fit_findings

LLAMA_8B = ModelConfig(
    "llama", "llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, 1e-5, 1, 2, "bf16", "silu",
    RopeConfig(128, 500000.0), attention_bias=False, mlp_bias=False, tied_head=False,
)  # fmt: skip
BF16 = EngineConfig(data_type="bf16", max_sequences=256)


def test_a_model_of_known_size_is_planned_to_the_byte():
    found = fit(LLAMA_8B, BF16, Place("cuda", 80 * GIB))
    parameters = 8_030_261_248  # of Meta-Llama-3-8B's safetensors index
    tables = 2 * 8192 * 64 * 4  # cos and sin of 8192 positions
    assert found.ranks[0].weights == 2 * parameters + tables
    assert found.ranks[0].block == 32 * 2 * 8 * 128 * 32 * 2  # layers, K and V, kv heads, size, tokens, bytes
    left = int(0.9 * 80 * GIB) - found.ranks[0].fixed - found.libraries
    assert found.blocks == left // found.ranks[0].block
    assert (
        dict(found.sequences)[512] == found.blocks // 16
        and dict(found.sequences)[8192] == found.blocks // 256
    )


def test_tensor_and_pipeline_ranks_share_it():
    config = replace(BF16, tensor_para_size=2, pipeline_para_size=2)
    found = fit(LLAMA_8B, config, Place("cuda", 24 * GIB, 4))
    assert len(found.ranks) == 4 and found.fits
    assert len({rank.block for rank in found.ranks}) == 1
    assert found.ranks[0].block == 16 * 2 * 4 * 128 * 32 * 2
    embedding = 2 * 2 * 128256 * 4096 // 2  # word embedding and head, cut by vocabulary
    norms = 2 * 4096 * (2 * 16 + 1)
    matrices = 2 * (8_030_261_248 - 2 * 128256 * 4096 - 4096 * 65) // 4
    assert found.ranks[3].weights == embedding + norms + matrices + 2 * 8192 * 64 * 4


@pytest.mark.parametrize(
    ("config", "place", "wanted"),
    [
        (BF16, Place("cuda", 16 * GIB, 2), "Set tensor_para_size 2 and pipeline_para_size 1."),
        (
            BF16,
            Place("cuda", 12 * GIB, 1),
            "Set tensor_para_size 2 and pipeline_para_size 1, which takes 2 GPUs.",
        ),
        (replace(BF16, data_type="fp32"), Place("cuda", 24 * GIB), "Set data_type to bf16."),
        (replace(BF16, data_type="fp32"), Place("cuda", 24 * GIB, 1, 75), "Set data_type to fp16."),
        (replace(BF16, cache_bytes=60 * GIB), Place("cuda", 40 * GIB), "Lower cache_bytes to"),
        (BF16, Place("cuda", 1 * GIB), "Use a smaller model"),
        (BF16, Place("cpu", 8 * GIB), "Use a smaller model"),
    ],
)
def test_a_model_that_does_not_fit_is_a_problem_with_a_way_out(config, place, wanted):
    config = replace(config, max_sequences=16, max_sequence_tokens=2048)
    found = fit(LLAMA_8B, config, place)
    (finding,) = fit_findings("where", LLAMA_8B, config, place, found)
    assert not found.fits and finding.severity == "error"
    assert finding.fix.startswith(wanted), finding.fix


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_an_8_bit_cache_is_planned_with_its_scales(dtype: str):
    config = replace(BF16, data_type="fp32", max_sequences=64, kv_cache_dtype=dtype)
    narrow = fit(LLAMA_8B, config, Place("cpu", 80 * GIB))
    whole = fit(LLAMA_8B, replace(config, kv_cache_dtype="auto"), Place("cpu", 80 * GIB))
    assert (whole.cache_dtype, narrow.cache_dtype) == ("fp32", dtype)
    # layers, K and V, kv heads, tokens; a byte for each of 128 values and 4 for their scale
    assert narrow.ranks[0].block == 32 * 2 * 8 * 32 * (128 + 4)
    assert 3.8 * whole.blocks < narrow.blocks <= 512 / 132 * (whole.blocks + 1)
    assert narrow.ranks[0].fixed == whole.ranks[0].fixed


@pytest.mark.parametrize(("longest", "expanded"), [(2048, 64 << 20), (1 << 17, (1 << 17) * 2 * 8 * 128 * 2)])
def test_an_8_bit_cache_on_a_gpu_is_planned_with_the_scratch_of_its_prompts(longest: int, expanded: int):
    """Scratch holds the longest context of a layer in bf16, or several shorter ones."""
    config = replace(BF16, max_sequences=16, max_sequence_tokens=longest)
    model = replace(LLAMA_8B, max_positions=longest)
    narrow, whole = (
        fit(model, replace(config, kv_cache_dtype=dtype), Place("cuda", 80 * GIB))
        for dtype in ("int8", "auto")
    )
    assert narrow.ranks[0].block == 32 * 2 * 8 * 32 * (128 + 4)
    assert narrow.ranks[0].scratch - whole.ranks[0].scratch == expanded
    assert narrow.ranks[0].weights == whole.ranks[0].weights


def follow(fix: str, config: EngineConfig) -> EngineConfig:
    """Return the settings after the change that a finding advises."""
    found = re.search(r"tensor_para_size (\d+) and pipeline_para_size (\d+)", fix)
    assert found, fix
    return replace(config, tensor_para_size=int(found[1]), pipeline_para_size=int(found[2]))


def test_what_is_said_to_change_helps():
    config, place = replace(BF16, max_sequences=16, max_sequence_tokens=2048), Place("cuda", 10 * GIB, 8)
    (finding,) = fit_findings("w", LLAMA_8B, config, place, fit(LLAMA_8B, config, place))
    changed = follow(finding.fix, config)
    assert list(fit_findings("w", LLAMA_8B, changed, place, fit(LLAMA_8B, changed, place))) == []


def test_a_cache_too_small_for_one_long_sequence_is_a_problem():
    config = replace(BF16, max_sequences=4, cache_bytes=512 << 20)
    found = fit(LLAMA_8B, config, Place("cuda", 80 * GIB))
    (finding,) = fit_findings("w", LLAMA_8B, config, found.place, found)
    assert finding.severity == "error" and "max_sequence_tokens 8,192" in finding.found
    assert f"to {found.tokens} or less" in finding.fix
    assert found.tokens == (512 << 20) // found.ranks[0].block * 32


def test_more_sequences_than_the_cache_holds_is_a_warning():
    config = replace(BF16, max_sequences=2000, max_sequence_tokens=2048, max_step_tokens=8192)
    found = fit(LLAMA_8B, config, Place("cuda", 24 * GIB))
    (finding,) = fit_findings("w", LLAMA_8B, config, found.place, found)
    room = found.blocks // 16
    assert finding.severity == "warning" and f"holds {room} of 512 tokens" in finding.found
    assert f"Set max_sequences to {room}" in finding.fix


def test_the_reference_of_shadow_runs_is_planned_and_its_lack_of_room_has_a_way_out():
    model = replace(LLAMA_8B, quantization=Quantization("int8"))
    config = replace(BF16, max_sequences=16, max_sequence_tokens=2048)
    shadowed = replace(config, shadow_share=0.01, shadow_weights="../dense")
    plain, found = (fit(model, one, Place("cuda", 80 * GIB)) for one in (config, shadowed))
    shadow, tables = found.ranks[0].background["shadow runs"], 2 * 2048 * 64 * 4
    cache = 2 * 2048 // 32 * found.ranks[0].block  # two caches of one sequence
    logits = (3 * 8 + 4) * 16 * 128256  # 16 rows: two distributions and scratch in float64, logits in float32
    exact = 2 * 8_030_261_248 + tables + cache + logits
    rows = (
        256 * (2 * 4096 + 6144 + 4096 + 2 * 14336) * 2
    )  # rows of a slice; with their copy at most twice as much
    assert exact < shadow < exact + 2 * rows
    assert found.ranks[0].fixed == plain.ranks[0].fixed + shadow
    tight = Place("cuda", 24 * GIB)
    assert fit(model, config, tight).fits and not (found := fit(model, shadowed, tight)).fits
    (finding,) = fit_findings("w", model, shadowed, tight, found)
    assert "for the 16-bit reference of shadow runs" in finding.found
    assert finding.fix.startswith("Set shadow_share to 0")


def test_adapters_without_room_beside_the_cache_are_warned_of():
    config = replace(BF16, lora_path="../adapters", max_loras=64, max_lora_rank=128, max_sequences=16)
    found = fit(LLAMA_8B, config, Place("cuda", 80 * GIB))
    # query_key_value counts as three modules and the gated MLP has two: docs/guides/doctor.md
    qkv, gate_up = 3 * (4096 + 6144), 2 * (4096 + 2 * 14336)
    one = 128 * (qkv + (4096 + 4096) + gate_up + (14336 + 4096)) * 32 * 2
    assert found.ranks[0].adapters == 64 * one
    (finding,) = fit_findings("w", LLAMA_8B, config, found.place, found)
    assert finding.severity == "warning" and "64 adapters of rank 128" in finding.found
    (fraction,) = re.findall(r"memory_fraction to (\d\.\d+)", finding.fix)
    changed = replace(config, memory_fraction=float(fraction))
    assert list(fit_findings("w", LLAMA_8B, changed, found.place, fit(LLAMA_8B, changed, found.place))) == []


def test_a_host_tier_is_proposed_for_a_gpu_within_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr("tridecode.tools.doctor.fit.available_memory", lambda: 101 * GIB)
    found = fit(LLAMA_8B, BF16, Place("cuda", 80 * GIB))
    assert found.host_cache == 50 * GIB
    assert found.host_tokens == 50 * GIB // (128 << 10), "128 KiB a token"
    assert fit(LLAMA_8B, replace(BF16, data_type="fp32"), Place("cpu", 200 * GIB)).host_cache == 0
    config = replace(BF16, host_cache_bytes=200 * GIB, max_sequences=16)
    given = fit(LLAMA_8B, config, Place("cuda", 80 * GIB))
    (finding,) = fit_findings("where", LLAMA_8B, config, Place("cuda", 80 * GIB), given)
    assert finding.severity == "warning" and finding.fix == f"Set host_cache_bytes to {50 * GIB} or less."
    assert "200.00 GiB" in finding.found and "101.00 GiB" in finding.found
    buffers = 2 * (128 << 20)
    assert (
        given.ranks[0].workspace
        == fit(LLAMA_8B, replace(config, host_cache_bytes=0), given.place).ranks[0].workspace + buffers
    )


def test_engines_of_one_machine_share_the_memory_for_host_tiers(monkeypatch):
    monkeypatch.setattr("tridecode.tools.doctor.fit.available_memory", lambda: 101 * GIB)
    place, config = Place("cuda", 80 * GIB, engines=4), replace(BF16, max_sequences=16)
    assert fit(LLAMA_8B, config, place).host_cache == 12 * GIB
    large = replace(config, host_cache_bytes=26 * GIB)
    (finding,) = fit_findings("where", LLAMA_8B, large, place, fit(LLAMA_8B, large, place))
    assert "26.00 GiB for each of 4 engines" in finding.found
    assert finding.fix == f"Set host_cache_bytes to {12 * GIB} or less."


@pytest.mark.parametrize("change", [{"prefix_cache": False}, {"cache_scope": "none"}])
def test_no_host_tier_is_proposed_where_no_request_shares_blocks(monkeypatch, change):
    monkeypatch.setattr("tridecode.tools.doctor.fit.available_memory", lambda: 101 * GIB)
    place, config = Place("cuda", 80 * GIB), replace(BF16, max_sequences=16, **change)
    assert fit(LLAMA_8B, config, place).host_cache == 0
    useless = replace(config, host_cache_bytes=GIB)
    found = fit(LLAMA_8B, useless, place)
    (finding,) = fit_findings("where", LLAMA_8B, useless, place, found)
    assert finding.severity == "warning" and "runs without a host tier" in finding.found
    assert (
        found.host_cache == 0 and found.ranks[0].workspace == fit(LLAMA_8B, config, place).ranks[0].workspace
    )
