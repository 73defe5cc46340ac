"""Bytes of scratch memory of the CUDA operations, without torch and the library: for planning."""

from __future__ import annotations

from tridecode.kernels.gemm_table import TWO_PARTS_TOKENS

#: scratch of GEMMs: partial sums, and a counter per tile of 16 weight rows
SUM_BYTES = 64 << 20
NUM_COUNTERS = 1 << 17
#: counters of the launch that runs all layers
LAYER_COUNTERS = 1 << 12
#: csrc/decode_attention.cuh, decode_tiles.cuh: blocks of the grid, warps of a block, heads of a group,
#: the largest head
_BLOCKS, _WARPS, _GROUP, _HEAD = 1024, 4, 8, 256
#: csrc/sampling.cu: ids of a chunk and of a segment; bytes of scratch of a chunk
_CHUNK, _SEGMENT, _CHUNK_BYTES = 2048, 64, 24
_EXPANDED = 64 << 20
#: csrc/sampling_exchange.cuh: bytes of a round from one rank to another, for each row
_EXCHANGE_BYTES = 4096
#: csrc/peer_memory.cuh: tensor ranks that map each other's memory
MOST_RANKS = 8
#: csrc/all_reduce.cu: bytes of a row, at most, and of the front of a rank's memory
PEER_ROW_BYTES, _PEER_HEADER = 32 << 10, 256
#: bytes of a rank's rows in one launch, by (at most) ranks. Two ranks send what NCCL would, so that longer
#: steps are summed in several launches. More ranks send more, and NCCL takes longer ones: the bounds are
#: those of vLLM's tables for H100s (pull requests 24111, 24532), not measured here.
PEER_SLOT_BYTES = ((2, 16 << 20), (4, 1 << 20), (8, 256 << 10))


def attention_bytes() -> int:
    """tridecode_decode_attention_scratch of the largest head: two partial results a warp."""
    return _BLOCKS * _WARPS * 2 * _GROUP * (_HEAD + 2) * 4


def sample_bytes(max_rows: int, vocab_size: int) -> int:
    """tridecode_sample_scratch."""
    chunks, segments = -(-vocab_size // _CHUNK), -(-vocab_size // _SEGMENT)
    return max_rows * ((chunks * _CHUNK_BYTES + segments * 4 + 15) // 16 * 16)


def arena_bytes(max_tokens: int, max_columns: int, sorts_inputs: bool = False) -> dict[str, int]:
    """What Cuda.reserve allocates for steps of max_tokens rows and max_columns columns.

    sorts_inputs: there is a weight whose columns are sorted by their groups (act-order).

    Products with 8-bit operands have rows of 8-bit values in "normed", of up to TWO_PARTS_TOKENS two each,
    and their scales in "row_scales".
    """
    rows = max(max_tokens, 2 * min(max_tokens + 7, TWO_PARTS_TOKENS))
    return {
        "product": 2 * max_tokens * max_columns,
        "normed": rows * max_columns,
        "row_scales": 4 * max_tokens,
        **({"ordered": 2 * max_tokens * max_columns} if sorts_inputs else {}),
    }


def expanded_bytes(context_bytes: int) -> int:
    """Of keys and values of an 8-bit cache that prompts attend to, expanded: those of the longest context,
    and of several shorter ones."""
    return max(context_bytes, _EXPANDED)


def fixed_bytes() -> int:
    """What every Cuda has, whatever the model."""
    return SUM_BYTES + 4 * (NUM_COUNTERS + LAYER_COUNTERS) + attention_bytes()


def peer_slot_bytes(ranks: int, max_tokens: int, row_bytes: int) -> int:
    """Bytes of the rows that a rank sends another in one launch: a step's, at most, and at least one row."""
    most = next(size for count, size in PEER_SLOT_BYTES if ranks <= count)
    return max(min(max_tokens, most // row_bytes), 1) * row_bytes


def exchange_bytes(ranks: int, max_rows: int) -> int:
    """tridecode_sample_exchange: of a rank's peer memory, where the ranks share the vocabulary."""
    return -(-max_rows * 4 // 256) * 256 + max_rows * 2 * (ranks - 1) * _EXCHANGE_BYTES


def peers_unsupported(ranks: int, row_bytes: int) -> str:
    """Why kernels cannot exchange such rows through peer memory; "": they can."""
    if ranks > MOST_RANKS:
        return f"{ranks} tensor ranks; it sums over at most {MOST_RANKS}"
    if row_bytes % 16 or row_bytes > PEER_ROW_BYTES:
        return f"rows of {row_bytes:,} bytes; it takes multiples of 16 up to {PEER_ROW_BYTES:,}"
    return ""


def peer_bytes(ranks: int, max_tokens: int, row_bytes: int) -> int:
    """tridecode_peer_bytes of these rows: what a rank allocates to sum them over the memory of its peers.

    0 where it cannot.
    """
    if peers_unsupported(ranks, row_bytes):
        return 0
    return _PEER_HEADER + 2 * (ranks - 1) * peer_slot_bytes(ranks, max_tokens, row_bytes)
