"""Describes the kernels that a GPU's architecture uses, as logged while an engine loads. No GPU needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from tridecode.kernels.gemm.packed_table import PACKED_TOKENS, choose_packed
from tridecode.kernels.gemm.plan import Device, Gemm
from tridecode.kernels.gemm.table import choose

_EXAMPLE = Gemm(1, 4096, 4096)  # a GEMM in 16 bit, without epilogue
_MOST = 300  # tokens; more tokens use the same kernel as the largest


def paths(device: Device) -> str:
    """Return one line: the kernels of GEMMs by number of tokens, of prefill attention, and of 8 and 4 bit."""
    hopper = device.capability == 90
    parts = [
        f"compute capability {device.capability // 10}.{device.capability % 10}",
        f"products of 4096 x 4096 in 16 bit, by tokens: {_ranges(_kernels(device))}",
        f"prompts: {'wgmma' if hopper else 'mma.sync'}",
        "8 and 4 bit: by wgmma" if hopper else _of_weights(device),
    ]
    if device.capability >= 80 and not hopper:
        parts.append(_of_8_bit_operands(device))
    if device.capability > 90:
        parts.append("the kernels for Hopper do not run on it, those for 8.0 do")
    if device.shared:
        parts.append("shared with other processes (MPS): no kernel whose blocks wait for each other")
    return "; ".join(parts)


def _kernels(device: Device) -> Iterator[str]:
    return (choose(_EXAMPLE._replace(tokens=count), device).kernel for count in range(1, _MOST))


def _of_weights(device: Device) -> str:
    """Describe the path of weights in 4 bit, whose kernel is the 8-bit one on this device."""
    products = (_EXAMPLE._replace(tokens=count) for count in range(1, PACKED_TOKENS))
    plans = (choose_packed(product, 128, device).kernel for product in products)
    return f"weights in 8 and 4 bit: {_ranges(plans)}"


def _of_8_bit_operands(device: Device) -> str:
    products = (_EXAMPLE._replace(tokens=count, operand="int8") for count in range(1, _MOST))
    formats = "int8 and fp8" if device.capability >= 89 else "int8"
    return f"W8A8 in {formats}: {_ranges(choose(product, device).kernel for product in products)}"


def _ranges(kernels: Iterable[str]) -> str:
    """Format as 'a to 2 tokens, b to 8, then c'."""
    runs = [(kernel, len(list(run))) for kernel, run in groupby(kernels)]
    named, last = [], 0
    for kernel, count in runs[:-1]:
        last += count
        named.append(f"{kernel} to {last}")
    return ", ".join([*named, f"then {runs[-1][0]}" if named else runs[-1][0]])
