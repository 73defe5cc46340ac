"""Tiny seeded transformers models and their weights as the engine wants them, converted in memory.

What the engine answers is compared with transformers; what files hold is tests/converters' matter.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.models import family
from tridecode.backend.models.weights import Weights
from tridecode.converters.families import family_of
from tridecode.converters.rules import plan_conversions
from tridecode.kernels.ops import Ops


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


def gptneox(seed: int = 0, heads: int = 5, head_size: int = 16, layers: int = 2, vocab: int = 107, **extra):
    config = GPTNeoXConfig(
        hidden_size=heads * head_size,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        vocab_size=vocab,
        intermediate_size=4 * heads * head_size,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    return randomize(GPTNeoXForCausalLM(config), seed)


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


def model_config(hf: PreTrainedConfig) -> ModelConfig:
    """The ModelConfig of transformers' config, by the converter of its family."""
    return family_of(hf.model_type, Path("tiny")).model_config(
        hf,
        model_name="tiny",
        start_id=hf.bos_token_id,
        end_id=hf.eos_token_id,
        weight_dtype="fp32",
        tied_head=hf.tie_word_embeddings,
    )


class HfWeights(Weights):
    """The weights of a transformers model, whole, in `dtype` on `device`."""

    def __init__(
        self, model: torch.nn.Module, ops: Ops, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ):
        config, state = model_config(model.config), model.state_dict()
        super().__init__(family(config.family).weight_specs(config), ops, dtype=dtype)
        self._device = device
        source = family_of(model.config.model_type, Path("tiny"))
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        rules, specs = source.rules_of(config), self.specs.values()
        conversions = plan_conversions(
            rules, specs, shapes, {source.head}, config.num_layers, source.source_file
        )
        self._held = {item.spec.name: item.make(state.__getitem__) for item in conversions}

    def tensor(self, name: str) -> Tensor:
        return self._held[name].to(self._device, self.dtype)
