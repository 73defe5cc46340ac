"""Baichuan in plain torch, after the published modeling files; importing registers it with transformers.

Rotary positions (7B) and ALiBi (13B), which is added to the scores after their division by sqrt(head size);
Baichuan 2's NormHead. No cache: every step computes all tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, silu, softmax
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tridecode.converters.families.baichuan import BaichuanConfig


def interleaved_slopes(heads: int) -> list[float]:
    """_get_interleave of modeling_baichuan."""

    def power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power_of_2(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return power_of_2(closest) + interleaved_slopes(2 * closest)[0::2][: heads - closest]


class BaichuanNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, config: BaichuanConfig):
        super().__init__()
        self.heads, self.theta = config.num_attention_heads, config.rope_theta
        self.is_rotary = config.is_rotary
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def rotated(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        frequencies = 1.0 / (self.theta ** (torch.arange(0, size, 2).float() / size))
        angles = torch.outer(torch.arange(x.shape[-2]).float(), frequencies).repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos().to(x) + torch.cat((-second, first), dim=-1) * angles.sin().to(x)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.W_pack(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)  # (B, H, T, D)
        if self.is_rotary:
            q, k = self.rotated(q), self.rotated(k)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if not self.is_rotary:
            slopes = torch.tensor(interleaved_slopes(self.heads)).to(scores)
            scores = scores + slopes[:, None, None] * torch.arange(length).to(scores)
        scores = scores + torch.full((length, length), -math.inf).to(scores).triu(1)
        attended = softmax(scores, dim=-1) @ v
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, hidden))


class Mlp(nn.Module):
    def __init__(self, config: BaichuanConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: BaichuanConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.input_layernorm = BaichuanNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = BaichuanNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class BaichuanPreTrainedModel(PreTrainedModel):
    config_class = BaichuanConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        """Tests draw all weights."""


class BaichuanModel(BaichuanPreTrainedModel):
    def __init__(self, config: BaichuanConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = BaichuanNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class BaichuanForCausalLM(BaichuanPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BaichuanConfig):
        super().__init__(config)
        self.model = BaichuanModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config.use_cache = False

    def forward(self, input_ids: Tensor, **_ignored) -> CausalLMOutput:
        weight = self.lm_head.weight
        if self.config.normalises_head:
            weight = normalize(weight)
        return CausalLMOutput(logits=self.model(input_ids) @ weight.t())


AutoConfig.register("baichuan", BaichuanConfig)
AutoModelForCausalLM.register(BaichuanConfig, BaichuanForCausalLM)
