"""`tridecode adapters` and `build-repo --lora`: what they leave in a repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoints import greedy, save, tiny_bloom
from tests.lora_adapters import make_adapter
from tridecode.backend.base.errors import CheckpointError, ConfigError, RequestError, UnsupportedError
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.engine.offline import OfflineEngine, run_greedy
from tridecode.backend.wire.messages import SamplingParams
from tridecode.tools.adapters.folder import adapter_folder, add_adapter, read_adapters, remove_adapter
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.checks.repository import check_repo
from tridecode.tools.cli import app


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """transformers' model, its checkpoint, and its repository."""
    directory = tmp_path_factory.mktemp("bloom")
    model = tiny_bloom()
    source = save(model, directory / "hf")
    return model, source, build_repo(source, directory / "repo")


@pytest.fixture
def repository(made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[2], tmp_path / "repo"))


def test_an_added_adapter_is_served_from_the_repositorys_own_settings(made, repository, tmp_path) -> None:
    model = made[0]
    adapted = make_adapter(model, tmp_path / "lora", seed=1)
    found = add_adapter(repository, "french", tmp_path / "lora")
    assert str(found).startswith("french: rank 4, 8 matrices, ")
    assert check_repo(repository) == []
    engine_dir = repository / "fastertransformer"
    config = read_engine_config(read_engine_parameters(str(engine_dir)), "config.pbtxt")
    folder = engine_dir / config.lora_path
    assert sorted(path.name for path in folder.iterdir()) == ["french"]
    offline = OfflineEngine.load(
        checkpoint_dir(str(engine_dir)), EngineConfig(lora_path=str(folder), cache_bytes=1 << 20)
    )
    number = offline.submit([5, 6], SamplingParams(max_tokens=5), "french")
    offline.run()
    offline.engine.close()
    assert offline.generations[number].tokens == greedy(adapted, [5, 6], 5)[0]


def test_a_merged_repository_is_compared_with_what_peft_merges(made, tmp_path: Path) -> None:
    model, source, _ = made
    adapted = make_adapter(model, tmp_path / "lora", seed=2)
    repository = build_repo(source, tmp_path / "merged", lora=tmp_path / "lora")
    assert json.loads((repository / "PARITY.json").read_text())["passed"]
    weights = checkpoint_dir(str(repository / "fastertransformer"))
    tokens, _ = run_greedy(weights, [[5, 6, 7]], 6)
    assert tokens == [greedy(adapted, [5, 6, 7], 6)[0]] != [greedy(model, [5, 6, 7], 6)[0]]


def test_a_wrong_merge_does_not_pass_parity(made, tmp_path: Path, monkeypatch) -> None:
    from tridecode.backend.weights.lora import LoraConfig

    make_adapter(made[0], tmp_path / "lora", seed=2)
    monkeypatch.setattr(LoraConfig, "scale", lambda self, module, rank: 0.5)
    with pytest.raises(CheckpointError, match="is not transformers' model"):
        build_repo(made[1], tmp_path / "merged", lora=tmp_path / "lora")
    assert not (tmp_path / "merged").exists()


def test_without_peft_the_reference_is_merged_by_plain_torch(made, tmp_path: Path, monkeypatch) -> None:
    make_adapter(made[0], tmp_path / "lora", seed=3)
    monkeypatch.setattr("tridecode.converters.adapters.find_spec", lambda name: None)
    repository = build_repo(made[1], tmp_path / "merged", lora=tmp_path / "lora")
    assert json.loads((repository / "PARITY.json").read_text())["greedy_agreement"] == 1.0


def test_adapters_are_listed_replaced_and_removed(made, repository, tmp_path: Path) -> None:
    make_adapter(made[0], tmp_path / "one", seed=1)
    make_adapter(made[0], tmp_path / "two", seed=2, r=2)
    add_adapter(repository, "a", tmp_path / "one")
    with pytest.raises(ConfigError, match="a exists; choose another name, or add --overwrite"):
        add_adapter(repository, "a", tmp_path / "two")
    add_adapter(repository, "a", tmp_path / "two", overwrite=True)
    add_adapter(repository, "b", tmp_path / "one")
    path = adapter_folder(repository).path / "b" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    a, b = read_adapters(repository)
    assert str(a).startswith("a: rank 2, 8 matrices") and "is cut short" in str(b)
    result = CliRunner().invoke(app, ["adapters", "list", str(repository)])
    assert result.exit_code == 1 and str(a) in result.output
    remove_adapter(repository, "b")
    assert CliRunner().invoke(app, ["adapters", "list", str(repository)]).exit_code == 0
    with pytest.raises(ConfigError, match="has no adapter b"):
        remove_adapter(repository, "b")
    assert [entry.name for entry in adapter_folder(repository).path.iterdir()] == ["a"]


def test_what_cannot_be_served_is_not_added(made, repository, tmp_path: Path) -> None:
    make_adapter(made[0], tmp_path / "wide", seed=1, r=65)
    make_adapter(tiny_bloom(hidden_size=48, n_head=6), tmp_path / "other", seed=1)
    make_adapter(made[0], tmp_path / "dora", seed=1, use_dora=True)
    for source, kind in (("wide", RequestError), ("other", CheckpointError), ("dora", UnsupportedError)):
        with pytest.raises(kind):
            add_adapter(repository, "x", tmp_path / source)
    with pytest.raises(CheckpointError, match="is not a folder"):
        add_adapter(repository, "x", tmp_path / "nothing")
    with pytest.raises(RequestError, match="lora_name"):
        add_adapter(repository, "../x", tmp_path / "wide")
    assert list(adapter_folder(repository).path.iterdir()) == []


def test_a_repository_that_serves_no_adapters_says_so(made, repository) -> None:
    path = repository / "fastertransformer" / "config.pbtxt"
    text = path.read_text()
    assert text.count('string_value: "adapters"') == 1
    path.write_text(text.replace('string_value: "adapters"', 'string_value: "none"'))
    with pytest.raises(ConfigError, match="lora_path is none"):
        read_adapters(repository)
