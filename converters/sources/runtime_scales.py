"""Scales of activations and of the KV cache that a checkpoint stores next to its weights.

An engine that quantises activations or its cache with static scales needs them; this one measures its scales
while it runs. Every tool spells their names in its own way: docs/reference/quantized_checkpoints.md.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from tridecode.converters.sources import TensorSource

#: `<module>.<subject>_<kind>`. subject: inputs, outputs, queries, keys, values, both, or scores of attention
_SUBJECTS = (
    "(input|output|prob_output|activation|act|q|k|v|kv|qkv|query|key|value|kv_cache|k_cache|v_cache|cache|attn"
    "|prob|softmax)"
)
_KINDS = "((global_)?scales?(_inv)?|zero_points?|offset|scaling_factor|amax)"
_NAME = re.compile(rf".*\.{_SUBJECTS}_{_KINDS}")


def is_runtime_scale(name: str) -> bool:
    """Return whether a tensor is a scale or zero of activations or of the KV cache, by its name."""
    return _NAME.fullmatch(name) is not None


class WithoutRuntimeScales:
    """A TensorSource over `inner` without scales of activations and of the KV cache.

    left_out: their names.
    """

    def __init__(self, inner: TensorSource):
        self._inner = inner
        self.shapes = {name: shape for name, shape in inner.shapes.items() if not is_runtime_scale(name)}
        self.left_out = sorted(set(inner.shapes) - set(self.shapes))

    @property
    def notes(self) -> list[str]:
        """A sentence for the user where something is left out."""
        if not self.left_out:
            return []
        count, first = len(self.left_out), self.left_out[0]
        return [f"scales of activations and of the KV cache are left out: {count} tensors, such as {first}"]

    def dtype(self, name: str) -> torch.dtype:
        return self._inner.dtype(name)

    def read(self, name: str) -> Tensor:
        return self._inner.read(name)
