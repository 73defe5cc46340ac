"""Shapes of one well-known model of each family, from its published config.json."""

from __future__ import annotations

from typing import Any

from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.backend.models.falcon import FalconConfig
from tridecode.backend.models.gemma2 import Gemma2Config
from tridecode.backend.models.gemma3 import Gemma3Config
from tridecode.backend.models.gptneox import GptNeoXConfig
from tridecode.backend.models.mpt import MptConfig
from tridecode.backend.models.opt import OptConfig


def _sizes(
    name: str, layers: int, hidden: int, heads: tuple[int, int, int], mlp: int, vocab: int, positions: int
) -> dict[str, Any]:
    """Return fields of a ModelConfig. heads: query heads, KV heads, head size."""
    return {
        "model_name": name,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_size": heads[2],
        "mlp_size": mlp,
        "vocab_size": vocab,
        "max_positions": positions,
    }


#: LLaMA's layers: RMSNorm, gated MLP, no biases, a head of its own
_GATED: dict[str, Any] = {
    "activation": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tied_head": False,
    "norm_eps": 1e-5,
    "start_id": 1,
    "end_id": 2,
}
_GEMMA: dict[str, Any] = {
    **_GATED,
    "activation": "gelu_tanh",
    "tied_head": True,
    "norm_eps": 1e-6,
    "start_id": 2,
    "end_id": 1,
    "residual": "sandwich",
}
_QWEN: dict[str, Any] = {**_GATED, "norm_eps": 1e-6, "start_id": 151643}
_GEMMA3_WINDOWS = tuple(0 if layer % 6 == 5 else 1024 for layer in range(34))

MODELS: tuple[ModelConfig, ...] = (
    ModelConfig(  # the usual draft model of LLaMA-3-8B
        family="llama",
        **_sizes("llama-3.2-1b", 16, 2048, (32, 8, 64), 8192, 128256, 131072),
        rope=RopeConfig(64, 500000.0),
        **{**_GATED, "tied_head": True, "start_id": 128000, "end_id": 128001},
    ),
    ModelConfig(
        family="mistral",
        **_sizes("mistral-7b", 32, 4096, (32, 8, 128), 14336, 32000, 32768),
        rope=RopeConfig(128),
        windows=(4096,) * 32,
        **_GATED,
    ),
    ModelConfig(
        family="qwen2",
        **_sizes("qwen2-7b", 28, 3584, (28, 4, 128), 18944, 152064, 131072),
        rope=RopeConfig(128, 1e6),
        dense_bias=False,
        **{**_QWEN, "attention_bias": True, "end_id": 151643},
    ),
    ModelConfig(
        family="qwen3",
        **_sizes("qwen3-8b", 36, 4096, (32, 8, 128), 12288, 151936, 40960),
        rope=RopeConfig(128, 1e6),
        **{**_QWEN, "end_id": 151645},
    ),
    Gemma2Config(
        family="gemma2",
        **_sizes("gemma-2-9b", 42, 3584, (16, 8, 256), 14336, 256000, 8192),
        rope=RopeConfig(256),
        windows=(4096, 0) * 21,
        attention_softcap=50.0,
        logit_softcap=30.0,
        **_GEMMA,
    ),
    Gemma3Config(
        family="gemma3",
        **_sizes("gemma-3-4b", 34, 2560, (8, 4, 256), 10240, 262208, 131072),
        rope=RopeConfig(256, 1e6, "linear", 8.0),
        local_rope=RopeConfig(256),
        windows=_GEMMA3_WINDOWS,
        **_GEMMA,
    ),
    ModelConfig(
        family="phi3",
        **_sizes("phi-3-mini", 32, 3072, (32, 32, 96), 8192, 32064, 4096),
        rope=RopeConfig(96),
        windows=(2047,) * 32,
        **{**_GATED, "end_id": 32000},
    ),
    FalconConfig(
        family="falcon",
        **_sizes("falcon-7b", 32, 4544, (71, 1, 64), 18176, 65024, 2048),
        rope=RopeConfig(64),
        activation="gelu",
        residual="parallel",
        attention_bias=False,
        mlp_bias=False,
        norm_eps=1e-5,
        start_id=11,
        end_id=11,
    ),
    ModelConfig(
        family="gptj",
        **_sizes("gpt-j-6b", 28, 4096, (16, 16, 256), 16384, 50400, 2048),
        rope=RopeConfig(64, interleaved=True),
        residual="parallel",
        attention_bias=False,
        tied_head=False,
        head_bias=True,
        norm_eps=1e-5,
        start_id=50256,
        end_id=50256,
    ),
    GptNeoXConfig(
        family="gptneox",
        **_sizes("gpt-neox-20b", 44, 6144, (64, 64, 96), 24576, 50432, 2048),
        rope=RopeConfig(24),
        residual="parallel",
        tied_head=False,
        norm_eps=1e-5,
        start_id=0,
        end_id=0,
    ),
    OptConfig(
        family="opt",
        **_sizes("opt-6.7b", 32, 4096, (32, 32, 128), 16384, 50272, 2048),
        activation="relu",
        embedding_size=4096,
        norm_eps=1e-5,
        start_id=2,
        end_id=2,
    ),
    MptConfig(
        family="mpt",
        **_sizes("mpt-7b", 32, 4096, (32, 32, 128), 16384, 50432, 2048),
        activation="gelu",
        attention_bias=False,
        mlp_bias=False,
        norm_eps=1e-5,
        start_id=0,
        end_id=0,
    ),
    ModelConfig(
        family="baichuan",
        **_sizes("baichuan2-7b", 32, 4096, (32, 32, 128), 11008, 125696, 4096),
        rope=RopeConfig(128),
        **{**_GATED, "norm_eps": 1e-6},
    ),
)
