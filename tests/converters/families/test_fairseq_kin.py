"""OPT, XGLM, Phi and StableLM: what is refused by name, and comparisons of XGLM in other precisions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import FAMILIES, save
from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.models import read_model_config
from tridecode.backend.models.xglm import sinusoids
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity.comparison import check_parity

REFUSED = [
    ("opt", {"activation_function": "quick_gelu"}, "OPT with activation_function = quick_gelu; this version"),
    ("xglm", {"activation_function": "mish"}, "XGLM with activation_function = mish; this version runs"),
    ("xglm", {"add_cross_attention": True}, "XGLM with add_cross_attention = True; this version runs False"),
    ("phi", {"hidden_act": "mish"}, "Phi with hidden_act = mish; this version runs"),
    ("stablelm", {"hidden_act": "relu"}, "StableLM with hidden_act = relu; this version runs silu"),
    (
        "stablelm",
        {"partial_rotary_factor": 0.2},
        "rotates 3 of 16 dimensions; this version runs even",
    ),
]


@pytest.mark.parametrize(("family", "settings", "complaint"), REFUSED)
def test_what_a_family_does_not_run_is_refused_by_name(tmp_path, family, settings, complaint):
    case = FAMILIES[family]
    source = save(case(), tmp_path / "hf", tokenizer=False)
    case.hf_config(**settings).save_pretrained(source)
    with pytest.raises(UnsupportedError, match=complaint):
        plan_conversion(open_checkpoint(source))


@pytest.mark.parametrize("size", [15, 16, 64])
def test_sinusoids_are_those_of_float64(size):
    half = size // 2
    angles = np.arange(2, 42)[:, None] * 10000.0 ** (-np.arange(half) / (half - 1))
    wanted = np.concatenate([np.sin(angles), np.cos(angles), np.zeros((40, size % 2))], axis=1)
    np.testing.assert_allclose(sinusoids(40, size).numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_an_xglm_in_16_bit_is_compared_with_exact_positions(tmp_path, dtype):
    source = save(FAMILIES["xglm"](), tmp_path / "hf")
    checkpoint = open_checkpoint(source)
    planned = plan_conversion(checkpoint, dtype)
    planned.write(tmp_path / "w")
    parity = check_parity(checkpoint, tmp_path / "w", planned.config, source / "tokenizer.json")
    assert parity.passed and parity.largest_logit_error < 5e-4
    model = checkpoint.reference_model(torch.float32).to(torch.float64)
    assert model(torch.tensor([[5, 6]])).logits.dtype == torch.float64


GPT = """[gpt]
model_name = m
head_num = 4
size_per_head = 8
inter_size = 64
num_layer = 2
max_pos_seq_len = 64
vocab_size = 99
start_id = 2
end_id = 2
weight_data_type = fp16
"""


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("activation_type = Relu\nlayernorm_eps = 1e-05\nhas_post_decoder_layernorm = 1", "gpt"),
        ("activation_type = Relu\nlayernorm_type = post_layernorm\nhas_post_decoder_layernorm = 0", "opt"),
        ("activation_type = Relu\nhas_post_decoder_layernorm = False", "opt"),
        ("model_variant = opt-pre", "opt"),
    ],
)
def test_an_opt_of_fastertransformer_is_told_from_gpt2(tmp_path: Path, lines: str, wanted: str):
    """A pre-norm OPT with its final norm is GPT-2's network."""
    (tmp_path / "config.ini").write_text(GPT + lines)
    config = read_model_config(tmp_path)
    assert config.family == wanted
    assert (config.residual == "post_norm") == ("layernorm_type = post" in lines)
