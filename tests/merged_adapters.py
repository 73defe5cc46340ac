"""LoRA adapters in files as `peft` writes them, and models into which they are merged, without `peft`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_SCALE = 0.3  # standard deviation of the matrices, as in tests/lora_adapters.py


def save_merged(model: PreTrainedModel, directory: Path, rank: int, seed: int) -> PreTrainedModel:
    """Save a random adapter of all linear layers of the blocks; return the model with it merged into its
    weights."""
    merged, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    tensors, names, alpha = {}, set(), 1.5 * rank
    for name, module in merged.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or name == "lm_head":
            continue
        weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()  # (out, in)
        a = torch.randn(rank, weight.shape[1], generator=generator) * _SCALE
        b = torch.randn(weight.shape[0], rank, generator=generator) * _SCALE / rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        names.add(name.rsplit(".", 1)[-1])
        with torch.no_grad():
            weight += alpha / rank * b @ a
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(names)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return merged.eval()
