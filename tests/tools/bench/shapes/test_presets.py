"""Presets, and repositories with random weights of their shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tridecode.backend.configuration.engine_config import read_engine_config
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.models import family, read_model_config
from tridecode.model_repo_templates.pbtxt import parse_model_config
from tridecode.tools.bench.load.prompts import find_tokenizer
from tridecode.tools.bench.shapes.hf_config import hf_config
from tridecode.tools.bench.shapes.presets import PRESETS, preset
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


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_has_as_many_parameters_as_transformers_model_of_it(name) -> None:
    model = preset(name).model
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf_config(model))
    specs = family(model.family).weight_specs(model)
    ours = sum(np.prod(spec.shape) for spec in specs)
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())
