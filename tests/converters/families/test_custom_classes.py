"""A model type that transformers has no class for: its config is data, its family may bring a reference."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.checkpoints import save, tiny_llama
from tridecode.backend.base.errors import CheckpointError
from tridecode.converters import families as families_module
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.families import CheckpointFamily, families
from tridecode.converters.families.llama import FAMILY as LLAMA
from tridecode.converters.parity.comparison import check_parity


class FoxConfig(LlamaConfig):
    model_type = "fox"


def register(monkeypatch, **hooks) -> None:
    """A family `fox`: LLaMA's network under a name that transformers does not know."""
    fox = CheckpointFamily(("fox",), LLAMA.embedding, LLAMA.model_config, LLAMA.rules, **hooks)
    known = {**families(), "fox": fox}
    monkeypatch.setattr(families_module, "families", lambda: known)


@pytest.fixture
def fox(tmp_path):
    """A LLaMA whose folder says that it is a fox, with code of its own."""
    folder = save(tiny_llama(), tmp_path / "fox")
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="fox", auto_map={"AutoConfig": "configuration_fox.FoxConfig"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_fox.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    return folder


def test_the_config_is_read_as_data_and_the_folders_code_never_runs(tmp_path, monkeypatch, fox):
    register(monkeypatch, config_class=FoxConfig)
    checkpoint = open_checkpoint(fox)
    assert isinstance(checkpoint.config, FoxConfig)
    assert checkpoint.config.num_key_value_heads == 2
    assert checkpoint.eos_ids == [2]
    assert not checkpoint.has_reference
    with pytest.raises(CheckpointError, match="transformers has no class for fox"):
        checkpoint.reference_model(torch.float32)
    assert not (tmp_path / "ran").exists()


class WithoutCache(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, past_key_values, use_cache):
        assert past_key_values is None
        return self.model(ids, use_cache=False)


def test_a_family_brings_its_own_reference_even_without_a_cache(tmp_path, monkeypatch, fox):
    asked = []

    def reference(checkpoint, dtype):
        asked.append(dtype)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**checkpoint.config.to_dict()), dtype=dtype)
        tensors = checkpoint.tensors
        model.load_state_dict({name: tensors.read(name) for name in tensors.shapes})
        return WithoutCache(model.eval())

    register(monkeypatch, config_class=FoxConfig, reference=reference)
    checkpoint = open_checkpoint(fox)
    assert checkpoint.has_reference
    planned = plan_conversion(checkpoint, "fp32")
    planned.write(tmp_path / "weights")
    parity = check_parity(checkpoint, tmp_path / "weights", planned.config, fox / "tokenizer.json")
    assert parity.passed and parity.greedy_agreement == 1.0
    assert asked == [torch.float32]


def test_a_config_that_its_class_refuses_is_named(monkeypatch, fox):
    register(monkeypatch, config_class=FoxConfig)
    config = json.loads((fox / "config.json").read_text())
    (fox / "config.json").write_text(json.dumps({**config, "num_attention_heads": "many"}))
    with pytest.raises(CheckpointError, match="config.json does not describe a model"):
        open_checkpoint(fox)
