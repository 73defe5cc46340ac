"""Chooses the kernel of every GEMM: a pure function from a GEMM and a device to a kernel and its tile.

out = epilogue(norm(x) @ weight^T), x (tokens, inputs), weight (outputs, inputs). kernels/gemm
and the launchers in csrc execute the plan; a launcher refuses a tile that it has no instance of. `python -m
tridecode.kernels.explain` prints the choices. This module needs neither torch nor a GPU.

    gemv                      1 or 2 tokens (1 on 9.0), CUDA cores, two weight rows per warp
    gemm_mma                  1 to 8 tokens, mma.sync, split-K through global memory; 9.0 hardly needs it
    gemm_mma_tiles            up to 64 tokens, mma.sync and cp.async, split-K likewise; not on 9.0 and later
    gemm_sm90_data_parallel   1 to 64 tokens, TMA and wgmma, all inputs of a tile in one block
    gemm_sm90_split_k         1 to 64 tokens, TMA and wgmma, split-K within a cluster of 1 to 3 blocks
    gemm_sm90_stream_k        any tokens, TMA and wgmma, whole tiles, or stream-K through global memory
    gemm_sm90_even_split      65 to 256 tokens, likewise, two or four clusters share each tile's inputs evenly
    gemm_library              cuBLAS, and gemm_library_epilogue for what cuBLAS does not fuse

GEMMs with both operands in 8 bit (gemm/eight_bit.py): W8A8 has gemm_sm90_split_k_8bit,
gemm_sm90_stream_k_8bit and gemm_sm90_even_split_8bit, and gemm_library for many tokens of fp8. int8 weights
with x in two int8 parts have the first two, named *_two_parts, up to TWO_PARTS_TOKENS; beyond, expand_rows:
the weight is dequantised to 16 bit, and one of the kernels above follows. Other GPUs have gemm_mma_tiles_8bit
for W8A8 up to 64 tokens, and library_8_bit for more: cuBLAS through torch.
"""

from __future__ import annotations

from tridecode.kernels.gemm.plan import LARGE_TOKENS, Device, Gemm, Plan
from tridecode.kernels.gemm.table_sm80 import (
    FEW_OUTPUTS,
    FUSED_NORM_TOKENS,
    GEMV_OUTPUTS,
    LONG_INPUTS,
    mma_tiles_plan,
    plan_8_bit,
    small_plan,
)
from tridecode.kernels.gemm.table_sm90 import (
    GEMV_TOKENS,
    data_parallel_plan,
    even_split_plan,
    fp8_library_tokens,
    large_8_bit_plan,
    large_plan,
    rounds_heads,
    split_k_plan,
    stream_k_plan,
)

#: above this many tokens, a weight in int8 rows is dequantised to 16 bit before the GEMM, unless x is
#: quantised
TWO_PARTS_TOKENS = 512


def choose(gemm: Gemm, device: Device) -> Plan:
    """Choose the kernel that computes `gemm` on `device` and its tiling, with the reason."""
    plan = _choose(gemm, device)
    if not gemm.rounds or rounds_heads(plan, gemm.head_size):
        return plan
    return _choose(gemm._replace(epilogue="linear"), device)._replace(fuses_heads=False)


def _choose(gemm: Gemm, device: Device) -> Plan:
    plan = None
    if gemm.operand == "two_parts" and gemm.tokens > TWO_PARTS_TOKENS:
        return Plan("expand_rows", f"more than {TWO_PARTS_TOKENS} tokens")
    if gemm.operand:
        return choose_8_bit(gemm, device)
    if gemm.half and gemm.aligned:
        if device.capability == 90:
            plan = large_plan(gemm, device)
        if plan is None and gemm.inputs % 8 == 0:
            plan = _small(gemm, device)
    return plan or Plan("gemm_library", _why_library(gemm))


def choose_8_bit(gemm: Gemm, device: Device) -> Plan:
    """Choose the kernel with 8-bit operands, for any number of tokens.

    The epilogue of `gemm` must be one that these kernels support.
    """
    assert gemm.half and gemm.aligned and gemm.out_aligned
    if device.capability != 90:
        return plan_8_bit(gemm, device)
    plan = None
    least = fp8_library_tokens(gemm, device)
    if least and gemm.tokens >= least:
        return Plan("gemm_library", f"{least} tokens or more")
    if gemm.tokens > LARGE_TOKENS:
        plan = even_split_plan(gemm, device) or large_8_bit_plan(gemm, device)
    elif gemm.epilogue != "swiglu":
        plan = split_k_plan(gemm, device)
    plan = plan or stream_k_plan(gemm, device)
    return plan._replace(kernel=f"{plan.kernel}_{'two_parts' if gemm.operand == 'two_parts' else '8bit'}")


def _small(gemm: Gemm, device: Device) -> Plan | None:
    hopper = device.capability == 90
    if gemm.tokens > (GEMV_TOKENS if hopper else FUSED_NORM_TOKENS):
        if hopper:
            return data_parallel_plan(gemm, device)
        return mma_tiles_plan(gemm, device) if device.capability < 90 else None
    if not gemm.bias and gemm.outputs <= FEW_OUTPUTS and gemm.inputs > LONG_INPUTS:
        return None
    if gemm.outputs > GEMV_OUTPUTS and gemm.tokens * gemm.inputs * 2 <= device.shared_bytes - 1024:
        why = f"1 or 2 tokens, more than {GEMV_OUTPUTS} outputs"
        return Plan("gemv", why, fuses_norm=gemm.norm, fuses_heads=True)
    return (data_parallel_plan(gemm, device) if hopper else None) or small_plan(gemm, device)


def _why_library(gemm: Gemm) -> str:
    if not gemm.half:
        return "float32"
    if not (gemm.aligned and gemm.out_aligned and gemm.inputs % 8 == 0):
        return "rows that are not at multiples of 16 bytes"
    return "cuBLAS is level or faster"
