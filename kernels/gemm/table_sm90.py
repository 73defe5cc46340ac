"""Kernels for compute capability 9.0: TMA and wgmma. See table.py."""

from __future__ import annotations

from tridecode.kernels.gemm.plan import LARGE_TOKENS, LEAST_STAGES, Device, Gemm, Plan, at_least, ceil_div

DATA_PARALLEL_TOKENS, DATA_PARALLEL_OUTPUTS = (8, 16, 32, 64), (32, 64)
SPLIT_K_TOKENS, SPLIT_K_SPLITS = (16, 32, 64), (1, 2, 3)
#: tokens of a tile of gemm_sm90_stream_k, by epilogue. us on an H100, 28672 x 4096 with SwiGLU, 160 tokens in
#: tiles of 192 / 160: 93.6 / 89.6; 224 in tiles of 256 / 224: 101.9 / 99.0
STREAM_K_TOKENS = {
    "linear": (16, 32, 64),
    "qkv": (16, 32, 64),
    "swiglu": (32, 64, 96, 128, 160, 192, 224, 256),
}
#: and of gemm_sm90_stream_k_8bit; fp8 has registers for its two sets of accumulators only up to 128. us on
#: an H100, int8, 160 / 192 / 224 tokens in tiles of 192 (SwiGLU) or 256 and in tiles of these sizes: 28672
#: x 4096: 52.3 / – / 57.5 and 49.9 / – / 55.9; 16384 x 4096: 38.5 / 35.2 / 33.9 and 31.0 / 31.9 / 33.1;
#: 6144 x 4096 in tiles of 128 / 96, 192 tokens: 19.3 / 18.4
STREAM_K_8BIT_TOKENS = {
    "linear": (16, 32, 64, 96, 128, 160, 192, 224, 256),
    "qkv": (16, 32, 64, 96, 128, 192, 256),
    "swiglu": (32, 64, 96, 128, 160, 192, 224, 256),
}
_FP8_TOKENS = {"linear": (16, 32, 64, 128), "qkv": (16, 32, 64, 128), "swiglu": (32, 64, 96, 128)}
#: and of gemm_sm90_stream_k_two_parts, where a token takes two columns of the instruction. us on an H100,
#: 6144 x 4096, 144 tokens in tiles of 32 / 96: 29.0 / 21.4; 192 in tiles of 128 / 96: 27.2 / 22.6
STREAM_K_TWO_PARTS_TOKENS = {
    "linear": (16, 32, 64, 96, 128),
    "qkv": (16, 32, 64, 96, 128),
    "swiglu": (32, 64, 96, 128),
}
#: and of gemm_sm90_even_split and gemm_sm90_even_split_8bit (fp8 only up to 128); its clusters per tile. us
#: on an H200, 4096 x 14336, 192 tokens in tiles of 256 / 192: 16 bit 47.9 / 42.3, int8 32.1 / 29.6; on an
#: H100 54.5 / 53.3 and 36.7 / 35.6
EVEN_SPLIT_TOKENS, EVEN_SPLIT = (128, 192, 256), 4
#: and of gemm_sm90_even_split_two_parts, by the most tokens: tokens of a tile, clusters per tile. us on an
#: H200 for 128 / 192 / 256 tokens of 4096 x 14336, stream-K and even: 33.1 / 49.6 / 54.7 and 30.5 / 42.3 /
#: 50.1
EVEN_SPLIT_TWO_PARTS = {128: (128, 4), 192: (96, 2), 256: (128, 2)}
#: name prefixes of kernels whose epilogue quantises keys and values for an 8-bit cache, and their head sizes
ROUNDING_KERNELS = ("gemm_sm90_split_k", "gemm_sm90_stream_k", "gemm_packed_sm90")
ROUNDED_HEADS = (64, 128)
#: and the maximum tokens that a block finishes. us per layer on an H200 that rotation and cache write add in
#: the epilogue / in a separate launch: LLaMA in W8A8, 8, 32 and 64 tokens (two blocks finish 32 each): 1.0 /
#: 2.5, 0.1 / 1.3 and 1.2 / 1.6; one block finishes 64: BLOOM in W8A8 4.3 / 2.4, LLaMA in int4 5.4 / 3.8
ROUNDED_TOKENS = 32
#: gemv computes up to this many tokens. us of a layer on an H200 whose smaller products have gemm_mma /
#: data-parallel, by hidden and inner size: 576, 1536: 20.4 / 18.0; 3072, 8192: 80.5 / 67.9
GEMV_TOKENS = 1
#: from this many weights on, gemm_sm90_split_k or gemm_sm90_stream_k replace the kernels of small products.
#: 4096 x 4096, 8 tokens: 9.8 split-K, 10.9 data-parallel; 8192 x 2048: 11.1 stream-K, 10.3 data-parallel
LARGE_WEIGHTS = 1 << 24
#: and without a gate already from this many on, with more than two tokens: no launch between the GEMM and its
#: neighbours then keeps weights from being prefetched. ms per step of Qwen2-7B (3584 x 3584, 4608 x 3584) on
#: an H200, 8 / 64 rows: 4.24 / 4.96 before, 4.00 / 4.77
MEDIUM_WEIGHTS, MEDIUM_TOKENS = 5 << 21, 3
#: and with these outputs and inputs, without bias and residual: the output projection of LLaMA-3-8B and
#: BLOOM-7B1 on two ranks, a part of a sum. ms per step of LLaMA-3-8B on two H200s, 8 / 64 rows: 2.686 / 3.487
#: before, 2.640 / 3.409. No other product with fewer than MEDIUM_WEIGHTS was measured
MEDIUM_PARTS = {(4096, 2048)}
#: from this many pipeline stages per tile on, gemm_sm90_even_split takes less time than cuBLAS, and than
#: stream-K in 8 bit. 72 / 128 / 192 / 256 tokens, cuBLAS and even: 4096 x 14336 (224 stages): 37.9 / 38.2 /
#: 46.0 / 49.7 and 35.0 / 34.8 / 45.2 / 48.0, of int8 (112), stream-K and even, 26.8 / 28.3 / 38.7 / 39.8 and
#: 24.0 / 26.0 / 31.7 / 33.9; 4096 x 4096 (64): 13.3 / 13.8 / 17.3 / 17.0 and 14.7 / 14.3 / 19.0 / 19.2. Two
#: clusters per tile, also of 6144 and 8192 rows, gained 0 to 9 % in int8 up to 128 tokens, and lost elsewhere
EVEN_SPLIT_STAGES = 100
#: and of int8 W8A8 with fewer stages, from EVEN_SPLIT_SHORT_STAGES on: by these tokens, tokens of a tile
#: and clusters per tile. us on an H100, 4096 x 4096, whole tiles of 64 tokens / this, 256 tokens: 18.8 /
#: 17.4, 192: 16.1 / 17.3. Four clusters per tile, 96 / 128 / 192 tokens: 13.9 / 14.4 / 16.1 whole and 13.1
#: / 15.0 / 17.0
EVEN_SPLIT_SHORT_TOKENS, EVEN_SPLIT_SHORT, EVEN_SPLIT_SHORT_STAGES = range(193, 257), (128, 2), 32
#: SwiGLU saves a pass over gate and up, so gemm_sm90_stream_k wins there except in this range of tokens: up
#: to 256 by bandwidth, from 1024 on by the pass (docs/lab/kernels.md, "At 256 sequences")
SWIGLU_LIBRARY = range(257, 1024)
#: 2/3 of the multiprocessors read weights as fast as all of them, which leaves the rest to the next kernel
SPLIT_K_FILL = (2, 3)
#: of weights below LARGE_WEIGHTS, half of them: stream-K's exchange through global memory costs more
MEDIUM_FILL = (1, 2)
#: but a block that loads more stages than this takes longer than stream-K's equal shares
SPLIT_K_STAGES = 80
#: whole tiles, unless the last wave leaves more than 1/20 of the clusters' time idle
IDLE_SHARE = 20
#: Costs of gemm_sm90_stream_k_8bit with more than LARGE_TOKENS tokens, in stages times tokens of a tile: the
#: exchange of partial sums, and the minimum cost of a tile however few its tokens. 4096 x 14336,
#: whole tiles / shared: tiles of 128 tokens, 128 tokens: 36.6 / 23.7, 256: 39.8 / 41.0; tiles of 256 tokens,
#: 512 tokens: 70.7 / 52.8; whole tiles of 64 / 128 tokens, 96 tokens: 33.7 / 36.7
#: There cuBLAS (torch._scaled_mm, float32 sums) takes, with no SwiGLU and no residual, 28672 x 4096, 256 /
#: 1024 / 4096 tokens: 55.6 / 182 / 703, fp8 here 67.1 / 202 / 838, int8 50.7 / 174 / 782; torch._int_mm
#: 89.6 / 298 / 1274. A pass over the results takes 6 to 80 more
SHARING_COST, LEAST_TILE_COST = 6000, 120
#: with more waves of tiles, sharing loses: concurrent clusters then work on distant tiles, so their operands
#: no longer fit in L2. 4096 x 14336, whole tiles / shared, int8, tiles of 256 tokens:
#: 1.45 waves: 181 / 160, 2.18: 272 / 247, 3.39: 367 / 463, 7.76: 779 / 1066; fp8, tiles of 128, 1.45: 117 /
#: 105, 2.42: 177 / 232
SHARED_WAVES = 2.25
#: with these tokens, clusters share the tiles of SwiGLU with x in two parts, if each has at least one row
#: tile. us on an H200, 28672 x 4096, 128 / 192 / 256 tokens, whole tiles and shared: 57.8 / 83.0 / 99.7 and
#: 55.9 / 74.7 / 91.2
SHARED_TWO_PARTS_TOKENS = range(97, 257)
#: fixed cost of a stage of a tile of fewer than 256 tokens, in tokens: weights are loaded more often. SwiGLU
#: of 28672 x 4096 in int8, tiles of 128 and 256 tokens, 1280 tokens (17 and 9 waves): 237 and 214, 2304 (31
#: and 16): 430 and 396, 8192 (109 and 55): 1586 and 1513; tiles of 192 and 256, 700 tokens (7 and 6): 142 and
#: 150. Does not apply to x in two parts: 128256 x 4096, tiles of 64 and 128, 256 tokens: 429 and 439
SMALL_TILE_COST = 16
#: from this many tokens on cuBLASLt is faster for E4M3, including the passes that follow (SwiGLU, rotation).
#: Without quantisation of x, our kernel / cuBLASLt: 6144 x 4096, 1024 tokens: 45 / 42, 8192: 400 / 309; 4096
#: x 14336: 97 / 102, 960 / 709; SwiGLU of 28672 x 4096: 259 / 185 and a pass of 30, 1870 / 1418 and 168
FP8_LIBRARY_TOKENS, FP8_LIBRARY_SWIGLU_TOKENS = 1536, 768
#: and for block-scaled E4M3, including quantisation of x, our kernel / cuBLASLt, 64, 96 and 4096 tokens: 6144
#: x 4096: 16.7 / 17.5, 26.8 / 17.6, 411 / 186; 4096 x 14336: 32.7 / 29.1, 38.4 / 28.3, 962 / 414; SwiGLU of
#: 28672 x 4096 with its pass: 44.3 / 42.9, 56.7 / 42.3, 1780 / 895
FP8_BLOCK_LIBRARY_TOKENS = 65
_STAGE_BYTES = 128  # bytes of a row in a pipeline stage: the width of the swizzle
_SPLIT_K_OUTPUTS = 128  # of a tile: 64 weight rows per warp group
_STREAM_K_OUTPUTS = 256  # of a cluster's tile


def rounds_heads(plan: Plan, head_size: int) -> bool:
    """Return whether the kernel of a "qkv" GEMM writes keys and values to an 8-bit cache."""
    shared = plan.split > 1 and plan.tile_tokens > SPLIT_K_TOKENS[0]  # two blocks of split-K finish half each
    finished = plan.tile_tokens // 2 if shared else plan.tile_tokens
    fits = head_size in ROUNDED_HEADS and finished <= ROUNDED_TOKENS
    return plan.fuses_heads and plan.kernel.startswith(ROUNDING_KERNELS) and fits


def fuses_heads_sm90(head_size: int, rotary_size: int, interleaved: bool) -> bool:
    """Return whether gemm_sm90_split_k and gemm_sm90_stream_k can rotate and cache such heads."""
    if rotary_size == 0:
        return head_size % 8 == 0
    return rotary_size == head_size and not interleaved and head_size in (64, 128, 256)


def large_plan(gemm: Gemm, device: Device) -> Plan | None:
    medium = gemm.epilogue != "swiglu" and MEDIUM_TOKENS <= gemm.tokens <= LARGE_TOKENS
    least = MEDIUM_WEIGHTS if medium else LARGE_WEIGHTS
    part = not gemm.bias and not gemm.residual and (gemm.outputs, gemm.inputs) in MEDIUM_PARTS
    few = gemm.outputs * gemm.inputs < least and not (medium and part)
    if few or not gemm.out_aligned:
        return None
    if gemm.epilogue == "swiglu":
        fits = not gemm.residual and not gemm.out_float32 and gemm.outputs % 16 == 0
        return stream_k_plan(gemm, device) if fits and gemm.tokens not in SWIGLU_LIBRARY else None
    if gemm.residual and gemm.out_float32:
        return None
    if gemm.tokens > LARGE_TOKENS:
        return even_split_plan(gemm, device)
    if gemm.epilogue == "qkv" and not fuses_heads_sm90(gemm.head_size, gemm.rotary_size, gemm.interleaved):
        return None
    return split_k_plan(gemm, device) or stream_k_plan(gemm, device)


def fp8_library_tokens(gemm: Gemm, device: Device) -> int:
    """Return the minimum tokens of an E4M3 GEMM that cuBLASLt computes; 0: none."""
    if gemm.outputs % 16 or not gemm.operand.startswith("fp8"):
        return 0
    # rows of scales, for both operands, must be multiples of 16 bytes for cuBLASLt
    if gemm.operand == "fp8_blocks":
        whole = gemm.inputs % (4 * _STAGE_BYTES) == 0 and gemm.tokens % 4 == 0
        takes = device.fp8_block_library and whole
        return FP8_BLOCK_LIBRARY_TOKENS if takes else 0
    if not device.fp8_library:
        return 0
    return FP8_LIBRARY_SWIGLU_TOKENS if gemm.epilogue == "swiglu" else FP8_LIBRARY_TOKENS


def library_rows(gemm: Gemm, device: Device) -> int:
    """Return how many rows of a block-scaled E4M3 GEMM cuBLASLt computes if it cannot compute all, a multiple
    of 4.

    The remaining rows are a separate GEMM. 0: cuBLASLt computes all rows or none.
    """
    rows = gemm.tokens - gemm.tokens % 4
    if rows == gemm.tokens or gemm.operand != "fp8_blocks":
        return 0
    least = fp8_library_tokens(gemm._replace(tokens=rows), device)
    return rows if least and rows >= least else 0


def _8_bit_sizes(gemm: Gemm) -> tuple[int, ...]:
    """Return the possible tile sizes, in tokens, of stream-K."""
    if gemm.operand == "two_parts":
        return STREAM_K_TWO_PARTS_TOKENS[gemm.epilogue]
    sizes = _FP8_TOKENS if gemm.operand.startswith("fp8") else STREAM_K_8BIT_TOKENS
    return sizes[gemm.epilogue]


def large_8_bit_plan(gemm: Gemm, device: Device) -> Plan:
    """Choose the tile with the fewest waves of whole tiles, or shared tiles if they take less; of equals the
    largest.
    """
    most, steps, rows = device.multiprocessors // 2, _steps(gemm), ceil_div(gemm.outputs, _STREAM_K_OUTPUTS)
    gated = gemm.operand == "two_parts" and gemm.epilogue == "swiglu"
    if gated and gemm.tokens in SHARED_TWO_PARTS_TOKENS and rows >= most:
        return _shared_two_parts(gemm, device)
    ways = []
    for tile_tokens in _8_bit_sizes(gemm):
        columns = tile_tokens * (2 if gemm.operand == "two_parts" else 1)
        if columns < LARGE_TOKENS:
            continue
        tiles, cost = rows * ceil_div(gemm.tokens, tile_tokens), _tile_cost(gemm.operand, columns)
        ways.append((ceil_div(tiles, most) * steps * cost, -tile_tokens, False))
        if tiles <= SHARED_WAVES * most:
            ways.append((tiles * steps * cost // most + SHARING_COST, -tile_tokens, True))
    _, negative, stream = min(ways)
    return _stream_k(gemm, device, -negative, stream, _steps(gemm))


def _shared_two_parts(gemm: Gemm, device: Device) -> Plan:
    """Choose the fewest tiles of tokens, and of those the smallest; all clusters share them."""
    sizes = [size for size in _8_bit_sizes(gemm) if size > LARGE_TOKENS]
    tiles = ceil_div(gemm.tokens, sizes[-1])
    tile_tokens = next(size for size in sizes if size * tiles >= gemm.tokens)
    return _stream_k(gemm, device, tile_tokens, True, _steps(gemm))


def _tile_cost(operand: str, columns: int) -> int:
    """Return the cost of one pipeline stage of a tile. The smallest tiles are bound by their loads."""
    more = SMALL_TILE_COST if columns < 256 and operand != "two_parts" else 0
    return max(columns + more, LEAST_TILE_COST + columns // 16)


def split_k_plan(gemm: Gemm, device: Device) -> Plan | None:
    """Choose the largest split whose tiles are all resident at once, if that fills the device."""
    tiles, steps = ceil_div(gemm.outputs, _SPLIT_K_OUTPUTS), _steps(gemm)
    split = 0
    for each in SPLIT_K_SPLITS:
        if tiles <= device.clusters[each - 1] and steps >= each * LEAST_STAGES:
            split = each
    large = gemm.outputs * gemm.inputs >= LARGE_WEIGHTS or gemm.operand
    share, whole = SPLIT_K_FILL if large else MEDIUM_FILL
    if tiles * split * whole < device.multiprocessors * share or steps > SPLIT_K_STAGES * split:
        return None
    return Plan(
        "gemm_sm90_split_k",
        f"{tiles} tiles of {steps} stages: all resident with {split} per tile",
        _SPLIT_K_OUTPUTS,
        at_least(gemm.tokens, SPLIT_K_TOKENS),
        split,
        fuses_heads=True,
    )


def even_split_plan(
    gemm: Gemm,
    device: Device,
    sizes: tuple[int, ...] = (),
    steps: int = 0,
    least_steps: int = EVEN_SPLIT_STAGES,
) -> Plan | None:
    """Choose EVEN_SPLIT clusters per tile, or EVEN_SPLIT_TWO_PARTS, if they are resident together and occupy
    at least two thirds of the device.

    sizes: tokens of a tile, default: those of gemm_sm90_even_split. steps: stages of a tile, likewise.
    """
    sizes, steps = sizes or _even_split_sizes(gemm), steps or _steps(gemm)
    short = EVEN_SPLIT_SHORT_STAGES <= steps < least_steps and gemm.operand == "int8"
    short = short and gemm.tokens in EVEN_SPLIT_SHORT_TOKENS
    if gemm.epilogue != "linear" or device.shared or gemm.tokens > sizes[-1]:
        return None
    if steps < least_steps and not short:
        return None
    tile_tokens, split = at_least(gemm.tokens, sizes), EVEN_SPLIT
    if short:
        tile_tokens, split = EVEN_SPLIT_SHORT
    elif gemm.operand == "two_parts":
        tile_tokens, split = EVEN_SPLIT_TWO_PARTS[tile_tokens]
    tiles = ceil_div(gemm.outputs, _STREAM_K_OUTPUTS) * ceil_div(gemm.tokens, tile_tokens)
    clusters, most = tiles * split, device.multiprocessors // 2
    if not 2 * most <= 3 * clusters <= 3 * most:
        return None
    return Plan(
        "gemm_sm90_even_split",
        f"{tiles} tiles of {steps} stages: {split} clusters finish each",
        _STREAM_K_OUTPUTS,
        tile_tokens,
        split,
        clusters,
        stream_k=True,
    )


def _even_split_sizes(gemm: Gemm) -> tuple[int, ...]:
    if gemm.operand == "two_parts":
        return tuple(EVEN_SPLIT_TWO_PARTS)
    return EVEN_SPLIT_TOKENS[:1] if gemm.operand.startswith("fp8") else EVEN_SPLIT_TOKENS


def stream_k_plan(gemm: Gemm, device: Device, sizes: tuple[int, ...] = (), steps: int = 0) -> Plan:
    """Choose the fewest tiles of tokens, and of those the smallest; whole tiles if they fill the last wave.

    sizes: tokens of a tile, default: those of gemm_sm90_stream_k. steps: stages of a tile, likewise.
    """
    sizes = sizes or (_8_bit_sizes(gemm) if gemm.operand else STREAM_K_TOKENS[gemm.epilogue])
    tile_tokens = at_least(ceil_div(gemm.tokens, ceil_div(gemm.tokens, sizes[-1])), sizes)
    tiles = ceil_div(gemm.outputs, _STREAM_K_OUTPUTS) * ceil_div(gemm.tokens, tile_tokens)
    most = device.multiprocessors // 2
    waves = ceil_div(tiles, most)
    shares = tiles * IDLE_SHARE < waves * most * (IDLE_SHARE - 1)
    return _stream_k(gemm, device, tile_tokens, shares, steps or _steps(gemm))


def _stream_k(gemm: Gemm, device: Device, tile_tokens: int, stream: bool, steps: int) -> Plan:
    tiles = ceil_div(gemm.outputs, _STREAM_K_OUTPUTS) * ceil_div(gemm.tokens, tile_tokens)
    most, stream = device.multiprocessors // 2, stream and not device.shared
    work = ceil_div(tiles * steps, LEAST_STAGES) if stream else tiles
    shared = "clusters share tiles" if stream else "whole tiles"
    return Plan(
        "gemm_sm90_stream_k",
        f"{tiles} tiles for {most} clusters: {shared}",
        _STREAM_K_OUTPUTS,
        tile_tokens,
        clusters=min(work, most),
        stream_k=stream,
        fuses_heads=True,
    )


def _steps(gemm: Gemm) -> int:
    """Return the pipeline stages of a tile."""
    return ceil_div(gemm.inputs * (1 if gemm.operand else 2), _STAGE_BYTES)


def data_parallel_plan(gemm: Gemm, device: Device) -> Plan | None:
    """Choose the tile that gives the busiest multiprocessor the fewest weight rows; of equals the largest."""
    tile_tokens = at_least(gemm.tokens, DATA_PARALLEL_TOKENS)
    if gemm.tokens > tile_tokens or gemm.outputs * gemm.inputs >= LARGE_WEIGHTS:
        return None

    def busiest(tile: int) -> int:
        return ceil_div(ceil_div(gemm.outputs, tile), device.multiprocessors) * tile

    tile = min(reversed(DATA_PARALLEL_OUTPUTS), key=busiest)
    # 4 / 16 tokens: 4096 x 1024: 4.5 / 4.5, cuBLAS 5.8 / 5.8; 1024 x 4096: 7.4 / 7.9, cuBLAS 8.1 / 8.5. us of
    # a step's CUDA graph on an H200, 32 / 64 rows, cuBLAS and here: SmolLM2-135M 796 / 836 and 592 / 760,
    # GPT-2 384 / 401 and 312 / 388, LLaMA-3.2-1B 985 / 1077 and 943 / 1080
    why = "1 to 64 tokens, a weight that cuBLAS does not spread over the device"
    fuses_heads = gemm.rotary_size == 0  # pairs of a rotation are too far apart for a tile
    return Plan("gemm_sm90_data_parallel", why, tile, tile_tokens, fuses_heads=fuses_heads)
