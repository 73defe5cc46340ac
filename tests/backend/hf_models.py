"""Tiny seeded Hugging Face models and their weights as the engine wants them, mapped here by hand:
independent of the converters, so that a model file can be wrong without a converter being wrong in the same
way."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tridecode.backend.config import ModelConfig, RopeConfig
from tridecode.kernels.ops import Linear, Norm, Ops


def randomize(model: torch.nn.Module, seed: int, scale: float = 0.25) -> torch.nn.Module:
    """Weights large enough that greedy decoding is not degenerate: norms around 1, biases not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = any(part in name for part in ("ln_", "layernorm", "norm")) and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else scale * noise)
    return model.eval()


def gpt2(
    seed: int = 0,
    heads: int = 3,
    head_size: int = 16,
    layers: int = 2,
    vocab: int = 97,
    positions: int = 64,
    **extra,
):
    config = GPT2Config(
        n_embd=heads * head_size,
        n_head=heads,
        n_layer=layers,
        vocab_size=vocab,
        n_positions=positions,
        bos_token_id=0,
        eos_token_id=1,
        **extra,
    )
    return randomize(GPT2LMHeadModel(config), seed)


def bloom(seed: int = 0, heads: int = 5, head_size: int = 16, layers: int = 2, vocab: int = 101, **extra):
    config = BloomConfig(
        hidden_size=heads * head_size,
        n_head=heads,
        n_layer=layers,
        vocab_size=vocab,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    return randomize(BloomForCausalLM(config), seed)


def llama(
    seed: int = 0,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 16,
    layers: int = 2,
    vocab: int = 103,
    positions: int = 128,
    hidden: int | None = None,
    inner: int = 88,
    **extra,
):
    config = LlamaConfig(
        hidden_size=hidden or heads * head_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        num_hidden_layers=layers,
        vocab_size=vocab,
        intermediate_size=inner,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    return randomize(LlamaForCausalLM(config), seed)


def model_config(model: torch.nn.Module) -> ModelConfig:
    """The ModelConfig of one of the models above."""
    c = model.config
    common = {
        "model_name": "tiny",
        "vocab_size": c.vocab_size,
        "start_id": c.bos_token_id,
        "end_id": c.eos_token_id,
        "tied_head": c.tie_word_embeddings,
    }
    if c.model_type == "gpt2":
        return ModelConfig(
            "gpt",
            num_layers=c.n_layer,
            hidden_size=c.n_embd,
            num_heads=c.n_head,
            num_kv_heads=c.n_head,
            head_size=c.n_embd // c.n_head,
            mlp_size=c.n_inner or 4 * c.n_embd,
            max_positions=c.n_positions,
            norm_eps=c.layer_norm_epsilon,
            activation={"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"}[c.activation_function],
            **common,
        )
    if c.model_type == "bloom":
        return ModelConfig(
            "bloom",
            num_layers=c.n_layer,
            hidden_size=c.hidden_size,
            num_heads=c.n_head,
            num_kv_heads=c.n_head,
            head_size=c.hidden_size // c.n_head,
            mlp_size=4 * c.hidden_size,
            max_positions=2048,
            norm_eps=c.layer_norm_epsilon,
            residual="from_norm" if c.apply_residual_connection_post_layernorm else "sequential",
            **common,
        )
    rope = c.rope_parameters
    return ModelConfig(
        "llama",
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_size=c.head_dim,
        mlp_size=c.intermediate_size,
        max_positions=c.max_position_embeddings,
        norm_eps=c.rms_norm_eps,
        activation="silu",
        rope=RopeConfig(
            c.head_dim,
            rope["rope_theta"],
            rope["rope_type"],
            rope.get("factor", 1.0),
            rope.get("low_freq_factor", 1.0),
            rope.get("high_freq_factor", 4.0),
            rope.get("original_max_position_embeddings", 8192),
        ),
        attention_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        **common,
    )


class HfWeights:
    """backend.models.layers.Weights of a Hugging Face model, whole, in `dtype` on `device`."""

    def __init__(
        self, model: torch.nn.Module, ops: Ops, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ):
        self._ops, self._dtype, self._device = ops, dtype, device
        c = model.config
        build = {"gpt2": _gpt2_names, "bloom": _bloom_names, "llama": _llama_names}[c.model_type]
        self._held = build(model.state_dict(), c)

    def tensor(self, name: str) -> Tensor:
        return self._held[name].to(self._device, self._dtype).contiguous()

    def linear(self, name: str, bias: bool) -> Linear:
        return self._ops.pack(
            Linear(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if bias else None)
        )

    def fused_linear(self, names: list[str], bias: bool) -> Linear:
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names])
        return self._ops.pack(
            Linear(weight, torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None)
        )

    def head(self, weight: Tensor) -> Linear:
        return self._ops.pack(Linear(weight))

    def norm(self, name: str, eps: float, bias: bool) -> Norm:
        return Norm(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if bias else None, eps)


def _pair(held: dict, state: dict, target: str, source: str, turn: bool = False) -> None:
    held[f"{target}.weight"] = state[f"{source}.weight"].t() if turn else state[f"{source}.weight"]
    if f"{source}.bias" in state:
        held[f"{target}.bias"] = state[f"{source}.bias"]


def _gpt2_names(state: dict, c) -> dict:
    held = {"model.wte": state["transformer.wte.weight"], "model.wpe": state["transformer.wpe.weight"]}
    held["model.lm_head.weight"] = state["lm_head.weight"]
    _pair(held, state, "model.final_layernorm", "transformer.ln_f")
    for i in range(c.n_layer):
        ours, theirs = f"model.layers.{i}", f"transformer.h.{i}"
        _pair(held, state, f"{ours}.input_layernorm", f"{theirs}.ln_1")
        _pair(held, state, f"{ours}.attention.query_key_value", f"{theirs}.attn.c_attn", turn=True)
        _pair(held, state, f"{ours}.attention.dense", f"{theirs}.attn.c_proj", turn=True)
        _pair(held, state, f"{ours}.post_attention_layernorm", f"{theirs}.ln_2")
        _pair(held, state, f"{ours}.mlp.dense_h_to_4h", f"{theirs}.mlp.c_fc", turn=True)
        _pair(held, state, f"{ours}.mlp.dense_4h_to_h", f"{theirs}.mlp.c_proj", turn=True)
    return held


def _bloom_names(state: dict, c) -> dict:
    held = {
        "model.wte": state["transformer.word_embeddings.weight"],
        "model.lm_head.weight": state["lm_head.weight"],
    }
    _pair(held, state, "model.pre_decoder_layernorm", "transformer.word_embeddings_layernorm")
    _pair(held, state, "model.final_layernorm", "transformer.ln_f")
    for i in range(c.n_layer):
        ours, theirs = f"model.layers.{i}", f"transformer.h.{i}"
        _pair(held, state, f"{ours}.input_layernorm", f"{theirs}.input_layernorm")
        for kind in ("weight", "bias"):  # (heads, 3, head size) -> (3, heads, head size)
            fused = state[f"{theirs}.self_attention.query_key_value.{kind}"]
            apart = fused.view(c.n_head, 3, c.hidden_size // c.n_head, *fused.shape[1:]).transpose(0, 1)
            held[f"{ours}.attention.query_key_value.{kind}"] = apart.reshape(fused.shape)
        _pair(held, state, f"{ours}.attention.dense", f"{theirs}.self_attention.dense")
        _pair(held, state, f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm")
        _pair(held, state, f"{ours}.mlp.dense_h_to_4h", f"{theirs}.mlp.dense_h_to_4h")
        _pair(held, state, f"{ours}.mlp.dense_4h_to_h", f"{theirs}.mlp.dense_4h_to_h")
    return held


def _llama_names(state: dict, c) -> dict:
    held = {"model.wte": state["model.embed_tokens.weight"], "model.lm_head.weight": state["lm_head.weight"]}
    _pair(held, state, "model.final_layernorm", "model.norm")
    for i in range(c.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"model.layers.{i}"
        _pair(held, state, f"{ours}.input_layernorm", f"{theirs}.input_layernorm")
        for kind in ("weight", "bias"):
            parts = [state.get(f"{theirs}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            if parts[0] is not None:
                held[f"{ours}.attention.query_key_value.{kind}"] = torch.cat(parts)
        _pair(held, state, f"{ours}.attention.dense", f"{theirs}.self_attn.o_proj")
        _pair(held, state, f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm")
        for part in ("gate_proj", "up_proj", "down_proj"):
            _pair(held, state, f"{ours}.mlp.{part}", f"{theirs}.mlp.{part}")
    return held
