"""NeMo's archives give the GPT-2 from which they were made; unexpected content is refused before its use."""

from __future__ import annotations

import configparser
import io
import tarfile

import numpy as np
import pytest
import torch
import yaml

from tests.checkpoints import greedy, tiny_tokenizer
from tests.converters.sources.megatron_checkpoints import nemo_members, prompt_members, torch_bytes, write_tar
from tests.converters.sources.test_megatron import PROMPTS, assert_state, megatron_model
from tests.converters.tokenizers.test_sentencepiece_tokenizer import trained
from tests.tools.build_repo.test_build_repo_sources import built
from tridecode.backend.base.errors import CheckpointError, TridecodeError
from tridecode.backend.engine.offline import run_greedy
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.sources.nemo import open_prompts
from tridecode.converters.tokenizers.files import PROBES, load_tokenizer
from tridecode.tools.checks.repository import check_repo

LAYOUTS = {
    "one rank": {},
    "tensor ranks": {"ranks": 2},
    "tensor and pipeline ranks": {
        "ranks": 2,
        "stages": 2,
        "folder": "tp_rank_{rank:02d}_pp_rank_{stage:03d}",
    },
}


@pytest.mark.parametrize("container", ["tar", "gz", "folder"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tensors_are_those_of_the_model(tmp_path, layout, container):
    model = megatron_model()
    members = nemo_members(model, **LAYOUTS[layout])
    if container == "folder":
        path = tmp_path / "unpacked"
        for name, data in members.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    else:
        path = write_tar(tmp_path / "gpt.nemo", members, compressed=container == "gz")
    checkpoint = open_checkpoint(path)
    assert_state(checkpoint, model)
    config = checkpoint.config
    assert (config.n_inner, config.n_positions, config.activation_function) == (96, 96, "gelu_fast")
    assert checkpoint.name == path.stem


def test_an_archive_becomes_a_repository_with_its_tokenizer(tmp_path):
    tiny_tokenizer().backend_tokenizer.model.save(str(tmp_path))
    files = {name: (tmp_path / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    model = megatron_model()
    path = write_tar(tmp_path / "gpt.nemo", nemo_members(model, ranks=2, tokenizer=files))
    said = built(path, tmp_path / "repo")
    assert "greedy tokens equal on 100.0%" in said and "no tokenizer" not in said
    assert check_repo(tmp_path / "repo", checksums=True) == []
    weights = tmp_path / "repo/fastertransformer/1/1-gpu"
    assert "end_id = 0" in (weights / "config.ini").read_text()
    assert run_greedy(weights, PROMPTS, 8)[0] == [greedy(model, ids, 8)[0] for ids in PROMPTS]


def test_a_sentencepiece_model_in_the_archive_is_its_tokenizer(tmp_path):
    original = trained(tmp_path / "sp", model_type="unigram")
    files = {"tokenizer.model": (tmp_path / "sp/tokenizer.model").read_bytes()}
    model = megatron_model(vocab_size=480)
    for compressed in (False, True):
        members = nemo_members(model, tokenizer=files)
        checkpoint = open_checkpoint(write_tar(tmp_path / "gpt.nemo", members, compressed))
        assert checkpoint.eos_ids == [original.eos_id()]
        tokenizer = load_tokenizer(checkpoint)
        assert tokenizer(PROBES[0]).input_ids == original.encode(PROBES[0])


def test_prompt_tables_are_written_under_fastertransformers_names(tmp_path):
    base = write_tar(tmp_path / "gpt.nemo", nemo_members(megatron_model()))
    random = torch.Generator().manual_seed(5)
    squad, mood = (torch.randn(length, 32, generator=random) for length in (6, 3))
    members = prompt_members(32, {"squad": 6, "mood": 3}, {"mood": mood, "squad": squad})
    prompts = write_tar(tmp_path / "tasks.nemo", members)
    said = built(base, tmp_path / "repo", prompts=[prompts], dtype="fp16")
    assert "prompt task 0: squad, 6 positions" in said and "prompt task 1: mood, 3 positions" in said
    weights = tmp_path / "repo/fastertransformer/1/1-gpu"
    for task, tensor in {"squad": squad, "mood": mood}.items():
        stored = np.fromfile(weights / f"model.prompt_table.{task}.weight.bin", np.float16)
        assert np.array_equal(stored.reshape(-1, 32), tensor.half().numpy())
    ini = configparser.ConfigParser()
    ini.read(weights / "config.ini")
    assert (ini["gpt"]["num_tasks"], ini["gpt"]["prompt_learning_type"]) == ("2", "3")
    assert ini["gpt"]["prompt_learning_start_id"] == "336"
    assert dict(ini["task_0"]) == {"task_name": "squad", "prompt_length": "6"}
    assert dict(ini["task_1"]) == {"task_name": "mood", "prompt_length": "3"}
    assert check_repo(tmp_path / "repo", checksums=True) == []


def test_an_archive_of_prompts_alone_says_how_to_name_it(tmp_path):
    members = prompt_members(32, {"squad": 2}, {"squad": torch.ones(2, 32)})
    path = write_tar(tmp_path / "tasks.nemo", members)
    with pytest.raises(CheckpointError, match="holds prompt tables only: name it with --prompts"):
        open_checkpoint(path)
    base = write_tar(tmp_path / "gpt.nemo", nemo_members(megatron_model()))
    with pytest.raises(CheckpointError, match="gpt.nemo holds no prompt tables"):
        open_prompts(base)


@pytest.mark.parametrize(
    "task, shape, told",
    [
        ("../x", (2, 32), "a prompt table's task is '../x'"),
        ("squad", (2, 31), r"the prompt table of squad is \(2, 31\); the model wants \(length, 32\)"),
    ],
)
def test_a_prompt_table_that_does_not_fit_is_refused(tmp_path, task, shape, told):
    base = write_tar(tmp_path / "gpt.nemo", nemo_members(megatron_model()))
    members = prompt_members(32, {"squad": 2}, {"squad": torch.ones(shape)})
    if task != "squad":
        weights = {f"prompt_table.{task}.prompt_embeddings.weight": torch.ones(shape)}
        members["./model_weights.ckpt"] = torch_bytes(weights)
    checkpoint = open_checkpoint(base)
    with pytest.raises(CheckpointError, match=told):
        checkpoint.prompts += open_prompts(write_tar(tmp_path / "tasks.nemo", members))
        plan_conversion(checkpoint).write(tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def entry(name: str, **fields) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(member, key, value)
    return member


HOSTILE = {
    "a path out of it": (entry("../../evil", size=3), "lies outside of it"),
    "an absolute path": (entry("/tmp/evil", size=3), "lies outside of it"),
    "a link": (
        entry("model_weights.ckpt", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "not a regular file",
    ),
    "a hard link": (entry("x", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "not a regular file"),
    "a device": (entry("x", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "not a regular file"),
    "a pipe": (entry("x", type=tarfile.FIFOTYPE), "not a regular file"),
    "two of one name": (entry("./model_config.yaml", size=3), "two members model_config.yaml"),
}


@pytest.mark.parametrize("compressed", [False, True], ids=["tar", "gz"])
@pytest.mark.parametrize("case", HOSTILE)
def test_members_that_do_not_belong_into_an_archive_are_refused(tmp_path, case, compressed):
    member, told = HOSTILE[case]
    path = tmp_path / "gpt.nemo"
    with tarfile.open(path, "w:gz" if compressed else "w") as archive:
        archive.addfile(entry("./model_config.yaml", size=3), io.BytesIO(b"a: "))
        archive.addfile(member, io.BytesIO(b"abc") if member.size else None)
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["gpt.nemo"]


def test_a_member_larger_than_the_disk_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "gpt.nemo"
    with tarfile.open(path, "w:gz") as archive:
        archive.fileobj.write(entry("./model_weights.ckpt", size=1 << 60).tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(CheckpointError, match="has 1,152,921,504,606,846,976 bytes; .* free"):
        open_checkpoint(path)


def changed(members: dict[str, bytes], **settings) -> dict[str, bytes]:
    values = {**yaml.safe_load(members["./model_config.yaml"]), **settings}
    return {**members, "./model_config.yaml": yaml.safe_dump(values).encode()}


DAMAGES = {
    "no weights": (lambda m: {k: v for k, v in m.items() if "ckpt" not in k}, "has no model_weights.ckpt"),
    "no settings": (lambda m: {k: v for k, v in m.items() if "yaml" not in k}, "has no model_config.yaml"),
    "settings that are code": (
        lambda m: {**m, "./model_config.yaml": b"a: !!python/object/apply:os.system ['touch /tmp/x']"},
        "not valid YAML: could not determine a constructor",
    ),
    "settings that are a list": (lambda m: {**m, "./model_config.yaml": b"[1]"}, "holds a list"),
    "a distributed checkpoint": (
        lambda m: {"./model_config.yaml": m["./model_config.yaml"], "./model_weights/common.pt": b"x"},
        "distributed checkpoint",
    ),
    "rotary positions": (lambda m: changed(m, position_embedding_type="rope"), "embedding_type = rope"),
    "another class": (lambda m: changed(m, target="nemo.x.MegatronT5Model"), "class nemo.x.MegatronT5Model"),
    "a gate": (lambda m: changed(m, activation="swiglu"), "the activation swiglu"),
    "grouped heads": (lambda m: changed(m, num_query_groups=2), "num_query_groups = 2"),
    "more ranks than there are": (
        lambda m: changed(m, tensor_model_parallel_size=4), "of 1 tensor-parallel ranks; its settings say 4",
    ),
    "no number of heads": (lambda m: changed(m, num_attention_heads=None), "number of attention heads"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_gives_one_clear_error(tmp_path, damage):
    spoil, told = DAMAGES[damage]
    path = write_tar(tmp_path / "gpt.nemo", spoil(nemo_members(megatron_model())))
    with pytest.raises(TridecodeError, match=told) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compressed", [False, True], ids=["tar", "gz"])
def test_an_archive_that_is_cut_short_is_refused_wherever_it_ends(tmp_path, compressed):
    path = write_tar(tmp_path / "gpt.nemo", nemo_members(megatron_model()), compressed)
    data = path.read_bytes()
    for share in (0.001, 0.1, 0.5, 0.9):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(CheckpointError, match="gpt.nemo"):
            open_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="gpt.nemo is not a readable tar archive"):
        open_checkpoint(path)


def test_the_names_of_megatron_core_are_known(tmp_path):
    model = megatron_model()
    members = nemo_members(model)
    state = torch.load(io.BytesIO(members["./model_weights.ckpt"]), weights_only=True)
    renamed = {}
    for name, tensor in state.items():
        for old, new in {
            "language_model.": "", "encoder.": "decoder.",
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "self_attention.query_key_value": "self_attention.linear_qkv", "dense_h_to_4h": "linear_fc1",
            "self_attention.dense": "self_attention.linear_proj", "dense_4h_to_h": "linear_fc2",
            "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
        }.items():  # fmt: skip
            name = name.replace(old, new)
        renamed[name] = tensor
    renamed["model.decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.ones(1)
    members["./model_weights.ckpt"] = torch_bytes(renamed)
    assert_state(open_checkpoint(write_tar(tmp_path / "gpt.nemo", members)), model)
