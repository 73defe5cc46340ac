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

    batch_invariant: see Cpu; a CPU only.
    TRIDECODE_OPS=reference runs plain torch on either: the switch for "is it the kernel or the model?".
    """
    if os.environ.get("TRIDECODE_OPS") == "reference":
        return Reference()
    if device.type == "cuda":
        from tridecode.kernels.cuda import Cuda  # needs the built library, which a CPU machine lacks

        return Cuda(device)
    return Cpu(batch_invariant)
