"""CodeGen: GPT-J's network. Its qkv_proj has four blocks, each with the queries, the values and the keys of a
quarter of the heads."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tridecode.backend.base.errors import UnsupportedError
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.families.gptj import BUFFERS, EMBEDDING, gptj_config, shared_rules
from tridecode.converters.rules import Rule

#: the TPU cores that it was trained on
BLOCKS = 4


def model_config(hf: PreTrainedConfig, **common) -> ModelConfig:
    if hf.n_head % BLOCKS:
        raise UnsupportedError(f"CodeGen with n_head = {hf.n_head}; this version runs multiples of {BLOCKS}")
    return gptj_config("CodeGen", hf, **common)


def split_blocks(weight: Tensor) -> Tensor:
    """(4 * 3 * C / 4, C), in each block q, v, k -> (C, 3 * C): q, k, v."""
    q, v, k = weight.reshape(BLOCKS, 3, -1, weight.shape[1]).unbind(1)  # (4, C / 4, C) each
    return torch.cat([part.flatten(0, 1) for part in (q, k, v)]).t()


def rules(num_heads: int) -> list[Rule]:
    source, target = "transformer.h.{i}.attn.qkv_proj.weight", "model.layers.{i}.attention.query_key_value"
    return [*shared_rules(), Rule(source, f"{target}.weight", split_blocks)]


FAMILY = CheckpointFamily(("codegen",), EMBEDDING, model_config, rules, ignored=BUFFERS)
