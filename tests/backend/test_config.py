"""config.ini as FasterTransformer's converters write it, and the engine's parameters."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.hf_models import model_config
from tests.checkpoints import FAMILIES
from tridecode.backend.base.errors import ConfigError, UnsupportedError
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config
from tridecode.backend.configuration.model_config import ModelConfig, check_stages
from tridecode.backend.models import model_config_ini, read_model_config

# output of FasterTransformer's bloom converter for bloom-560m: no blanks around "="
BLOOM_560M = """[gpt]
model_name=bigscience/bloom-560m
head_num=16
size_per_head=64
inter_size=4096
num_layer=24
vocab_size=250880
start_id=1
end_id=2
weight_data_type=fp16
tensor_para_size=2
model_variant=bloom-pre
layernorm_eps=1e-05
layernorm_type=pre_layernorm
activation_type=Gelu
has_positional_encoding=False
has_pre_decoder_layernorm=True
has_post_decoder_layernorm=True
use_attention_linear_bias=True
"""
# output of its Hugging Face gpt converter for gpt2
GPT2 = """[gpt]
model_name = gpt2
head_num = 12
size_per_head = 64
inter_size = 3072
max_pos_seq_len = 1024
num_layer = 12
vocab_size = 50257
start_id = 50256
end_id = 50256
weight_data_type = fp32
tensor_para_size = 1
"""


def write(directory: Path, text: str) -> Path:
    (directory / "config.ini").write_text(text, encoding="utf-8")
    return directory


def test_a_bloom_directory_of_fastertransformer_is_understood(tmp_path):
    config = read_model_config(write(tmp_path, BLOOM_560M))
    assert config == ModelConfig(
        family="bloom", model_name="bigscience/bloom-560m", num_layers=24, hidden_size=1024, num_heads=16,
        num_kv_heads=16, head_size=64, mlp_size=4096, vocab_size=250880, max_positions=16384, norm_eps=1e-5,
        start_id=1, end_id=2, weight_dtype="fp16", activation="gelu_tanh", tied_head=True,
    )  # fmt: skip


def test_a_gpt_directory_of_fastertransformer_is_understood(tmp_path):
    config = read_model_config(write(tmp_path, GPT2))
    assert (config.family, config.max_positions, config.num_layers) == ("gpt", 1024, 12)
    assert config.norm_eps == 1e-6  # FasterTransformer's default: its gpt converter writes none


def test_the_head_is_tied_unless_its_file_is_there(tmp_path):
    write(tmp_path, GPT2)
    assert read_model_config(tmp_path).tied_head
    (tmp_path / "model.lm_head.weight.bin").touch()
    assert not read_model_config(tmp_path).tied_head


def test_the_ini_dialect_of_fastertransformer(tmp_path):
    text = (
        "\ufeff; a comment\n[GPT]\nHead_Num : 0x10\nsize_per_head = 64 ; inline\n# another\n"
        "inter_size = 4096\nnum_layer = 24\nvocab_size = 250880\nstart_id = 1\nend_id = 2\n"
        "weight_data_type = FP32\nhas_positional_encoding = off\nhas_pre_decoder_layernorm = 1\n"
        "use_attention_linear_bias = YES\n"
    )
    config = read_model_config(write(tmp_path, text))
    assert (config.family, config.num_heads, config.head_size) == ("bloom", 16, 64)


@pytest.mark.parametrize(
    "key", ["head_num", "size_per_head", "inter_size", "num_layer", "vocab_size", "start_id", "end_id",
            "max_pos_seq_len", "weight_data_type"]
)  # fmt: skip
def test_a_missing_key_is_an_error_that_names_file_section_and_key(tmp_path, key):
    lines = [line for line in GPT2.splitlines(keepends=True) if not line.startswith(key)]
    with pytest.raises(ConfigError) as caught:
        read_model_config(write(tmp_path, "".join(lines)))
    assert str(tmp_path / "config.ini") in str(caught.value)
    assert f"[gpt] has no {key}" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("head_num = twelve", "head_num = 'twelve'; wanted a whole number"),
        ("head_num = 0", "head_num = 0; wanted 1 or more"),
        ("weight_data_type = int8", "weight_data_type = 'int8'; wanted one of fp32, fp16, bf16"),
        ("layernorm_eps = small", "layernorm_eps = 'small'; wanted a number"),
        ("use_attention_linear_bias = maybe", "use_attention_linear_bias = 'maybe'; wanted true or false"),
    ],
)
def test_a_value_that_cannot_be_read_is_an_error_that_says_what_was_wanted(tmp_path, line, complaint):
    key = line.split(" ")[0]
    lines = [kept for kept in GPT2.splitlines() if not kept.startswith(key)]
    with pytest.raises(ConfigError) as caught:
        read_model_config(write(tmp_path, "\n".join([*lines, line])))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("layernorm_type = sandwich", "layernorm_type = sandwich; this version runs pre_layernorm"),
        ("activation_type = GeGLU", "activation_type = geglu; this version runs gelu, gelu_erf, relu"),
        ("has_adapters = true", "has_adapters = true; this version runs false"),
        (
            "use_attention_linear_bias = true",
            "[gpt] has the flags of another network; this version runs BLOOM (ALiBi",
        ),
    ],
)
def test_a_network_that_this_version_does_not_run_is_refused_by_name(tmp_path, line, complaint):
    with pytest.raises(UnsupportedError) as caught:
        read_model_config(write(tmp_path, GPT2 + line))
    assert complaint in str(caught.value)


def test_other_sections_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"sections found: \[t5\]; wanted .*\[gpt\]"):
        read_model_config(write(tmp_path, GPT2.replace("[gpt]", "[t5]")))


@pytest.mark.parametrize("text", ["head_num = 3\n", "[gpt\nx", "[gpt]\nno equals sign\n"])
def test_a_text_that_is_no_ini_file_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="config.ini is not a valid INI file"):
        read_model_config(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="config.ini is missing"):
        read_model_config(tmp_path)


COMMON = {
    "num_layers": st.integers(1, 200),
    "head_size": st.integers(1, 256).map(lambda n: 2 * n),
    "mlp_size": st.integers(1, 10**6),
    "vocab_size": st.integers(1, 10**6),
    "max_positions": st.integers(1, 10**6),
    "norm_eps": st.floats(1e-12, 1e-2),
    "weight_dtype": st.sampled_from(["fp32", "fp16", "bf16"]),
    "model_name": st.sampled_from(["model", "bigscience/bloom-7b1", "LLaMA 3", "50% off"]),
    "tied_head": st.booleans(),
}


@st.composite
def model_configs(draw) -> ModelConfig:
    case = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    values = {name: draw(strategy) for name, strategy in {**COMMON, **case.ini}.items()}
    heads = draw(st.integers(1, 128)) * values.get("num_kv_heads", 1)
    fixed = {"num_heads": heads, "num_kv_heads": heads, "hidden_size": heads * values["head_size"]}
    for name in ("start_id", "end_id"):
        values[name] = draw(st.integers(-1, values["vocab_size"] - 1))
    if "zero_position" in values:
        values["zero_position"] = min(values["zero_position"], values["max_positions"] - 1)
    config = dataclasses.replace(model_config(case.hf_config()), **{**fixed, **values})
    largest = max((rope.size for rope in config.ropes), default=0)
    size = max(config.head_size, largest + largest % 2)
    hidden = values.get("hidden_size", heads * size)
    return dataclasses.replace(config, head_size=size, hidden_size=hidden)


@settings(deadline=None)
@given(config=model_configs(), ranks=st.integers(1, 8))
def test_what_is_written_is_what_is_read(tmp_path_factory, config, ranks):
    directory = write(tmp_path_factory.mktemp("ini"), model_config_ini(config, ranks))
    assert read_model_config(directory, config.tied_head) == config


# ---------------------------------------------------------------- the engine's parameters


def test_parameters_become_settings_and_strangers_are_kept_apart():
    config = read_engine_config(
        {
            "tensor_para_size": "2", "data_type": "bf16", "max_sequences": " 17 ", "memory_fraction": "0.5",
            "cuda_graphs": "FALSE", "cache_bytes": "0x100000", "model_type": "GPT",
        },
        "config.pbtxt",
    )  # fmt: skip
    assert (config.tensor_para_size, config.data_type, config.max_sequences) == (2, "bf16", 17)
    assert (config.memory_fraction, config.cuda_graphs, config.cache_bytes) == (0.5, False, 2**20)
    assert config.extra == {"model_type": "GPT"}


def test_auto_and_an_empty_text_are_the_default():
    names = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "extra"]
    for text in ("auto", "", "  "):
        assert read_engine_config(dict.fromkeys(names, text), "config.pbtxt") == EngineConfig()


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("tensor_para_size", "two", "a whole number"),
        ("tensor_para_size", "0", "1 or more"),
        ("max_sequence_tokens", "-5", "1 or more, or auto"),
        ("memory_fraction", "1.5", r"a number in \(0, 1\]"),
        ("memory_fraction", "nan", r"a number in \(0, 1\]"),
        ("shadow_share", "-0.1", r"a number in \[0, 1\]"),
        ("shadow_share", "nan", r"a number in \[0, 1\]"),
        ("shadow_share", "some", "a number"),
        ("shadow_time_share", "1.01", r"a number in \[0, 1\]"),
        ("shadow_slice_tokens", "0", "1 or more, or auto"),
        ("shadow_queue", "0", "1 or more"),
        ("shadow_seed", "-1", "0 or more"),
        ("host_cache_bytes", "-1", r"0, or 1048576 \(1 MiB\) to 2\*\*50"),
        ("host_cache_bytes", "4096", r"0, or 1048576 \(1 MiB\) to 2\*\*50"),
        ("host_cache_bytes", "9" * 20, r"0, or 1048576 \(1 MiB\) to 2\*\*50"),
        ("host_cache_bytes", "8G", "a whole number"),
        ("step_timeout_s", "0", "more than 0 seconds"),
        ("cuda_graphs", "perhaps", "true or false"),
        ("batch_invariant", "2", "true or false"),
        ("data_type", "fp8", "one of fp32, fp16, bf16"),
        ("kv_cache_dtype", "fp16", "one of auto, fp8, int8"),
        ("device", "tpu", "one of auto, cpu, cuda"),
    ],
)
def test_a_wrong_parameter_is_an_error_with_file_key_found_and_wanted(key, text, wanted):
    with pytest.raises(ConfigError, match=rf"the/config.pbtxt: parameter {key} is .*; wanted {wanted}"):
        read_engine_config({key: text}, "the/config.pbtxt")


def test_int8_mode_rounds_weights_and_refuses_other_modes_by_name():
    for mode in (1, 2):
        assert read_engine_config({"int8_mode": str(mode)}, "config.pbtxt").int8_mode == mode
    with pytest.raises(UnsupportedError, match="int8_mode is 3; this version runs 0, 1, 2"):
        read_engine_config({"int8_mode": "3"}, "config.pbtxt")


@pytest.mark.parametrize("layers", [1, 3, 5, 6, 12, 80])
def test_the_stages_that_are_refused_are_those_of_which_one_would_be_empty(layers):
    """Against stages that are filled by hand, layer by layer."""
    fitting = []
    for stages in range(1, layers + 3):
        each = math.ceil(layers / stages)
        filled = {layer // each for layer in range(layers)}
        if filled == set(range(stages)):
            fitting.append(str(stages))
            check_stages(layers, stages, "a model")
        else:
            with pytest.raises(ConfigError, match=f"pipeline_para_size = {stages} leaves stages"):
                check_stages(layers, stages, "a model")
    with pytest.raises(ConfigError, match=f"wanted one of {', '.join(fitting)}$"):
        check_stages(layers, layers + 1, "a model")
