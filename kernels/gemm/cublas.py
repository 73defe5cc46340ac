"""GEMMs by cuBLASLt: the library that torch has loaded, called with algorithms of our choice.

torch's own GEMMs add a bias to a residual in a separate pass, copy a residual that is not `out`, and may add
the partial sums of a split in 16 bit. Here every GEMM is summed in float32 and rounded once
(gemm_library.cu), with one exception: if `out` is the residual, cuBLAS' kernels for Hopper round the product
with its bias and add it to the residual in memory, as transformers does, which rounds twice.

The algorithm is the first that cuBLASLt proposes, so that a shape has the same bits at every start. The
fastest of all proposals takes 14 % less for the last GEMM of LLaMA-3-8B and BLOOM-7B1 at 72 rows, 3 % at 256
and 0 to 4 % elsewhere (one H200): not worth answers that differ from start to start, or between ranks.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable

import torch

from tridecode.kernels.library import KernelError, Library

log = logging.getLogger("tridecode.engine")

#: cuBLASLt's functions in the order of csrc/gemm/library/cublas_lt.h
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
#: bytes of Found in csrc/gemm/library/cublas_lt.h; its first 64 bytes are the algorithm
_FOUND_BYTES = 96
_Algorithm = ctypes.Array[ctypes.c_uint8]
#: cuBLAS' own choice on Hopper
WORKSPACE_BYTES = 32 << 20
#: cuBLASLt ignores a greater alignment than this, in bytes
_MOST_ALIGNED = 256
#: properties that determine an algorithm, besides the number of tokens
_KEY = ("inputs", "outputs", "x_stride", "weight_stride", "residual_stride", "out_stride", "activation",
        "out_float32", "dtype", "operand", "alignment")  # fmt: skip


class LibraryProducts:
    """csrc/gemm/library/gemm_library.cu with an algorithm for each shape.

    workspace: address of WORKSPACE_BYTES that each GEMM may overwrite. `is_open`: False if cuBLASLt cannot be
    called.
    """

    def __init__(self, library: Library, workspace: int):
        self._library, self._workspace = library, workspace
        self._algorithms: dict[tuple[float, ...], _Algorithm | None] = {}
        found = addresses()
        self.is_open = found is not None
        if found is not None:
            library.library_bind(ctypes.addressof(found))

    def run(self, stream: int, tokens: int, **fields: float) -> bool:
        """Launch a GEMM, given the fields of tridecode_library_task.

        Returns False if cuBLASLt has no algorithm for it.
        """

        def launch(found: _Algorithm) -> None:
            self._library.gemm_library(
                stream,
                tokens=tokens,
                workspace=self._workspace,
                workspace_bytes=WORKSPACE_BYTES,
                found=ctypes.addressof(found),
                **fields,
            )

        fields["alignment"] = _alignment(fields)
        return self.is_open and self._launch(tokens, (fields,), launch)

    def run_pieces(
        self, stream: int, tokens: int, piece: int, packed: dict[str, float], **fields: float
    ) -> bool:
        """Run the GEMM with a weight that is dequantised to `weight`, `piece` outputs at a time.

        packed: the fields of tridecode_expanded_task that describe the quantised weight. Returns the same as
        `run`.
        """
        done = ctypes.c_int()

        def launch(found: _Algorithm, last: _Algorithm | None = None) -> None:
            self._library.gemm_expanded(
                stream,
                tokens=tokens,
                workspace=self._workspace,
                workspace_bytes=WORKSPACE_BYTES,
                piece=piece,
                found=ctypes.addressof(found),
                last_found=0 if last is None else ctypes.addressof(last),
                done=ctypes.addressof(done),
                **packed,
                **fields,
            )

        # pieces start at multiples of _MOST_ALIGNED bytes of bias, residual and out, so all have the same
        # alignment
        shape = {**fields, "weight_stride": fields["inputs"], "alignment": _alignment(fields)}
        sizes = (piece, fields["outputs"] % piece)
        shapes = tuple({**shape, "outputs": outputs} for outputs in sizes if outputs)
        if self.is_open and self._launch(tokens, shapes, launch):
            return True
        if done.value:  # an output that is its own residual would be added twice
            raise KernelError(f"cuBLASLt multiplied {done.value} of {fields['outputs']} outputs")
        return False

    def _launch(self, tokens: int, shapes: tuple[dict[str, float], ...], launch: Callable[..., None]) -> bool:
        """Call launch with the algorithms of these shapes. Returns False if there are none."""
        found = [self._algorithm(tokens, rows_of_choice(tokens), fields) for fields in shapes]
        if None in found:
            return False
        try:
            launch(*found)
        except KernelError:  # an algorithm for slightly more rows that does not accept this number
            found = [self._algorithm(tokens, tokens, fields) for fields in shapes]
            if None in found:
                return False
            launch(*found)
        return True

    def takes_fp8(self, operand: int) -> bool:
        """Return whether this cuBLASLt multiplies E4M3. operand: the code of "fp8" or "fp8_blocks"."""
        if not self.is_open:
            return False
        names = ("out", "x", "weight", "x_scales", "weight_scales")  # never read, but must not be null
        fields: dict[str, float] = dict.fromkeys(names, self._workspace)
        sizes = dict.fromkeys(("inputs", "outputs", "x_stride", "weight_stride", "out_stride"), 512)
        fields |= {"dtype": 2, "operand": operand, "alignment": 256, **sizes}
        try:
            return self._algorithm(128, 128, fields) is not None
        except KernelError:  # CUDA before 12.9 lacks this scale mode
            return False

    def _algorithm(self, tokens: int, rows: int, fields: dict[str, float]) -> _Algorithm | None:
        """Return the first proposal for `rows` rows, or None."""
        has = bool(fields.get("bias")), bool(fields.get("residual"))
        key = (rows, *has, *(fields.get(name, 0) for name in _KEY))
        if key not in self._algorithms:
            found, count = (ctypes.c_uint8 * _FOUND_BYTES)(), ctypes.c_int()
            self._library.library_algorithms(
                0,
                tokens=rows,
                workspace_bytes=WORKSPACE_BYTES,
                found=ctypes.addressof(found),
                count=ctypes.addressof(count),
                most=1,
                **fields,
            )
            self._algorithms[key] = found if count.value else None
        return self._algorithms[key]


def rows_of_choice(tokens: int) -> int:
    """Round a token count up to the row count of the algorithm query, which takes 50 us: prompt lengths
    vary.
    """
    step = 16 if tokens <= 256 else 128
    return -(-tokens // step) * step


def _alignment(fields: dict[str, float]) -> int:
    """Return the alignment of all tensors in bytes, a power of two."""
    bits = _MOST_ALIGNED
    for name in ("out", "x", "weight", "bias", "residual"):
        bits |= int(fields.get(name, 0))
    return bits & -bits


def addresses() -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the addresses of FUNCTIONS in the library that torch has loaded; None, with a warning, if it has
    none.
    """
    name = f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}"
    try:
        found = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        pointers = [ctypes.cast(getattr(found, each), ctypes.c_void_p).value for each in FUNCTIONS]
    except (OSError, AttributeError) as error:
        log.warning("cuBLASLt cannot be called (%s); torch's GEMMs are used", error)
        return None
    return (ctypes.c_void_p * len(pointers))(*pointers)
