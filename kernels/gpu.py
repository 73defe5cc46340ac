"""One NVIDIA GPU for the operations: the kernel library, scratch memory, and the choice of GEMMs."""

from __future__ import annotations

import logging
import os
from functools import lru_cache, partial

import torch
from torch import Tensor

from tridecode.kernels.checks import DtypeError, LayoutError, ShapeError, match, same_dtype
from tridecode.kernels.gemm.cublas import LibraryProducts
from tridecode.kernels.gemm.packed_table import choose_packed
from tridecode.kernels.gemm.plan import Device, Plan
from tridecode.kernels.gemm.table import choose
from tridecode.kernels.library import KernelError, Library, current_stream
from tridecode.kernels.operands import CacheLayer, Heads, Norm
from tridecode.kernels.paths import paths
from tridecode.kernels.scratch import EXCHANGE_BYTES, NUM_COUNTERS, SUM_BYTES

log = logging.getLogger("tridecode.engine")

#: codes of the activations in epilogues of GEMMs, and of those in a kernel of their own
ACTIVATIONS = {None: 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "swiglu": 4, "geglu_tanh": 5}
ROW_ACTIVATIONS = {"geglu": 6, "silu": 7}
#: the ACTIVATIONS that combine pairs of outputs
FUSED_GATES = ("swiglu", "geglu_tanh")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CACHE_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}


class Gpu:
    """The library, the scratch memory and the properties of one GPU. Used by one thread.

    device: of every tensor. dependent_launch: see kernels.cuda.Cuda. arenas: scratch buffers by name; two
    operations in a row may overwrite each other's.
    """

    def __init__(self, device: torch.device, dependent_launch: bool | None = None):
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        if dependent_launch is None:
            dependent_launch = os.environ.get("TRIDECODE_DEPENDENT_LAUNCH", "1") != "0"
        self.library = Library()
        if self.library.info.endswith("debug"):
            log.warning("the kernels are a debug build (TRIDECODE_KERNELS): slower, with limits of waits")
        torch.zeros(1, device=self.device)  # makes torch create its context before the library does
        properties = torch.zeros(4, dtype=torch.int32)
        self.library.initialize(self.device.index, int(dependent_launch), properties.data_ptr())
        multiprocessors, self.capability, shared_bytes, shared = properties.tolist()
        #: shared memory limit of a prefill attention block; 0: the device's limit, and the Hopper kernel
        self.prompt_shared_bytes = 0
        self.sums = self.bytes(SUM_BYTES)
        self.library_products = LibraryProducts(self.library, self.sums.data_ptr())
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
            setattr(torch.backends.cuda.matmul, name, False)  # process-wide: torch's GEMMs sum in float32
        clusters, fp8_library = (0, 0, 0), (False, False)
        operands = self.library.operands
        if self.capability == 90:
            clusters = tuple(self.library.gemm_sm90_clusters(split) for split in (1, 2, 3))
            takes = self.library_products.takes_fp8
            fp8_library = takes(operands["fp8"]), takes(operands["fp8_blocks"])
        self.gemm_device = Device(
            self.capability, multiprocessors, shared_bytes, clusters, bool(shared), *fp8_library
        )
        log.info("%s", paths(self.gemm_device))
        #: plans of GEMMs; prompt lengths vary, so the cache is bounded
        self.choose_gemm = lru_cache(maxsize=1 << 14)(partial(choose, device=self.gemm_device))
        self.choose_packed = lru_cache(maxsize=1 << 14)(partial(choose_packed, device=self.gemm_device))
        self.exchange = torch.zeros(EXCHANGE_BYTES, dtype=torch.uint8, device=self.device)
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=self.device)
        self.scratch_fields: dict[str, float] = {
            "partials": self.sums.data_ptr(),
            "partial_bytes": SUM_BYTES,
            "counters": self.counters.data_ptr(),
            "num_counters": NUM_COUNTERS,
        }
        self.attention = self.bytes(self.library.decode_attention_scratch(256))
        self.arenas: dict[str, Tensor] = {}

    @property
    def stream(self) -> int:
        """Return torch's current stream, read at each launch: a stored one would escape a graph's capture."""
        return current_stream(self.device)

    def bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def arena(self, name: str, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes; it grows only outside of graph capture."""
        held = self.arenas.get(name)
        if held is None or held.numel() < size:
            if torch.cuda.is_current_stream_capturing():
                raise KernelError(
                    f"the {name} buffer needs {size:,} bytes within a capture; call reserve first"
                )
            held = self.arenas[name] = self.bytes(size)
        return held

    def temporary(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return (rows, columns) in the arena `name`, valid until its next use."""
        size = rows * columns * dtype.itemsize
        return self.arena(name, size)[:size].view(dtype).view(rows, columns)

    def norm(self, x: Tensor, norm: Norm, out: Tensor) -> None:
        """kernels.ops.Ops.norm."""
        sizes = match("norm", ("TC", "x", x), ("C", "weight", norm.weight), ("TC", "out", out))
        dtype = same_dtype("norm", ("x", x), ("weight", norm.weight), ("out", out))
        if norm.bias is not None:
            match("norm", ("TC", "x", x), ("C", "bias", norm.bias))
            same_dtype("norm", ("x", x), ("bias", norm.bias))
        self.library.norm(
            out.data_ptr(),
            x.data_ptr(),
            norm.weight.data_ptr(),
            pointer(norm.bias),
            norm.eps,
            sizes["T"],
            sizes["C"],
            x.stride(0),
            out.stride(0),
            DTYPES[dtype],
            self.stream,
        )

    def add_normed(
        self, residual: Tensor, x: Tensor, norm: Norm | None, next_norm: Norm | None, normed: Tensor | None
    ) -> None:
        """kernels.ops.Ops.add_normed."""
        rows = [("residual", residual), ("x", x), *([] if normed is None else [("normed", normed)])]
        if (next_norm is None) != (normed is None):
            raise ShapeError("add_normed: next_norm and normed belong together")
        fields: dict[str, float] = {}
        constants = []
        for prefix, one in (("", norm), ("next_", next_norm)):
            if one is not None:
                fields[f"{prefix}weight"], fields[f"{prefix}bias"] = one.weight.data_ptr(), pointer(one.bias)
                fields[f"{prefix}eps"] = one.eps
                constants += [(f"{prefix}norm", part) for part in (one.weight, one.bias) if part is not None]
        sizes = match("add_normed", *(("TC", *row) for row in rows), *(("C", *part) for part in constants))
        dtype = same_dtype("add_normed", *rows, *constants)
        for name, tensor in rows:
            fields[name], fields[f"{name}_stride"] = tensor.data_ptr(), tensor.stride(0)
        fields |= {"tokens": sizes["T"], "columns": sizes["C"], "dtype": DTYPES[dtype]}
        self.library.add_normed(self.stream, fields)

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        """Return norm(x) in scratch memory, valid until the next operation."""
        normed = self.temporary("normed", x.shape[0], x.shape[1], x.dtype)
        self.norm(x, norm, normed)
        return normed


def plan_fields(plan: Plan) -> dict[str, float]:
    """Return the fields of a GEMM task for its tile."""
    return {
        "tile_outputs": plan.tile_outputs,
        "tile_tokens": plan.tile_tokens,
        "split": plan.split,
        "clusters": plan.clusters,
        "stream_k": plan.stream_k,
    }


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def norm_fields(norm: Norm | None) -> dict[str, float]:
    """Return the fields of a GEMM task for the norm that a kernel fuses."""
    if norm is None:
        return {}
    return {"norm_weight": norm.weight.data_ptr(), "norm_bias": pointer(norm.bias), "norm_eps": norm.eps}


def aligned(tensor: Tensor) -> bool:
    """Return whether rows of 16-bit numbers begin at multiples of 16 bytes, as TMA requires."""
    return tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0


def contiguous(operation: str, *tensors: tuple[str, Tensor]) -> None:
    for name, tensor in tensors:
        if not tensor.is_contiguous():
            raise LayoutError(f"{operation}: {name} is not contiguous (strides {tensor.stride()})")


def check_cache(operation: str, heads: Heads, cache: CacheLayer, like: Tensor) -> None:
    sizes = match(operation, ("NTKPD", "cache.blocks", cache.blocks))
    if (sizes["T"], sizes["K"], sizes["D"]) != (2, heads.num_kv_heads, heads.head_size):
        raise ShapeError(
            f"{operation}: cache.blocks is {tuple(cache.blocks.shape)}; "
            f"wanted (N, 2, {heads.num_kv_heads}, P, {heads.head_size})"
        )
    contiguous(operation, ("cache.blocks", cache.blocks))
    if cache.scales is None:
        same_dtype(operation, ("activations", like), ("cache.blocks", cache.blocks))
        return
    match(operation, ("NTKPD", "cache.blocks", cache.blocks), ("NTKP", "cache.scales", cache.scales))
    contiguous(operation, ("cache.scales", cache.scales))
    if cache.blocks.dtype not in CACHE_FORMATS or cache.scales.dtype != torch.float32:
        raise DtypeError(
            f"{operation}: cache.blocks is {cache.blocks.dtype} with scales of {cache.scales.dtype}; wanted "
            "int8 or float8_e4m3fn with float32"
        )


def cache_fields(cache: CacheLayer) -> dict[str, float]:
    """Return the fields of a task for the cache that it reads or writes."""
    exact = cache.scales is None
    return {
        "cache": cache.blocks.data_ptr(),
        "block_tokens": cache.block_tokens,
        "cache_format": 0 if exact else CACHE_FORMATS[cache.blocks.dtype],
        "cache_scales": pointer(cache.scales),
    }
