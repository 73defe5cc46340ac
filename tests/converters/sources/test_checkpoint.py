"""Every layout of a checkpoint gives the same tensors; whatever can be wrong gives an error that says so."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import FAMILIES, save, tiny_bloom, tiny_gpt2, tiny_llama
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion


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
        told = "its pickle holds more than tensors|it holds the Python object [A-Za-z_.]+,"
        with pytest.raises(CheckpointError, match=f"pytorch_model.bin .*({told})") as caught:
            open_checkpoint(tmp_path)
        assert "\n" not in str(caught.value)
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


@pytest.mark.parametrize("container", ["safetensors", "bin"])
def test_a_tensor_of_two_files_has_equal_values_or_is_refused(tmp_path, model, container):
    """transformers takes the file that sorts last, whatever the index says."""
    save(model, tmp_path, tokenizer=False)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    stem = {"safetensors": "model", "bin": "pytorch_model"}[container]
    shard, overlay = f"{stem}-00001-of-00001.{container}", f"{stem}-00000-overlay.{container}"
    name = "transformer.h.1.mlp.dense_4h_to_h.weight"
    index = {key: overlay if key == name else shard for key in state}
    (tmp_path / f"{stem}.{container}.index.json").write_text(json.dumps({"weight_map": index}))
    write = save_file if container == "safetensors" else torch.save
    nan = state[name].clone()
    nan[0, 0] = torch.nan  # is equal to itself here
    for value, other in ((state[name], state[name]), (nan, nan)):
        write({**state, name: value}, tmp_path / shard)
        write({name: other}, tmp_path / overlay)
        open_checkpoint(tmp_path)
    for other in (-state[name], state[name].half(), state[name][:1].clone()):
        write(state, tmp_path / shard)
        write({name: other}, tmp_path / overlay)
        with pytest.raises(CheckpointError, match="different values") as caught:
            open_checkpoint(tmp_path)
        assert all(part in str(caught.value) for part in (shard, overlay, name))


def test_a_truncated_safetensors_file_is_named(tmp_path, model):
    save(model, tmp_path, tokenizer=False)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is not a readable safetensors file"):
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
    with pytest.raises(CheckpointError, match="is a file, but not a .gguf"):
        open_checkpoint(path)


def test_a_config_that_is_no_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("model_type", ["t5", "mamba", "a-model-of-tomorrow", None])
def test_another_model_type_is_refused_by_name_with_those_there_are(tmp_path, model_type):
    save(tiny_llama(), tmp_path, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with pytest.raises(UnsupportedError, match=f"model_type {model_type!r}; this version converts .*gpt2"):
        open_checkpoint(tmp_path)


def test_a_method_of_quantisation_that_is_not_read_is_refused_by_name(tmp_path):
    save(tiny_llama(), tmp_path, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm", "nbits_per_codebook": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="quantised by 'aqlm'; this version reads gptq, awq"):
        open_checkpoint(tmp_path)


def test_a_config_that_transformers_refuses_is_refused_with_its_words(tmp_path):
    save(tiny_llama(), tmp_path, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 47}))
    with pytest.raises(CheckpointError, match="transformers cannot read the config of .*not a multiple"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------- what a checkpoint may not do


INDEXES = {"model.safetensors.index.json": "model.safetensors", "pytorch_model.bin.index.json": "model.bin"}


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("name", ["../secret", "/etc/secret", "a/b", "..", "", "a\\b", 7, None, ["x"]])
def test_an_index_names_files_of_its_own_folder_only(tmp_path, model, index, name):
    folder = tmp_path / "hf"
    save(model, folder, tokenizer=False)
    (folder / "model.safetensors").rename(tmp_path / "secret")
    (folder / index).write_text(json.dumps({"weight_map": {"h.0.x": name}}))
    with pytest.raises(CheckpointError, match=f"{index} lists .*; wanted the name of a file in"):
        open_checkpoint(folder)


def test_a_snapshot_of_the_hubs_cache_is_made_of_links_and_loads(tmp_path, model):
    save(model, tmp_path / "blobs", tokenizer=False, max_shard_size="20KB")
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    checkpoint = open_checkpoint(snapshot)
    name = "transformer.word_embeddings.weight"
    assert torch.equal(checkpoint.tensors.read(name), model.state_dict()[name])


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000])
def test_an_index_of_another_shape_is_refused(tmp_path, model, content):
    save(model, tmp_path, tokenizer=False)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json (has no|holds a|is not valid)"):
        open_checkpoint(tmp_path)


def test_what_is_too_long_or_not_a_file_is_refused_before_it_is_read(tmp_path, model):
    save(model, tmp_path, tokenizer=False)
    with open(tmp_path / "config.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="config.json holds 1,099,511,627,776 bytes; wanted at most"):
        open_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    save(model, tmp_path, tokenizer=False)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(CheckpointError, match="generation_config.json is not a regular file"):
        open_checkpoint(tmp_path)


def in_header(path: Path, change) -> None:
    """Change the header of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


HEADERS = {
    "overlapping tensors": lambda t: t["h.0.b"].update(data_offsets=t["h.0.a"]["data_offsets"]),
    "a shape of NaN": lambda t: t["h.0.a"].update(shape=[float("nan")]),
    "a negative shape": lambda t: t["h.0.a"].update(shape=[-4]),
    "a huge shape": lambda t: t["h.0.a"].update(shape=[2**62, 2**62]),
    "bytes past the end": lambda t: t["h.0.b"].update(data_offsets=[16, 2**40]),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_safetensors_header_that_lies_is_refused(tmp_path, model, fault):
    save(model, tmp_path, tokenizer=False)
    path = tmp_path / "model.safetensors"
    save_file({"h.0.a": torch.zeros(4), "h.0.b": torch.ones(4)}, path)
    in_header(path, HEADERS[fault])
    with pytest.raises(CheckpointError, match="model.safetensors is not a readable safetensors file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [2**63, 2**40])
def test_a_safetensors_header_that_is_longer_than_the_file_is_refused(tmp_path, model, length):
    save(model, tmp_path, tokenizer=False)
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        open_checkpoint(tmp_path)


def pickled(directory: Path) -> Path:
    save(tiny_gpt2(), directory, tokenizer=False)
    as_pickles(directory, 1)
    return directory / "pytorch_model.bin"


def test_a_compressed_archive_is_refused_before_it_grows(tmp_path):
    path = pickled(tmp_path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    with pytest.raises(CheckpointError, match="data.pkl is compressed .* torch.save stores .* uncompress"):
        open_checkpoint(tmp_path)


FOREIGN = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "it is a Git LFS pointer",
    b"<!DOCTYPE html><html>": "it is an HTML page",
    b"GGUF\x03\0\0\0": "it is a GGUF file",
    b"": "it is empty",
    b"\x80\x02}q\x00(jjjj": "pickle",
    b"174812789": "pickle|Error",
}


@pytest.mark.parametrize("content", FOREIGN)
def test_weights_of_another_format_are_told_by_what_they_are(tmp_path, content):
    path = pickled(tmp_path)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"as plain tensors: .*({FOREIGN[content]})") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value) and not str(caught.value).rsplit(": ", 1)[1].strip("'").isdigit()


def test_code_that_comes_with_a_config_is_not_run(tmp_path, model):
    save(model, tmp_path, tokenizer=False)
    victim = tmp_path / "victim"
    (tmp_path / "evil.py").write_text(f"open({str(victim)!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    open_checkpoint(tmp_path).reference_model(torch.float32)
    assert not victim.exists()


@pytest.mark.parametrize("ids", ["two", [1, "x"], {"a": 1}, 2**40])
def test_end_ids_that_are_no_ids_are_refused(tmp_path, model, ids):
    save(model, tmp_path, tokenizer=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match="generation_config.json: eos_token_id is .*; wanted token ids"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_weights_stored_in_eight_bits_are_refused_by_name(tmp_path, model, dtype, container):
    """Without a quantization_config, too: the tensor itself says it."""
    save(model, tmp_path, tokenizer=False)
    name = "transformer.h.1.mlp.dense_h_to_4h.weight"
    state = load_file(tmp_path / "model.safetensors")
    state[name] = state[name].to(dtype)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if container == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    told = f"{name} is stored as {str(dtype).removeprefix('torch.')}, quantised"
    with pytest.raises(UnsupportedError, match=told):
        open_checkpoint(tmp_path)


def test_weights_of_another_framework_are_named(tmp_path, model):
    save(model, tmp_path, tokenizer=False)
    (tmp_path / "model.safetensors").rename(tmp_path / "tf_model.h5")
    with pytest.raises(
        CheckpointError, match="has tf_model.h5, weights for another framework; wanted model.s"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("container", ["safetensors", "bin", "sharded bin"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_the_bare_model_are_read_as_the_full_ones(tmp_path, family, container):
    """Old checkpoints lack the prefix that today's models have: transformer., model. and the like."""
    full = FAMILIES[family]()
    save(full, tmp_path, tokenizer=False)
    prefix = full.base_model_prefix + "."
    state = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    assert bare.keys() != state.keys()
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if container.endswith("bin"):
        as_pickles(tmp_path, 3 if container.startswith("sharded") else 1)
    planned = plan_conversion(open_checkpoint(tmp_path))
    reference = plan_conversion(open_checkpoint(save(full, tmp_path / "full", tokenizer=False)))
    assert planned.config == replace(reference.config, model_name=planned.config.model_name)
    read = [plan.checkpoint.tensors.read for plan in (planned, reference)]
    for ours, theirs in zip(planned.conversions, reference.conversions, strict=True):
        made = ours.make(lambda name: read[0](planned.names[name]))
        assert torch.equal(made, theirs.make(lambda name: read[1](reference.names[name])))
