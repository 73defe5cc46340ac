"""config.ini with one wrong value, in every family: refused with the key, what was found and wanted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.backend.hf_models import model_config
from tests.checkpoints import FAMILIES, save
from tests.converters.sources import ft_directories
from tridecode.backend.base.errors import ConfigError, TridecodeError, UnsupportedError, WeightFileError
from tridecode.backend.models import family, file_specs, model_config_ini, read_model_config
from tridecode.backend.models.prompt_ini import task_spec
from tridecode.backend.weights.directory_files import StoredFiles, unread_tensor
from tridecode.backend.weights.reader import WeightReader
from tridecode.backend.wire.prompt_learning import P_TUNING, PREFIX_PROMPT, PromptTask
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

#: key -> wrong values, and what the error says is wanted
WRONG: dict[str, tuple[tuple[object, ...], str]] = {
    "head_num": ((0, -1, "x", 1 << 40), "1 or more|a whole number|or less"),
    "size_per_head": ((0, -2), "1 or more"),
    "inter_size": ((0, -2), "1 or more"),
    "num_layer": ((0, -1, 5000, "2.5"), "1 or more|4096 or less|a whole number"),
    "vocab_size": ((0, -331), "1 or more"),
    "max_pos_seq_len": ((0, -1, (1 << 24) + 1), "1 or more|16777216 or less"),
    "start_id": ((-7, -2, 331, 9999), r"0 to 330, a token of vocab_size = 331, or -1 for none"),
    "end_id": ((-7, -2, 331, 9999), r"0 to 330, a token of vocab_size = 331, or -1 for none"),
    "layernorm_eps": ((-1e-5, 1.5, 1e9, "nan", "inf"), "0 to 1|a number"),
    "weight_data_type": (("fp8",), "one of fp32, fp16, bf16"),
    "activation_type": (("swishy",), "this version runs"),
    "layernorm_type": (("sandwich",), "this version runs pre_layernorm"),
    "kv_head_num": ((0, 97), "1 or more|a multiple of it|multiple"),
    "hidden_units": ((0, -48), "1 or more"),
    "embedding_size": ((0,), "1 or more"),
    "alibi_bias_max": ((0, -8, "nan"), "more than 0|a number"),
    "attention_scale": ((0, -0.1, "inf"), "more than 0|a number"),
    "query_pre_attn_scalar": ((0, -24), "more than 0"),
    "attn_logit_softcapping": ((-1,), "0 or more"),
    "final_logit_softcapping": ((-1,), "0 or more"),
    "clip_qkv": ((-1, "nan"), "0 or more|a number"),
    "attention_windows": (("8", "-1 -1", "8 x"), "numbers|whole numbers"),
    "zero_position": ((-2, 128, 9999), "-1 or more|127 or less"),
    "rotary_embedding": ((0, -2, 1000, 1001), "1 or more|at most size_per_head|an even number"),
    "rope_theta": ((0, 1, -500, "nan"), "more than 1|a number"),
    "rope_scaling_type": (("ntk",), "this version runs default"),
    "rope_scaling_factor": ((0, -4), "more than 0"),
    "rope_low_freq_factor": ((0, -1), "more than 0"),
    "rope_high_freq_factor": ((0, -1), "more than 0"),
    "rope_original_max_positions": ((0, -1), "1 or more"),
    "rope_beta_fast": ((0, -1), "more than 0"),
    "rope_beta_slow": ((0, -1), "more than 0"),
    "rope_attention_factor": ((0, -1), "more than 0"),
    "rope_truncate": (("maybe",), "true or false"),
    "rope_interleaved": (("maybe",), "true or false"),
    "rope_recompute": (("maybe",), "true or false"),
    **dict.fromkeys(
        (
            *("has_positional_encoding", "has_pre_decoder_layernorm", "has_post_decoder_layernorm"),
            *("use_attention_linear_bias", "layernorm_weights", "residual_from_norm", "bias_sum"),
            *("use_gptj_residual", "parallel_attention", "has_mlp_layernorm", "linear_bias", "attn_bias"),
            *("mlp_bias", "qk_layernorm", "scale_attn_by_inverse_layer_idx", "scale_embedding"),
        ),
        (("maybe", 2), "true or false"),
    ),
}  # fmt: skip
#: texts, degrees and keys that are written for other readers
FREE = {"model_name", "model_variant", "tensor_para_size"}
#: refused wherever they stand
ADDED = {
    "expert_num": (8, "this version runs one MLP in each layer"),
    "moe_layers": ("[0, 2]", "this version runs one MLP in each layer"),
    "end_ids": ("330", "all tokens that end a text, end_id = "),
    "weight_quantization": ("int3", "this version runs none, int8"),
    "head_num_per_layer": ("1 2 3 4 5 6 7", "one for each of num_layer"),
}
#: keys that other networks have
FOREIGN = ("clip_qkv", "attention_windows", "local_rope_theta", "final_logit_softcapping", "qk_layernorm")


def ini(name: str, **variant) -> str:
    return model_config_ini(model_config(FAMILIES[name].hf_config(**variant)), 1)


def refusal(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.ini").write_text(text)
    with pytest.raises(TridecodeError) as caught:
        read_model_config(tmp_path)
    assert isinstance(caught.value, (ConfigError, UnsupportedError)), caught.value
    return str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_wrong_value_is_refused_with_the_key_and_what_is_wanted(tmp_path, name):
    text = ini(name)
    keys = re.findall(r"^(\w+) = ", text, re.MULTILINE)
    for written in keys:
        key = written.removeprefix("local_")
        if key in FREE:
            continue
        values, wanted = WRONG[key]
        for value in values:
            said = refusal(tmp_path, re.sub(rf"^{written} = .*$", f"{written} = {value}", text, flags=re.M))
            assert f"] {written} = " in said or f", {written} = " in said, said
            assert str(value) in said or str(float(value)) in said, said
            assert re.search(wanted, said), said


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("key", ADDED)
def test_each_added_key_is_refused(tmp_path, name, key):
    value, wanted = ADDED[key]
    said = refusal(tmp_path, ini(name) + f"{key} = {value}\n")
    assert key in said and wanted in said, said


END_IDS = {
    "5 331": "16 tokens or fewer, of 0 to 330",
    " ".join(map(str, range(17))): "16 tokens or fewer, of 0 to 330",
    "5 -1": "whole numbers of 0 or more",
    "5 six": "numbers",
}


@pytest.mark.parametrize("ids", END_IDS)
def test_end_ids_that_no_engine_can_have_are_refused(tmp_path, ids):
    text = re.sub(r"^end_id = .*$", f"end_id = 5\nend_ids = {ids}", ini("llama"), flags=re.M)
    said = refusal(tmp_path, text)
    assert "end_ids = " in said and END_IDS[ids] in said, said
    (tmp_path / "config.ini").write_text(text.replace(f"end_ids = {ids}", "end_ids = 9, 5 7"))
    config = read_model_config(tmp_path)
    assert (config.end_id, config.more_end_ids) == (5, (9, 7))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("key", FOREIGN)
def test_a_key_that_the_network_does_not_read_is_refused(tmp_path, name, key):
    text = ini(name)
    if f"\n{key} = " in text or (key == "attention_windows" and name in WINDOWED):
        return
    said = refusal(tmp_path, f"{text}{key} = 3\n")
    assert f"{key} = 3; wanted no such key" in said or "numbers" in said, said


WINDOWED = ("mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neo")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_is_there_twice_is_refused(tmp_path, name):
    text = ini(name)
    for key in re.findall(r"^(\w+) = ", text, re.MULTILINE):
        assert f"has {key} twice" in refusal(tmp_path, f"{text}{key.upper()} = 1\n")


@pytest.mark.parametrize("second", ["[{}]", "[{}]\nnum_layer = 7"])
def test_a_section_that_is_there_twice_is_refused(tmp_path, second):
    for again in ("gpt", "GPT"):
        assert f"has the section [{again}] twice" in refusal(tmp_path, ini("gpt2") + second.format(again))


def test_two_models_in_one_file_are_refused(tmp_path):
    assert "has the sections [gpt] and [llama]; wanted one" in refusal(tmp_path, ini("gpt2") + ini("llama"))


def test_values_of_a_default_section_are_of_no_other_section(tmp_path):
    """FasterTransformer's reader knows no such section."""
    text = ini("gpt2")
    (tmp_path / "config.ini").write_text("[DEFAULT]\nscale_attn_by_inverse_layer_idx = true\n" + text)
    assert not read_model_config(tmp_path).scale_by_layer


@pytest.mark.parametrize(
    ("name", "odd"),
    [("gptj", 7), ("codegen", 7), ("phi", 7), ("stablelm", 7), ("llama", 7), ("falcon", 7), ("mistral", 3)],
)
def test_an_odd_rotary_embedding_is_refused(tmp_path, name, odd):
    text = re.sub(r"^rotary_embedding = .*$", f"rotary_embedding = {odd}", ini(name), flags=re.M)
    assert f"rotary_embedding = {odd}; wanted an even number up to size_per_head" in refusal(tmp_path, text)


def test_a_section_of_fastertransformers_neox_has_no_odd_rotary_embedding(tmp_path):
    """Ours may: transformers rounds it up, and the frequencies are those of the odd number."""
    ours = re.sub(r"^rotary_embedding = .*$", "rotary_embedding = 7", ini("gpt_neox"), flags=re.M)
    (tmp_path / "config.ini").write_text(ours)
    assert read_model_config(tmp_path).rope.size == 7
    theirs = re.sub(r"^rope_.*\n", "", ours, flags=re.M)
    assert "rotary_embedding = 7; wanted an even number" in refusal(tmp_path, theirs)


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"rope_scaling_type": "dynamic", "rotary_embedding": 2}, "rotary_embedding = 2; wanted more than 2"),
        (
            {"rope_scaling_type": "llama3", "rope_low_freq_factor": 4.0},
            "rope_high_freq_factor = 4.0; wanted more than rope_low_freq_factor = 4.0",
        ),
        ({"rope_scaling_type": "longrope"}, "rope_scaling_type = longrope; wanted rope_short_factors and"),
        (
            {
                "rope_scaling_type": "longrope", "rope_short_factors": "1 1 1 0",
                "rope_long_factors": "1 1 1 1",
            },
            "rope_short_factors = 0.0; wanted numbers above 0",
        ),
    ],
)  # fmt: skip
def test_scalings_that_cannot_be_computed_are_refused(tmp_path, edits, said):
    text = ini("llama")
    for key, value in edits.items():
        text = re.sub(rf"^{key} = .*\n", "", text, flags=re.M) + f"{key} = {value}\n"
    assert said in refusal(tmp_path, text)


# ---------------------------------------------------------------- the files, without a manifest


@pytest.fixture
def converted(tmp_path):
    def write(name: str, ranks: int = 1, **settings) -> Path:
        source = save(FAMILIES[name](**settings), tmp_path / "hf", tokenizer=False)
        plan_conversion(open_checkpoint(source)).write(tmp_path / "w", ranks)
        (tmp_path / "w" / "manifest.json").unlink()
        return tmp_path / "w"

    return write


def load_refusal(directory: Path) -> str:
    with pytest.raises(WeightFileError) as caught:
        WeightReader(directory, read_model_config(directory))
    return str(caught.value)


def change(directory: Path, key: str, value: object) -> None:
    path = directory / "config.ini"
    text, count = re.subn(rf"^{key} ?=.*$", f"{key} = {value}", path.read_text(), flags=re.M)
    assert count == 1, key
    path.write_text(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_fewer_layers_than_the_files_have_are_refused(converted, name):
    directory = converted(name)
    config = read_model_config(directory)
    WeightReader(directory, config)
    fewer = config.num_layers - 1
    change(directory, "num_layer", fewer)
    if config.windows:
        change(directory, "attention_windows", " ".join(map(str, config.windows[:fewer])))
    said = load_refusal(directory)
    assert f"config.ini describes num_layer = {fewer}, and the files have {config.num_layers} layers" in said


@pytest.mark.parametrize("name", FAMILIES)
def test_each_size_that_differs_from_the_files_is_named(converted, name):
    directory = converted(name)
    text = (directory / "config.ini").read_text()
    config = read_model_config(directory)
    for key, value, wanted in (
        ("vocab_size", config.vocab_size - 2, f"the length is that of {config.vocab_size}"),
        ("inter_size", config.mlp_size + 8, f"the length is that of {config.mlp_size}"),
        ("num_layer", config.num_layers + 1, "is missing"),
        ("max_pos_seq_len", config.max_positions + 2, f"the length is that of {config.max_positions}"),
        ("weight_data_type", "fp16", "fp32; weight_data_type in config.ini is fp16"),
    ):
        if key == "max_pos_seq_len" and not family(config.family).has_position_table(config):
            continue
        change(directory, key, value)
        if key == "num_layer" and config.windows:
            change(directory, "attention_windows", " ".join(map(str, (*config.windows, 0))))
        said = load_refusal(directory)
        assert wanted in said and (key == "num_layer" or f"{key} in config.ini is {value}" in said), said
        (directory / "config.ini").write_text(text)


@pytest.mark.parametrize(
    ("name", "settings", "key", "value", "tensor"),
    [
        ("gpt2", {}, "has_post_decoder_layernorm", "false", "model.final_layernorm"),
        ("bloom", {}, "has_pre_decoder_layernorm", "false", ""),
        ("llama", {"attention_bias": True}, "attn_bias", "false", "attention.dense.bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias", "false", "mlp.down_proj.bias"),
        ("falcon", {"bias": True}, "linear_bias", "false", "attention.dense.bias"),
        ("falcon", {}, "parallel_attention", "false", ""),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm", "false", "attention.k_norm.weight"),
        ("opt", {}, "layernorm_weights", "false", "layernorm"),
        ("opt", {}, "attn_bias", "false", "attention.dense.bias"),
    ],
)
def test_a_flag_that_leaves_out_a_tensor_of_the_files_is_refused(
    converted, name, settings, key, value, tensor
):
    directory = converted(name, **settings)
    change(directory, key, value)
    with pytest.raises(TridecodeError) as caught:
        WeightReader(directory, read_model_config(directory))
    assert tensor in str(caught.value), caught.value


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_every_family_is_known(name):
    """The list of directory_files is written by hand."""
    for variant in ({}, *FAMILIES[name].variants.values()):
        config = model_config(FAMILIES[name].hf_config(**variant))
        for spec in file_specs(config):
            if spec.name in ("model.wte", "model.lm_head.weight"):
                continue
            assert unread_tensor(StoredFiles({spec.name: set()}), [], config.num_layers), spec.name


@pytest.mark.parametrize("make", [ft_directories.gpt2, ft_directories.gptneox, ft_directories.gptj])
def test_a_rank_file_that_is_gone_is_said_to_be_missing(tmp_path, make):
    names = {"gpt2": "gpt2", "gptneox": "gpt_neox", "gptj": "gptj"}
    sizes = {"gpt2": {"n_head": 4, "n_embd": 32}, "gptj": {"n_embd": 64, "n_head": 4}}
    sizes["gptneox"] = {"hidden_size": 64, "num_attention_heads": 4}
    model = FAMILIES[names[make.__name__]](**sizes.get(make.__name__, {}))
    for number, gone in enumerate(
        (
            "model.layers.0.attention.query_key_value.weight.1.bin",
            "model.layers.0.attention.query_key_value.weight.0.bin",
            "model.layers.1.mlp.dense_4h_to_h.weight.1.bin",
        )
    ):
        directory = make(model, tmp_path / f"{number}/2-gpu", 2)
        (directory / gone).unlink()
        said = load_refusal(directory)
        assert f"{gone} is missing" in said and "fp16" not in said, said


def test_the_last_rank_without_any_of_its_files_is_named_by_the_length_of_the_others(tmp_path):
    directory = ft_directories.gpt2(FAMILIES["gpt2"](n_head=4, n_embd=32), tmp_path / "4-gpu", 4)
    for path in directory.glob("*.3.bin"):
        path.unlink()
    said = load_refusal(directory)
    assert "has files of 3 ranks, but" in said and "cannot be split over tensor_para_size = 3" in said
    assert said.endswith("files of a rank may be missing")
    for path in directory.glob("*.2.bin"):
        path.unlink()
    assert "(the length of one of 4 ranks' files; those of 2 ranks are missing)" in load_refusal(directory)


def test_files_that_fastertransformer_does_not_read_are_ignored(tmp_path):
    model = FAMILIES["gpt_neox"](use_parallel_residual=True)
    directory = ft_directories.gptneox(model, tmp_path / "1-gpu")
    for name in ("model.layers.0.attention.dense.weight.int8.0", "model.prompt_table.t.weight", "args.txt"):
        (directory / f"{name}.bin").write_bytes(b"x")
    WeightReader(directory, read_model_config(directory))


@pytest.mark.parametrize("kind", [P_TUNING, PREFIX_PROMPT])
def test_an_fp32_table_of_prompt_learning_in_an_fp16_directory_is_named_by_its_dtype(tmp_path, kind):
    """FasterTransformer's NeMo converter writes such tables."""
    directory = ft_directories.gpt2(FAMILIES["gpt2"](n_head=4, n_embd=32), tmp_path / "2-gpu", 2, "fp16")
    config = read_model_config(directory)
    reader, spec = WeightReader(directory, config), task_spec(PromptTask("squad", 10, kind), config)
    path = reader.files(spec)[0]
    path.write_bytes(bytes(2 * reader.file_bytes(spec)))
    said = reader.problem(path, spec)
    assert said and said.endswith("(the length of fp32; weight_data_type in config.ini is fp16)")
