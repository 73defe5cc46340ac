"""Reading of weight files, compared with files that numpy splits by FasterTransformer's rules."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.hf_models import model_config
from tests.checkpoints import FAMILIES
from tridecode.backend.base.errors import ConfigError, WeightFileError
from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.backend.models import family, model_config_ini, read_model_config
from tridecode.backend.weights.layout import WeightSpec, vocabulary_rows
from tridecode.backend.weights.manifest import MANIFEST_FORMAT
from tridecode.backend.weights.reader import WeightReader

NUMPY_DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}

CONFIGS = {
    "gpt": ModelConfig("gpt", "g", 2, 24, 12, 12, 2, 36, 29, 7, 1e-5, 0, 0),
    "bloom": ModelConfig("bloom", "b", 1, 24, 12, 12, 2, 96, 29, 16384, 1e-5, 1, 2),
    "llama": ModelConfig(
        "llama", "l", 2, 24, 12, 6, 4, 36, 29, 64, 1e-6, 1, 2, activation="silu", rope=RopeConfig(4),
        attention_bias=False, mlp_bias=False, tied_head=False,
    ),
}  # fmt: skip

#: configs of every family, with 12 heads, which many numbers of ranks divide
SHARED = {family: model_config(case.hf_config(**case.shared)) for family, case in FAMILIES.items()}


def whole_tensors(config: ModelConfig, seed: int = 5) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    dtype = NUMPY_DTYPES[config.weight_dtype]
    return {
        spec.name: random.standard_normal(spec.shape).astype(np.float32).astype(dtype)
        for spec in family(config.family).weight_specs(config)
    }


def rank_share(name: str, whole: np.ndarray, config: ModelConfig, rank: int, ranks: int) -> np.ndarray | None:
    """Return the content of the rank's file of `name` by FasterTransformer's rules; None: it is not split."""

    def cut(part: np.ndarray, axis: int) -> np.ndarray:
        return np.split(part, ranks, axis=axis)[rank]

    if ".query_key_value." in name:
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        parts = np.split(whole, [heads * size, (heads + kv_heads) * size], axis=-1)
        return np.concatenate([cut(part, -1) for part in parts], axis=-1)
    if any(f".mlp.{column}." in name for column in ("dense_h_to_4h", "gate_proj", "up_proj")):
        return cut(whole, -1)
    if name.endswith((".attention.dense.weight", ".mlp.dense_4h_to_h.weight", ".mlp.down_proj.weight")):
        return cut(whole, 0)
    if name.endswith(("q_norm.weight", "k_norm.weight")) and whole.ndim == 2:  # a row for each head
        return cut(whole, 0)
    return None


def write_like_fastertransformer(directory: Path, config: ModelConfig, ranks: int) -> dict[str, np.ndarray]:
    """A weight directory without manifest.json, every file by ndarray.tofile. Returns the whole tensors."""
    directory.mkdir()
    (directory / "config.ini").write_text(model_config_ini(config, ranks))
    tensors = whole_tensors(config)
    for name, whole in tensors.items():
        shares = [rank_share(name, whole, config, rank, ranks) for rank in range(ranks)]
        if shares[0] is None:
            whole.tofile(directory / f"{name}.bin")
        else:
            for rank, share in enumerate(shares):
                np.ascontiguousarray(share).tofile(directory / f"{name}.{rank}.bin")
    return tensors


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy()


def degrees_of(config: ModelConfig, *degrees: int) -> list[int]:
    """Return the degrees that do not split a head."""
    return [ranks for ranks in degrees if config.num_kv_heads % ranks == 0]


@pytest.mark.parametrize(
    "name, stored", [(name, stored) for name in SHARED for stored in degrees_of(SHARED[name], 1, 2, 3, 4)]
)
def test_any_stored_degree_reads_at_any_other(tmp_path, name, stored):
    config = SHARED[name]
    degrees = degrees_of(config, 1, 2, 3, 4, 6)
    tensors = write_like_fastertransformer(tmp_path / "w", config, stored)
    reader = WeightReader(tmp_path / "w", read_model_config(tmp_path / "w"))
    assert reader.stored_size == stored
    assert set(reader.specs) == set(tensors)
    for world, spec in itertools.product(degrees, reader.specs.values()):
        for rank in range(world):
            share = rank_share(spec.name, tensors[spec.name], config, rank, world)
            wanted = tensors[spec.name] if share is None else share
            read = reader.read(spec, rank, world)
            assert read.dtype == torch.float32
            np.testing.assert_array_equal(read.numpy(), wanted, err_msg=f"{spec.name} {rank}/{world}")


@pytest.mark.parametrize(
    "kv_heads, stored",
    [
        (kv_heads, stored)
        for kv_heads in (1, 2, 3)
        for stored in (1, 2, 6, 12)
        if kv_heads % stored == 0 or stored % kv_heads == 0  # the writer refuses the others
    ],
)
def test_fewer_kv_heads_than_ranks_are_replicated(tmp_path, kv_heads, stored):
    """With 12 query heads, rank r reads the KV head of its first query head."""
    shape = replace(CONFIGS["llama"], num_kv_heads=kv_heads, attention_bias=True, mlp_size=48)
    heads = whole_tensors(shape)["model.layers.0.attention.query_key_value.weight"]

    def share(rank: int, ranks: int) -> np.ndarray:
        queries, keys, values = np.split(heads, [48, 48 + 4 * kv_heads], axis=1)
        parts = [np.split(queries, ranks, axis=1)[rank]]
        for part in (keys, values):
            by_head = np.split(part, kv_heads, axis=1)
            first, last = rank * 12 // ranks, (rank + 1) * 12 // ranks - 1  # query heads
            group = 12 // kv_heads
            parts += by_head[first // group : last // group + 1]
        return np.concatenate(parts, axis=1)

    spec = next(
        s
        for s in family("llama").weight_specs(shape)
        if s.name.endswith("0.attention.query_key_value.weight")
    )
    reader = object.__new__(WeightReader)
    reader.directory, reader.stored_size, reader.dtype = tmp_path, stored, torch.float32
    for rank in range(stored):
        np.ascontiguousarray(share(rank, stored)).tofile(tmp_path / f"{spec.name}.{rank}.bin")
    for world in (n for n in (1, 2, 3, 4, 6, 12) if kv_heads % n == 0 or n % kv_heads == 0):
        for rank in range(world):
            np.testing.assert_array_equal(reader.read(spec, rank, world).numpy(), share(rank, world))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [29, 32, 50257 // 1000, 3])
def test_rows_of_the_vocabulary_are_split_and_padded(tmp_path, size, ranks):
    """The file has the same rows at any degree t: ceil(V / t), rounded up to a multiple of 8."""
    whole = np.random.default_rng(size).standard_normal((size, 5)).astype(np.float32)
    whole.tofile(tmp_path / "model.wte.bin")
    spec = vocabulary_rows(WeightSpec("model.wte", (size, 5)))
    rows = size if ranks == 1 else (-(-size // ranks) + 7) // 8 * 8
    padded = np.zeros((rows * ranks, 5), np.float32)
    padded[:size] = whole
    reader = object.__new__(WeightReader)
    reader.directory, reader.stored_size, reader.dtype = tmp_path, 4, torch.float32
    for rank in range(ranks):
        assert spec.shard_shape(ranks) == (rows, 5)
        np.testing.assert_array_equal(reader.read(spec, rank, ranks).numpy(), np.split(padded, ranks)[rank])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bit_files_are_read_bit_for_bit(tmp_path, dtype):
    config = ModelConfig(**{**vars(CONFIGS["gpt"]), "weight_dtype": dtype})
    tensors = write_like_fastertransformer(tmp_path / "w", config, 2)
    reader = WeightReader(tmp_path / "w", read_model_config(tmp_path / "w"))
    for name, whole in tensors.items():
        np.testing.assert_array_equal(as_numpy(reader.read(reader.specs[name])), whole.astype(np.float32))


def test_one_file_is_mapped_and_not_copied(tmp_path):
    config = CONFIGS["gpt"]
    tensors = write_like_fastertransformer(tmp_path / "w", config, 2)
    reader = WeightReader(tmp_path / "w", config)
    name = "model.layers.0.mlp.dense_h_to_4h.weight"
    before = len(os.listdir("/proc/self/fd"))
    held = [reader.read(reader.specs[name], rank, 4) for rank in range(4) for _ in range(100)]
    # on a CPU a large model maps more files than a process may have open
    assert len(os.listdir("/proc/self/fd")) == before
    file_bytes = (tmp_path / "w" / f"{name}.0.bin").stat().st_size
    assert held[0].untyped_storage().nbytes() == file_bytes  # the whole file behind a quarter of the tensor
    assert not held[0].is_contiguous()
    with open("/proc/self/maps") as maps:
        assert f"{name}.0.bin" in maps.read()
    np.testing.assert_array_equal(held[100].numpy(), np.split(tensors[name], 4, axis=1)[1])


def test_a_mapped_tensor_never_writes_to_its_file(tmp_path):
    config = CONFIGS["gpt"]
    write_like_fastertransformer(tmp_path / "w", config, 1)
    reader = WeightReader(tmp_path / "w", config)
    before = (tmp_path / "w" / "model.wpe.bin").read_bytes()
    reader.read(reader.specs["model.wpe"]).fill_(7.0)
    assert (tmp_path / "w" / "model.wpe.bin").read_bytes() == before


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_fill_a_shard_exactly_once(tmp_path_factory, data):
    """Any sections, stored degree and wanted degree give the right part and read only byte_range of each
    file."""
    stored, world = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    unit = int(np.lcm(stored, world))
    sections = tuple(unit * n for n in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, 1))
    shape = (5, sum(sections)) if axis else (sum(sections), 5)
    padded = data.draw(st.booleans())  # without effect if the sizes are divisible by the ranks
    spec = WeightSpec("t", shape, axis=axis, sections=sections, padded=padded)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def share(rank: int, ranks: int) -> np.ndarray:
        parts = np.split(whole, np.cumsum(sections)[:-1], axis=axis)
        return np.concatenate([np.split(part, ranks, axis=axis)[rank] for part in parts], axis=axis)

    directory = tmp_path_factory.mktemp("pieces")
    reader = object.__new__(WeightReader)  # only the fields that pieces() reads; no family has such shapes
    reader.directory, reader.stored_size, reader.dtype = directory, stored, torch.float32
    for rank in range(stored):
        np.ascontiguousarray(share(rank, stored)).tofile(directory / f"t.{rank}.bin")
    for rank in range(world):
        shard = torch.full(spec.shard_shape(world), float("nan"))
        for piece in reader.pieces(spec, rank, world):
            slot = piece.slot(shard)
            assert torch.isnan(slot).all()
            slot.copy_(piece.view())
            offset, length = piece.byte_range
            raw = piece.path.read_bytes()[offset : offset + length]
            ends = np.frombuffer(raw, np.float32)[[0, -1]]
            np.testing.assert_array_equal(ends, piece.view().flatten()[[0, -1]].numpy())
        np.testing.assert_array_equal(shard.numpy(), share(rank, world))


def test_every_file_of_every_family_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "design" / "weight_files.md").read_text(encoding="utf-8")
    shapes = [
        replace(model_config(case.hf_config(**settings)), attention_bias=True, mlp_bias=True, tied_head=False)
        for case in FAMILIES.values()
        for settings in ({}, *case.variants.values())
    ]
    for config in shapes:
        for spec in family(config.family).weight_specs(config):
            stem, _, kind = spec.name.replace(".0.", ".{l}.").replace(".1.", ".{l}.").rpartition(".")
            row = next((line for line in text.splitlines() if line.startswith(f"| `{stem}.")), "")
            assert f".{kind}`" in row or f"| `{stem}.{kind}`" in text, spec.name


# ---------------------------------------------------------------- wrong directories


@pytest.fixture
def written(tmp_path) -> Path:
    write_like_fastertransformer(tmp_path / "w", CONFIGS["bloom"], 2)
    return tmp_path / "w"


FILE = "model.layers.0.attention.dense.weight.1.bin"  # (12, 24) float32: 1,152 bytes


@pytest.mark.parametrize("length", [0, 1151, 1153, 5000])
def test_a_file_of_another_length_is_named_with_both_lengths(written, length):
    (written / FILE).write_bytes(bytes(length))
    with pytest.raises(WeightFileError) as caught:
        WeightReader(written, CONFIGS["bloom"])
    assert str(caught.value) == (
        f"{written / FILE} holds {length:,} bytes; "
        "model.layers.0.attention.dense.weight (24, 24) fp32 needs 1,152"
    )


def test_a_missing_file_is_named(written):
    (written / "model.final_layernorm.bias.bin").unlink()
    with pytest.raises(
        WeightFileError, match=r"model\.final_layernorm\.bias\.bin is missing; .*\(24,\) fp32 needs it"
    ):
        WeightReader(written, CONFIGS["bloom"])


def test_int8_files_of_fastertransformer_do_not_replace_those_of_the_weights(written):
    """FasterTransformer writes int8 files next to the float files; we read these and quantise at load."""
    file = next(written.glob("model.layers.0.attention.dense.weight.*.bin"))
    rounded = file.with_name(file.name.replace(".weight.", ".weight.int8."))
    rounded.write_bytes(bytes(file.stat().st_size // 4))
    WeightReader(written, CONFIGS["bloom"])
    file.unlink()
    with pytest.raises(WeightFileError, match=f"{file.name} is missing.*{rounded.name}, for .* int8_mode 2"):
        WeightReader(written, CONFIGS["bloom"])


def test_the_number_of_further_wrong_files_is_told(written):
    for name in ("model.wte.bin", FILE, "model.final_layernorm.bias.bin"):
        (written / name).unlink()
    with pytest.raises(
        WeightFileError, match="model.wte.bin is missing.*; 2 more files are missing or wrong"
    ):
        WeightReader(written, CONFIGS["bloom"])


def test_files_of_the_other_precision_are_recognised(written):
    halved = ModelConfig(**{**vars(CONFIGS["bloom"]), "weight_dtype": "fp16"})
    with pytest.raises(WeightFileError, match="the length of fp32; weight_data_type in config.ini is fp16"):
        WeightReader(written, halved)


def test_a_rank_file_left_over_from_another_conversion_is_noticed(written):
    name = "model.layers.0.attention.query_key_value.weight.2.bin"
    (written / name).write_bytes((written / name.replace(".2.", ".1.")).read_bytes())
    with pytest.raises(WeightFileError, match="query_key_value"):
        WeightReader(written, CONFIGS["bloom"])


def test_an_empty_directory_names_the_first_file_it_misses(tmp_path):
    with pytest.raises(WeightFileError, match=r"query_key_value\.weight\.0\.bin is missing"):
        WeightReader(tmp_path, CONFIGS["gpt"])


def test_a_degree_that_does_not_divide_is_refused(written):
    reader = WeightReader(written, CONFIGS["bloom"])
    with pytest.raises(ConfigError, match="cannot be split over tensor_para_size = 5"):
        reader.read(reader.specs["model.layers.0.attention.dense.weight"], 0, 5)


def test_an_untied_head_must_be_there(tmp_path):
    config = CONFIGS["llama"]
    write_like_fastertransformer(tmp_path / "w", config, 1)
    (tmp_path / "w" / "model.lm_head.weight.bin").unlink()
    with pytest.raises(WeightFileError, match="lm_head"):
        WeightReader(tmp_path / "w", config)
    assert "model.lm_head.weight" not in WeightReader(tmp_path / "w", read_model_config(tmp_path / "w")).specs


# ---------------------------------------------------------------- manifest.json


def sampled(data: bytes) -> str:
    """The digest of docs/design/weight_files.md: 4 KiB at every MiB, the last 4 KiB, the length."""
    parts = [data[start : start + 4096] for start in range(0, len(data), 1 << 20)]
    return hashlib.sha256(b"".join([*parts, data[-4096:], len(data).to_bytes(8, "little")])).hexdigest()


def write_manifest(directory: Path, **changes) -> None:
    """A manifest of the directory as it is, by the description in docs/design/weight_files.md."""
    entries = [
        {
            "name": spec.name, "shape": spec.shape, "dtype": "fp32", "axis": spec.axis,
            "sections": spec.sections,
            "files": [
                {
                    "name": p.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(),
                    "sample": sampled(data),
                }
                for ending in (".bin", ".?.bin")
                for p in sorted(directory.glob(spec.name + ending))
                for data in [p.read_bytes()]
            ],
        }
        for spec in family("bloom").weight_specs(CONFIGS["bloom"])
    ]  # fmt: skip
    manifest = {
        "format": MANIFEST_FORMAT, "family": "bloom", "tensor_para_size": 2, "dtype": "fp32",
        "tensors": entries, **changes,
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_checksums_of_untouched_files_agree(written):
    write_manifest(written)
    seen = []
    WeightReader(written, CONFIGS["bloom"]).verify_checksums(seen.append)
    assert sum(seen) == sum(path.stat().st_size for path in written.glob("*.bin"))


def test_one_flipped_bit_is_found_and_named(written):
    write_manifest(written)
    data = bytearray((written / FILE).read_bytes())
    data[77] ^= 1
    (written / FILE).write_bytes(data)
    with pytest.raises(WeightFileError, match=f"{FILE} has SHA-256 {hashlib.sha256(data).hexdigest()}"):
        WeightReader(written, CONFIGS["bloom"]).verify_checksums()


def test_without_a_manifest_there_is_nothing_to_verify_against(written):
    with pytest.raises(WeightFileError, match="manifest.json is missing; it holds the checksums"):
        WeightReader(written, CONFIGS["bloom"]).verify_checksums()


@pytest.mark.parametrize("text", ["", "{}", '{"format": 3}', "not json"])
def test_a_damaged_manifest_is_refused(written, text):
    (written / "manifest.json").write_text(text)
    with pytest.raises(WeightFileError, match="manifest.json is not a valid manifest"):
        WeightReader(written, CONFIGS["bloom"])


def test_a_manifest_of_another_format_is_refused(written):
    write_manifest(written, format="tridecode-weights-99")
    with pytest.raises(WeightFileError, match="format 'tridecode-weights-99'; this version reads"):
        WeightReader(written, CONFIGS["bloom"])
