"""GGUF files: a tiny one written here with llama.cpp's own writer, and SmolLM2 from its package."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.checkpoints import tiny_llama
from tridecode.backend.config import RopeConfig
from tridecode.backend.errors import UnsupportedError
from tridecode.converters.checkpoint import Checkpoint, open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity import check_parity
from tridecode.converters.tokenizer import PROBES, load_tokenizer, save_tokenizer
from tridecode.tools.demo import packaged_model

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def as_llama_cpp(name: str, weight: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k: element d and d + D/2 of a head lie side by side."""
    for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
        if part in name:
            size = weight.shape[0] // count
            order = [
                h * size + half * size // 2 + d
                for h in range(count)
                for d in range(size // 2)
                for half in (0, 1)
            ]
            return weight[order]
    return weight


def write_gguf(path: Path, model, kind: gguf.GGMLQuantizationType, **extra) -> Path:
    """The model in llama.cpp's format: matrices of type `kind`, the rest float32. extra: more metadata."""
    hf = model.config
    writer = gguf.GGUFWriter(path, extra.pop("architecture", "llama"))
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_rope_dimension_count(hf.head_dim)
    writer.add_rope_freq_base(hf.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_vocab_size(hf.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(extra.pop("pre", "gpt-2"))
    writer.add_token_list([f"t{i}" for i in range(hf.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    if "scaling" in extra:
        writer.add_rope_scaling_type(extra.pop("scaling"))
    for name, tensor in extra.pop("tensors", {}).items():
        writer.add_tensor(name, tensor)
    assert not extra
    for name, parameter in model.named_parameters():
        weight = as_llama_cpp(
            name, parameter.detach().numpy(), hf.num_attention_heads, hf.num_key_value_heads
        )
        weight = np.ascontiguousarray(weight)
        if weight.ndim == 1:
            writer.add_tensor(llama_cpp_name(name), weight)
        else:
            writer.add_tensor(llama_cpp_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model():
    """Sizes that llama.cpp's blocks of 32 divide."""
    return tiny_llama(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 40000.0},
    )  # fmt: skip


QUANTISATIONS = {"F32": (torch.float32, 0.0), "F16": (torch.float16, 2e-3), "Q8_0": (torch.float16, 2e-2)}


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_the_tensors_of_a_gguf_are_transformers_again(tmp_path, model, kind):
    dtype, tolerance = QUANTISATIONS[kind]
    path = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType[kind])
    tensors = open_checkpoint(path).tensors
    state = model.state_dict()
    assert tensors.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name, tensor in state.items():
        torch.testing.assert_close(tensors.read(name), tensor, atol=tolerance, rtol=0)
        assert tensors.dtype(name) == (dtype if tensor.ndim > 1 else torch.float32)


def test_its_metadata_become_the_config(tmp_path, model):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F32))
    config = plan_conversion(checkpoint, "fp32").config
    hf = model.config
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size) == (64, 4, 2, 16)
    assert (config.num_layers, config.mlp_size, config.vocab_size) == (2, 96, hf.vocab_size)
    assert config.rope == RopeConfig(16, 40000.0)
    assert config.norm_eps == pytest.approx(hf.rms_norm_eps)
    assert not config.tied_head
    assert (config.start_id, config.end_id) == (1, 2)
    assert checkpoint.eos_ids == [2, 5]  # the end of a turn ends a text too


def test_a_directory_with_one_gguf_is_that_gguf(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F16)
    assert open_checkpoint(tmp_path).path == path


def test_a_gguf_of_another_architecture_is_refused_by_name(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F32, architecture="qwen2")
    with pytest.raises(UnsupportedError, match="GGUF architecture 'qwen2'; this version reads llama"):
        open_checkpoint(path)


def test_a_rope_scaling_that_gguf_keeps_elsewhere_is_refused_and_not_lost(tmp_path, model):
    freqs = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", model, gguf.GGMLQuantizationType.F32, tensors=freqs)
    with pytest.raises(UnsupportedError, match="rope_freqs.weight: its rope scaling would be lost"):
        open_checkpoint(path)
    linear = gguf.RopeScalingType.LINEAR
    path = write_gguf(tmp_path / "b.gguf", model, gguf.GGMLQuantizationType.F32, scaling=linear)
    with pytest.raises(UnsupportedError, match="llama.rope.scaling.type = linear"):
        open_checkpoint(path)


def test_a_way_of_splitting_text_that_cannot_be_rebuilt_is_refused(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F32, pre="some-new-model")
    with pytest.raises(
        UnsupportedError, match="tokenizer.ggml.pre = some-new-model, which cannot be rebuilt"
    ):
        load_tokenizer(open_checkpoint(path))


# ---------------------------------------------------------------- SmolLM2


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    return open_checkpoint(packaged_model())


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2") / "tokenizer"
    save_tokenizer(load_tokenizer(smollm2), None, directory)
    return directory


def test_smollm2s_tokenizer_is_llama_cpps_and_splits_every_digit(smollm2, smollm2_tokenizer):
    tokenizer = Tokenizer.from_file(str(smollm2_tokenizer / "tokenizer.json"))
    recorded = json.loads(Path(__file__).with_name("smollm2_tokens.json").read_text())["tokens"]
    assert {row["text"] for row in recorded} >= set(PROBES)
    for row in recorded:
        assert tokenizer.encode(row["text"]).ids == row["ids"], row["text"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1999").ids] == ["1", "9", "9", "9"]


def test_smollm2s_chat_template_lies_beside_its_tokenizer(smollm2, smollm2_tokenizer):
    template = (smollm2_tokenizer / "chat_template.jinja").read_text()
    assert template == smollm2.gguf_fields["tokenizer.chat_template"]


def test_smollm2s_config(smollm2):
    config = plan_conversion(smollm2, "fp32").config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.head_size, config.mlp_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.max_positions, config.rope) == (8192, RopeConfig(64, 100000.0))
    assert (config.start_id, config.end_id, config.tied_head) == (1, 2, True)


@pytest.mark.slow
def test_smollm2_converted_says_what_transformers_says(smollm2, smollm2_tokenizer, tmp_path):
    planned = plan_conversion(smollm2, "fp32")
    planned.write(tmp_path / "w", 3)
    parity = check_parity(smollm2, tmp_path / "w", planned.config, smollm2_tokenizer / "tokenizer.json")
    assert parity.passed
    assert parity.greedy_agreement == 1.0
    assert parity.largest_logit_error < 1e-3
