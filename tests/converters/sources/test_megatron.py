"""Megatron-LM's checkpoints, of any number of ranks and of each version, give the GPT-2 they were made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoints import greedy, tiny_gpt2, tiny_tokenizer
from tests.converters.sources.megatron_checkpoints import CORE, LEGACY, NEWER, write_megatron
from tests.tools.build_repo.test_build_repo_sources import built
from tridecode.backend.base.errors import CheckpointError, TridecodeError, UnsupportedError
from tridecode.backend.engine.offline import run_greedy
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

PROMPTS = [[5], [7, 9, 11], list(range(20, 60))]
SIZES = {"n_head": 4, "n_embd": 32, "n_layer": 4, "n_inner": 96, "vocab_size": 336, "n_positions": 96}


def megatron_model(**settings):
    return tiny_gpt2(**{**SIZES, "activation_function": "gelu_new", **settings})


LAYOUTS = {
    "version 0, one rank, first names": {
        "version": 0,
        "names": LEGACY,
        "encoder": "transformer",
        "zipped": False,
    },
    "version 0, two ranks": {"version": 0, "ranks": 2, "names": LEGACY, "encoder": "transformer"},
    "version 1, two ranks": {"version": 1.0, "ranks": 2},
    "version 2, four ranks": {"version": 2.0, "ranks": 4},
    "version 3, two ranks, two stages": {"version": 3.0, "ranks": 2, "stages": 2},
    "version 3, four stages, distributed optimizer": {"stages": 4, "file": "model_rng.pt"},
    "core names": {"ranks": 2, "names": CORE},
}


def assert_state(checkpoint, model) -> None:
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight" or not tied(model)}
    assert checkpoint.tensors.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name, tensor in state.items():
        assert torch.equal(checkpoint.tensors.read(name), tensor), name
        assert checkpoint.tensors.dtype(name) == tensor.dtype


def tied(model) -> bool:
    return model.config.tie_word_embeddings


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tensors_are_those_of_the_model(tmp_path, layout):
    model = megatron_model()
    checkpoint = open_checkpoint(write_megatron(model, tmp_path / "megatron", **LAYOUTS[layout]))
    assert_state(checkpoint, model)
    config = checkpoint.config
    assert (config.n_head, config.n_inner, config.activation_function) == (4, 96, "gelu_fast")
    assert config.layer_norm_epsilon == 1e-5 and config.vocab_size == 336


def test_an_interleaved_pipeline_has_its_layers_in_order(tmp_path):
    """Two chunks a stage: model0 of all stages comes before model1 of any."""
    model = megatron_model()
    write_megatron(model, tmp_path / "four", stages=4)
    pieces = [torch.load(path, weights_only=False) for path in sorted((tmp_path / "four").glob("*/*.pt"))]
    for stage in range(2):
        folder = tmp_path / "two" / f"mp_rank_00_{stage:03d}"
        folder.mkdir(parents=True)
        args = pieces[0]["args"]
        args.pipeline_model_parallel_size = 2
        chunks = {"model0": pieces[stage]["model"], "model1": pieces[2 + stage]["model"]}
        torch.save({"args": args, "checkpoint_version": 3.0, **chunks}, folder / "model_optim_rng.pt")
    assert_state(open_checkpoint(tmp_path / "two"), model)


@pytest.mark.parametrize("untied", [False, True])
def test_greedy_tokens_are_those_of_transformers(tmp_path, untied):
    model = megatron_model(tie_word_embeddings=not untied)
    extra = {"untie_embeddings_and_output_weights": untied}
    checkpoint = open_checkpoint(write_megatron(model, tmp_path / "megatron", ranks=2, stages=2, **extra))
    assert_state(checkpoint, model)
    plan_conversion(checkpoint).write(tmp_path / "weights", 4)
    assert run_greedy(tmp_path / "weights", PROMPTS, 8)[0] == [greedy(model, ids, 8)[0] for ids in PROMPTS]


def test_a_repository_with_the_tokenizer_beside_the_ranks(tmp_path):
    root = write_megatron(megatron_model(), tmp_path / "run" / "iter_0000500", ranks=2).parent
    (root / "latest_checkpointed_iteration.txt").write_text("500\n")
    (root / "iter_0000100").mkdir()
    tokenizer = tiny_tokenizer()
    files = tokenizer.backend_tokenizer.model.save(str(root / "iter_0000500"))
    assert {Path(file).name for file in files} == {"vocab.json", "merges.txt"}
    said = built(root, tmp_path / "repo")
    assert "greedy tokens equal on 100.0%" in said and "no tokenizer" not in said
    ini = (tmp_path / "repo/fastertransformer/1/1-gpu/config.ini").read_text()
    assert "end_id = 0" in ini  # <|endoftext|> of vocab.json
    assert json.loads((tmp_path / "repo/PARITY.json").read_text())["passed"]


def test_a_checkpoint_without_arguments_needs_its_heads(tmp_path):
    model = megatron_model()
    folder = write_megatron(model, tmp_path / "345m", with_args=False, version=0, names=LEGACY)
    with pytest.raises(CheckpointError, match="holds no arguments; name its number of attention heads"):
        open_checkpoint(folder)
    checkpoint = open_checkpoint(folder, num_heads=4)
    assert_state(checkpoint, model)
    assert "layernorm_eps is taken as 1e-05" in checkpoint.notes[0]
    assert checkpoint.config.n_inner == 96


@pytest.mark.parametrize(
    "extra, wanted",
    [
        ({"bias_gelu_fusion": True}, "gelu_fast"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_new"),
        ({"bias_gelu_fusion": True, "onnx_safe": True}, "gelu"),
    ],
)
def test_the_form_of_gelu_follows_the_arguments(tmp_path, extra, wanted):
    checkpoint = open_checkpoint(write_megatron(megatron_model(), tmp_path / "m", **extra))
    assert checkpoint.config.activation_function == wanted


def test_norm_weights_stored_less_one(tmp_path):
    model = megatron_model()
    lowered = megatron_model()
    with torch.no_grad():
        for name, parameter in lowered.named_parameters():
            if "ln_" in name and name.endswith("weight"):
                parameter.sub_(1)
    checkpoint = open_checkpoint(write_megatron(lowered, tmp_path / "m", apply_layernorm_1p=True))
    for name in ("transformer.h.1.ln_2.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"):
        assert torch.allclose(checkpoint.tensors.read(name), model.state_dict()[name], atol=1e-6)


OTHER_NETWORKS = {
    "position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm", "num_experts": 8,
    "group_query_attention": True, "add_bias_linear": False, "kv_channels": 64, "squared_relu": True,
    "apply_residual_connection_post_layernorm": True,
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER_NETWORKS)
def test_another_network_is_refused_by_name(tmp_path, key):
    folder = write_megatron(megatron_model(), tmp_path / "m", **{key: OTHER_NETWORKS[key]})
    with pytest.raises(UnsupportedError, match=f"{tmp_path}.*({key}|squared ReLU)"):
        open_checkpoint(folder)


def edit_args(folder: Path, **changes) -> None:
    for path in folder.glob("*/*.pt"):
        tree = torch.load(path, weights_only=False)
        vars(tree["args"]).update(changes)
        torch.save(tree, path)


def drop_tensor(folder: Path) -> None:
    path = folder / "mp_rank_01/model_optim_rng.pt"
    tree = torch.load(path, weights_only=False)
    del tree["model"]["language_model"]["encoder"]["layers.1.mlp.dense_h_to_4h.bias"]
    torch.save(tree, path)


def add_tensor(folder: Path) -> None:
    for path in folder.glob("*/*.pt"):
        tree = torch.load(path, weights_only=False)
        tree["model"]["language_model"]["encoder"]["layers.0.adaptor1.weight"] = torch.ones(3)
        torch.save(tree, path)


DAMAGES = {
    "a missing rank": (lambda f: shutil.rmtree(f / "mp_rank_01"), "of 1 tensor-parallel ranks; .* say 2"),
    "a missing stage": (
        lambda f: edit_args(f, pipeline_model_parallel_size=2), "of 1 pipeline-parallel ranks; .* say 2",
    ),
    "a folder without its file": (
        lambda f: (f / "mp_rank_01/model_optim_rng.pt").unlink(), "mp_rank_01 has no model_optim_rng.pt",
    ),
    "a cut file": (
        lambda f: (f / "mp_rank_01/model_optim_rng.pt").write_bytes(b"PK\x03\x04"), "not a readable file of",
    ),
    "a tensor of one rank only": (drop_tensor, "tensor ranks 0 and 1 do not both have .*mlp.c_fc.bias"),
    "an unknown tensor": (add_tensor, "has .*adaptor1.weight, which is not a known tensor"),
    "more layers than said": (lambda f: edit_args(f, num_layers=3), "holds 4 layers; its settings say 3"),
    "another vocabulary": (lambda f: edit_args(f, padded_vocab_size=50304), "336 rows .* 50304"),
    "no number of heads": (lambda f: edit_args(f, num_attention_heads="x"), "num_attention_heads = x"),
    "heads that do not divide": (lambda f: edit_args(f, num_attention_heads=3, kv_channels=None), "3 heads"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_gives_one_clear_error(tmp_path, damage):
    spoil, told = DAMAGES[damage]
    folder = write_megatron(megatron_model(), tmp_path / "m", ranks=2, names=NEWER)
    spoil(folder)
    with pytest.raises(TridecodeError, match=told) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_of_several_iterations_one_must_be_named(tmp_path):
    for iteration in (1, 2):
        write_megatron(megatron_model(), tmp_path / f"iter_{iteration:07d}")
    with pytest.raises(CheckpointError, match="iter_0000001, iter_0000002; name one of them"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "iter_0000002").name == "iter_0000002"
    assert open_checkpoint(tmp_path / "iter_0000002" / "mp_rank_00").path.name == "iter_0000002"
