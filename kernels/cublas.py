"""Products by cuBLASLt: the library that torch has loaded, called with algorithms of our choice.

torch's own products round before a bias meets a residual, and may add the parts of a split sum in 16 bit.
Here every product is summed in float32 and rounded once (csrc/gemm_library.cu).
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tridecode.kernels.library import Library

log = logging.getLogger("tridecode.kernels")

#: cuBLASLt's functions in the order of csrc/cublas_lt.h
FUNCTIONS = (
    "cublasLtCreate",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmul",
)
#: bytes of csrc/cublas_lt.h's Found, of which the first 64 are the algorithm
FOUND_BYTES = 96
#: as cuBLAS' own default on Hopper
WORKSPACE_BYTES = 32 << 20


def addresses() -> ctypes.Array[ctypes.c_void_p] | None:
    """Of FUNCTIONS in the library that torch has loaded; None if it has loaded none."""
    if torch.version.cuda is None:
        return None
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        found = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        pointers = [ctypes.cast(getattr(found, each), ctypes.c_void_p).value for each in FUNCTIONS]
    except (OSError, AttributeError) as error:
        log.warning("cuBLASLt cannot be called (%s): torch's products are used", error)
        return None
    return (ctypes.c_void_p * len(pointers))(*pointers)
