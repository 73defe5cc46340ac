"""FasterTransformer's directories, 1-gpu to 8-gpu: served as they are, and as sources of build-repo."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import FAMILIES, greedy, save, tiny_bloom, tiny_gpt2
from tests.converters.sources import ft_directories
from tests.tools.build_repo.test_build_repo_sources import built
from tridecode.backend.base.errors import CheckpointError, TridecodeError, UnsupportedError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.models import read_model_config
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.quantize.texts import read_given_text
from tridecode.tools.checks.repository import check_repo

PROMPTS = [[5], [7, 9, 11], list(range(20, 60))]
EIGHT = {"n_head": 8, "n_embd": 64}
tiny_gptneox = FAMILIES["gpt_neox"]
NEOX = {"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "hidden_act": "gelu_new"}
GPTJ = {"n_embd": 64, "n_head": 4, "layer_norm_epsilon": 1e-6}


def tiny_gptj(**settings):
    return FAMILIES["gptj"](**{**GPTJ, **settings})


def tiny_opt(**settings):
    return FAMILIES["opt"](**{"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 96, **settings})


#: name -> transformers' model, the writer, its number of ranks and further settings
CASES = {
    "gpt2 1-gpu": (lambda: tiny_gpt2(layer_norm_epsilon=1e-6), ft_directories.gpt2, 1, {}),
    "gpt2 8-gpu": (lambda: tiny_gpt2(layer_norm_epsilon=1e-6, **EIGHT), ft_directories.gpt2, 8, {}),
    "megatron 2-gpu": (
        lambda: tiny_gpt2(layer_norm_epsilon=1e-5, **EIGHT),
        ft_directories.gpt2,
        2,
        {"layernorm_eps": 1e-5, "has_adapters": False, "adapter_inter_size": 0},
    ),
    "opt 4-gpu": (lambda: tiny_opt(do_layer_norm_before=True), ft_directories.opt, 4, {}),
    "opt-350m 2-gpu": (
        lambda: tiny_opt(do_layer_norm_before=False, word_embed_proj_dim=24), ft_directories.opt, 2, {},
    ),
    "gptj whole heads 1-gpu": (
        lambda: tiny_gptj(rotary_dim=16), ft_directories.gptj, 1, {"rotary_embedding": None},
    ),
    "gptj 4-gpu": (lambda: tiny_gptj(rotary_dim=4), ft_directories.gptj, 4, {}),
    "bloom 1-gpu": (tiny_bloom, ft_directories.bloom, 1, {}),
    "bloom 4-gpu": (lambda: tiny_bloom(n_head=4), ft_directories.bloom, 4, {}),
    "bloom-post 2-gpu": (
        lambda: tiny_bloom(n_head=4, apply_residual_connection_post_layernorm=True),
        ft_directories.bloom,
        2,
        {},
    ),
    "gptneox 1-gpu": (lambda: tiny_gptneox(**NEOX), ft_directories.gptneox, 1, {}),
    "gptneox 4-gpu": (lambda: tiny_gptneox(**NEOX), ft_directories.gptneox, 4, {}),
    "gptneox sequential 1-gpu": (
        lambda: tiny_gptneox(use_parallel_residual=False, **NEOX), ft_directories.gptneox, 1, {},
    ),
}  # fmt: skip


def written(tmp_path: Path, case: str):
    """(transformers' model, its directory <n>-gpu) of a case."""
    make, write, ranks, extra = CASES[case]
    model = make()
    return model, write(model, tmp_path / "c-model" / f"{ranks}-gpu", ranks, **extra)


def assert_same_tokens(model, weights) -> None:
    tokens, logits = run_greedy(weights, PROMPTS, 8)
    for prompt, ours, our_logits in zip(PROMPTS, tokens, logits):
        theirs, their_logits = greedy(model, prompt, 8)
        assert ours == theirs
        assert np.abs(our_logits - their_logits.numpy()).max() < 2e-3


@pytest.mark.parametrize("case", CASES)
def test_a_directory_is_served_as_it_is(tmp_path, case):
    model, directory = written(tmp_path, case)
    assert_same_tokens(model, directory)


@pytest.mark.parametrize("case", CASES)
def test_a_directory_is_converted_to_another_degree(tmp_path, case):
    model, directory = written(tmp_path, case)
    checkpoint = open_checkpoint(directory)
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "weights", 2 if planned.config.num_heads % 2 == 0 else 1)
    assert_same_tokens(model, tmp_path / "weights")
    assert read_model_config(tmp_path / "weights").norm_eps == planned.config.norm_eps
    assert checkpoint.has_reference
    ids = list(range(20, 60))
    reference = greedy(checkpoint.reference_model(planned.checkpoint.tensors.reader.dtype), ids, 4)
    assert reference[0] == greedy(model, ids, 4)[0]


@pytest.mark.parametrize("case", ["gpt2 8-gpu", "bloom-post 2-gpu", "gptneox 4-gpu"])
def test_a_repository_is_built_of_a_directory_and_compared_with_its_checkpoint(tmp_path, case):
    model, directory = written(tmp_path, case)
    source = save(model, tmp_path / "hf")
    said = built(directory.parent, tmp_path / "repo", reference=source)
    assert "parity with transformers" in said and "greedy tokens equal on 100.0%" in said
    assert "has no tokenizer" in said
    assert ("no layernorm_eps, so 1e-06 as in FasterTransformer" in said) == case.startswith("gpt2")
    parity = json.loads((tmp_path / "repo/PARITY.json").read_text())
    assert parity["passed"] and parity["source"] == "hf"
    assert_same_tokens(model, tmp_path / "repo/fastertransformer/1/1-gpu")


def test_a_reference_of_the_directory_itself_is_named_as_such(tmp_path):
    """It reads the same config.ini: a wrong number of heads passes."""
    _, directory = written(tmp_path, "gpt2 1-gpu")
    path = directory / "config.ini"
    path.write_text(path.read_text().replace("head_num = 3", "head_num = 6").replace("head = 8", "head = 4"))
    said = built(directory, tmp_path / "repo")
    assert (
        "parity with transformers' model of the files of 1-gpu (not independent: a wrong config.ini" in said
    )
    reference = json.loads((tmp_path / "repo/PARITY.json").read_text())["reference"]
    assert (reference["of"], reference["independent"]) == ("1-gpu", False)
    warnings = [finding for finding in check_repo(tmp_path / "repo") if finding.severity == "warning"]
    assert any("model of the files of 1-gpu" in finding.found for finding in warnings)


def padded(directory, rows: int, value: float) -> None:
    """Add rows to the word embedding, as Megatron does."""
    text = (directory / "config.ini").read_text()
    size = int(re.search(r"vocab_size = (\d+)", text)[1])
    (directory / "config.ini").write_text(text.replace(f"size = {size}", f"size = {size + rows}"))
    words = np.fromfile(directory / "model.wte.bin", np.float32).reshape(size, -1)
    more = np.concatenate([words, np.full((rows, words.shape[1]), value, np.float32)])
    more.tofile(directory / "model.wte.bin")


@pytest.mark.parametrize("text", [False, True])
def test_a_padded_directory_is_compared_on_the_ids_of_its_checkpoint(tmp_path, text):
    model, directory = written(tmp_path, "gpt2 1-gpu")
    source = save(model, tmp_path / "hf")
    padded(directory, 37, 0.0)
    options = {"tokenizer": source}
    if text:
        (tmp_path / "text.jsonl").write_text('{"text": "The history of the city begins with a harbour"}\n')
        options["parity_text"] = read_given_text(tmp_path / "text.jsonl")
    said = built(directory, tmp_path / "repo", reference=source, **options)
    assert (
        "parity with transformers: " in said and "compared on the 331 token ids that both models have" in said
    )
    parity = json.loads((tmp_path / "repo/PARITY.json").read_text())
    assert parity["reference"]["vocab_size"] == 331 and parity["passed"]
    assert parity["largest_logit_error"] < 2e-3


def test_padding_that_is_chosen_fails_and_is_named(tmp_path):
    model, directory = written(tmp_path, "gpt2 1-gpu")
    source = save(model, tmp_path / "hf", tokenizer=False)
    final = np.fromfile(directory / "model.final_layernorm.bias.bin", np.float32)
    padded(directory, 2, 0.0)
    words = np.fromfile(directory / "model.wte.bin", np.float32).reshape(333, -1)
    words[331] = 1000 * final
    words.tofile(directory / "model.wte.bin")
    with pytest.raises(CheckpointError, match="greedy tokens are ids that the reference does not have"):
        built(directory, tmp_path / "repo", reference=source)


def test_a_reference_with_more_ids_is_compared_on_those_of_the_directory(tmp_path):
    model, directory = written(tmp_path, "gpt2 1-gpu")
    model.resize_token_embeddings(400)
    with torch.no_grad():
        model.transformer.wte.weight[331:] = 0
    source = save(model, tmp_path / "hf", tokenizer=False)
    said = built(directory, tmp_path / "repo", reference=source)
    assert "compared on the 331 token ids that both models have" in said


def test_another_checkpoint_as_reference_fails_the_comparison(tmp_path):
    _, directory = written(tmp_path, "gpt2 1-gpu")
    other = save(tiny_gpt2(seed=77), tmp_path / "other", tokenizer=False)
    with pytest.raises(CheckpointError, match="the converted model is not transformers' model of .*other"):
        built(directory, tmp_path / "repo", reference=other)


def test_a_transposed_head_is_turned_back_and_not_served_as_it_is(tmp_path):
    model = tiny_bloom(tie_word_embeddings=False)
    directory = ft_directories.bloom(model, tmp_path / "1-gpu")
    with pytest.raises(UnsupportedError, match="model.lm_head.weight.bin is transposed.*build-repo"):
        read_model_config(directory)
    checkpoint = open_checkpoint(directory)
    assert any("is transposed" in note for note in checkpoint.notes)
    plan_conversion(checkpoint).write(tmp_path / "weights")
    assert_same_tokens(model, tmp_path / "weights")


def test_a_bloom_of_ours_is_a_source_too_with_its_head_as_it_is(tmp_path):
    model = tiny_bloom(tie_word_embeddings=False)
    plan_conversion(open_checkpoint(save(model, tmp_path / "hf"))).write(tmp_path / "first")
    checkpoint = open_checkpoint(tmp_path / "first")
    assert checkpoint.notes == []
    plan_conversion(checkpoint).write(tmp_path / "second")
    assert_same_tokens(model, tmp_path / "second")


def test_a_head_equal_to_the_embedding_needs_no_file(tmp_path):
    """huggingface_opt_convert.py and the Japanese GPT-2 converter write it in any case."""
    _, directory = written(tmp_path, "gpt2 1-gpu")
    (directory / "model.lm_head.weight.bin").write_bytes((directory / "model.wte.bin").read_bytes())
    planned = plan_conversion(open_checkpoint(directory))
    assert planned.config.tied_head
    assert "model.lm_head.weight" not in {item.spec.name for item in planned.conversions}


def test_prompt_learning_of_a_directory_is_kept(tmp_path):
    model, directory = written(tmp_path, "megatron 2-gpu")
    tasks = "num_tasks = 2\nprompt_learning_start_id = 50257\nprompt_learning_type = 3\n"
    tasks += (
        "[task_0]\ntask_name = squad\nprompt_length = 16\n[task_1]\ntask_name = mood\nprompt_length = 4\n"
    )
    with open(directory / "config.ini", "a") as file:
        file.write(tasks)
    for name in ("squad", "other"):
        np.ones((16, 64), np.float32).tofile(directory / f"model.prompt_table.{name}.weight.bin")
    checkpoint = open_checkpoint(directory)
    assert "the task mood of prompt learning has no model.prompt_table.mood.weight.bin" in checkpoint.notes[0]
    assert "names the files model.prompt_table.other.weight.bin; they are left out" in checkpoint.notes[1]
    assert [(table.task, table.shape[0], table.kind) for table in checkpoint.prompts] == [
        ("squad", 16, 3), ("mood", 4, 3)
    ]  # fmt: skip
    assert checkpoint.prompt_start_id == 50257
    assert_same_tokens(model, directory)


def test_a_gptj_of_fastertransformer_has_its_epsilon(tmp_path):
    _, directory = written(tmp_path, "gptj 4-gpu")
    assert read_model_config(directory).norm_eps == 1e-6
    assert any("no layernorm_eps, so 1e-06" in note for note in open_checkpoint(directory).notes)


def test_sequential_neox_of_several_ranks_is_pointed_out(tmp_path):
    model = tiny_gptneox(use_parallel_residual=False, **NEOX)
    directory = ft_directories.gptneox(model, tmp_path / "2-gpu", 2)
    assert any("divides two biases" in note for note in open_checkpoint(directory).notes)


def test_half_precision_directories_are_read_in_their_dtype(tmp_path):
    model = tiny_gpt2(layer_norm_epsilon=1e-6, **EIGHT)
    directory = ft_directories.gpt2(model, tmp_path / "4-gpu", 4, dtype="fp16")
    planned = plan_conversion(open_checkpoint(directory))
    assert planned.config.weight_dtype == "fp16"
    planned.write(tmp_path / "weights", 8)
    config = EngineConfig(data_type="fp32")
    ours, logits = run_greedy(tmp_path / "weights", PROMPTS, 4, config)
    again, same_logits = run_greedy(directory, PROMPTS, 4, config)
    assert ours == again
    assert all(np.array_equal(a, b) for a, b in zip(logits, same_logits))
    assert ours == [greedy(model.half().float(), prompt, 4)[0] for prompt in PROMPTS]


def test_of_several_directories_one_must_be_named(tmp_path):
    for ranks in (1, 2):
        ft_directories.gpt2(tiny_gpt2(**EIGHT), tmp_path / f"{ranks}-gpu", ranks)
    with pytest.raises(CheckpointError, match="holds 1-gpu, 2-gpu; name one of them"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "2-gpu").name == "2-gpu"


DAMAGES = {
    "a missing file": (lambda path: (path / "model.wpe.bin").unlink(), "model.wpe.bin is missing"),
    "a missing rank": (
        lambda path: (path / "model.layers.1.mlp.dense_h_to_4h.weight.1.bin").unlink(),
        "dense_h_to_4h.weight.1.bin is missing",
    ),
    "a short file": (
        lambda path: (path / "model.wte.bin").write_bytes(b"1234"), "model.wte.bin holds 4 bytes",
    ),
    "no head_num": (
        lambda path: edit(path, "head_num = 8", ""), r"section \[gpt\] has no head_num",
    ),
    "adapters": (lambda path: edit(path, "has_adapters = False", "has_adapters = True"), "has_adapters"),
    "no INI file": (lambda path: (path / "config.ini").write_text("{}"), "not a valid INI file"),
}  # fmt: skip


def edit(directory: Path, old: str, new: str) -> None:
    text = (directory / "config.ini").read_text()
    assert old in text
    (directory / "config.ini").write_text(text.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_gives_one_clear_error(tmp_path, damage):
    spoil, told = DAMAGES[damage]
    _, directory = written(tmp_path, "megatron 2-gpu")
    spoil(directory)
    with pytest.raises(TridecodeError, match=told) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
