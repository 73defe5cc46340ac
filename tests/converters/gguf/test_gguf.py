"""GGUF files: tiny ones made with llama.cpp's own writer, and SmolLM2 from its package."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.checkpoints import TEXTS, greedy, tiny_bloom, tiny_gpt2, tiny_llama, tiny_tokenizer
from tridecode.backend.base.errors import CheckpointError, UnsupportedError
from tridecode.backend.configuration.model_config import RopeConfig
from tridecode.backend.engine.offline import run_greedy
from tridecode.converters.checkpoint import Checkpoint, open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity.comparison import check_parity
from tridecode.converters.tokenizers.files import PROBES, load_tokenizer, save_tokenizer
from tridecode.tools.build_repo.build import build_repo
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
    """Reorder the rows of q and k as llama.cpp does: elements d and d + D/2 of a head are neighbours."""
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
    """Write the model in llama.cpp's format: matrices of type `kind`, other tensors float32. extra:
    metadata."""
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
    """Make a model whose sizes are multiples of llama.cpp's blocks of 32."""
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
    assert checkpoint.eos_ids == [2, 5]  # the end of a turn also ends a text


def test_a_directory_with_one_gguf_is_that_gguf(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F16)
    assert open_checkpoint(tmp_path).path == path


def test_a_way_of_splitting_text_that_cannot_be_rebuilt_is_refused(tmp_path, model):
    path = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F32, pre="some-new-model")
    with pytest.raises(
        UnsupportedError, match="tokenizer.ggml.pre = some-new-model, which cannot be rebuilt"
    ):
        load_tokenizer(open_checkpoint(path))


@pytest.mark.parametrize("size", [0, 4, 8, 24, 100, 1000, 5000])
def test_a_gguf_that_is_cut_short_is_one_line(tmp_path, model, size):
    path = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F32)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="m.gguf is not a readable GGUF file: it is") as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at", [8, 16])  # the counts of tensors and of metadata
def test_a_gguf_whose_counts_lie_is_refused_at_once(tmp_path, model, at):
    path = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.F32)
    data = bytearray(path.read_bytes())
    data[at : at + 8] = (2**62).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="m.gguf is not a readable GGUF file"):
        open_checkpoint(path)


# ---------------------------------------------------------------- GPT-2 and BLOOM


def tiny_gpt2_32():
    """Make a model with multiples of llama.cpp's blocks of 32, and other positions than GPT-2's 1024."""
    return tiny_gpt2(n_embd=64, n_head=4, n_positions=96, n_inner=160)


def tiny_bloom_32():
    return tiny_bloom(hidden_size=64, n_head=4)


def written_as_llama_cpp_does(path: Path, model, kind: gguf.GGMLQuantizationType, pre: str) -> Path:
    """Write GPT-2 or BLOOM like convert_hf_to_gguf.py: names from gguf's table, GPT-2's matrices transposed,
    BLOOM's query_key_value regrouped from q, k, v per head to all q, all k, all v."""
    hf = model.config
    architecture = {"gpt2": gguf.MODEL_ARCH.GPT2, "bloom": gguf.MODEL_ARCH.BLOOM}[hf.model_type]
    names = gguf.get_tensor_name_map(architecture, hf.num_hidden_layers)
    writer = gguf.GGUFWriter(path, hf.model_type)
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_context_length(getattr(hf, "n_positions", 2048))
    writer.add_embedding_length(hf.hidden_size)
    writer.add_feed_forward_length(getattr(hf, "n_inner", None) or 4 * hf.hidden_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_attention_heads)
    writer.add_layer_norm_eps(hf.layer_norm_epsilon)
    tokenizer = tiny_tokenizer().backend_tokenizer
    held = json.loads(tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(held["vocab"], key=held["vocab"].get))
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(held["vocab"]) - 3))
    writer.add_token_merges([" ".join(pair) for pair in held["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if hf.model_type == "gpt2" and weight.ndim == 2 and ".h." in name:
            weight = weight.T
        if "query_key_value" in name:
            by_head = weight.reshape(hf.num_attention_heads, 3, -1, *weight.shape[1:])
            weight = by_head.swapaxes(0, 1).reshape(weight.shape)
        theirs = names.get_name(name.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
        weight = np.ascontiguousarray(weight)
        quantised = weight.ndim == 2 and "position" not in theirs
        data = gguf.quantize(weight, kind) if quantised else weight
        writer.add_tensor(theirs, data, raw_dtype=kind if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_FAMILIES = {"gpt2": (tiny_gpt2_32, "gpt-2"), "bloom": (tiny_bloom_32, "bloom")}


@pytest.mark.parametrize("family", GGUF_FAMILIES)
@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_the_tensors_of_another_familys_gguf_are_transformers_again(tmp_path, family, kind):
    make, pre = GGUF_FAMILIES[family]
    model, (_, tolerance) = make(), QUANTISATIONS[kind]
    path = written_as_llama_cpp_does(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType[kind], pre)
    tensors = open_checkpoint(path).tensors
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert tensors.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name, tensor in state.items():
        torch.testing.assert_close(tensors.read(name), tensor, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", GGUF_FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_another_familys_gguf_becomes_a_repository_that_matches_transformers(tmp_path, family, kind, capfd):
    """PARITY.json agrees with transformers' own reading of the file, and the tokens are those of the
    model."""
    make, pre = GGUF_FAMILIES[family]
    model = make()
    path = written_as_llama_cpp_does(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType[kind], pre)
    repository = build_repo(path, tmp_path / "repo", tensor_para_size=2)
    parity = json.loads((repository / "PARITY.json").read_text())
    assert parity["passed"] and parity["greedy_agreement"] == 1.0
    config = plan_conversion(open_checkpoint(path), "fp32").config
    assert config.max_positions == (96 if family == "gpt2" else 16384)
    assert config.mlp_size == (160 if family == "gpt2" else 256)
    if kind == "F32":
        tokens, _ = run_greedy(repository / "fastertransformer/1/2-gpu", [[7, 9, 11]], 8)
        assert tokens == [greedy(model, [7, 9, 11], 8)[0]]
    written = capfd.readouterr()
    assert "\r" not in written.out + written.err


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_another_familys_tokenizer_splits_as_the_original(tmp_path, family):
    make, pre = GGUF_FAMILIES[family]
    path = written_as_llama_cpp_does(tmp_path / "m.gguf", make(), gguf.GGMLQuantizationType.F32, pre)
    found = save_tokenizer(load_tokenizer(open_checkpoint(path)), None, tmp_path / "t")
    original = tiny_tokenizer().backend_tokenizer
    if family == "bloom":  # the pre_tokenizer of bigscience/bloom's tokenizer.json
        split = {"Regex": " ?[^(\\s|[.,!?…。，、।۔،])]+"}
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        first = {"type": "Split", "pattern": split, "behavior": "Isolated", "invert": False}
        settings = json.loads(original.to_str())
        settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, bytes_]}
        original = Tokenizer.from_str(json.dumps(settings))
    for text in [*PROBES, *TEXTS]:
        assert found.encode(text, add_special_tokens=False).ids == original.encode(text).ids, text
        assert found.decode(found.encode(text).ids) == text
    settings = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] != "TokenizersBackend"


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


def test_smollm2s_tokenizer_names_a_class_that_transformers_4_knows(smollm2_tokenizer):
    settings = json.loads((smollm2_tokenizer / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"backend", "is_local", "local_files_only"} & set(settings)


def test_smollm2s_chat_template_lies_beside_its_tokenizer(smollm2, smollm2_tokenizer):
    template = (smollm2_tokenizer / "chat_template.jinja").read_text()
    assert template == smollm2.gguf_fields["tokenizer.chat_template"]


def test_smollm2s_config(smollm2):
    config = plan_conversion(smollm2, "fp32").config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.head_size, config.mlp_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.max_positions, config.rope) == (8192, RopeConfig(64, 100000.0))
    assert (config.start_id, config.end_id, config.tied_head) == (1, 2, True)


@pytest.mark.nightly  # test_gguf_families.py compares tiny models of every family
@pytest.mark.slow
def test_smollm2_converted_says_what_transformers_says(smollm2, smollm2_tokenizer, tmp_path):
    planned = plan_conversion(smollm2, "fp32")
    planned.write(tmp_path / "w", 3)
    parity = check_parity(smollm2, tmp_path / "w", planned.config, smollm2_tokenizer / "tokenizer.json")
    assert parity.passed
    assert parity.greedy_agreement == 1.0
    assert parity.largest_logit_error < 1e-3
