"""transformers' XGLM for comparisons in several precisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from transformers import XGLMForCausalLM

if TYPE_CHECKING:
    from tridecode.converters.sources import Checkpoint


def reference(checkpoint: Checkpoint, dtype: torch.dtype) -> Module:
    """transformers' model of a checkpoint, in evaluation mode on the CPU."""
    model = Reference.from_pretrained(
        checkpoint.path, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    return model.eval()


class Reference(XGLMForCausalLM):
    """A model that can be converted to a higher precision: transformers' would keep sines and cosines rounded
    to 16 bit, and its attention cannot compute in float64.
    """

    def _apply(self, fn: Callable, recurse: bool = True) -> Module:
        super()._apply(fn, recurse)
        table = self.model.embed_positions
        table.make_weights(table.num_positions + table.offset, table.embedding_dim, table.padding_idx)
        return self

    def forward(self, *args, **kwargs) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self.dtype == torch.float64 else before)
        try:
            return super().forward(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
