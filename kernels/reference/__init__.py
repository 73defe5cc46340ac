"""Defines each operation in plain torch: the engine's CPU implementation and the oracle of the CUDA kernels.

Contracts are in ops.py. Runs on any device; TRIDECODE_OPS=reference chooses it on a GPU.
"""

from tridecode.kernels.reference.operations import Reference

__all__ = ["Reference"]
