"""LoRA adapters of the tiny checkpoints, made, saved and run by the real `peft`."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel


def make_adapter(model: PreTrainedModel, directory: Path, seed: int, **config) -> PeftModel:
    """Save an adapter of the model as PEFT does, with weights that change its tokens. Returns PEFT's model.

    config: fields of LoraConfig; default: rank 4, alpha 6, all linear layers."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **config}
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted.save_pretrained(str(directory))
    return adapted.eval()
