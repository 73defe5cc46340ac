"""Chooses the kernel of a GEMM whose weight is in 8 or 4 bit (packed_weight.py); table.py chooses the others.
A pure function, without torch or a GPU.

    gemm_int4_sm90     up to 32 tokens, int4 in groups of n x 128, x in two int8 parts, split-K in a cluster
    gemm_int4_stream_k_sm90  up to 64 tokens, the same for large weights, stream-K through global memory
    gemm_packed_mma    1 to 8 tokens, mma.sync, split-K through global memory
    gemm_packed_sm90   up to 256 tokens, TMA and wgmma, whole tiles, or stream-K through global memory
    gemm_packed_wide_sm90  129 to 256 tokens of int4, tiles of 160 to 256 tokens
    gemm_packed_even_split_sm90  129 to 256 tokens of int4, few outputs; four clusters share each tile evenly
    expand_weight      more tokens: dequantises the weight to 16 bit; table.py chooses the GEMM
"""

from __future__ import annotations

from tridecode.kernels.gemm.plan import Device, Gemm, Plan, ceil_div
from tridecode.kernels.gemm.table_sm90 import (
    even_split_plan,
    fuses_heads_sm90,
    rounds_heads,
    stream_k_plan,
)

#: above this many tokens the weight is dequantised first
PACKED_TOKENS = 256
#: up to this many tokens gemm_packed_mma is faster than gemm_packed_sm90; its maximum number of tokens
FEW_TOKENS, MMA_TOKENS = 2, 8
FUSED_NORM_TOKENS = 2
STAGE_INPUTS = 128  # inputs per pipeline stage of gemm_packed_sm90 and gemm_int4_sm90
#: tokens per tile of gemm_int4_sm90; two of its blocks fit on a multiprocessor
INT4_TOKENS = (8, 16, 32)
INT4_RESIDENT = 2
#: splits; 8 is slower. us on an H200 (bf16, random values, quantisation of x included), 8 tokens, split 1 /
#: 2 / 4: 4096 x 4096: 11.0 / 7.8 / 7.1; 4096 x 14336: 33.1 / 19.7 / 18.2; 28672 x 4096: 20.4 / 23.4 / 30.2
INT4_SPLITS = (1, 2, 4)
#: most tokens of gemm_int4_sm90, the second with more inputs than INT4_LONG_INPUTS; gemm_int4_stream_k_sm90
#: takes more. us for 16 / 32 tokens of 4096 x 14336: 19.3 / 24.0 and 21.9 / 20.6
INT4_MOST_TOKENS, INT4_LONG_TOKENS, INT4_LONG_INPUTS = 32, 16, 8192
#: of gemm_int4_stream_k_sm90: tokens per tile, inputs per stage, smallest matrix in weights. us for 64
#: tokens, gemm_packed_sm90 in brackets: 4096 x 4096: 14.3 (12.6); 6144 x 4096: 15.8 (14.5); 4096 x 14336:
#: 23.7 (26.3); 28672 x 4096: 37.6 (44.1)
INT4_STREAM_TOKENS, INT4_STREAM_INPUTS, INT4_STREAM_WEIGHTS = (32, 64), 256, 3 << 24
#: minimum stages of a block
INT4_LEAST_STAGES = 4
#: tokens per tile of int4 with one group per granule and more than 128 tokens: every weight is dequantised
#: once, not once per 128 tokens
WIDE_TOKENS = {"linear": (160, 192, 224, 256), "qkv": (192,), "swiglu": (160, 192, 224, 256)}
#: thirds of the clusters that must have a tile, up to and above 192 tokens. us on an H200, tiles of 128
#: tokens / wide tiles: 6144 x 4096 (24 tiles on 66 clusters), 192 tokens: 24.4 / 20.8, 256: 24.7 / 27.0;
#: 28672 x 4096 with SwiGLU 97.7 / 67.6 and 97.3 / 85.5. On an H100, the same in tiles of 192 and 256 / 160
#: and 224, 160 tokens: 63.9 / 58.0, 224: 82.7 / 71.0
WIDE_THIRDS = 1, 2
#: tokens of a tile that four clusters share evenly, and minimum steps of it. Stream-K of tiles of 128
#: tokens / this, 192 and 256 tokens: 4096 x 4096 (32 steps): 19.1 / 15.7 and 19.4 / 19.2; 4096 x 14336:
#: 49.4 / 35.1 and 49.8 / 46.2
WIDE_EVEN_TOKENS, WIDE_EVEN_STEPS = (192, 256), 32
#: tokens of a tile of gemm_packed_sm90. us on an H100, int4, 96 tokens in tiles of 128 / 96: 28672 x 4096:
#: 49.0 / 44.0; 4096 x 14336: 29.3 / 27.1; 6144 x 4096: 17.5 / 15.8; 4096 x 4096: 15.3 / 13.8
STREAM_K_TOKENS = {
    "linear": (16, 32, 64, 96, 128),
    "qkv": (16, 32, 64, 96, 128),
    "swiglu": (32, 64, 96, 128),
}

_MMA_STEP_INPUTS = 2048  # inputs that the 8 warps of gemm_packed_mma process per step
_SUM_BYTES = 8192
_MAX_SPLIT = 64


def choose_packed(gemm: Gemm, granule_inputs: int, device: Device) -> Plan:
    """Choose the kernel and its tile, with the reason. granule_inputs: 64 or 128."""
    plan = _choose(gemm, granule_inputs, device)
    return (
        plan._replace(fuses_heads=False) if gemm.rounds and not rounds_heads(plan, gemm.head_size) else plan
    )


def _choose(gemm: Gemm, granule_inputs: int, device: Device) -> Plan:
    most = INT4_LONG_TOKENS if gemm.inputs > INT4_LONG_INPUTS else INT4_MOST_TOKENS
    if gemm.operand == "int4" and device.capability == 90 and _has_epilogue_sm90(gemm):
        if gemm.tokens <= most:
            return _int4(gemm, device)
        if gemm.tokens <= INT4_STREAM_TOKENS[-1] and gemm.outputs * gemm.inputs >= INT4_STREAM_WEIGHTS:
            return _int4_stream_k(gemm, device)
    if gemm.tokens <= PACKED_TOKENS and gemm.aligned and gemm.inputs % 8 == 0:
        few = FEW_TOKENS if device.capability == 90 else MMA_TOKENS
        plan = _mma(gemm, granule_inputs, device) if gemm.tokens <= few else None
        if plan is None and device.capability == 90:
            plan = _sm90(gemm, device)
        if plan is not None:
            return plan
    return Plan("expand_weight", f"more than {PACKED_TOKENS} tokens, or rows not at multiples of 16 bytes")


def _int4(gemm: Gemm, device: Device) -> Plan:
    """Choose the smallest tile that holds the tokens, and the largest split whose blocks are all resident at
    once.
    """
    tile_tokens = next((size for size in INT4_TOKENS if size >= gemm.tokens), INT4_TOKENS[-1])
    tiles = ceil_div(gemm.outputs, 128) * ceil_div(gemm.tokens, tile_tokens)
    steps, room = ceil_div(gemm.inputs, STAGE_INPUTS), INT4_RESIDENT * device.multiprocessors
    split = 1
    for each in INT4_SPLITS:
        if tiles * each <= room and steps >= each * INT4_LEAST_STAGES:
            split = each
    heads = gemm.epilogue == "qkv" and fuses_heads_sm90(gemm.head_size, gemm.rotary_size, gemm.interleaved)
    why = f"{tiles} tiles of {steps} stages, room for {room} blocks"
    return Plan("gemm_int4_sm90", why, 128, tile_tokens, split, fuses_norm=True, fuses_heads=heads)


def _int4_stream_k(gemm: Gemm, device: Device) -> Plan:
    """Choose gemm_int4_stream_k_sm90 with one tile of tokens."""
    steps = ceil_div(gemm.inputs, INT4_STREAM_INPUTS)
    plan = stream_k_plan(gemm._replace(operand=""), device, INT4_STREAM_TOKENS, steps)
    heads = gemm.epilogue == "qkv" and fuses_heads_sm90(gemm.head_size, gemm.rotary_size, gemm.interleaved)
    return plan._replace(kernel="gemm_int4_stream_k_sm90", fuses_norm=True, fuses_heads=heads)


def _mma(gemm: Gemm, granule_inputs: int, device: Device) -> Plan | None:
    """Choose the smallest split whose x fits twice in the shared memory of a multiprocessor; with a fused
    norm, one block holds all of x.
    """
    if gemm.epilogue == "swiglu" and gemm.outputs % 16:
        return None
    rest, heads = _SUM_BYTES + 4 * 1024, _fuses_heads(gemm)
    fused = gemm.norm and gemm.tokens <= FUSED_NORM_TOKENS
    if fused and _x_bytes(gemm, 1, granule_inputs) <= device.shared_bytes - rest - 1024:
        return Plan(
            "gemm_packed_mma", "1 or 2 tokens, norm fused", 16, 8, 1, fuses_norm=True, fuses_heads=heads
        )
    for split in range(1, _MAX_SPLIT + 1):
        if _x_bytes(gemm, split, granule_inputs) <= device.shared_bytes // 2 - rest:
            return Plan("gemm_packed_mma", "few tokens", 16, 8, split, fuses_heads=heads)
    return None


def _x_bytes(gemm: Gemm, split: int, granule_inputs: int) -> int:
    """Return the shared memory of a slice of x, padded to the inputs that the warps process per step."""
    chunks = ceil_div(ceil_div(gemm.inputs, granule_inputs), split)
    return ceil_div(chunks * granule_inputs, _MMA_STEP_INPUTS) * _MMA_STEP_INPUTS * 2 * gemm.tokens


def _fuses_heads(gemm: Gemm) -> bool:
    if gemm.rotary_size == 0:
        return gemm.head_size % 8 == 0
    return not gemm.interleaved and gemm.head_size % 16 == 0 and gemm.rotary_size % 16 == 0


def _has_epilogue_sm90(gemm: Gemm) -> bool:
    if not gemm.out_aligned or (gemm.residual and gemm.out_float32):
        return False
    return gemm.epilogue != "swiglu" or not (gemm.residual or gemm.out_float32 or gemm.outputs % 16)


def _sm90(gemm: Gemm, device: Device) -> Plan | None:
    if not _has_epilogue_sm90(gemm):
        return None
    steps, sizes = ceil_div(gemm.inputs, STAGE_INPUTS), STREAM_K_TOKENS[gemm.epilogue]
    kernel = "gemm_packed_sm90"
    if gemm.operand == "int4" and gemm.tokens > sizes[-1]:
        plan = even_split_plan(gemm._replace(operand=""), device, WIDE_EVEN_TOKENS, steps, WIDE_EVEN_STEPS)
        if plan is not None:
            return plan._replace(kernel="gemm_packed_even_split_sm90")
        if _has_wide_tiles(gemm, device):
            kernel, sizes = "gemm_packed_wide_sm90", WIDE_TOKENS[gemm.epilogue]
    heads = gemm.epilogue == "qkv" and fuses_heads_sm90(gemm.head_size, gemm.rotary_size, gemm.interleaved)
    return stream_k_plan(gemm, device, sizes, steps)._replace(kernel=kernel, fuses_heads=heads)


def _has_wide_tiles(gemm: Gemm, device: Device) -> bool:
    """Return whether enough clusters have a wide tile of their own; otherwise many add up each tile."""
    sizes = WIDE_TOKENS[gemm.epilogue]
    if gemm.tokens > sizes[-1]:
        return False
    tiles, clusters = ceil_div(gemm.outputs, 256), device.multiprocessors // 2
    return 3 * tiles >= WIDE_THIRDS[gemm.tokens > 192] * clusters
