"""The settings that families related to LLaMA read from transformers' config, and those they refuse."""

from __future__ import annotations

import pytest

from tests.backend.hf_models import model_config
from tests.checkpoints import FAMILIES
from tests.families.fam_c import longrope
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.configuration.model_config import RopeConfig

HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SLIDING, FULL = "sliding_attention", "full_attention"
REFUSED = {
    "mistral act": ("mistral", {"hidden_act": "relu"}, "Mistral with hidden_act = relu; this version runs"),
    "mistral partial": ("mistral", {"rope_parameters": HALF}, "Mistral with partial_rotary_factor = 0.5"),
    "mistral layers": ("mistral", {"layer_types": [FULL, SLIDING]}, "one window for all layers"),
    "mistral no layer": ("mistral", {"layer_types": [FULL, FULL]}, "one window for all layers"),
    "mistral window": ("mistral", {"sliding_window": 0}, "Mistral with sliding_window = 0; wanted 1 or more"),
    "qwen2 partial": ("qwen2", {"rope_parameters": HALF}, "Qwen2 with partial_rotary_factor = 0.5"),
    "qwen2 window": (
        "qwen2", {"layer_types": [FULL, SLIDING], "use_sliding_window": False}, "sliding_window = None",
    ),
    "qwen3 layers": (
        "qwen3", {"layer_types": [FULL, "chunked_attention"]}, "Qwen3 with a layer of chunked_attention",
    ),
    "gemma direction": (
        "gemma", {"use_bidirectional_attention": True}, "Gemma with use_bidirectional_attention = True",
    ),
    "gemma3 direction": (
        "gemma3_text", {"use_bidirectional_attention": True}, "Gemma 3 with use_bidirectional_attention",
    ),
    "gemma2 act": ("gemma2", {"hidden_activation": "relu"}, "Gemma 2 with hidden_activation = relu"),
    "gemma3 longropes": (
        "gemma3_text",
        {"rope_parameters": {FULL: longrope(16, 20), SLIDING: longrope(16, 30)}},
        r"Gemma 3 with original_max_position_embeddings of \[20, 30\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_network_does_not_have_is_refused_by_name(case: str):
    family, settings, complaint = REFUSED[case]
    with pytest.raises(TridecodeError, match=complaint):
        model_config(FAMILIES[family].hf_config(**settings))


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"sliding_window": 9}, (9, 9)),
        ("qwen2", {"use_sliding_window": False}, ()),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 1}, (0, 9)),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 2}, ()),
        ("qwen3", {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 7}, (7, 0)),
        ("gemma2", {"num_hidden_layers": 3}, (8, 0, 8)),
        ("gemma3_text", {"num_hidden_layers": 4, "sliding_window_pattern": 3}, (8, 8, 0, 8)),
    ],
)
def test_the_window_of_each_layer(family, settings, windows):
    assert model_config(FAMILIES[family].hf_config(**settings)).windows == windows


def test_an_odd_number_of_rotated_dimensions_is_kept():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.7}
    config = model_config(FAMILIES["phi3"].hf_config(rope_parameters=rope))  # 5.6 of 8
    assert config.rope == RopeConfig(5)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_computes_again_what_outgrows_the_short_factors(kind: str):
    """su and yarn: longrope in older checkpoints of Phi-3."""
    scaling = {key: value for key, value in longrope(8, 24).items() if key != "rope_type"}
    hf = FAMILIES["phi3"].hf_config(
        rope_parameters=None, rope_scaling={**scaling, "type": kind}, original_max_position_embeddings=24
    )
    config = model_config(hf)
    assert (config.long_prompt_tokens, config.recomputes_long) == (24, True)
    assert model_config(FAMILIES["llama"].hf_config(rope_parameters=longrope(8, 24))).recomputes_long is False
