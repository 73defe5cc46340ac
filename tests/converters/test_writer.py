"""What the writer leaves on disk, and what it refuses before it writes."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from tests.checkpoints import save, tiny_gpt2, tiny_llama
from tridecode.backend.config import ModelConfig
from tridecode.backend.errors import CheckpointError, ConfigError
from tridecode.backend.models import family
from tridecode.backend.weights import WeightReader
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.writer import TensorToWrite, write_weights

CONFIG = ModelConfig("gpt", "g", 1, 8, 2, 2, 4, 12, 11, 6, 1e-5, 0, 0)


def tensors(config: ModelConfig, **values: torch.Tensor) -> list[TensorToWrite]:
    """Every tensor of `config`, 1.0 where `values` (by the last parts of its name) gives nothing else."""
    specs = family(config.family).weight_specs(config)

    def value(spec):
        given = next((tensor for name, tensor in values.items() if spec.name.endswith(name)), None)
        return torch.ones(spec.shape) if given is None else given

    return [TensorToWrite(spec, lambda spec=spec: value(spec)) for spec in specs]


def with_dtype(dtype: str) -> ModelConfig:
    return ModelConfig(**{**vars(CONFIG), "weight_dtype": dtype})


def test_the_manifest_describes_every_file_to_the_byte(tmp_path):
    write_weights(tmp_path / "w", CONFIG, tensors(CONFIG), 2)
    manifest = json.loads((tmp_path / "w" / "manifest.json").read_text())
    assert (manifest["tensor_para_size"], manifest["dtype"], manifest["family"]) == (2, "fp32", "gpt")
    listed = {file["name"]: file for tensor in manifest["tensors"] for file in tensor["files"]}
    on_disk = {path.name: path.read_bytes() for path in (tmp_path / "w").glob("*.bin")}
    assert set(listed) == set(on_disk)
    for name, data in on_disk.items():
        assert listed[name]["bytes"] == len(data)
        assert listed[name]["sha256"] == hashlib.sha256(data).hexdigest()
    qkv = next(t for t in manifest["tensors"] if t["name"].endswith("query_key_value.weight"))
    assert (qkv["shape"], qkv["axis"], qkv["sections"]) == ([8, 24], 1, [8, 8, 8])
    WeightReader(tmp_path / "w", CONFIG).verify_checksums()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bit_files_hold_the_nearest_values(tmp_path, dtype):
    value = torch.tensor([[0.1, -1 / 3, 1e-3, 3.14159, 65000.0, -2e-6] * 2] * 8)
    write_weights(tmp_path / "w", with_dtype(dtype), tensors(CONFIG, **{"dense_h_to_4h.weight": value}))
    data = bytearray((tmp_path / "w" / "model.layers.0.mlp.dense_h_to_4h.weight.0.bin").read_bytes())
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert torch.equal(torch.frombuffer(data, dtype=kind).view(8, 12), value.to(kind))


def test_a_value_that_fp16_cannot_hold_is_an_error_and_not_infinity(tmp_path):
    value = torch.ones(8, 12)
    value[3, 4] = -70000.0
    with pytest.raises(
        CheckpointError, match=r"dense_h_to_4h.weight \(8, 12\) holds values up to 70000.*use bf16 or fp32"
    ):
        write_weights(tmp_path / "a", with_dtype("fp16"), tensors(CONFIG, **{"dense_h_to_4h.weight": value}))
    write_weights(tmp_path / "b", with_dtype("bf16"), tensors(CONFIG, **{"dense_h_to_4h.weight": value}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_checkpoint_with_values_that_are_not_finite_is_refused(tmp_path, bad):
    with pytest.raises(CheckpointError, match="model.wpe .* holds values that are not finite"):
        write_weights(tmp_path / "w", CONFIG, tensors(CONFIG, wpe=torch.full((6, 8), bad)))


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_a_degree_that_cuts_a_head_is_refused_before_anything_is_written(tmp_path, ranks):
    with pytest.raises(ConfigError, match=f"tensor_para_size = {ranks} does not divide head_num = 2 of g"):
        write_weights(tmp_path / "w", CONFIG, tensors(CONFIG), ranks)
    assert not (tmp_path / "w").exists()


def test_grouped_heads_and_the_mlp_must_divide_too(tmp_path):
    for overrides, key in (
        ({"num_key_value_heads": 3}, "kv_head_num = 3"),
        ({"intermediate_size": 71}, "inter_size = 71"),
    ):
        save(tiny_llama(**overrides), tmp_path / key, tokenizer=False)
        with pytest.raises(ConfigError, match=f"tensor_para_size = 2 does not divide {key}"):
            plan_conversion(open_checkpoint(tmp_path / key)).write(tmp_path / "w", 2)


def test_one_failing_tensor_ends_the_writing(tmp_path):
    def fail():
        raise OSError("the disk is gone")

    items = tensors(CONFIG)
    items[3] = TensorToWrite(items[3].spec, fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_weights(tmp_path / "w", CONFIG, items)
    assert not (tmp_path / "w" / "manifest.json").exists()


def test_an_existing_directory_is_not_written_into(tmp_path):
    (tmp_path / "w").mkdir()
    with pytest.raises(FileExistsError):
        write_weights(tmp_path / "w", CONFIG, tensors(CONFIG))


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path):
    save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    for name in ("a", "b"):
        plan_conversion(open_checkpoint(tmp_path / "hf")).write(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
