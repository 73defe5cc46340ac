"""Weight directories damaged by hand, through the engine's own load: one clear error that names the file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import save, tiny_llama
from tridecode.backend.base.errors import ConfigError, WeightFileError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.weights.manifest import SampleDigest, sample_sha256
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

LAYER = "model.layers.{}.attention.dense.weight.{}.bin"
FILE = LAYER.format(0, 1)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """Convert a model for two ranks, with an embedding of 3 MiB."""
    folder = tmp_path_factory.mktemp("manifest")
    save(tiny_llama(vocab_size=16384), folder / "hf", tokenizer=False)
    plan_conversion(open_checkpoint(folder / "hf"), "fp32", "tiny").write(folder / "w", 2)
    return folder / "w"


@pytest.fixture
def weights(converted, tmp_path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "w"))


def load(weights: Path, **settings) -> None:
    OfflineEngine.load(
        weights, EngineConfig(device="cpu", max_sequence_tokens=32, max_sequences=2, **settings)
    )


def refusal(weights: Path, error=WeightFileError, **settings) -> str:
    with pytest.raises(error) as caught:
        load(weights, **settings)
    return str(caught.value)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def change_manifest(weights: Path, change) -> None:
    path = weights / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def entry(manifest: dict, name: str) -> dict:
    return next(tensor for tensor in manifest["tensors"] if tensor["name"] == name)


@pytest.mark.parametrize("mode", ["sizes", "sampled", "full"])
def test_an_untouched_directory_loads(weights, mode):
    load(weights, verify_weights=mode)


# ---------------------------------------------------------------- bytes


def test_a_truncated_file_is_named_with_both_sizes(weights):
    size = (weights / FILE).stat().st_size
    os.truncate(weights / FILE, size - 1)
    text = refusal(weights)
    assert f"{weights / FILE} holds {size - 1:,} bytes" in text and f"needs {size:,}" in text


def test_swapped_files_are_named_with_both_checksums(weights):
    one, other = weights / LAYER.format(0, 0), weights / LAYER.format(1, 0)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    text = refusal(weights)
    assert f"{one} is not the file that was converted" in text and "1 more files differ" in text
    assert all(sampled(data) in text for data in (first, second))
    load(weights, verify_weights="sizes")


def sampled(data: bytes) -> str:
    """Return the sampled digest as described in docs/design/weight_files.md."""
    parts = [data[start : start + 4096] for start in range(0, len(data), 1 << 20)]
    return hashlib.sha256(b"".join([*parts, data[-4096:], len(data).to_bytes(8, "little")])).hexdigest()


def test_a_file_that_was_written_by_half_is_found_by_its_samples(weights):
    path = weights / "model.wte.bin"
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)  # the rest: zeros
    assert f"{path} is not the file that was converted" in refusal(weights)


def test_full_finds_a_bit_between_the_samples_and_sampled_does_not(weights):
    flip(weights / "model.wte.bin", 500_000)
    load(weights)
    text = refusal(weights, verify_weights="full")
    found = hashlib.sha256((weights / "model.wte.bin").read_bytes()).hexdigest()
    assert f"model.wte.bin has SHA-256 {found}; manifest.json says" in text


def test_an_unknown_mode_is_refused_by_name():
    from tridecode.backend.configuration.engine_config import read_engine_config

    with pytest.raises(ConfigError, match="verify_weights is 'never'; wanted one of sizes, sampled, full"):
        read_engine_config({"verify_weights": "never"}, "config.pbtxt")


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 5, (3 << 20) + 4000])
def test_the_digest_of_a_stream_is_that_of_the_file(tmp_path, length):
    data = np.random.default_rng(length).bytes(length)
    (tmp_path / "f").write_bytes(data)
    assert sample_sha256(tmp_path / "f") == sampled(data)
    for chunk in (1000, 4096, 99_999, 1 << 20, 1 << 22):
        digest = SampleDigest()
        for start in range(0, length, chunk):
            digest.update(memoryview(data)[start : start + chunk])
        assert digest.hexdigest() == sampled(data), chunk


def test_sampling_reads_a_small_part(tmp_path):
    """A file of 16 GiB without bytes: reading all of it would take 10 s."""
    with open(tmp_path / "f", "wb") as file:
        file.truncate(16 << 30)
    started = time.monotonic()
    sample_sha256(tmp_path / "f")
    assert time.monotonic() - started < 5


# ---------------------------------------------------------------- kinds of files


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_a_fifo_is_refused_and_not_opened(weights, name):
    (weights / name).unlink()
    os.mkfifo(weights / name)
    text = refusal(weights)
    assert f"{weights / name} is a FIFO" in text and "regular file" in text


def test_a_directory_in_the_place_of_a_file_is_refused(weights):
    (weights / FILE).unlink()
    (weights / FILE).mkdir()
    assert f"{weights / FILE} is a directory" in refusal(weights)


def test_a_link_to_the_file_loads_and_one_to_nothing_is_named(weights, tmp_path):
    (weights / FILE).rename(tmp_path / "elsewhere.bin")
    (weights / FILE).symlink_to(tmp_path / "elsewhere.bin")
    load(weights)
    (tmp_path / "elsewhere.bin").unlink()
    text = refusal(weights)
    assert f"{weights / FILE} is missing (it is a link to {tmp_path / 'elsewhere.bin'})" in text


def test_a_missing_head_is_not_taken_for_a_tied_one(weights):
    (weights / "model.lm_head.weight.bin").unlink()
    text = refusal(weights)
    assert "manifest.json lists 'model.lm_head.weight', but" in text
    assert f"{weights / 'model.lm_head.weight.bin'} is missing" in text


# ---------------------------------------------------------------- manifest and config.ini


@pytest.mark.parametrize(
    ("old", "new"),
    [("layernorm_eps = 1e-06", "layernorm_eps = 1e-05"), ("rope_theta = 10000.0", "rope_theta = 20000.0")],
)
def test_a_setting_of_the_network_that_was_edited_is_named_with_both_values(weights, old, new):
    path = weights / "config.ini"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    key, before, after = old.split(" = ")[0], old.split(" = ")[1], new.split(" = ")[1]
    assert f"{path}: [llama] {key} is {after}; the weights were converted with {before}" in refusal(weights)


def test_what_clients_see_of_config_ini_may_be_edited(weights):
    path = weights / "config.ini"
    path.write_text(
        path.read_text()
        .replace("model_name = tiny", "model_name = other")
        .replace("end_id = 2", "end_id = 5")
    )
    load(weights)


def test_a_config_ini_of_another_shape_is_refused(weights):
    path = weights / "config.ini"
    path.write_text(path.read_text().replace("inter_size = 72", "inter_size = 36"))
    assert "inter_size is 36; the weights were converted with 72" in refusal(weights)
    change_manifest(weights, lambda manifest: manifest.pop("config"))  # as an older version wrote it
    assert "manifest.json has model.layers.0.mlp.gate_proj.weight (48, 72) split along axis 1" in refusal(
        weights
    )


WTE = "model.wte"
DAMAGES = {
    "another family": (
        lambda m: m.update(family="gpt"),
        "manifest.json is of family gpt; .*config.ini says llama",
    ),
    "another dtype": (
        lambda m: m.update(dtype="fp16"),
        "manifest.json is of dtype fp16; .*config.ini says fp32",
    ),
    "other ranks": (
        lambda m: m.update(tensor_para_size=1),
        r"lists 'model.layers.0.attention.query_key_value.weight.1.bin' for",
    ),
    "impossible ranks": (lambda m: m.update(tensor_para_size=10**12), "has tensor_para_size 1000000000000"),
    "indivisible ranks": (
        lambda m: m.update(tensor_para_size=5),
        "manifest.json .*layers.0.attention.query_key",
    ),
    "a tensor twice": (lambda m: m["tensors"].append(m["tensors"][0]), "lists model.wte twice"),
    "a missing entry": (lambda m: m["tensors"].pop(3), "does not list model.layers.0"),
    "an unknown entry": (
        lambda m: m["tensors"].append({**m["tensors"][0], "name": "model.wpe"}),
        "lists 'model.wpe', but config.ini describes a model without it",
    ),
    "another shape": (
        lambda m: entry(m, WTE).update(shape=[48, 16384]),
        r"has model.wte \(48, 16384\); .*\(16384, 48\)",
    ),
    "a path": (
        lambda m: entry(m, WTE)["files"][0].update(name="../../etc/passwd"),
        "lists '../../etc/passwd' for model.wte; wanted model.wte.bin",
    ),
    "an absolute path": (
        lambda m: entry(m, WTE)["files"][0].update(name="/dev/zero"),
        "lists '/dev/zero' for",
    ),
    "no files": (lambda m: entry(m, WTE).update(files=[]), "lists '0 files' for model.wte"),
    "another length": (
        lambda m: entry(m, WTE)["files"][0].update(bytes=12),
        "says that model.wte.bin has 12 bytes; its shape needs 3,145,728",
    ),
    "another digest": (
        lambda m: entry(m, WTE)["files"][0].update(sample="00"),
        "model.wte.bin is not the file .*says 00",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_manifest_that_is_not_of_these_files_is_refused(weights, damage):
    change, wanted = DAMAGES[damage]
    change_manifest(weights, change)
    with pytest.raises(WeightFileError, match=wanted):
        load(weights)


def test_a_huge_manifest_is_refused_unread(weights):
    os.truncate(weights / "manifest.json", 1 << 40)
    assert "manifest.json holds 1,099,511,627,776 bytes; wanted at most" in refusal(weights)


def test_a_manifest_of_an_older_version_loads(weights):
    def older(manifest: dict) -> None:
        manifest.pop("config")
        for tensor in manifest["tensors"]:
            for file in tensor["files"]:
                file.pop("sample")

    change_manifest(weights, older)
    load(weights)
    load(weights, verify_weights="full")


def test_full_wants_a_manifest_and_a_directory_without_one_loads(weights):
    (weights / "manifest.json").unlink()
    load(weights)
    assert "manifest.json is missing; it holds the checksums" in refusal(weights, verify_weights="full")


def test_a_conversion_that_has_not_ended_is_not_served(weights):
    (weights / "manifest.json").unlink()
    (weights / "conversion.journal").write_text("{}\n")
    text = refusal(weights)
    assert "has not ended (conversion.journal); run the same conversion again" in text
