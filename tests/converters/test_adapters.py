"""Adapters at conversion: merged weights and lora_targets.json, compared with PEFT; what is refused."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import FAMILIES, save, variants
from tests.lora_adapters import make_adapter
from tridecode.backend.base.errors import CheckpointError, RequestError, TridecodeError, UnsupportedError
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.lora import (
    TARGETS_FILE,
    LoraTargets,
    check_name,
    read_lora_config,
    read_targets,
)
from tridecode.backend.weights.lora_tensors import Lora, read_lora
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters.adapters import merge, write_targets
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import PlannedConversion, plan_conversion
from tridecode.converters.output_layout import OutputLayout, output_layout
from tridecode.converters.rules import Conversion

NAME = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """family -> (transformers' model, its checkpoint), made once."""

    @cache
    def make(family: str):
        model = variants()[family]()
        return model, open_checkpoint(save(model, tmp_path_factory.mktemp(family)))

    return make


def targets_of(planned: PlannedConversion, directory: Path) -> LoraTargets:
    directory.mkdir(exist_ok=True)
    write_targets(directory, planned)
    return read_targets(directory)


#: Conv1D, heads apart, by head and by group, and modules that make several of our matrices
MERGED = [family for family in ("gpt2", "llama", "bloom", "falcon", "phi3") if family in FAMILIES]


@pytest.mark.parametrize("family", MERGED)
def test_a_merged_checkpoint_has_the_weights_that_peft_merges(tiny, family: str, tmp_path: Path) -> None:
    model, checkpoint = tiny(family)
    adapted = make_adapter(model, tmp_path / "lora", seed=3)
    plan_conversion(merge(checkpoint, tmp_path / "lora")).write(tmp_path / "ours")
    merged = save(adapted.merge_and_unload(), tmp_path / "hf")
    plan_conversion(open_checkpoint(merged)).write(tmp_path / "theirs")
    assert len(list(tmp_path.glob("ours/*.bin"))) > 10
    changed = 0
    plain = plan_conversion(checkpoint)
    plain.write(tmp_path / "base")
    for ours in tmp_path.glob("ours/*.bin"):
        found, wanted, base = (
            torch.from_file(str(tmp_path / kind / ours.name), size=ours.stat().st_size // 4)
            for kind in ("ours", "theirs", "base")
        )
        assert torch.allclose(found, wanted, atol=1e-6), ours.name
        changed += not torch.equal(found, base)
    assert changed >= 4 * checkpoint.config.num_hidden_layers


#: variants that store query, key and value in another way than their family's tiny model
OTHER_LAYOUTS = ["falcon-40b", "falcon-sequential-alibi", "gpt_bigcode-all-heads", "llama-one-kv"]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_LAYOUTS])
def test_a_served_adapter_is_the_difference_that_peft_merges(tiny, family: str, tmp_path: Path) -> None:
    """b @ a in our layout: what PEFT's merge changes in the files."""
    model, checkpoint = tiny(family)
    adapted = make_adapter(model, tmp_path / "lora", seed=4, use_rslora=True)
    planned = plan_conversion(checkpoint)
    targets = targets_of(planned, tmp_path / "w")
    lora = read_lora(tmp_path / "lora", targets, max_rank=4)
    planned.write(tmp_path / "base")
    plan_conversion(open_checkpoint(save(adapted.merge_and_unload(), tmp_path / "hf"))).write(tmp_path / "to")
    base, merged = (WeightReader(tmp_path / name, planned.config) for name in ("base", "to"))
    matrices = [spec for spec in base.specs.values() if spec.layer is not None and len(spec.shape) == 2]
    assert set(lora.pairs) == {spec.name.removesuffix(".weight") for spec in matrices}
    for spec in matrices:
        a, b = lora.pairs[spec.name.removesuffix(".weight")]
        wanted = merged.read(spec) - base.read(spec)
        assert torch.allclose((b @ a).t(), wanted, atol=2e-5), spec.name


def test_ranks_alphas_and_chosen_modules_of_patterns(tiny, tmp_path: Path) -> None:
    model, checkpoint = tiny("llama")
    adapted = make_adapter(
        model, tmp_path / "lora", seed=5, r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"v_proj": 2, "layers.1.mlp.down_proj": 6},
        alpha_pattern={"v_proj": 9, "^model.layers.0.self_attn.q_proj": 1, r"layers\.\d+\.mlp\.down_proj": 2},
    )  # fmt: skip
    ours = merge(checkpoint, tmp_path / "lora").tensors
    theirs = adapted.merge_and_unload().state_dict()
    for name in ours.shapes:
        assert torch.allclose(ours.read(name), theirs[name], atol=1e-6), name


def test_target_modules_may_name_what_the_model_lacks_as_in_peft(tiny, tmp_path: Path) -> None:
    model, checkpoint = tiny("llama")
    names = ["q_proj", "query_key_value", "c_attn"]
    adapted = make_adapter(model, tmp_path / "lora", seed=5, target_modules=names)
    merged = merge(checkpoint, tmp_path / "lora")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.allclose(merged.tensors.read(name), adapted.merge_and_unload().state_dict()[name], atol=1e-6)
    assert len(merged.notes) == 1 and "query_key_value" in merged.notes[0] and "c_attn" in merged.notes[0]
    assert "q_proj" not in merged.notes[0]
    assert not checkpoint.notes  # of the base alone
    lora = read_lora(tmp_path / "lora", targets_of(plan_conversion(checkpoint), tmp_path / "w"), 4)
    assert len(lora.pairs) == 2


def test_a_pattern_of_modules_and_an_adapter_of_the_bare_model(tiny, tmp_path: Path) -> None:
    model, checkpoint = tiny("bloom")
    make_adapter(model.transformer, tmp_path / "bare", seed=6, target_modules=r".*h\.1\..*(dense|4h_to_h)")
    targets = targets_of(plan_conversion(checkpoint), tmp_path / "w")
    lora = read_lora(tmp_path / "bare", targets, 4)
    assert set(lora.pairs) == {"model.layers.1.attention.dense", "model.layers.1.mlp.dense_4h_to_h"}
    merged = merge(checkpoint, tmp_path / "bare").tensors
    name = "transformer.h.1.self_attention.dense.weight"
    held = load_file(tmp_path / "bare" / NAME)
    a, b = (held[f"base_model.model.h.1.self_attention.dense.lora_{half}.weight"] for half in "AB")
    assert torch.allclose(merged.read(name), checkpoint.tensors.read(name) + b @ a * 6 / 4, atol=1e-6)


def test_pickled_tensors_are_merged_and_code_in_them_is_not_run(tiny, tmp_path: Path) -> None:
    model, checkpoint = tiny("gpt2")
    make_adapter(model, tmp_path / "lora", seed=7)
    path = tmp_path / "lora" / NAME
    wanted = merge(checkpoint, tmp_path / "lora").tensors
    torch.save(load_file(path), tmp_path / "lora" / "adapter_model.bin")
    path.unlink()
    found = merge(checkpoint, tmp_path / "lora").tensors
    for name in wanted.shapes:
        assert torch.equal(found.read(name), wanted.read(name))
    torch.save({"base_model.model.x.lora_A.weight": Path("/")}, tmp_path / "lora" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="code is never run"):
        merge(checkpoint, tmp_path / "lora")


SETTINGS = {
    "DoRA": ({"use_dora": True}, "use_dora = True"),
    "biases": ({"bias": "lora_only"}, "bias = 'lora_only'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "changes the base weights"),
    "another method": ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    "a later setting": ({"use_new_thing": 1}, "use_new_thing = 1"),
    "slow pattern": ({"alpha_pattern": {"(a+)+b": 1}}, "alpha_pattern"),
    "an invalid pattern": ({"alpha_pattern": {"a[": 1}}, "alpha_pattern"),
    "rank 0": ({"r": 0}, "r = 0"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha = None"),
    "a module without tensors": ({"target_modules": ["q_proj", "v_proj"]}, "target_modules has v_proj"),
    "tensors that are not listed": (
        {"target_modules": ["x_proj"]},
        "target_modules does not have model.layers.0",
    ),
}


@pytest.mark.parametrize("changes, text", SETTINGS.values(), ids=SETTINGS)
def test_what_is_not_applied_is_refused_by_name(tiny, tmp_path: Path, changes: dict, text: str) -> None:
    model, checkpoint = tiny("llama")
    make_adapter(model, tmp_path / "lora", seed=1, target_modules=["q_proj"])
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(TridecodeError, match="lora") as caught:
        merge(checkpoint, tmp_path / "lora")
    assert text in str(caught.value)


def test_a_transform_that_does_more_than_reorder_outputs_is_not_adapted() -> None:
    def layout_of(transform, shape=(6, 4), wanted=(4, 6)):
        conversion = Conversion(WeightSpec("x.weight", wanted, layer=0), ("x.weight",), transform)
        return output_layout(conversion, [shape])

    assert layout_of(lambda w: w.t().flip(1)).runs == tuple((0, 5 - i, 1) for i in range(6))
    assert layout_of(lambda w: w, (4, 6)) == OutputLayout(((0, 0, 6),), conv1d=True)
    padded = layout_of(lambda w: torch.nn.functional.pad(w.t(), (2, 0)), wanted=(4, 8))
    assert padded.runs == ((-1, 0, 2), (0, 0, 6))
    for changed in (
        lambda w: w.t().flip(0),  # inputs are moved
        lambda w: w.t() * 2,
        lambda w: w.t() / 3,
        lambda w: w.t() + 1,
        lambda w: w.t().roll(1, 0),
        lambda w: w.t()[:2],
    ):
        assert layout_of(changed) is None


def test_adapters_of_head_and_embedding_are_refused_by_name(tiny, tmp_path: Path) -> None:
    model, checkpoint = tiny("llama")
    make_adapter(model, tmp_path / "head", seed=1, target_modules=["lm_head"])
    with pytest.raises(UnsupportedError, match="lm_head.base_layer.weight"):
        merge(checkpoint, tmp_path / "head")
    make_adapter(model, tmp_path / "embedding", seed=1, target_modules=["embed_tokens"])
    with pytest.raises(UnsupportedError, match="embed_tokens"):
        merge(checkpoint, tmp_path / "embedding")


def test_an_adapter_of_another_model_is_refused(tiny, tmp_path: Path) -> None:
    make_adapter(FAMILIES["llama"](intermediate_size=80), tmp_path / "lora", seed=1)
    checkpoint = tiny("llama")[1]
    with pytest.raises(CheckpointError, match="another model"):
        merge(checkpoint, tmp_path / "lora")
    targets = targets_of(plan_conversion(checkpoint), tmp_path / "w")
    with pytest.raises(CheckpointError, match="another model"):
        read_lora(tmp_path / "lora", targets, 4)


def header(tensors: dict) -> bytes:
    data = json.dumps(tensors).encode()
    return struct.pack("<Q", len(data)) + data


A, B = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "lora_B"
ENTRY = {"dtype": "F32", "shape": [4, 48], "data_offsets": [0, 768]}
DAMAGED = {
    "empty": b"",
    "a short length": b"\1\0",
    "an endless header": struct.pack("<Q", 1 << 60) + b"{}",
    "a byte of a name that is not UTF-8": (header({A: ENTRY}).replace(b"q_proj", b"q_pr\xffj") + b"\0" * 768),
    "a byte of a value that is not UTF-8": header({A: ENTRY}).replace(b"F32", b"F3\xff") + b"\0" * 768,
    "many dimensions": header({A: {**ENTRY, "shape": [2**62] * 200_000}}) + b"\0" * 768,
    "no JSON": struct.pack("<Q", 4) + b"abcd",
    "deep JSON": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "cut short": header({A: ENTRY}) + b"\0" * 700,
    "a wrong size": header({A: {**ENTRY, "data_offsets": [0, 700]}}) + b"\0" * 768,
    "a negative shape": header({A: {**ENTRY, "shape": [-4, -48]}}) + b"\0" * 768,
    "a negative offset": header({A: {**ENTRY, "data_offsets": [-768, 0]}}) + b"\0" * 768,
    "integers": header({A: {**ENTRY, "dtype": "I32"}}) + b"\0" * 768,
    "no B": header({A: ENTRY}) + b"\0" * 768,
    "nothing": header({}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_clear_error(tiny, tmp_path: Path, content: bytes) -> None:
    model, checkpoint = tiny("llama")
    make_adapter(model, tmp_path / "lora", seed=1, target_modules=["q_proj"])
    targets = targets_of(plan_conversion(checkpoint), tmp_path / "w")
    (tmp_path / "lora" / NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=NAME):
        read_lora(tmp_path / "lora", targets, 4)


def test_a_damaged_config_is_one_clear_error(tiny, tmp_path: Path) -> None:
    model, checkpoint = tiny("llama")
    make_adapter(model, tmp_path / "lora", seed=1, target_modules=["q_proj"])
    targets = targets_of(plan_conversion(checkpoint), tmp_path / "w")
    path = tmp_path / "lora" / "adapter_config.json"
    for content in (
        b'{"peft_type": "\xff"}',
        b'{"\xff": 1}',
        b"\xff\xfe",
        b"",
        b"[",
        b"[" * 100_000,
        b"null",
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="adapter_config.json (is not valid JSON|holds a)"):
            read_lora(tmp_path / "lora", targets, 4)


def test_limits_are_checked_before_tensors_are_read(tiny, tmp_path: Path) -> None:
    model, checkpoint = tiny("gpt2")
    targets = targets_of(plan_conversion(checkpoint), tmp_path / "w")
    make_adapter(model, tmp_path / "lora", seed=1, r=5)
    with pytest.raises(RequestError, match="rank 5; this model accepts 4 .max_lora_rank"):
        read_lora(tmp_path / "lora", targets, 4)
    with open(tmp_path / "lora" / NAME, "r+b") as file:
        file.truncate(1 << 40)  # a hole, no bytes
    with pytest.raises(RequestError, match="holds 1,099,511,627,776 bytes"):
        read_lora(tmp_path / "lora", targets, 5)


def test_values_that_are_not_finite_are_refused(tiny, tmp_path: Path) -> None:
    model, checkpoint = tiny("gpt2")
    targets = targets_of(plan_conversion(checkpoint), tmp_path / "w")
    make_adapter(model, tmp_path / "lora", seed=1)
    held = load_file(tmp_path / "lora" / NAME)
    next(iter(held.values()))[0, 0] = torch.nan
    save_file(held, tmp_path / "lora" / NAME)
    with pytest.raises(CheckpointError, match="not finite"):
        read_lora(tmp_path / "lora", targets, 5)


def test_damaged_targets_are_refused(tiny, tmp_path: Path) -> None:
    checkpoint = tiny("bloom")[1]
    targets = targets_of(plan_conversion(checkpoint), tmp_path)
    beyond = msgspec.structs.replace(targets, layouts=[[(0, 100, 50)]])
    wrong = {
        "is not valid: 'utf-8' codec": b'{"format": "\xff"}',
        "is not valid": b"{",
        "has format 'x'": msgspec.json.encode(msgspec.structs.replace(targets, format="x")),
        "does not fit": msgspec.json.encode(beyond),
    }
    for text, data in wrong.items():
        (tmp_path / TARGETS_FILE).write_bytes(data)
        with pytest.raises(CheckpointError, match=text):
            read_targets(tmp_path)
    (tmp_path / TARGETS_FILE).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        read_targets(tmp_path)


def test_the_digest_of_an_adapter_changes_with_every_target_shape_and_value() -> None:
    def lora(target: str = "a", value: float = 1.0, rank: int = 2) -> Lora:
        a, b = torch.arange(float(6 * rank)).view(rank, 6), torch.ones(4, rank)
        b[3, 1] = value
        return Lora({"first": (torch.ones(1, 2), torch.ones(2, 1)), target: (a, b)})

    turned = {name: lora().pairs[name] for name in ("a", "first")}
    assert lora().digest() == lora().digest() == Lora(turned).digest()
    swapped = Lora({"a": lora().pairs["first"], "first": lora().pairs["a"]})
    others = [lora("b"), lora(value=1.0000001), lora(rank=3), Lora({}), swapped]
    assert len({one.digest() for one in [lora(), *others]}) == 6


def test_names_cannot_lead_out_of_the_folder() -> None:
    for name in ("a", "My-adapter_2.1", "_x", "x" * 128):
        check_name(name)
    for name in ("", ".", "..", ".x", "-x", "a/b", "../a", "a\\b", "a\0", "a b", "ä", "a\n", "x" * 129):
        with pytest.raises(RequestError, match="lora_name is"):
            check_name(name)


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"[]", b"{", b"[" * 100_000, b'"' + b"x" * (2 << 20) + b'"'):
        (tmp_path / "adapter_config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="adapter_config.json"):
            read_lora_config(tmp_path)
