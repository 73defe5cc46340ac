"""Sparse weights: dense files with zeros, and the bitmask containers, packed here with numpy and, where it is
installed, by compressed-tensors itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import FAMILIES, greedy, save
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.weights.manifest import read_manifest
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity.comparison import check_parity
from tridecode.converters.pruning.zeros import ZeroCounter, zeros_summary
from tridecode.converters.writer import is_matrix

PROMPTS = [[5], [7, 9, 11], list(range(20, 45))]


def sparsify(model, pattern: str):
    """Zero the matrices of the layers in place: magnitude pruning, 2:4 along the inputs or half of all."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layers." in name:
            weight = parameter.data  # (out, in)
            flat = weight.reshape(-1, 4) if pattern == "2:4" else weight.reshape(1, -1)
            smallest = flat.abs().argsort(dim=1)[:, : flat.shape[1] // 2]
            weight.copy_(flat.scatter(1, smallest, 0.0).reshape(weight.shape))
    return model


def packed(module: str, weight: Tensor, container: str) -> dict[str, Tensor]:
    """One matrix in a container, by the documented layout."""
    values = weight.float().numpy()
    mask = values != 0
    bits = np.packbits(mask, axis=-1, bitorder="little")
    counts = mask.sum(-1)
    parts = {
        "shape": torch.tensor(weight.shape),
        "bitmask": torch.from_numpy(bits),
        "compressed": torch.from_numpy(values[mask]).to(weight.dtype),
        "row_offsets": torch.from_numpy(np.cumsum(counts) - counts),
    }
    if container == "sparse-24-bitmask":
        del parts["row_offsets"]
        parts["shape"] = parts["shape"].reshape(-1, 1)
        parts["compressed"] = parts["compressed"].reshape(len(values), -1)
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}


def container_config(container: str, **quantization) -> dict:
    sparsity = {"format": container, "global_sparsity": 0.5, "ignore": ["lm_head"], "targets": ["Linear"]}
    described = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    return {"quantization_config": {**described, "sparsity_config": sparsity, **quantization}}


def save_container(model, directory: Path, container: str, pack=packed) -> Path:
    """The checkpoint with the matrices of its layers in a container, sharded in two files."""
    save(model, directory, tokenizer=False)
    rewrite_config(directory, **container_config(container))
    state: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim == 2 and ".layers." in name:
            state.update(pack(name.removesuffix(".weight"), tensor, container))
        else:
            state[name] = tensor
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, directory / file)
    index = {"weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def rewrite_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_same_files(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.glob("*.bin"))
    assert names == sorted(path.name for path in second.glob("*.bin"))
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


# ---------------------------------------------------------------- dense files with zeros


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pattern, share", [("2:4", 0.5), ("half", 0.5), ("none", 0.0)])
def test_zeros_are_counted_in_the_manifest_and_the_model_serves(
    pattern, share, ranks, tmp_path: Path
) -> None:
    model = FAMILIES["llama"]()
    if pattern != "none":
        sparsify(model, pattern)
    planned = plan_conversion(open_checkpoint(save(model, tmp_path / "hf", tokenizer=False)))
    manifest = planned.write(tmp_path / "w", ranks)
    assert manifest.weight_sparsity == pytest.approx(share, abs=1e-3)
    assert manifest.sparsity_pattern == ("2:4" if pattern == "2:4" else "")
    assert read_manifest(tmp_path / "w") == manifest
    specs = {item.spec.name: item.spec for item in planned.conversions}
    for tensor in manifest.tensors:
        files = [np.fromfile(tmp_path / "w" / file.name, np.float32) for file in tensor.files]
        zeros = sum(int((file == 0).sum()) for file in files) if is_matrix(specs[tensor.name]) else 0
        assert tensor.zeros == zeros, tensor.name
    matrices = 2 * 5
    summary = zeros_summary(manifest)
    assert summary.endswith(f"; {matrices} of {matrices} are 2:4 sparse") == (pattern == "2:4")
    assert f"zeros: {share:.1%} of" in summary
    tokens, _ = run_greedy(tmp_path / "w", PROMPTS, 4)
    assert tokens == [greedy(model, prompt, 4)[0] for prompt in PROMPTS]


@given(
    rows=st.integers(1, 13), columns=st.integers(1, 5), density=st.floats(0, 1), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), cuts=st.sets(st.integers(1, 12)),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_the_counter_counts_as_numpy_in_any_cut(rows, columns, density, seed, dtype, cuts) -> None:
    random = np.random.default_rng(seed)
    values = np.where(random.random((rows, columns)) < density, random.standard_normal((rows, columns)), 0.0)
    values[random.random((rows, columns)) < 0.1] = -0.0
    weight = torch.from_numpy(values).to(dtype)
    counter, edges = ZeroCounter(), [0, *sorted(cut for cut in cuts if cut < rows), rows]
    for start, stop in zip(edges, edges[1:]):
        counter.update(weight[start:stop])
    rounded = weight.float().numpy()
    assert (counter.weights, counter.zeros) == (rounded.size, int((rounded == 0).sum()))
    groups = rows % 4 == 0 and ((rounded != 0).reshape(-1, 4, columns).sum(1) <= 2).all()
    assert counter.two_of_four == bool(groups)


# ---------------------------------------------------------------- containers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("container, pattern", [("sparse-24-bitmask", "2:4"), ("sparse-bitmask", "half")])
def test_a_container_converts_to_the_files_of_the_dense_checkpoint(
    container, pattern, dtype, tmp_path
) -> None:
    model = sparsify(FAMILIES["llama"](), pattern).to(dtype)
    plan_conversion(open_checkpoint(save(model, tmp_path / "hf", tokenizer=False))).write(tmp_path / "w1")
    source = save_container(model, tmp_path / "packed", container)
    planned = plan_conversion(open_checkpoint(source))
    manifest = planned.write(tmp_path / "w2")
    assert_same_files(tmp_path / "w1", tmp_path / "w2")
    assert manifest.sparsity_pattern == ("2:4" if pattern == "2:4" else "")


@pytest.mark.parametrize("container, pattern", [("sparse-24-bitmask", "2:4"), ("sparse-bitmask", "half")])
def test_a_container_of_the_package_is_understood(container, pattern, tmp_path: Path) -> None:
    from compressed_tensors.compressors import sparse_compressors as compressors

    def pack(module: str, weight: Tensor, container: str) -> dict[str, Tensor]:
        if container == "sparse-bitmask":
            return compressors.BitmaskTensor.from_dense(weight).dict(module)
        return compressors.Sparse24BitMaskTensor.from_dense(weight).dict(module)

    model = sparsify(FAMILIES["llama"](), pattern)
    plan_conversion(open_checkpoint(save(model, tmp_path / "hf", tokenizer=False))).write(tmp_path / "w1")
    source = save_container(model, tmp_path / "packed", container, pack)
    plan_conversion(open_checkpoint(source)).write(tmp_path / "w2")
    assert_same_files(tmp_path / "w1", tmp_path / "w2")


def test_a_container_is_compared_with_transformers_model_of_its_weights(tmp_path: Path) -> None:
    model = sparsify(FAMILIES["llama"](), "2:4")
    checkpoint = open_checkpoint(save_container(model, tmp_path / "packed", "sparse-24-bitmask"))
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    reference = checkpoint.reference_model(torch.float32)
    assert set(reference.state_dict()) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(reference.state_dict()[name], tensor), name
    assert check_parity(checkpoint, tmp_path / "w", planned.config, None).passed


def test_a_matrix_of_many_chunks_is_expanded(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tridecode.converters.sources.bitmasks._CHUNK", 100)
    model = sparsify(FAMILIES["llama"](), "half")
    source = save_container(model, tmp_path / "packed", "sparse-bitmask")
    checkpoint = open_checkpoint(source)
    for name in plan_conversion(checkpoint).names.values():
        assert torch.equal(checkpoint.tensors.read(name), model.state_dict()[name]), name


# ---------------------------------------------------------------- refusals

Q = "model.layers.0.self_attn.q_proj"


def _narrow(state: dict[str, Tensor]) -> None:
    state[f"{Q}.compressed"] = state[f"{Q}.compressed"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        ({"sparsity_config": {"format": "sparse-nm"}}, "compressed as sparse-nm; this version reads"),
        ({"format": "marlin-24", "sparsity_config": {}}, "compressed as marlin-24; this version reads"),
        ({"quant_method": "quip"}, "quantised by 'quip'; this version reads gptq, awq, compressed-tensors"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(described, complaint, tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path / "hf", tokenizer=False)
    rewrite_config(tmp_path / "hf", **container_config("sparse-bitmask", **described))
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(tmp_path / "hf")
    assert complaint in str(caught.value) and "config.json" in str(caught.value)


def test_a_description_that_is_none_is_refused(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path / "hf", tokenizer=False)
    rewrite_config(tmp_path / "hf", quantization_config="int8")
    with pytest.raises(CheckpointError, match="quantization_config = 'int8'; wanted an object"):
        open_checkpoint(tmp_path / "hf")


def test_a_container_without_compression_is_a_plain_checkpoint(tmp_path: Path) -> None:
    """llm-compressor writes such a container for sparse weights if compression is disabled."""
    model = sparsify(FAMILIES["llama"](), "2:4")
    save(model, tmp_path / "hf", tokenizer=False)
    rewrite_config(tmp_path / "hf", **container_config("dense"))
    plan_conversion(open_checkpoint(tmp_path / "hf")).write(tmp_path / "w")
    assert run_greedy(tmp_path / "w", PROMPTS, 4)[0] == [greedy(model, prompt, 4)[0] for prompt in PROMPTS]


def damaged(tmp_path: Path, change) -> Path:
    source = save_container(sparsify(FAMILIES["llama"](), "half"), tmp_path / "packed", "sparse-bitmask")
    state = {}
    for file in source.glob("model-*.safetensors"):
        state.update(load_file(file))
        file.unlink()
    change(state)
    (source / "model.safetensors.index.json").unlink()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, source / "model.safetensors")
    return source


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: s.pop(f"{Q}.shape"), f"has {Q}.bitmask, but no {Q}.shape"),
        (lambda s: s.pop(f"{Q}.compressed"), f"has {Q}.bitmask, but no {Q}.compressed"),
        (lambda s: s.update({f"{Q}.shape": torch.tensor([48, 48, 1])}), "wanted the two sizes"),
        (lambda s: s.update({f"{Q}.shape": torch.tensor([48.0, 48.0])}), "wanted the two sizes"),
        (lambda s: s.update({f"{Q}.shape": torch.tensor([48, 1 << 40])}), "wanted two sizes of 1 or more"),
        (lambda s: s.update({f"{Q}.shape": torch.tensor([96, 48])}), "torch.uint8; wanted (96, 6)"),
        (lambda s: s.update({f"{Q}.bitmask": s[f"{Q}.bitmask"].int()}), "torch.int32; wanted (48"),
        (_narrow, "fp16, bf16 or fp32"),
        (lambda s: s.update({f"{Q}.compressed": torch.zeros(48 * 48 + 1)}), "2,305 weights; wanted"),
        (lambda s: s.update({f"{Q}.weight": torch.zeros(48, 48)}), f"has {Q}.weight twice"),
    ],
)  # fmt: skip
def test_a_damaged_container_is_refused_before_it_is_read(change, complaint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(damaged(tmp_path, change))
    assert complaint in str(caught.value) and str(tmp_path) in str(caught.value)


def _flip(state: dict[str, Tensor]) -> None:
    state[f"{Q}.bitmask"][0, 0] ^= 1
    del state[f"{Q}.row_offsets"]


def _move(state: dict[str, Tensor]) -> None:
    state[f"{Q}.row_offsets"][7] += 1


def _pad(state: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.down_proj"  # (48, 72): cut to 70 columns, whose last bits stay
    state[f"{name}.shape"] = torch.tensor([48, 70])
    state[f"{name}.bitmask"][:, -1] |= 0x80


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_flip, "bits in its bitmask; wanted"),
        (_move, "row_offsets from row 0"),
        (_pad, "bits beyond its last column"),
    ],
)  # fmt: skip
def test_a_bitmask_that_does_not_fit_its_weights_is_refused(change, complaint, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(damaged(tmp_path, change))
    with pytest.raises(CheckpointError) as caught:
        for name in checkpoint.tensors.shapes:
            checkpoint.tensors.read(name)
    assert complaint in str(caught.value) and str(tmp_path) in str(caught.value)
