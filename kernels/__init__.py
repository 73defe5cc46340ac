"""The operations of a model: contracts in ops.py, definitions in reference/, fast implementations in cpu.py
and cuda.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from tridecode.kernels.cpu import Cpu
from tridecode.kernels.reference import Reference

if TYPE_CHECKING:
    from tridecode.kernels.ops import Ops


def select(device: torch.device, batch_invariant: bool = False) -> Ops:
    """Return the operations for a device: CUDA kernels on a GPU, torch's libraries on a CPU.

    batch_invariant: see Cpu; ignored on a GPU. TRIDECODE_OPS=reference selects plain torch on either, which
    separates a kernel's errors from a model's.
    """
    if os.environ.get("TRIDECODE_OPS") == "reference":
        return Reference()
    if device.type == "cuda":
        from tridecode.kernels.cuda import Cuda  # imported here: it loads the binding of the built library

        return Cuda(device)
    return Cpu(batch_invariant)
