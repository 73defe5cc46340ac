"""The operations of a model: contracts in ops.py, meaning in reference.py, CUDA in cuda.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from tridecode.kernels.reference import Reference

if TYPE_CHECKING:
    from tridecode.kernels.ops import Ops


def select(device: torch.device) -> Ops:
    """The operations for a device: CUDA kernels on a GPU, plain torch elsewhere.

    TRIDECODE_OPS=reference runs plain torch on the GPU too: the switch for "is it the kernel or the model?".
    """
    if device.type == "cuda" and os.environ.get("TRIDECODE_OPS") != "reference":
        from tridecode.kernels.cuda import Cuda  # needs the built library, which a CPU machine lacks

        return Cuda(device)
    return Reference()
