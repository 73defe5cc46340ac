"""Input and output of the kernel tables: a GEMM, a GPU, a plan. Needs neither torch nor a GPU."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """Properties of a GPU that the choice of a kernel depends on."""

    capability: int  # compute capability: 10 * major + minor
    multiprocessors: int
    shared_bytes: int  # largest shared memory of a block
    #: clusters of 1, 2 and 3 blocks of gemm_sm90_split_k that are resident at once
    clusters: tuple[int, int, int] = (0, 0, 0)
    #: shared through MPS with other processes, whose blocks may keep ours from starting: no block may wait
    #: for another
    shared: bool = False
    fp8_library: bool = False  # cuBLASLt multiplies E4M3 with a scale for each row and output
    fp8_block_library: bool = False  # and with one for 128 numbers of a row, and 128 x 128 of the weight


class Gemm(NamedTuple):
    """A GEMM and the operations fused into it, without addresses."""

    tokens: int
    inputs: int
    outputs: int  # rows of the weight; with SwiGLU, gate and up together
    #: "linear": activation and residual; "swiglu": SwiGLU or a gated GELU; "qkv": rotation and cache write
    epilogue: str = "linear"
    bias: bool = False
    residual: bool = False
    norm: bool = False
    half: bool = True  # x and weight are float16 or bfloat16
    out_float32: bool = False  # the result of a 16-bit GEMM is float32
    aligned: bool = True  # rows of x and weight begin at multiples of 16 bytes
    out_aligned: bool = True  # rows of residual and of a 16-bit out do, too
    head_size: int = 0  # of "qkv"
    rotary_size: int = 0
    interleaved: bool = False
    #: "int8", "fp8": x and weight both are (W8A8); "fp8_blocks": with scales per 128 numbers of a row, and
    #: per 128 x 128 of the weight; "two_parts", "int4": the weight is int8 or int4, x in two int8 parts
    operand: str = ""
    rounds: bool = False  # for "qkv": keys and values go to an 8-bit cache


class Plan(NamedTuple):
    """A kernel and its tile. Fields that a kernel does not have are 0."""

    kernel: str  # a function of csrc/api.h without its prefix, or gemm_library
    why: str
    tile_outputs: int = 0
    tile_tokens: int = 0
    split: int = 0  # parts that the inputs are split into (split-K)
    clusters: int = 0  # gemm_sm90_stream_k and gemm_sm90_even_split: clusters launched
    stream_k: bool = False  # the same: clusters share a tile's inputs
    fuses_norm: bool = False  # else a norm kernel comes first
    fuses_heads: bool = False  # else rotate_and_cache follows a "qkv" product

    @property
    def sends(self) -> bool:
        """Return whether the kernel has a function that sends its part of a sum over two ranks."""
        return (self.tile_tokens, self.split) in SENT_TILES.get(self.kernel, ())

    @property
    def keeps(self) -> bool:
        """Return whether the kernel has a function that also stores the products of some rows."""
        return self.kernel == "gemm_sm90_stream_k" and self.tile_tokens in KEPT_TILES

    @property
    def adapts(self) -> bool:
        """Return whether the kernel has a function for rows with adapters."""
        return self.kernel in ADAPTED_KERNELS and self.tile_tokens <= ADAPTED_TOKENS


#: above this many tokens cuBLAS is level or faster: 16384 x 4096, 64 tokens: 34.7 stream-K, 37.0 cuBLAS; at
#: 96 LLaMA's steps gained 2 to 4 %, BLOOM's lost at 72 to 128 (docs/lab/kernels.md)
LARGE_TOKENS = 64
#: kernels that also have a function for rows with adapters (csrc/gemm/adapted), the most tokens of its calls
#: and tiles, and the most slots of a table
ADAPTED_KERNELS = (
    "gemm_sm90_split_k",
    "gemm_sm90_stream_k",
    "gemm_sm90_split_k_two_parts",
    "gemm_sm90_stream_k_two_parts",
)
ADAPTED_TOKENS, ADAPTED_SLOTS = 64, 255
#: kernels that also have a function for a part of a sum over two tensor ranks (csrc/gemm/sent): tokens of a
#: tile and split; and the most tokens of a call
_SENT_SPLITS = tuple((tokens, split) for tokens in (16, 32, 64) for split in (2, 3))
SENT_TILES = {
    "gemm_sm90_split_k": _SENT_SPLITS,
    "gemm_sm90_split_k_8bit": _SENT_SPLITS,
    "gemm_sm90_stream_k_8bit": ((64, 0),),
}
SENT_TOKENS = 256
#: tokens of the tiles of SwiGLU for which gemm_sm90_stream_k has a function that also stores the products of
#: rows with an adapter, and the most tokens of a call
KEPT_TILES = (96, 128, 160, 192, 224, 256)
KEPT_TOKENS = 256
#: minimum stages of a cluster: each cluster that shares a tile costs about one stage
LEAST_STAGES = 4


def at_least(count: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in sizes if size >= count), sizes[-1])


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
