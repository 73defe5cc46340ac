"""Kernels for any compute capability from 7.5 on: CUDA cores, mma.sync, cp.async. See table.py."""

from __future__ import annotations

from tridecode.kernels.gemm.plan import LEAST_STAGES, Device, Gemm, Plan, at_least, ceil_div

#: tokens of a tile of gemm_mma_tiles
MMA_TILES_TOKENS = (16, 32, 64)
#: a fused norm is repeated in every block. 3072 x 1024, 1 / 2 tokens: 5.5 / 6.3, with a norm kernel 6.1 /
#: 6.6
FUSED_NORM_TOKENS = 2
#: gemm_mma is faster while its tiles of 16 rows fill one wave of 2 blocks per multiprocessor. With a norm,
#: 1 / 2 tokens: 3072 x 2048: 6.6 / 8.4, gemv 6.9 / 8.7; 6144 x 2048: 10.5 / 11.8, gemv 9.6 / 12.4
GEMV_OUTPUTS = 5120
#: cuBLAS splits long sums of few outputs better, unless a bias costs it a kernel. 4096 x 14336, 1 / 2
#: tokens: 32.0 / 32.1, gemm_mma 33.8 / 37.3
LONG_INPUTS, FEW_OUTPUTS = 8192, 8192
_MMA_STEP_INPUTS = 2048  # inputs that the 8 warps of gemm_mma take at once
_MMA_SUM_BYTES = 8192  # of the warps' partial sums
_MMA_MAX_SPLIT = 64
_MMA_TILES_OUTPUTS, _MMA_TILES_STAGE_INPUTS = 64, 64  # of gemm_mma_tiles: weight rows, inputs of a stage
#: blocks of gemm_mma_tiles on a multiprocessor: as many as fit in the 100 KiB of 8.6 and 8.9
_MMA_TILES_RESIDENT = 2


def plan_8_bit(gemm: Gemm, device: Device) -> Plan:
    """Plan W8A8 with one scale per output. A row counts as half as many 16-bit words."""
    plan = mma_tiles_plan(gemm._replace(inputs=gemm.inputs // 2), device)
    if plan is None:
        return Plan("library_8_bit", f"more than {MMA_TILES_TOKENS[-1]} tokens")
    why = f"up to {MMA_TILES_TOKENS[-1]} tokens"
    return plan._replace(kernel="gemm_mma_tiles_8bit", why=why, fuses_heads=False)


def small_plan(gemm: Gemm, device: Device) -> Plan | None:
    """Choose the smallest split whose x fits twice in the shared memory of a multiprocessor: one block
    streams weights while the other adds up.

    A fused norm needs the whole row in one block.
    """
    rest = _MMA_SUM_BYTES + 2 * 1024
    if gemm.norm and _mma_x_bytes(gemm, 1) <= device.shared_bytes - rest - 1024:
        return Plan("gemm_mma", "1 or 2 tokens, norm fused", 16, 8, 1, fuses_norm=True, fuses_heads=True)
    for split in range(1, _MMA_MAX_SPLIT + 1):
        if _mma_x_bytes(gemm, split) <= device.shared_bytes // 2 - rest:
            return Plan("gemm_mma", "1 or 2 tokens", 16, 8, split, fuses_heads=True)
    return None


def mma_tiles_plan(gemm: Gemm, device: Device) -> Plan | None:
    """Choose the smallest tile that holds the tokens, and the largest split whose blocks are all resident at
    once.
    """
    if gemm.tokens > MMA_TILES_TOKENS[-1]:
        return None
    tiles = ceil_div(gemm.outputs, _MMA_TILES_OUTPUTS)
    most = _MMA_TILES_RESIDENT * device.multiprocessors // tiles
    steps = ceil_div(gemm.inputs, _MMA_TILES_STAGE_INPUTS)
    split = max(1, min(most, steps // LEAST_STAGES))
    return Plan(
        "gemm_mma_tiles",
        f"3 to {MMA_TILES_TOKENS[-1]} tokens: {tiles} tiles of {steps} stages",
        _MMA_TILES_OUTPUTS,
        at_least(gemm.tokens, MMA_TILES_TOKENS),
        split,
        fuses_heads=True,
    )


def _mma_x_bytes(gemm: Gemm, split: int) -> int:
    """Return the shared memory of x's slice of the inputs, padded to what the warps take at once."""
    slice_inputs = ceil_div(ceil_div(gemm.inputs, 32), split) * 32
    return ceil_div(slice_inputs, _MMA_STEP_INPUTS) * _MMA_STEP_INPUTS * 2 * gemm.tokens
