"""Quantised checkpoints that are damaged or stored in another way are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoints import FAMILIES, save
from tests.converters.sources import compressed_checkpoints
from tests.converters.sources.quantized_checkpoints import METHODS, save_quantized
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.sources.quantized import quantization_of

CASES = {**METHODS, **compressed_checkpoints.CASES}
Q = "model.layers.0.self_attn.q_proj"  # (48, 48)
GROUPS = "W4A16 groups"
ACT_ORDER = "gptq 4 bit v2 asymmetric act-order"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each method that the tests damage."""
    used = (
        "gptq 4 bit", ACT_ORDER, "awq", "fp8 blocks", "bitsandbytes 8 bit",
        "nf4 nested", GROUPS, "W8A8", "FP8 channels",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("quantized")
    small = {"num_hidden_layers": 1}
    return {
        method: save_quantized(FAMILIES["llama"](**small), folder / str(number), CASES[method])
        for number, method in enumerate(used)
    }


def set_value(part: str, value: Any):
    """A change of a part's first number."""

    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{Q}.{part}"].flatten()[0] = value

    return change


def cut(part: str):
    """A change that drops the last row of a part."""

    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{Q}.{part}"] = state[f"{Q}.{part}"][:-1].contiguous()

    return change


def cast(part: str, dtype: torch.dtype):
    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{Q}.{part}"] = state[f"{Q}.{part}"].to(dtype)

    return change


def drop(part: str):
    return lambda state: state.pop(f"{Q}.{part}")


def state_of(text: bytes):
    name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
    return lambda state: state.update({name: torch.tensor(list(text), dtype=torch.uint8)})


def nan_byte(part: str):
    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{Q}.{part}"].view(torch.uint8).flatten()[0] = 0xFF

    return change


DAMAGE = [
    ("gptq 4 bit", drop("qzeros"), f"has no {Q}.qzeros"),
    ("gptq 4 bit", cut("scales"), f"{Q}.scales is (5, 48); wanted (6, 48)"),
    ("gptq 4 bit", cut("qweight"), f"{Q}.qweight is (5, 48); wanted (6, 48)"),
    ("gptq 4 bit", cast("qweight", torch.int64), f"{Q}.qweight is torch.int64; wanted torch.int32"),
    ("gptq 4 bit", set_value("scales", 0), f"{Q}.scales holds 0; wanted scales above 0"),
    ("gptq 4 bit", set_value("scales", -1), f"{Q}.scales holds -1; wanted scales above 0"),
    ("gptq 4 bit", set_value("scales", torch.nan), f"{Q}.scales holds NaN or infinity"),
    (ACT_ORDER, set_value("g_idx", 6), f"{Q}.g_idx has groups 0 to 6; wanted 0 to 5"),
    (ACT_ORDER, set_value("g_idx", -1), f"{Q}.g_idx has groups -1 to 5"),
    ("awq", cut("qzeros"), f"{Q}.qzeros is (5, 6); wanted (6, 6)"),
    ("awq", set_value("scales", torch.inf), f"{Q}.scales holds NaN or infinity"),
    ("awq", lambda state: state.update({f"{Q}.weight": torch.zeros(48, 48)}), f"has {Q}.weight twice"),
    ("fp8 blocks", cut("weight_scale_inv"), f"{Q}.weight_scale_inv is (2, 2); wanted (3, 2)"),
    ("fp8 blocks", set_value("weight_scale_inv", 0), "holds 0; wanted scales above 0"),
    ("fp8 blocks", nan_byte("weight"), f"{Q}.weight holds NaN"),
    ("fp8 blocks", cast("weight", torch.float8_e5m2), "is torch.float8_e5m2; wanted torch.float8_e4m3fn"),
    ("bitsandbytes 8 bit", cut("SCB"), f"{Q}.SCB is (47,); wanted (48)"),
    ("bitsandbytes 8 bit", set_value("SCB", torch.nan), f"{Q}.SCB holds NaN"),
    ("bitsandbytes 8 bit", set_value("weight_format", 2), f"{Q}.weight_format is 2; wanted 0, rows"),
    ("nf4 nested", cut("weight"), f"{Q}.weight holds 1,151 bytes; wanted 1,152 of (48, 48)"),
    ("nf4 nested", cut("weight.absmax"), f"{Q}.weight.absmax is (35,); wanted (36)"),
    ("nf4 nested", drop("weight.nested_absmax"), f"has no {Q}.weight.nested_absmax"),
    ("nf4 nested", set_value("weight.quant_map", torch.nan), f"{Q}.weight.quant_map holds a number beyond"),
    ("nf4 nested", state_of(b"{"), "is not valid JSON"),
    ("nf4 nested", state_of(b"[" * 4000), "is not valid JSON"),
    ("nf4 nested", state_of(b"{}" + b" " * 5000), "holds 5,002 bytes; wanted at most 4,096"),
    ("nf4 nested", state_of(b'{"shape": [48], "blocksize": 64}'), "has no shape of a matrix"),
    ("nf4 nested", state_of(b'{"shape": [48, 1e9], "blocksize": 64}'), "has no shape of a matrix"),
    ("nf4 nested", state_of(b'{"shape": [48, 48], "blocksize": 0}'), "has blocksize = 0; wanted 1 or more"),
    ("nf4 nested", state_of(b'{"shape": [48, 48]}'), "has blocksize = None; wanted 1 or more"),
    (
        "nf4 nested",
        state_of(b'{"shape": [48, 48], "blocksize": 64, "nested_offset": NaN}'),
        "has nested_offset = nan",
    ),
    (GROUPS, set_value("weight_shape", -48), "says (-48, 48); wanted two sizes of 1 or more"),
    (GROUPS, set_value("weight_shape", 96), f"{Q}.weight_packed is (48, 6); wanted (96, 6)"),
    (GROUPS, drop("weight_scale"), f"has no {Q}.weight_scale"),
    (GROUPS, set_value("weight_scale", 0), "holds 0; wanted scales above 0"),
    ("W8A8", cut("weight_scale"), f"{Q}.weight_scale is (47, 1)"),
    ("W8A8", cast("weight", torch.uint8), f"{Q}.weight is torch.uint8; wanted torch.int8"),
    ("FP8 channels", nan_byte("weight"), f"{Q}.weight holds NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "change", "complaint"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_the_tensor(method, change, complaint, sources, tmp_path) -> None:
    state = load_file(sources[method] / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((sources[method] / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path).tensors.read(f"{Q}.weight")
    assert complaint in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_checkpoint_without_a_quantised_module_is_refused(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path, tokenizer=False)
    held = json.loads((tmp_path / "config.json").read_text())
    held["quantization_config"] = METHODS["awq"].config
    (tmp_path / "config.json").write_text(json.dumps(held))
    with pytest.raises(
        CheckpointError, match=r"\(awq, 4 bit, groups of 8\), but no tensor's name ends in .qweight"
    ):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------- settings

GPTQ, AWQ = METHODS["gptq 4 bit"].config, METHODS["awq"].config
ROUND = METHODS["auto-round as gptq"].config
BNB, FP8 = METHODS["nf4"].config, METHODS["fp8 blocks"].config
PACKED = CASES[GROUPS].config


def with_weights(**changes: Any) -> dict[str, Any]:
    group = PACKED["config_groups"]["group_0"]
    return {**PACKED, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


EIGHT_BIT = with_weights(num_bits=8)["config_groups"]["group_0"]
UNSUPPORTED = [
    ({**GPTQ, "bits": 3}, "quantised by gptq with bits = 3; this version reads 4, 8"),
    ({**GPTQ, "bits": True}, "bits = True"),
    ({**GPTQ, "bits": None}, "bits = None"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'; this version reads gptq"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format = True"),
    ({**GPTQ, "dynamic": {"+:.*down": {"bits": 8}}}, "dynamic settings of '+:.*down'"),
    ({**ROUND, "packing_format": "auto_round:auto_awq"}, "packing_format = 'auto_round:auto_awq'; this"),
    ({**ROUND, "bits": 2}, "quantised by auto-round with bits = 2; this version reads 4, 8"),
    ({**ROUND, "data_type": "mx_fp"}, "data_type = 'mx_fp'"),
    ({**ROUND, "act_bits": 8}, "act_bits = 8; this version reads 16"),
    ({**ROUND, "extra_config": {"lm_head": {"bits": 8}}}, "extra_config of 'lm_head', bits = 8; this"),
    ({**AWQ, "version": "gemv"}, "version = 'gemv'; this version reads gemm"),
    ({**AWQ, "bits": 8}, "quantised by awq with bits = 8"),
    ({**AWQ, "zero_point": False}, "zero_point = False"),
    ({**FP8, "fmt": "e5m2"}, "fmt = 'e5m2'; this version reads e4m3"),
    ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
    ({**BNB, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type = 'int4'; this version reads nf4, fp4"),
    ({**PACKED, "format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'; this version reads"),
    ({**PACKED, "quantization_status": "frozen"}, "quantization_status = 'frozen'; this version reads compr"),
    ({**PACKED, "transform_config": {"R1": {}}}, "with a transform_config"),
    ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format = 'sparse-24-bitmask'; this"),
    (with_weights(num_bits=3), "config_groups, group_0, weights with num_bits = 3; this version reads 4"),
    (with_weights(type="float"), "type = 'float'; this version reads int"),
    (with_weights(strategy="token"), "strategy = 'token'"),
    ({**PACKED, "config_groups": {**PACKED["config_groups"], "b": EIGHT_BIT}},
     "differing config_groups (compressed-tensors, pack-quantized, int4, groups of 8; compressed"),
    ({"quant_method": "torchao"}, "quantised by 'torchao'; this version reads gptq, awq, compressed-tensors"),
    ({"quant_method": ["gptq"]}, "quantised by ['gptq']"),
]  # fmt: skip
MALFORMED = [
    ({**GPTQ, "group_size": 0}, "group_size = 0; wanted -1, or 1 to 1,048,576"),
    ({**GPTQ, "group_size": "128"}, "group_size = '128'"),
    ({**GPTQ, "dynamic": ["a"]}, "dynamic = ['a']; wanted an object"),
    ({**ROUND, "extra_config": {"lm_head": 8}}, "extra_config = 8; wanted an object for each module"),
    ({**ROUND, "rotation_config": {"R1": 1}}, "rotation_config = an object; wanted none"),
    ({**FP8, "weight_block_size": [128]}, "weight_block_size = [128]; wanted two sizes"),
    ({**BNB, "load_in_8bit": True}, "wanted one of them true"),
    ({**PACKED, "config_groups": {str(number): {} for number in range(101)}}, "101 groups'; wanted 1 to 100"),
    ({**PACKED, "config_groups": {"group_0": None}}, "group_0 = None; wanted an object"),
    (with_weights(group_size=None), "group_size = None; wanted 1 or more"),
    ("int8", "has quantization_config = 'int8'; wanted an object"),
]


@pytest.mark.parametrize(("held", "complaint"), UNSUPPORTED)
def test_a_setting_that_is_not_read_is_refused_by_name(held, complaint) -> None:
    with pytest.raises(UnsupportedError) as caught:
        quantization_of({"quantization_config": held}, Path("c/config.json"))
    assert complaint in str(caught.value) and str(caught.value).startswith("c/config.json says")


@pytest.mark.parametrize(("held", "complaint"), MALFORMED)
def test_a_malformed_setting_is_refused_by_name(held, complaint) -> None:
    with pytest.raises(CheckpointError) as caught:
        quantization_of({"quantization_config": held}, Path("c/config.json"))
    assert complaint in str(caught.value) and str(caught.value).startswith("c/config.json has")


def test_settings_that_are_unknown_are_named() -> None:
    method, unknown = quantization_of(
        {"quantization_config": {**GPTQ, "rotation": 1, "dataset": "c4"}}, Path("c")
    )
    assert method.title == "gptq, 4 bit, groups of 8" and unknown == ["rotation"]


def test_a_list_of_modules_that_stay_dense_is_no_setting_of_others() -> None:
    held = {**GPTQ, "dynamic": {"-:.*down.*": {}}}
    assert quantization_of({"quantization_config": held}, Path("c")) is not None


_KEYS = sorted({key for case in CASES.values() for key in case.config} | {"dynamic", "format", "group_size"})
_ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("compressed-tensors"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(CASES)), st.dictionaries(st.sampled_from(_KEYS), _ODD, max_size=3), _ODD, _ODD)
@settings(max_examples=150, deadline=None)
def test_whatever_a_description_holds_it_is_read_or_refused(method, changes, group, weights) -> None:
    held = {**CASES[method].config, **changes}
    if isinstance(held.get("config_groups"), dict) and isinstance(weights, dict):
        held["config_groups"] = {"a": {"weights": weights}, **held["config_groups"], "b": group}
    try:
        found = quantization_of({"quantization_config": held}, Path("c"))
    except (CheckpointError, UnsupportedError) as error:
        assert len(str(error)) < 600
    else:
        assert found is None or found[0].title
