"""The operations of a model: contracts in ops.py, meaning in reference.py, speed in cpu.py and cuda.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from tridecode.kernels.cpu import Cpu
from tridecode.kernels.reference import Reference

if TYPE_CHECKING:
    from tridecode.kernels.ops import Ops


def select(device: torch.device, batch_invariant: bool = False) -> Ops:
    """The operations for a device: CUDA kernels on a GPU, torch's libraries on a CPU.

    batch_invariant: see Cpu; ignored on a GPU.
    TRIDECODE_OPS=reference runs plain torch on either, which tells an error of a kernel from one of a model.
    """
    if os.environ.get("TRIDECODE_OPS") == "reference":
        return Reference()
    if device.type == "cuda":
        from tridecode.kernels.cuda import Cuda  # imports the binding of the built library

        return Cuda(device)
    return Cpu(batch_invariant)
