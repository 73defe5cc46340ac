"""Every layout of a checkpoint gives the same tensors; whatever can be wrong gives an error that says so."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import save, tiny_bloom, tiny_gpt2, tiny_llama
from tridecode.backend.errors import CheckpointError, UnsupportedError
from tridecode.converters import checkpoint as checkpoint_module
from tridecode.converters.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def model():
    return tiny_bloom()


def as_pickles(directory: Path, shards: int, zipped: bool = True) -> None:
    """Turn model.safetensors into pytorch_model.bin, or its shards with their index."""
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(state)
    files = {}
    for shard in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        part = {key: state[key] for key in names[shard::shards]}
        files.update(dict.fromkeys(part, name))
        torch.save(part, directory / name, _use_new_zipfile_serialization=zipped)
    if shards > 1:
        index = {"metadata": {}, "weight_map": files}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


LAYOUTS = {
    "one safetensors file": lambda directory: None,
    "sharded safetensors": None,
    "one pickle": lambda directory: as_pickles(directory, 1),
    "sharded pickles": lambda directory: as_pickles(directory, 3),
    "a pickle of before torch 1.6": lambda directory: as_pickles(directory, 1, zipped=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_tensors_of_the_model(tmp_path, model, layout):
    change = LAYOUTS[layout]
    if change is None:
        save(model, tmp_path, tokenizer=False, max_shard_size="20KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    else:
        save(model, tmp_path, tokenizer=False)
        change(tmp_path)
    tensors = open_checkpoint(tmp_path).tensors
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert set(tensors.shapes) == set(state)
    for name, tensor in state.items():
        assert tensors.shapes[name] == tuple(tensor.shape)
        assert tensors.dtype(name) == tensor.dtype
        assert torch.equal(tensors.read(name), tensor)


def test_safetensors_come_before_pickles_as_in_transformers(tmp_path, model):
    save(model, tmp_path, tokenizer=False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert open_checkpoint(tmp_path).tensors.shapes


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path):
    save(tiny_gpt2(), tmp_path, tokenizer=False)
    (tmp_path / "model.safetensors").unlink()
    victim = tmp_path / "victim"

    class Exploit:
        def __reduce__(self):
            return Path.touch, (victim,)

    for data in (lambda f: torch.save({"wte.weight": Exploit()}, f), lambda f: pickle.dump(Exploit(), f)):
        with open(tmp_path / "pytorch_model.bin", "wb") as file:
            data(file)
        with pytest.raises(CheckpointError, match="pytorch_model.bin cannot be loaded as plain tensors"):
            open_checkpoint(tmp_path)
    assert not victim.exists()


def test_a_pickle_that_holds_no_state_dict_is_refused(tmp_path):
    save(tiny_gpt2(), tmp_path, tokenizer=False)
    (tmp_path / "model.safetensors").unlink()
    torch.save([torch.zeros(3)], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a list; wanted a dict of tensors"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path, model):
    save(model, tmp_path, tokenizer=False, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        CheckpointError, match=f"{shard.name} is missing; model.safetensors.index.json lists it"
    ):
        open_checkpoint(tmp_path)


def test_a_truncated_safetensors_file_is_named(tmp_path, model):
    save(model, tmp_path, tokenizer=False)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is no readable safetensors file"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path, model):
    save(model, tmp_path, tokenizer=False)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="has no weights; wanted model.safetensors, .*pytorch_model.bin"
    ):
        open_checkpoint(tmp_path)


def test_a_directory_without_a_config_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds neither config.json nor a .gguf file"):
        open_checkpoint(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointError, match="is a file, but no .gguf"):
        open_checkpoint(path)


def test_a_config_that_is_no_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is no JSON"):
        open_checkpoint(tmp_path)


def test_a_name_that_is_nothing_says_all_three_things_it_is_not(monkeypatch):
    def unreachable(repository, allow_patterns):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(checkpoint_module, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("someone/a-model")
    assert str(caught.value) == (
        "'someone/a-model' is not a directory, not a .gguf, and the hub could not be reached or "
        "does not have it: no route to the hub"
    )


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match="is not a directory, not a .gguf, and the hub could not be reached"
    ):
        open_checkpoint(tmp_path / "absent")


def test_a_hub_repository_is_fetched_without_its_pickles_if_it_has_safetensors(tmp_path, model, monkeypatch):
    save(model, tmp_path, tokenizer=False)
    asked = []

    def download(repository, allow_patterns):
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(checkpoint_module, "snapshot_download", download)
    assert open_checkpoint("someone/a-model").config.model_type == "bloom"
    assert [repository for repository, _ in asked] == ["someone/a-model"]
    assert "*.safetensors" in asked[0][1] and "*.bin" not in asked[0][1]


@pytest.mark.parametrize("model_type", ["mistral", "baichuan", "gpt_neox", None])
def test_another_model_type_is_refused_by_name_with_those_there_are(tmp_path, model_type):
    save(tiny_llama(), tmp_path, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with pytest.raises(
        UnsupportedError, match=f"model_type {model_type!r}; this version converts bloom, gpt2, llama"
    ):
        open_checkpoint(tmp_path)


def test_a_quantised_checkpoint_is_refused_by_its_method(tmp_path):
    save(tiny_llama(), tmp_path, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="quantised by gptq; convert the unquantised checkpoint"):
        open_checkpoint(tmp_path)


def test_a_config_that_transformers_refuses_is_refused_with_its_words(tmp_path):
    save(tiny_llama(), tmp_path, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 47}))
    with pytest.raises(CheckpointError, match="transformers cannot read the config of .*not a multiple"):
        open_checkpoint(tmp_path)
