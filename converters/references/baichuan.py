"""Baichuan for comparisons: transformers' LLaMA with Baichuan's tensors, and a mask that holds ALiBi."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from tridecode.converters.sources import Checkpoint


def reference(checkpoint: Checkpoint, dtype: torch.dtype) -> Module:
    """An independent model of a Baichuan checkpoint, in evaluation mode on the CPU; it has no cache."""
    hf, tensors = checkpoint.config, checkpoint.tensors
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = LlamaConfig(
        **{name: getattr(hf, name) for name in names},
        rms_norm_eps=hf.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": hf.rope_theta},
        tie_word_embeddings=hf.tie_word_embeddings,
    )
    model = LlamaForCausalLM(config)
    Module.to(model, dtype)
    state: dict[str, Tensor] = {}
    for name in tensors.shapes:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        tensor = tensors.read(name).to(dtype)
        if "W_pack" in name:
            for part, rows in zip("qkv", tensor.chunk(3)):
                state[name.replace("W_pack", f"{part}_proj")] = rows
        elif name == "lm_head.weight" and hf.normalises_head:
            state[name] = tensor / tensor.float().norm(dim=1, keepdim=True).to(dtype)
        else:
            state[name] = tensor
    model.load_state_dict(state, strict=not hf.tie_word_embeddings)
    if not hf.is_rotary:
        model.model.rotary_emb.inv_freq.zero_()  # a rotation by 0 everywhere
    return Reference(model.eval(), None if hf.is_rotary else _slopes(config.num_attention_heads))


class Reference(Module):
    """model, with an additive mask of ALiBi if slopes (H,) are given."""

    def __init__(self, model: LlamaForCausalLM, slopes: Tensor | None):
        super().__init__()
        self.model, self.slopes = model, slopes

    def forward(self, ids: Tensor, past_key_values: None = None, use_cache: bool = False) -> Any:
        mask = None
        if self.slopes is not None:
            steps = torch.arange(ids.shape[1])
            distances = (steps[None, :] - steps[:, None]).float()  # (T, T), 0 and less where seen
            mask = self.slopes[:, None, None] * distances
            mask = mask.masked_fill(distances > 0, -math.inf)[None].to(ids.device, self.model.dtype)
        return self.model(ids, attention_mask=mask, use_cache=False)


def _slopes(heads: int) -> Tensor:
    """Of Press et al. 2022, from their code."""

    def of_power(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]

    power = 2 ** math.floor(math.log2(heads))
    rest = of_power(2 * power)[0::2][: heads - power]
    return torch.tensor(of_power(power) + rest)
