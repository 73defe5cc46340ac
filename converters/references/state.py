"""Builds transformers' model from tensors with transformers' names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.sources import TensorSource


def state_reference(config: PreTrainedConfig, tensors: TensorSource) -> Callable[[torch.dtype], Module]:
    """Return a function from dtype to the model of `config` with these tensors, in evaluation mode on the
    CPU.

    Its arithmetic is independent of ours, but not the merging of tensors.
    """
    return partial(_model, config, tensors)


def _model(config: PreTrainedConfig, tensors: TensorSource, dtype: torch.dtype) -> Module:
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    wanted = model.state_dict()
    with torch.no_grad():
        for name in tensors.shapes:
            if name not in wanted:
                raise CheckpointError(f"{type(model).__name__} of transformers has no {name}")
            wanted.pop(name).copy_(tensors.read(name))
    missing = [name for name in wanted if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing:
        raise CheckpointError(f"the checkpoint has no {missing[0]} of {type(model).__name__}")
    return model.eval()
