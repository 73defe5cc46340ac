"""Conversions put back: files read with numpy by FasterTransformer's layout, compared with transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import (
    FAMILIES,
    TINY_VOCAB,
    greedy,
    save,
    tiny_bloom,
    tiny_gpt2,
    tiny_llama,
    variants,
)
from tridecode.backend.base.errors import CheckpointError, ConfigError, UnsupportedError
from tridecode.backend.configuration.model_config import RopeConfig
from tridecode.backend.engine.offline import run_greedy
from tridecode.backend.models import read_model_config
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion

VARIANTS = variants()


def convert(source: Path, directory: Path, ranks: int = 1, dtype: str | None = None):
    planned = plan_conversion(open_checkpoint(source), dtype)
    planned.write(directory, ranks)
    return planned.config


def read_files(directory: Path, name: str, ranks: int, columns: int, join: int | None) -> np.ndarray:
    """All ranks' files of a tensor, `columns` columns a rank, joined along axis `join`; None: one file."""
    if join is None:
        return np.fromfile(directory / f"{name}.bin", np.float32).reshape(-1, columns)
    files = [np.fromfile(directory / f"{name}.{rank}.bin", np.float32) for rank in range(ranks)]
    return np.concatenate([file.reshape(-1, columns) for file in files], axis=join)


def read_qkv(directory: Path, name: str, ranks: int, queries: int, keys: int) -> tuple[np.ndarray, ...]:
    """q (in, H * D), k, v (in, K * D): a rank's file has its share of each, side by side."""
    width = (queries + 2 * keys) // ranks
    parts: list[list[np.ndarray]] = [[], [], []]
    for rank in range(ranks):
        file = np.fromfile(directory / f"{name}.{rank}.bin", np.float32).reshape(-1, width)
        cuts = np.split(file, [queries // ranks, (queries + keys) // ranks], axis=1)
        for part, cut in zip(parts, cuts):
            part.append(cut)
    return tuple(np.concatenate(part, axis=1) for part in parts)


def put_back(directory: Path, model, ranks: int) -> dict[str, np.ndarray]:
    """transformers' state dict from the files alone; sizes come from transformers' config."""
    hf, case = model.config, FAMILIES[model.config.model_type]
    hidden, heads = hf.hidden_size, hf.num_attention_heads
    size = getattr(hf, "head_dim", None) or hidden // heads
    queries, keys = heads * size, case.num_kv_heads(hf) * size
    inner = case.inner_size(hf)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    out: dict[str, np.ndarray] = {}

    def put(name: str, kind: str, value: np.ndarray) -> None:
        matrix = value.ndim == 2 and case.turned and bool(re.search(r"\.\d+\.", name))  # of a layer
        out[f"{name}.{kind}"] = value.T if matrix else value

    def put_qkv(stem: str, names: str | tuple[str, ...], kind: str) -> None:
        parts = read_qkv(directory, f"{stem}.{kind}", ranks, queries, keys)
        if case.heads == "by head":
            by_head = [part.reshape(-1, heads, 1, size) for part in parts]
            parts = (np.concatenate(by_head, axis=2).reshape(parts[0].shape[0], -1),)
        elif case.heads == "joined":
            parts = (np.concatenate(parts, axis=1),)
        elif callable(case.heads):
            parts = case.heads(hf, *parts)
        for name, part in zip((names,) if isinstance(names, str) else names, parts):
            put(name, kind, part if kind == "weight" else part[0])

    layers = range(hf.num_hidden_layers)
    files = [
        (stem.replace("{i}", str(i)), fill(names, i)) for stem, names in case.names.items() for i in layers
    ]
    for stem, names in files:
        rows_split = stem.endswith(("attention.dense", "mlp.dense_4h_to_h", "mlp.down_proj"))
        if (directory / f"{stem}.bin").exists():  # a table
            columns = shapes[f"{names}.weight"][1]
            put(str(names), "weight", read_files(directory, stem, ranks, columns, None))
        for kind in ("weight", "bias"):
            whole, first = directory / f"{stem}.{kind}.bin", directory / f"{stem}.{kind}.0.bin"
            if whole.exists():
                shape = shapes[f"{names}.{kind}"]
                turned = len(shape) == 2 and stem != "model.lm_head"
                found = np.fromfile(whole, np.float32).reshape(shape[::-1] if turned else shape)
                out[f"{names}.{kind}"] = found.T if turned else found
            elif stem.endswith("query_key_value") and first.exists():
                put_qkv(stem, names, kind)
            elif first.exists():
                columns = hidden if rows_split else inner // ranks
                joined = read_files(directory, f"{stem}.{kind}", ranks, columns, 0 if rows_split else 1)
                put(str(names), kind, joined if kind == "weight" else joined[0])
    return join_parts(out)


def join_parts(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Modules whose rows are apart in our files: name#0, name#1 and so on."""
    out: dict[str, np.ndarray] = {}
    for name in sorted(state):
        module, mark, end = name.partition("#")
        if not mark:
            out[name] = state[name]
        elif end.startswith("0."):
            kind, count = end.split(".")[1], sum(other.startswith(f"{module}#") for other in state)
            parts = [state[f"{module}#{part}.{kind}"] for part in range(count)]
            out[f"{module}.{kind}"] = np.concatenate(parts)
    return out


def fill(names: str | tuple[str, ...], layer: int) -> str | tuple[str, ...]:
    if isinstance(names, str):
        return names.replace("{i}", str(layer))
    return tuple(name.replace("{i}", str(layer)) for name in names)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_files_put_back_are_transformers_tensors(tmp_path, variant):
    model = VARIANTS[variant]()
    save(model, tmp_path / "hf", tokenizer=False)
    for ranks in (ranks for ranks in (1, 2, 3) if _divides(model.config, ranks)):
        convert(tmp_path / "hf", tmp_path / f"w{ranks}", ranks, "fp32")
        back = put_back(tmp_path / f"w{ranks}", model, ranks)
        state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        state = FAMILIES[model.config.model_type].stored(model.config, state)
        if model.config.tie_word_embeddings:
            assert not (tmp_path / f"w{ranks}" / "model.lm_head.weight.bin").exists()
            state.pop(FAMILIES[model.config.model_type].names["model.lm_head"] + ".weight")
        assert set(back) == set(state)
        for name, value in back.items():
            np.testing.assert_array_equal(value, state[name], err_msg=f"{name} of {ranks} ranks")


def _divides(hf, ranks: int) -> bool:
    case = FAMILIES[hf.model_type]
    parts = (hf.num_attention_heads, case.num_kv_heads(hf), case.inner_size(hf))
    return all(part % ranks == 0 for part in parts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_over_the_files_says_what_transformers_says(tmp_path, variant):
    model = VARIANTS[variant]()
    save(model, tmp_path / "hf", tokenizer=False)
    convert(tmp_path / "hf", tmp_path / "w")
    prompts = [[5], [7, 9, 11], list(range(20, 46))]
    tokens, logits = run_greedy(tmp_path / "w", prompts, 6)
    for prompt, ours, our_logits in zip(prompts, tokens, logits):
        theirs, their_logits = greedy(model, prompt, 6)
        assert ours == theirs
        np.testing.assert_allclose(our_logits, their_logits.numpy(), atol=1e-3, rtol=0)


def test_the_config_that_is_written_is_the_one_that_is_read(tmp_path):
    for variant, make in VARIANTS.items():
        save(make(), tmp_path / variant, tokenizer=False)
        config = convert(tmp_path / variant, tmp_path / f"{variant}-w")
        assert read_model_config(tmp_path / f"{variant}-w") == config


# ---------------------------------------------------------------- names and prefixes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_the_bare_model_lacks_the_prefix_and_converts_alike(tmp_path, family):
    model = FAMILIES[family](tie_word_embeddings=True)
    save(model, tmp_path / "full", tokenizer=False)
    model.base_model.save_pretrained(tmp_path / "bare")
    assert set(load_file(tmp_path / "bare" / "model.safetensors")).isdisjoint(model.state_dict())
    if model.get_output_embeddings().bias is not None:
        with pytest.raises(CheckpointError, match="the checkpoint has no lm_head.bias"):
            convert(tmp_path / "bare", tmp_path / "w2")
        return
    convert(tmp_path / "full", tmp_path / "w1")
    convert(tmp_path / "bare", tmp_path / "w2")
    assert_same_files(tmp_path / "w1", tmp_path / "w2")


def assert_same_files(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.glob("*.bin"))
    assert names == sorted(path.name for path in second.glob("*.bin"))
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def rewrite(directory: Path, change) -> None:
    """Apply `change` to the state dict of a checkpoint on disk."""
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")


def test_the_buffers_of_old_checkpoints_are_left_out(tmp_path):
    save(tiny_gpt2(), tmp_path / "gpt2", tokenizer=False)
    rewrite(
        tmp_path / "gpt2",
        lambda state: state.update(
            {
                f"transformer.h.{i}.attn.{name}": torch.zeros(1, 1)
                for i in (0, 1)
                for name in ("bias", "masked_bias")
            }
        ),
    )
    convert(tmp_path / "gpt2", tmp_path / "w1")
    save(tiny_llama(), tmp_path / "llama", tokenizer=False)
    rewrite(
        tmp_path / "llama",
        lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}),
    )
    convert(tmp_path / "llama", tmp_path / "w2")


def test_a_tensor_that_no_rule_knows_is_named_with_its_shape(tmp_path):
    save(tiny_llama(), tmp_path / "hf", tokenizer=False)
    rewrite(
        tmp_path / "hf", lambda state: state.update({"model.layers.1.mlp.router.weight": torch.zeros(4, 48)})
    )
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(open_checkpoint(tmp_path / "hf"))
    assert str(caught.value) == (
        "the checkpoint holds model.layers.1.mlp.router.weight (4, 48), which the network of its model_type "
        "and config does not have: it is of another model, or its config lacks a setting "
        "(converters/families/llama.py lists all)"
    )


def test_a_bias_that_the_config_denies_is_not_dropped_in_silence(tmp_path):
    save(tiny_llama(), tmp_path / "hf", tokenizer=False)
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(tmp_path / "hf", lambda state: state.update({name: torch.zeros(48)}))
    with pytest.raises(CheckpointError, match=rf"the checkpoint holds {name} \(48,\)"):
        plan_conversion(open_checkpoint(tmp_path / "hf"))


def test_a_missing_tensor_is_named(tmp_path):
    save(tiny_bloom(), tmp_path / "hf", tokenizer=False)
    rewrite(tmp_path / "hf", lambda state: state.pop("transformer.h.1.mlp.dense_4h_to_h.bias"))
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(open_checkpoint(tmp_path / "hf"))
    assert str(caught.value) == (
        "the checkpoint has no transformer.h.1.mlp.dense_4h_to_h.bias; "
        "model.layers.1.mlp.dense_4h_to_h.bias (40,) needs it; see converters/families/bloom.py"
    )


@pytest.mark.parametrize("shape", [(24, 73), (72, 24), (24,), (0, 72)])
def test_a_tensor_of_a_wrong_shape_is_named_with_both_shapes(tmp_path, shape):
    save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    name = "transformer.h.0.attn.c_attn.weight"
    rewrite(tmp_path / "hf", lambda state: state.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(open_checkpoint(tmp_path / "hf"))
    assert f"{name} {shape}" in str(caught.value)
    assert "model.layers.0.attention.query_key_value.weight" in str(caught.value)
    assert "(24, 72)" in str(caught.value)


# ---------------------------------------------------------------- the head


@pytest.mark.pairwise
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("stored", ["equal", "different", "head only", "embedding only"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_the_one_that_transformers_uses(tmp_path, family, stored, ties):
    model = FAMILIES[family](tie_word_embeddings=ties)
    save(model, tmp_path / "hf", tokenizer=False)
    embedding = FAMILIES[family].names["model.wte"] + ".weight"
    weight = model.get_input_embeddings().weight.detach().clone()

    def change(state: dict) -> None:
        head = next(
            (name for name in state if name in ("lm_head.weight", "embed_out.weight")), "lm_head.weight"
        )
        state[head] = weight.clone() + (0.25 if stored == "different" else 0.0)
        state[embedding] = weight.clone()
        if stored == "head only":
            state.pop(embedding)
        if stored == "embedding only":
            state.pop(head)

    rewrite(tmp_path / "hf", change)
    if not ties and stored in ("head only", "embedding only"):
        missing = embedding if stored == "head only" else "lm_head.weight"
        with pytest.raises(CheckpointError, match=f"has no {missing}; tie_word_embeddings = false wants"):
            plan_conversion(open_checkpoint(tmp_path / "hf"))
        return
    convert(tmp_path / "hf", tmp_path / "w")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    head_file = tmp_path / "w" / "model.lm_head.weight.bin"
    assert head_file.exists() == (stored == "different")
    written = np.fromfile(head_file if head_file.exists() else tmp_path / "w" / "model.wte.bin", np.float32)
    wanted = reference.get_output_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(written.reshape(TINY_VOCAB, -1), wanted)
    table = np.fromfile(tmp_path / "w" / "model.wte.bin", np.float32).reshape(TINY_VOCAB, -1)
    np.testing.assert_array_equal(table, reference.get_input_embeddings().weight.detach().numpy())


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("activation", "ours"),
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("gelu_python_tanh", "gelu_tanh"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("relu", "relu"),
        ("silu", "silu"),
        ("swish", "silu"),
    ],
)
def test_an_activation_computes_what_transformers_computes(tmp_path, activation, ours):
    model = tiny_gpt2(activation_function=activation)
    save(model, tmp_path / "hf", tokenizer=False)
    assert plan_conversion(open_checkpoint(tmp_path / "hf")).config.activation == ours
    x = torch.linspace(-6, 6, 101)
    formula = {
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
    }[ours]
    torch.testing.assert_close(model.transformer.h[0].mlp.act(x), formula(x), atol=1e-5, rtol=0)


def test_a_gpt2_that_this_version_does_not_run_is_refused_by_name(tmp_path):
    save(tiny_gpt2(add_cross_attention=True), tmp_path / "hf", tokenizer=False)
    with pytest.raises(UnsupportedError, match="GPT-2 with add_cross_attention = True; this version runs"):
        plan_conversion(open_checkpoint(tmp_path / "hf"))


def test_other_activations_are_refused_by_name(tmp_path):
    save(tiny_gpt2(activation_function="quick_gelu"), tmp_path / "gpt2", tokenizer=False)
    with pytest.raises(UnsupportedError, match="= quick_gelu; this version runs gelu_new, "):
        plan_conversion(open_checkpoint(tmp_path / "gpt2"))
    save(tiny_llama(hidden_act="relu"), tmp_path / "llama", tokenizer=False)
    with pytest.raises(UnsupportedError, match="hidden_act = relu; this version runs silu, swish, gelu"):
        plan_conversion(open_checkpoint(tmp_path / "llama"))


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


ROPES = {
    "transformers 5": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}, RopeConfig(8, 5e3)),
    "a top-level rope_theta": ({"rope_parameters": None, "rope_theta": 5000.0}, RopeConfig(8, 5000.0)),
    "none at all": ({"rope_parameters": None}, RopeConfig(8, 10000.0)),
    "the oldest linear": (
        {"rope_parameters": None, "rope_theta": 7000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        RopeConfig(8, 7000.0, "linear", 2.0),
    ),
    "LLaMA 3.1 as released": (
        {
            "rope_parameters": None, "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        RopeConfig(8, 500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", ROPES)
def test_every_spelling_of_the_rotary_embedding_is_understood(tmp_path, spelling):
    changes, wanted = ROPES[spelling]
    save(tiny_llama(), tmp_path / "hf", tokenizer=False)
    edit_config(tmp_path / "hf", **changes)
    assert plan_conversion(open_checkpoint(tmp_path / "hf")).config.rope == wanted


def test_another_rope_scaling_is_refused_by_name(tmp_path):
    save(tiny_llama(), tmp_path / "hf", tokenizer=False)
    kind = "proportional"
    edit_config(tmp_path / "hf", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    known = "default, linear, dynamic, yarn, longrope, llama3"
    with pytest.raises(UnsupportedError, match=f"rope scaling {kind}; this version runs {known}"):
        plan_conversion(open_checkpoint(tmp_path / "hf"))


def test_the_end_ids_are_those_of_generation_config(tmp_path):
    save(tiny_llama(), tmp_path / "hf", tokenizer=False)
    (tmp_path / "hf" / "generation_config.json").write_text('{"bos_token_id": 4, "eos_token_id": [9, 2, 7]}')
    checkpoint = open_checkpoint(tmp_path / "hf")
    assert checkpoint.eos_ids == [9, 2, 7]
    planned = plan_conversion(checkpoint)
    config = planned.config
    assert (config.start_id, config.end_id, config.more_end_ids) == (4, 9, (2, 7))
    planned.write(tmp_path / "weights")
    assert read_model_config(tmp_path / "weights") == config
    again = plan_conversion(open_checkpoint(tmp_path / "weights"))  # a directory is a source, too
    assert (again.config.end_id, again.config.more_end_ids) == (9, (2, 7))


def test_more_end_ids_than_an_engine_holds_are_refused_by_name(tmp_path):
    save(tiny_llama(), tmp_path / "hf", tokenizer=False)
    for ids, refused in (([*range(16), 3, 10**6], False), (list(range(17)), True)):
        (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        if refused:
            with pytest.raises(CheckpointError, match="names 17 end tokens .* has room for 16"):
                plan_conversion(open_checkpoint(tmp_path / "hf"))
        else:
            config = plan_conversion(open_checkpoint(tmp_path / "hf")).config
            assert (config.end_id, config.more_end_ids) == (0, tuple(range(1, 16)))


def test_a_model_without_special_ids_has_no_end_and_starts_at_0(tmp_path):
    save(tiny_llama(), tmp_path / "hf", tokenizer=False)
    (tmp_path / "hf" / "generation_config.json").unlink()
    edit_config(tmp_path / "hf", bos_token_id=None, eos_token_id=None)
    checkpoint = open_checkpoint(tmp_path / "hf")
    checkpoint.bos_id, checkpoint.eos_ids = None, []  # transformers' defaults stand in otherwise
    config = plan_conversion(checkpoint).config
    assert (config.start_id, config.end_id) == (0, -1)


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float64, "fp32")]
)
def test_the_files_take_the_checkpoints_dtype_unless_told(tmp_path, dtype, name):
    model = tiny_llama().to(dtype)
    save(model, tmp_path / "hf", tokenizer=False)
    assert convert(tmp_path / "hf", tmp_path / "w").weight_dtype == name
    wte = (tmp_path / "w" / "model.wte.bin").read_bytes()
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]
    held = torch.frombuffer(bytearray(wte), dtype=kind).view(TINY_VOCAB, 48)
    assert torch.equal(held, model.model.embed_tokens.weight.detach().to(kind))


def test_a_dtype_that_is_none_is_refused(tmp_path):
    save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    with pytest.raises(ConfigError, match="dtype is 'int8'; wanted one of fp32, fp16, bf16"):
        plan_conversion(open_checkpoint(tmp_path / "hf"), "int8")


def edited(tmp_path: Path, **values) -> Path:
    """A LLaMA whose config.json has other values."""
    source = save(FAMILIES["llama"](), tmp_path / "hf", tokenizer=False)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, **values}))
    return source


def test_ids_of_another_vocabulary_are_no_ids_of_the_model(tmp_path):
    (source := edited(tmp_path, eos_token_id=50256, bos_token_id=50256))
    (source / "generation_config.json").unlink(missing_ok=True)
    config = plan_conversion(open_checkpoint(source)).config
    assert (config.start_id, config.end_id) == (0, -1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rms_norm_eps": 7.0}, r"\[llama\] layernorm_eps = 7.0; wanted 0 to 1"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
            "rope_theta = 1.0; wanted more than 1",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                }
            },
            "rope_high_freq_factor = 4.0; wanted more than rope_low_freq_factor = 4.0",
        ),
        ({"max_position_embeddings": 1 << 25}, "max_pos_seq_len = 33554432; wanted 16777216 or less"),
    ],
)  # fmt: skip
def test_a_checkpoint_whose_directory_would_not_load_is_refused_before_it_is_written(tmp_path, values, said):
    with pytest.raises(CheckpointError, match="makes a model that does not load: .*" + said):
        plan_conversion(open_checkpoint(edited(tmp_path, **values)))
