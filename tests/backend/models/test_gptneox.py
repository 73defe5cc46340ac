"""Directories as FasterTransformer's huggingface_gptneox_convert.py writes them, made here with numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import FAMILIES, greedy
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.models import read_model_config


def write_as_fastertransformer(directory: Path, model, ranks: int) -> None:
    """Both dense biases, and their sum in the parallel form, are divided by the ranks; no layernorm_eps."""
    hf, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    heads, size = hf.num_attention_heads, hf.hidden_size // hf.num_attention_heads
    directory.mkdir()
    rotary = int(size * hf.rope_parameters["partial_rotary_factor"])
    (directory / "config.ini").write_text(
        f"[gptneox]\nmodel_name = tiny\nhead_num = {heads}\nsize_per_head = {size}\n"
        f"inter_size = {hf.intermediate_size}\nnum_layer = {hf.num_hidden_layers}\n"
        f"rotary_embedding = {rotary}\nvocab_size = {hf.vocab_size}\nstart_id = 1\nend_id = 2\n"
        f"weight_data_type = fp32\nuse_gptj_residual = {int(hf.use_parallel_residual)}\n"
    )

    def write(name: str, value: np.ndarray) -> None:
        np.ascontiguousarray(value).tofile(directory / f"{name}.bin")

    def split(name: str, value: np.ndarray, axis: int) -> None:
        for rank, part in enumerate(np.split(value, ranks, axis)):
            write(f"{name}.{rank}", part)

    write("model.wte", state["gpt_neox.embed_in.weight"])
    write("model.lm_head.weight", state["lm_head.weight"])
    for kind in ("weight", "bias"):
        write(f"model.final_layernorm.{kind}", state[f"gpt_neox.final_layer_norm.{kind}"])
    for i in range(hf.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"gpt_neox.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            for kind in ("weight", "bias"):
                write(f"{ours}.{norm}.{kind}", state[f"{theirs}.{norm}.{kind}"])
        fused = f"{theirs}.attention.query_key_value"
        weight = state[f"{fused}.weight"].T.reshape(-1, heads, 3, size).swapaxes(1, 2)
        bias = state[f"{fused}.bias"].reshape(heads, 3, size).swapaxes(0, 1)
        split(f"{ours}.attention.query_key_value.weight", weight, 2)
        split(f"{ours}.attention.query_key_value.bias", bias, 1)
        split(f"{ours}.mlp.dense_h_to_4h.weight", state[f"{theirs}.mlp.dense_h_to_4h.weight"].T, 1)
        split(f"{ours}.mlp.dense_h_to_4h.bias", state[f"{theirs}.mlp.dense_h_to_4h.bias"], 0)
        dense, down = (
            state[f"{theirs}.{name}.bias"] / ranks for name in ("attention.dense", "mlp.dense_4h_to_h")
        )
        for name, value in (("attention.dense", dense), ("mlp.dense_4h_to_h", down)):
            split(f"{ours}.{name}.weight", state[f"{theirs}.{name}.weight"].T, 0)
            write(f"{ours}.{name}.bias", value)
        if hf.use_parallel_residual:
            write(f"{ours}.mlp.attention.bias.sum", dense + down)


@pytest.mark.parametrize("ranks, parallel", [(1, True), (2, True), (1, False)])
def test_a_directory_of_fastertransformer_answers_as_transformers(tmp_path, ranks, parallel):
    """hidden_act: FasterTransformer's Gelu is the tanh form. For the sequential form and several ranks its
    converter writes biases that are too small, which its engine reads as they are."""
    case = FAMILIES["gpt_neox"]
    model = case(**case.shared, use_parallel_residual=parallel, hidden_act="gelu_new")
    write_as_fastertransformer(tmp_path / "w", model, ranks)
    config = read_model_config(tmp_path / "w")
    assert (config.norm_eps, config.activation, config.bias_sum) == (1e-5, "gelu_tanh", parallel)
    prompts = [[5], [7, 9, 11], list(range(20, 40))]
    tokens, logits = run_greedy(tmp_path / "w", prompts, 6)
    for prompt, ours, our_logits in zip(prompts, tokens, logits):
        theirs, their_logits = greedy(model, prompt, 6)
        assert ours == theirs
        np.testing.assert_allclose(our_logits, their_logits.numpy(), atol=1e-3, rtol=0)
