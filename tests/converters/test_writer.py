"""The files that the writer leaves on disk, and its refusals before it writes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.checkpoints import save, tiny_gpt2, tiny_llama
from tridecode.backend.base.errors import CheckpointError, ConfigError, WeightFileError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import family
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.reader import WeightReader
from tridecode.converters import writer
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.journal import Journal
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


def test_heads_that_ranks_cannot_share_are_refused(tmp_path):
    for overrides, key in (
        ({"num_key_value_heads": 3}, "kv_head_num = 3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "head_num = 3"),
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


# ---------------------------------------------------------------- an interrupted conversion


class Stopped(Exception):
    pass


def stopping_after(items: list[TensorToWrite], count: int) -> list[TensorToWrite]:
    """The tensors; all after the first `count` raise instead of loading."""

    def stop():
        raise Stopped

    return [item if index < count else TensorToWrite(item.spec, stop) for index, item in enumerate(items)]


def counting(items: list[TensorToWrite], loaded: list[str]) -> list[TensorToWrite]:
    def load(item: TensorToWrite) -> torch.Tensor:
        loaded.append(item.spec.name)
        return item.load()

    return [TensorToWrite(item.spec, lambda item=item: load(item)) for item in items]


def random_tensors(seed: int = 0) -> list[TensorToWrite]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TensorToWrite(item.spec, torch.randn(item.spec.shape, generator=generator).clone)
        for item in tensors(CONFIG)
    ]


def interrupted(directory, count: int = 6, **options) -> None:
    with pytest.raises(Stopped):
        write_weights(directory, CONFIG, stopping_after(random_tensors(), count), 2, **options)
    assert not (directory / "manifest.json").exists()


def resumed(directory, **options) -> list[str]:
    """Write all again; the names of the tensors that were made, while every file ends up right."""
    loaded: list[str] = []
    manifest = write_weights(directory, CONFIG, counting(random_tensors(), loaded), 2, **options)
    whole = directory.with_name("whole")
    assert manifest == write_weights(whole, CONFIG, random_tensors(), 2, **options)
    assert files_of(directory) == files_of(whole)
    return loaded


def files_of(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_finished_files_of_an_interrupted_conversion_are_kept(tmp_path):
    interrupted(tmp_path / "w", 6)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "w").glob("*.bin")}
    assert before
    loaded = resumed(tmp_path / "w")
    assert len(loaded) == len(tensors(CONFIG)) - 6
    after = {path.name: path.stat().st_ino for path in (tmp_path / "w").glob("*.bin")}
    assert {name: after[name] for name in before} == before


def test_a_kept_file_that_was_changed_or_cut_is_written_again(tmp_path):
    interrupted(tmp_path / "w", 6)
    wte, wpe = tmp_path / "w" / "model.wte.bin", tmp_path / "w" / "model.wpe.bin"
    data = bytearray(wte.read_bytes())
    data[10] ^= 4
    wte.write_bytes(data)
    wpe.write_bytes(wpe.read_bytes()[:-1])
    assert {"model.wte", "model.wpe"} <= set(resumed(tmp_path / "w"))


@pytest.mark.parametrize("cut", [1, 30, 10_000])
def test_a_journal_whose_end_is_missing_loses_only_that(tmp_path, cut):
    interrupted(tmp_path / "w", 6)
    journal = tmp_path / "w" / "conversion.journal"
    journal.write_bytes(journal.read_bytes()[:-cut])
    loaded = resumed(tmp_path / "w")
    assert len(tensors(CONFIG)) - 6 < len(loaded) <= len(tensors(CONFIG))


@pytest.mark.parametrize("change", ["source", "dtype"])
def test_files_of_another_conversion_are_not_kept(tmp_path, change):
    interrupted(tmp_path / "w", 6, source="a")
    (tmp_path / "w" / "model.wte.bin.part").write_bytes(b"half")
    loaded: list[str] = []
    config = with_dtype("fp16") if change == "dtype" else CONFIG
    source = "b" if change == "source" else "a"
    write_weights(tmp_path / "w", config, counting(random_tensors(1), loaded), 2, source=source)
    assert len(loaded) == len(tensors(CONFIG))
    WeightReader(tmp_path / "w", config).verify_checksums()
    assert not list((tmp_path / "w").glob("*.part"))


def test_a_checkpoint_that_changed_in_between_is_converted_anew(tmp_path, monkeypatch):
    save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    finish = Journal.close

    def stop(journal, manifest):
        raise Stopped

    monkeypatch.setattr(Journal, "close", stop)
    with pytest.raises(Stopped):
        plan_conversion(open_checkpoint(tmp_path / "hf")).write(tmp_path / "w")
    monkeypatch.setattr(Journal, "close", finish)
    save(tiny_gpt2(seed=77), tmp_path / "hf", tokenizer=False)
    planned = plan_conversion(open_checkpoint(tmp_path / "hf"))
    planned.write(tmp_path / "w")
    planned.write(tmp_path / "whole")
    assert files_of(tmp_path / "w") == files_of(tmp_path / "whole")


def test_a_killed_conversion_goes_on(tmp_path):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    items = random_tensors()
    items[-1] = TensorToWrite(items[-1].spec, die)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks of a process with threads: the child starts its own
        child = os.fork()
    if child == 0:
        try:
            write_weights(tmp_path / "w", CONFIG, items, 2)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with pytest.raises(WeightFileError, match="has not ended"):
        WeightReader(tmp_path / "w", CONFIG)
    assert len(resumed(tmp_path / "w")) < len(tensors(CONFIG))


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("view", ["rows", "columns", "float64"])
def test_a_tensor_of_many_chunks_is_that_of_numpy(tmp_path, ranks, view, monkeypatch):
    """Parts of 300 bytes; sections with heads that ranks share, and a size that is padded."""
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 300)
    monkeypatch.setattr(writer, "_BLOCK_ROWS", 3)
    monkeypatch.setattr(writer, "is_mapped", lambda tensor: True)
    kind = np.float64 if view == "float64" else np.float32
    random = np.random.default_rng(0)
    qkv, up, down = (random.standard_normal(s).astype(kind) for s in ((13, 84), (13, 50), (50, 13)))
    specs = {
        "qkv": WeightSpec("qkv", (13, 84), axis=1, sections=(72, 6, 6), heads=(12, 1, 1)),
        "up": WeightSpec("up", (13, 50), axis=1, padded=True),
        "down": WeightSpec("down", (50, 13), axis=0, padded=True),
    }

    def given(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.T.copy()).t() if view == "columns" else torch.from_numpy(array)

    arrays = {"qkv": qkv, "up": up, "down": down}
    items = [TensorToWrite(specs[name], lambda array=array: given(array)) for name, array in arrays.items()]
    write_weights(tmp_path / "w", replace(CONFIG, num_heads=12, num_kv_heads=12), items, ranks)

    def file(name: str, rank: int, columns: int) -> np.ndarray:
        return np.fromfile(tmp_path / "w" / f"{name}.{rank}.bin", np.float32).reshape(-1, columns)

    width = {1: 50, 2: 25, 3: 24, 4: 16}[ranks]
    padded = np.zeros((13, width * ranks), np.float32)
    padded[:, :50] = up
    for rank in range(ranks):
        queries = np.split(qkv[:, :72], ranks, axis=1)[rank]
        wanted = np.concatenate([queries, qkv[:, 72:]], axis=1).astype(np.float32)
        np.testing.assert_array_equal(file("qkv", rank, 72 // ranks + 12), wanted)
        np.testing.assert_array_equal(file("up", rank, width), np.split(padded, ranks, axis=1)[rank])
        rows = np.zeros((width * ranks, 13), np.float32)
        rows[:50] = down
        np.testing.assert_array_equal(file("down", rank, 13), np.split(rows, ranks)[rank])
