"""A model of a GGUF file to compare with: transformers' network, with the tensors that it reads itself."""

from __future__ import annotations

import torch
import transformers.modeling_gguf_pytorch_utils as transformers_gguf
from torch.nn import Module
from transformers import AutoModelForCausalLM

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.families import CheckpointFamily
from tridecode.converters.references.state import state_reference
from tridecode.converters.sources import Checkpoint
from tridecode.converters.sources.huggingface import no_progress_bars

#: architectures whose tensors transformers' reader restores completely
_READ_BY_TRANSFORMERS = (
    *("llama", "gpt2", "bloom", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "stablelm"),
)


def reads_itself(family: CheckpointFamily, is_plain: bool) -> bool:
    """Return whether transformers can read the tensors itself. is_plain: each of its tensors is one of the
    file.
    """
    assert family.gguf is not None
    return is_plain and family.reference is None and family.gguf.architecture in _READ_BY_TRANSFORMERS


def gguf_reference(
    checkpoint: Checkpoint, family: CheckpointFamily, is_plain: bool, dtype: torch.dtype
) -> Module:
    """The model in evaluation mode on the CPU. is_plain: each tensor of transformers is one of the file.

    If transformers' reader does not support the architecture or the layout, our own reader supplies the
    tensors: then the comparison tests arithmetic and conversion, but not the reading.
    """
    if family.reference is not None:
        return family.reference(checkpoint, dtype)
    if reads_itself(family, is_plain):
        return _as_transformers_reads(checkpoint, dtype)
    return state_reference(checkpoint.config, checkpoint.tensors)(dtype)


def _as_transformers_reads(checkpoint: Checkpoint, dtype: torch.dtype) -> Module:
    # built directly: a model that from_pretrained reads from .gguf needs accelerate and cannot be saved
    path, config = checkpoint.path, checkpoint.config
    softcap = getattr(config, "attn_logit_softcapping", None)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=False, attn_implementation="eager" if softcap else None
    )
    with no_progress_bars():
        state = transformers_gguf.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(state["tensors"], strict=False)
    missing = [name for name in missing if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing or unexpected:
        raise CheckpointError(f"{path}: transformers finds no {missing} and does not know {unexpected}")
    return model.eval()
