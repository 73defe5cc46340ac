"""Baichuan, which transformers does not know: its networks are written out in tests.baichuan."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints import FAMILIES, greedy, save
from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.engine.offline import run_greedy
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.families.baichuan import BaichuanConfig
from tridecode.converters.parity.comparison import check_parity

TINY = FAMILIES["baichuan"]
ALIBI = {"max_position_embeddings": None, "model_max_length": 128}
#: (settings of config.json, rotary positions, normalised head) of the published repositories
PUBLISHED = {
    "Baichuan-7B": (
        {"architectures": ["BaiChuanForCausalLM"], "hidden_size": 4096, "max_position_embeddings": 4096,
         "vocab_size": 64000}, True, False,
    ),
    "Baichuan-13B": (
        {"architectures": ["BaichuanForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40,
         "model_max_length": 4096, "vocab_size": 64000}, False, False,
    ),
    "Baichuan2-7B": (
        {"architectures": ["BaichuanForCausalLM"], "hidden_size": 4096, "max_position_embeddings": 4096,
         "model_max_length": 4096, "vocab_size": 125696}, True, True,
    ),
    "Baichuan2-13B": (
        {"architectures": ["BaichuanForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40,
         "model_max_length": 4096, "z_loss_weight": 0, "vocab_size": 125696}, False, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configs_are_told_apart(name):
    settings, rotary, normalised = PUBLISHED[name]
    config = BaichuanConfig.from_dict({**settings, "rms_norm_eps": 1e-6, "use_cache": True})
    assert (config.is_rotary, config.normalises_head) == (rotary, normalised)


def test_the_rotary_network_of_the_tests_is_transformers_llama():
    model = TINY()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(model.config, name) for name in names}))
    state = model.state_dict()
    for i in range(model.config.num_hidden_layers):
        packed = state.pop(f"model.layers.{i}.self_attn.W_pack.weight")
        for part, rows in zip("qkv", packed.chunk(3)):
            state[f"model.layers.{i}.self_attn.{part}_proj.weight"] = rows
    llama.load_state_dict(state)
    ids = torch.arange(20, 60)[None]
    torch.testing.assert_close(model(ids).logits, llama.eval()(ids).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("positions", [{"rope_theta": 500.0}, ALIBI], ids=["rotary", "ALiBi"])
def test_baichuan_2_with_its_normalised_head_answers_as_the_published_network(tmp_path, positions):
    model = TINY(seed=6, z_loss_weight=0.0, **positions)
    source = save(model, tmp_path / "hf")
    checkpoint = open_checkpoint(source)
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    head = np.fromfile(tmp_path / "w" / "model.lm_head.weight.bin", np.float32).reshape(331, -1)
    np.testing.assert_allclose(np.linalg.norm(head, axis=1), 1.0, rtol=1e-6)
    prompts = [[5], [7, 9, 11], list(range(20, 60))]
    tokens, logits = run_greedy(tmp_path / "w", prompts, 6)
    for prompt, ours, our_logits in zip(prompts, tokens, logits):
        theirs, their_logits = greedy(model, prompt, 6)
        assert ours == theirs
        np.testing.assert_allclose(our_logits, their_logits.numpy(), atol=1e-4, rtol=0)
    parity = check_parity(checkpoint, tmp_path / "w", planned.config, source / "tokenizer.json")
    assert parity.passed and parity.greedy_agreement == 1.0


def test_parity_sees_a_head_that_is_not_normalised(tmp_path):
    source = save(TINY(z_loss_weight=0.0, **ALIBI), tmp_path / "hf")
    checkpoint = open_checkpoint(source)
    planned = plan_conversion(checkpoint)
    planned.write(tmp_path / "w")
    path = tmp_path / "w" / "model.lm_head.weight.bin"
    path.write_bytes((np.fromfile(path, np.float32) * np.float32(1.5)).tobytes())
    (tmp_path / "w" / "manifest.json").unlink()
    parity = check_parity(checkpoint, tmp_path / "w", planned.config, source / "tokenizer.json")
    assert not parity.passed and parity.largest_logit_error > parity.logit_error_bound


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_act": "gelu"}, "Baichuan with hidden_act = gelu; this version runs silu"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "Baichuan with rope_scaling = .*; this version",
        ),
    ],
)
def test_what_the_network_does_not_have_is_refused_by_name(tmp_path, changes, complaint):
    save(TINY(), tmp_path / "hf", tokenizer=False)
    edit_config(tmp_path / "hf", **changes)
    with pytest.raises(UnsupportedError, match=complaint):
        plan_conversion(open_checkpoint(tmp_path / "hf"))


def test_a_normalised_head_that_is_the_word_embedding_is_refused(tmp_path):
    save(TINY(tie_word_embeddings=True, z_loss_weight=0.0), tmp_path / "hf", tokenizer=False)
    with pytest.raises(UnsupportedError, match="Baichuan 2 with a head that is its word embedding"):
        plan_conversion(open_checkpoint(tmp_path / "hf"))
