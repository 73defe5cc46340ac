"""Presets, and repositories with random weights of their shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tridecode.backend.configuration.engine_config import read_engine_config
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.models import family, model_config_ini, read_model_config
from tridecode.model_repo_templates.pbtxt import parse_model_config
from tridecode.tools.bench.load.prompts import find_tokenizer
from tridecode.tools.bench.shapes.hf_config import hf_config
from tridecode.tools.bench.shapes.presets import FAMILY_PRESETS, PRESETS, preset
from tridecode.tools.bench.shapes.random_repo import toy_tokenizer, write_random_repository


def test_every_id_of_a_toy_tokenizer_decodes_to_a_text_of_its_own() -> None:
    tokenizer = toy_tokenizer(700)
    assert tokenizer.get_vocab_size() == 700
    fillers = [tokenizer.decode([token]) for token in range(256, 700)]
    assert len(set(fillers)) == 444 and all(text.strip() for text in fillers)
    text = "Grüße, 今日は 🙂\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


def test_a_random_repository_is_complete_and_says_that_it_is_random(tmp_path) -> None:
    model = preset("toy").model
    write_random_repository(tmp_path / "r", model, {"data_type": "fp32", "max_sequences": 8})
    engine_dir = str(tmp_path / "r" / "fastertransformer")
    config = read_engine_config(read_engine_parameters(engine_dir), "config.pbtxt")
    assert (config.weights, config.data_type, config.max_sequences) == ("random", "fp32", 8)
    text = (tmp_path / "r" / "fastertransformer" / "config.pbtxt").read_text()
    assert text.count('"weights"') == 1
    assert read_model_config(checkpoint_dir(engine_dir)) == model
    names = set()
    for path in (tmp_path / "r").glob("*/config.pbtxt"):
        names.add(parse_model_config(path.read_text(), str(path)).name)
    assert {"fastertransformer", "fastertransformer_streaming", "tensorrt_llm_bls", "ensemble"} <= names
    assert find_tokenizer(tmp_path / "r").get_vocab_size() == model.vocab_size


def config_of(
    kind: type[PretrainedConfig], layers: int, hidden: int, heads: tuple[int, int, int], mlp: int, vocab: int
) -> PretrainedConfig:
    return kind(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        intermediate_size=mlp,
        vocab_size=vocab,
        tie_word_embeddings=kind in (Gemma2Config, Gemma3TextConfig),
    )


#: configurations of the models that hf_config does not write; the classes' defaults are the 7B models
THEIRS = {
    "mistral-7b": MistralConfig(),
    "qwen2-7b": config_of(Qwen2Config, 28, 3584, (28, 4, 128), 18944, 152064),
    "qwen3-8b": config_of(Qwen3Config, 36, 4096, (32, 8, 128), 12288, 151936),
    "gemma-2-9b": config_of(Gemma2Config, 42, 3584, (16, 8, 256), 14336, 256000),
    "gemma-3-4b": config_of(Gemma3TextConfig, 34, 2560, (8, 4, 256), 10240, 262208),
    "phi-3-mini": Phi3Config(),
    "falcon-7b": FalconConfig(),
    "opt-6.7b": OPTConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        ffn_dim=16384,
        word_embed_proj_dim=4096,
    ),
    "mpt-7b": MptConfig(n_layers=32, d_model=4096, n_heads=32, vocab_size=50432),
    "baichuan2-7b": config_of(LlamaConfig, 32, 4096, (32, 32, 128), 11008, 125696),
}
#: rows of transformers' table of positions that no position has
UNUSED_ROWS = {"opt-6.7b": 2}


@pytest.mark.parametrize("name", sorted((*PRESETS, *FAMILY_PRESETS)))
def test_a_preset_has_as_many_parameters_as_transformers_model_of_it(name) -> None:
    model = preset(name).model
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(THEIRS.get(name) or hf_config(model))
    specs = family(model.family).weight_specs(model)
    ours = sum(np.prod(spec.shape) for spec in specs) + UNUSED_ROWS.get(name, 0) * model.hidden_size
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize("name", sorted((*PRESETS, *FAMILY_PRESETS)))
def test_a_preset_is_the_model_that_its_config_ini_describes(name, tmp_path) -> None:
    model = preset(name).model
    (tmp_path / "config.ini").write_text(model_config_ini(model, 1), encoding="utf-8")
    assert read_model_config(tmp_path, tied_head=model.tied_head) == model
