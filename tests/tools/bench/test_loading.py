"""`tridecode bench loading`: files of a true shape with numbers in them, an engine that leaves nothing."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.weights.layout import WeightSpec
from tridecode.backend.weights.reader import WeightReader
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.bench import loading
from tridecode.tools.bench.shapes.presets import preset
from tridecode.tools.bench.shapes.random_files import RandomNumbers, weight_bytes, write_random_files
from tridecode.tools.cli import app


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("loading") / "weights"
    model = preset("toy").model
    assert write_random_files(directory, model) == weight_bytes(model)
    return directory


def test_a_directory_of_random_numbers_holds_the_model_and_runs(written) -> None:
    model = preset("toy").model
    reader = WeightReader(written, model)  # checks every length
    files = [path for spec in reader.specs.values() for path in reader.files(spec)]
    assert sum(path.stat().st_size for path in files) == weight_bytes(model)
    offline = OfflineEngine.load(written, EngineConfig(device="cpu", max_sequence_tokens=64))
    assert offline.model_config == model
    (done,) = offline.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
    assert len(done.tokens) == 4


def test_every_tensor_has_its_own_numbers_and_norms_are_about_one(written) -> None:
    reader = WeightReader(written, preset("toy").model)
    beginnings = Counter()
    for name, spec in reader.specs.items():
        tensor = reader.read(spec)
        assert abs(tensor.mean().item() - ("layernorm.weight" in name)) < 0.01, name
        assert 0.01 < tensor.std().item() < 0.03, name
        beginnings[tuple(tensor.flatten()[:4].tolist())] += 1
    assert max(beginnings.values()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_longer_than_the_block_goes_round_it(tmp_path, dtype) -> None:
    numbers = RandomNumbers(dtype, count=101)
    spec = WeightSpec("model.wte", (7, 43))
    size = numbers.write(tmp_path / "file.bin", spec)
    assert size == (tmp_path / "file.bin").stat().st_size == 7 * 43 * dtype.itemsize
    values = torch.from_file(str(tmp_path / "file.bin"), size=7 * 43, dtype=dtype)
    assert torch.equal(values[:200], values[101:]) and len(set(values[:101].tolist())) > 50


def test_a_dropped_engine_is_gone_and_a_held_one_is_not(written, monkeypatch) -> None:
    held: list[Engine] = []
    monkeypatch.setattr(loading, "_HELD", held)

    def engines() -> int:
        gc.collect()
        return sum(type(thing) is Engine for thing in gc.get_objects())

    before = engines()
    found = loading.load_once(str(written), "cpu", drop=True)
    assert engines() == before and set(found["memory"]) == {"before", "loaded", "dropped"}
    assert found["load_s"] >= found["weights_s"] > 0
    assert abs(663_040 / found["bytes_per_s"] - found["weights_s"]) < 0.001
    found = loading.load_once(str(written), "cpu", drop=False)
    assert engines() == before + 1 == before + len(held) and "dropped" not in found["memory"]


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(TridecodeError, match="the process of _exit died"):
        loading._apart(os._exit, 3)


def test_bench_loading_writes_its_report_and_removes_the_weights(tmp_path) -> None:
    folder = tmp_path / "big"
    folder.mkdir()
    arguments = ["bench", "loading", "--preset", "toy", "--device", "cpu", "--loads", "2"]
    done = CliRunner().invoke(app, [*arguments, "--folder", str(folder), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert not list(folder.iterdir())
    text = (tmp_path / "out" / "loading-toy.json").read_text()
    results = json.loads(text)["results"]
    assert results["bytes"] == 663_040 and len(results["loads"]) == 2
    assert results["median"]["load_s"] > 0 and results["read"]["bytes_per_s"] > 0
    memories = [set(one["memory"]) for one in results["loads"]]
    assert memories == [{"before", "loaded", "dropped"}, {"before", "loaded"}]
    settings = json.loads(text)["settings"]
    assert settings == {"preset": "toy", "dtype": "fp32", "device": "cpu", "loads": 2}
    assert "they are in the page" in done.output


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path) -> None:
    arguments = ["bench", "loading", "--preset", "toy", "--folder", str(tmp_path / "none")]
    done = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2
    assert "--folder" in done.output and "does not exist" in done.output


def test_a_folder_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch) -> None:
    free = SimpleNamespace(free=663_040)  # the files alone
    monkeypatch.setattr(loading.shutil, "disk_usage", lambda path: free)
    arguments = ["bench", "loading", "--preset", "toy", "--folder", str(tmp_path), "--output", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2
    assert "bytes free; the weights need 663,040" in done.output and not list(tmp_path.iterdir())
