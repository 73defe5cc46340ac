"""Baichuan: transformers has no class for it, so its config.json is read as data.

The published repositories use one model_type for four networks. By common practice, a 7B model (architecture
BaiChuanForCausalLM or hidden size 4096) has rotary positions, and a 13B model (hidden size 5120) has ALiBi.
Other sizes have rotary positions if they name max_position_embeddings, which no 13B model does. Baichuan 2,
with a normalised head, has a vocabulary of 125,696 or a z_loss_weight.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig, RopeConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.families.llama import halves_of_heads
from tridecode.converters.gguf.hyperparameters import GgufHeader
from tridecode.converters.gguf.rules import QKV_PARTS, GgufRules, rms_decoder_settings
from tridecode.converters.hf_config import shape
from tridecode.converters.references.baichuan import reference
from tridecode.converters.rules import Rule, module_rules, transpose

EMBEDDING = "model.embed_tokens.weight"
#: values that define the network in the published repositories, and may not differ
_FIXED = {"hidden_act": "silu", "rope_scaling": None}
_VOCABULARY_2 = 125696
_HIDDEN_SIZES = 4096, 5120  # 7B, 13B
_GGUF_LAYERS = 32, 40  # layers of 7B, 13B


class BaichuanConfig(PreTrainedConfig):
    """The keys of config.json; the defaults are those of the published configuration classes.

    model_type becomes "baichuan2" for a model with a normalised head.
    """

    model_type = "baichuan"

    vocab_size: int = 64000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    model_max_length: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    z_loss_weight: float | None = None
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.vocab_size == _VOCABULARY_2 or self.z_loss_weight is not None:
            self.model_type = "baichuan2"  # type: ignore[misc]  # transformers gets the type from the class

    @property
    def is_rotary(self) -> bool:
        names_7b = "BaiChuanForCausalLM" in (self.architectures or ())
        if names_7b or self.hidden_size in _HIDDEN_SIZES:
            return names_7b or self.hidden_size == _HIDDEN_SIZES[0]
        return self.max_position_embeddings is not None

    @property
    def normalises_head(self) -> bool:
        return self.model_type == "baichuan2"


def model_config(hf: BaichuanConfig, **common) -> ModelConfig:
    for key, value in _FIXED.items():
        if getattr(hf, key) != value:
            raise UnsupportedError(f"Baichuan with {key} = {getattr(hf, key)}; this version runs {value}")
    if hf.normalises_head and common["tied_head"]:
        raise UnsupportedError("Baichuan 2 with a head that is its word embedding; this version runs two")
    sizes = shape(hf)
    return ModelConfig(
        family="baichuan",
        **sizes,
        mlp_size=hf.intermediate_size,
        max_positions=hf.max_position_embeddings or hf.model_max_length or 4096,
        norm_eps=hf.rms_norm_eps,
        activation="silu",
        rope=RopeConfig(sizes["head_size"], float(hf.rope_theta)) if hf.is_rotary else None,
        attention_bias=False,
        mlp_bias=False,
        **common,
    )


def rules(num_heads: int) -> list[Rule]:
    layer, out = "model.layers.{i}", "model.layers.{i}"
    return [
        Rule(EMBEDDING, "model.wte"),
        *module_rules(f"{layer}.input_layernorm", f"{out}.input_layernorm"),
        *module_rules(f"{layer}.self_attn.W_pack", f"{out}.attention.query_key_value", transpose),
        *module_rules(f"{layer}.self_attn.o_proj", f"{out}.attention.dense", transpose),
        *module_rules(f"{layer}.post_attention_layernorm", f"{out}.post_attention_layernorm"),
        *module_rules(f"{layer}.mlp.gate_proj", f"{out}.mlp.gate_proj", transpose),
        *module_rules(f"{layer}.mlp.up_proj", f"{out}.mlp.up_proj", transpose),
        *module_rules(f"{layer}.mlp.down_proj", f"{out}.mlp.down_proj", transpose),
        *module_rules("model.norm", "model.final_layernorm"),
        Rule("lm_head.weight", "model.lm_head.weight"),
    ]


def _gguf_settings(header: GgufHeader) -> dict[str, Any]:
    """Return the settings: llama.cpp distinguishes the models by their number of layers, 32 with rotary
    positions, 40 with ALiBi.
    """
    held = rms_decoder_settings(header)
    layers, rope = held["num_hidden_layers"], held.pop("rope_parameters")
    if layers not in _GGUF_LAYERS or held["num_key_value_heads"] != held["num_attention_heads"]:
        wanted = "32 (7B) or 40 (13B), and a kv head for each head"
        raise UnsupportedError(f"{header.path}: Baichuan with {layers} layers; this version reads {wanted}")
    if rope["rope_type"] != "default":
        found = f"scaled rotary positions ({rope['rope_type']})"
        raise UnsupportedError(f"{header.path}: Baichuan with {found}; this version does not run them")
    is_rotary = layers == _GGUF_LAYERS[0]
    length = held.pop("max_position_embeddings")
    return {
        **{key: value for key, value in held.items() if key not in ("head_dim", "num_key_value_heads")},
        "architectures": ["BaiChuanForCausalLM" if is_rotary else "BaichuanForCausalLM"],
        "rope_theta": rope["rope_theta"],
        "max_position_embeddings": length if is_rotary else None,
        "model_max_length": length,
    }


_IGNORED = ("model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.future_mask")
_GGUF = GgufRules("baichuan", _gguf_settings, restore=halves_of_heads, joined={"self_attn.W_pack": QKV_PARTS})
FAMILY = CheckpointFamily(
    model_types=("baichuan",),
    embedding=EMBEDDING,
    model_config=model_config,
    rules=rules,
    ignored=_IGNORED,
    config_class=BaichuanConfig,
    reference=reference,
    gguf=_GGUF,
)
