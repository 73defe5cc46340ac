"""Computes the sizes of the CUDA operations' scratch memory, without torch and the kernel library."""

from __future__ import annotations

import os
from typing import NamedTuple

from tridecode.kernels.gemm.table import TWO_PARTS_TOKENS

#: scratch of GEMMs: partial sums, and a counter per tile of 16 weight rows
SUM_BYTES = 64 << 20
NUM_COUNTERS = 1 << 17
#: exchange buffer of the chained-GEMM kernel (product_chain_sm90a.cu)
EXCHANGE_BYTES = 1 << 20
#: from decode_attention.cuh and decode_columns.cuh: blocks per grid, warps per block, heads per group,
#: largest head size
_BLOCKS, _WARPS, _GROUP, _HEAD = 1024, 4, 8, 256
#: from csrc/sampling/sampling_row.cuh: ids per chunk and per segment; scratch bytes per chunk
_CHUNK, _SEGMENT, _CHUNK_BYTES = 2048, 64, 80
#: from csrc/sampling/top_log_probs.cu: ids per chunk, scratch bytes per chunk
_TOP_CHUNK, _TOP_CHUNK_BYTES = 4096, 268
_EXPANDED = 64 << 20


def _bytes_of_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; wanted a number of bytes, 0 for no limit")
    return int(text)


#: scratch bytes in which a GEMM of many rows dequantises an 8- or 4-bit weight to 16 bit; a larger weight is
#: dequantised in pieces. At least PIECE_ROWS rows always fit. 0: every weight is dequantised whole
EXPANDED_WEIGHT_BYTES = _bytes_of_environment("TRIDECODE_EXPANDED_WEIGHT_BYTES", 32 << 20)
#: rows of a piece are a multiple of this, so that a piece's GEMM has whole tiles, and columns of its result
#: have the largest alignment that matters to cuBLASLt
PIECE_ROWS = 256
#: inputs of a block-scaled E4M3 row that share a scale
_SCALE_GROUP = 128
#: tokens per tile of block-scaled GEMMs
_MOST_TILE_TOKENS = 256
#: from csrc/sampling/sampling_exchange.cuh: bytes per row that one rank sends to another in a round
_EXCHANGE_BYTES = 4096
#: from csrc/ranks/all_reduce.cu: largest row in bytes, and header bytes of a rank's memory
PEER_ROW_BYTES, _PEER_HEADER = 32 << 10, 256


class PeerLimits(NamedTuple):
    """Limits for all-reduces over at most `ranks` ranks, in bytes of a launch's rows: up to the first, one
    shot is used (each rank sends its rows to every other rank); up to the second, two shots
    (csrc/ranks/all_reduce_two_shots.cu).
    """

    ranks: int
    one_shot: int
    two_shots: int


#: The only place that chooses the algorithm. With two ranks, one shot sends as many bytes as NCCL, so longer
#: steps are summed in several launches; measured (docs/lab/two_gpus.md). With more ranks, NCCL sums longer
#: steps. Limits for more ranks are not measured, because no machine with four GPUs was available. Those of
#: one shot are where vLLM's kernel switches to two shots on NVLink (csrc/custom_all_reduce.cuh). Those of two
#: shots are guesses below 32 MiB, vLLM's limit for four H100s
#: (distributed/device_communicators/all_reduce_utils.py).
PEER_LIMITS = (
    PeerLimits(2, one_shot=16 << 20, two_shots=0),
    PeerLimits(4, one_shot=512 << 10, two_shots=16 << 20),
    PeerLimits(8, one_shot=256 << 10, two_shots=8 << 20),
)


#: Two ranks compute a step of at least this many tokens in halves, and copy engines exchange the rows of a
#: sum of one half together with a GEMM of the other (PeerCopies); steps of 5,120 and 6,144 tokens were slower
#: in halves than whole
HALVED_TOKENS = 8192
#: buffers for copied rows, and bytes of the words that follow them
COPY_BUFFERS, ARRIVAL_BYTES = 4, 256


def attention_bytes() -> int:
    """Return tridecode_decode_attention_scratch for the largest head: two partial results per warp."""
    return _BLOCKS * _WARPS * 2 * _GROUP * (_HEAD + 2) * 4


def sample_bytes(max_rows: int, vocab_size: int) -> int:
    """Return tridecode_sample_scratch."""
    chunks, segments = -(-vocab_size // _CHUNK), -(-vocab_size // _SEGMENT)
    return max_rows * ((chunks * _CHUNK_BYTES + segments * 4 + 15) // 16 * 16)


def top_log_probs_bytes(max_rows: int, vocab_size: int) -> int:
    """Return the bytes of tridecode_top_log_probs_scratch."""
    chunks = -(-vocab_size // _TOP_CHUNK)
    return max_rows * ((chunks * _TOP_CHUNK_BYTES + 15) // 16 * 16)


def arena_bytes(max_tokens: int, max_columns: int, sorts_inputs: bool = False) -> dict[str, int]:
    """Return what Cuda.reserve allocates for steps of max_tokens rows and max_columns columns.

    sorts_inputs: some weight's columns are sorted by group (act-order). GEMMs with 8-bit operands store rows
    of 8-bit values in "normed" (two per token up to TWO_PARTS_TOKENS), and their scales in "row_scales".
    """
    rows = max(max_tokens, 2 * min(max_tokens + 7, TWO_PARTS_TOKENS))
    return {
        "product": 2 * max_tokens * max_columns,
        "normed": rows * max_columns,
        "row_scales": row_scale_bytes(max_tokens, -(-max_columns // _SCALE_GROUP)),
        **({"ordered": 2 * max_tokens * max_columns} if sorts_inputs else {}),
    }


def row_scale_bytes(tokens: int, groups: int) -> int:
    """Return the bytes of the scales of `tokens` rows with `groups` groups each; block-scaled GEMMs read
    beyond the last one.
    """
    return 4 * (tokens * groups + _MOST_TILE_TOKENS)


def expanded_rows(rows: int, columns: int, itemsize: int) -> int:
    """Return the rows of a weight (rows, columns) that are dequantised at a time: all if they fit, else the
    rows of each piece; the last piece may have fewer.
    """
    row_bytes = columns * itemsize
    if not EXPANDED_WEIGHT_BYTES or rows * row_bytes <= EXPANDED_WEIGHT_BYTES:
        return rows
    most = max(EXPANDED_WEIGHT_BYTES // row_bytes // PIECE_ROWS, 1) * PIECE_ROWS
    pieces = -(-rows // most)
    return min(rows, -(-rows // (pieces * PIECE_ROWS)) * PIECE_ROWS)


def expanded_weight_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Return the bytes of scratch memory in which a quantised weight of this shape is dequantised."""
    return expanded_rows(rows, columns, itemsize) * columns * itemsize


def expanded_bytes(context_bytes: int) -> int:
    """Return the bytes of dequantised keys and values of an 8-bit cache in prefill: for the longest context,
    or several shorter ones.
    """
    return max(context_bytes, _EXPANDED)


def fixed_bytes() -> int:
    """Return the bytes of scratch memory that every Cuda allocates, whatever the model."""
    return SUM_BYTES + 4 * NUM_COUNTERS + EXCHANGE_BYTES + attention_bytes()


class PeerPlan(NamedTuple):
    """Largest number of rows per launch in one shot and in two; bytes of the slot between two ranks."""

    one_shot: int
    two_shots: int
    slot_bytes: int

    @property
    def rows(self) -> int:
        return max(self.one_shot, self.two_shots)


def peer_limits(ranks: int) -> PeerLimits | None:
    """Return the row of PEER_LIMITS for this number of ranks; None: NCCL sums."""
    return next((limits for limits in PEER_LIMITS if ranks <= limits.ranks), None)


def plan_peers(limits: PeerLimits, ranks: int, max_tokens: int, row_bytes: int) -> PeerPlan:
    """Plan sums for steps of up to max_tokens rows; at least one row.

    A slot holds the rows of one shot or, with two shots, the rows owned by either end.
    """
    two_shots = min(max_tokens, limits.two_shots // row_bytes)
    one_shot = max(min(max_tokens, limits.one_shot // row_bytes), 0 if two_shots else 1)
    two_shots = two_shots if two_shots > one_shot else 0
    lines = max(one_shot, 2 * -(-two_shots // ranks))
    return PeerPlan(one_shot, two_shots, lines * row_bytes)


def exchange_bytes(ranks: int, max_rows: int) -> int:
    """Return tridecode_sample_exchange: bytes of a rank's peer memory if the ranks share the vocabulary."""
    return -(-max_rows * 4 // 256) * 256 + max_rows * 2 * (ranks - 1) * _EXCHANGE_BYTES


def chain_exchange_bytes(ranks: int) -> int:
    """Return the bytes of a rank's peer memory for the chained GEMMs, which sum over two ranks only."""
    return EXCHANGE_BYTES if ranks == 2 else 0


def halved_rows(ranks: int, max_tokens: int) -> int:
    """Return the most rows of half a step whose sums copy engines exchange; 0: no step is halved."""
    return -(-max_tokens // 2) if ranks == 2 and max_tokens >= HALVED_TOKENS else 0


def copied_bytes(ranks: int, max_tokens: int, row_bytes: int) -> int:
    """Return the bytes of a rank's peer memory for the rows that copy engines bring: two buffers for each
    half of a step, and the words that follow the rows.
    """
    rows = halved_rows(ranks, max_tokens)
    return ARRIVAL_BYTES + COPY_BUFFERS * rows * row_bytes if rows else 0


def peers_unsupported(ranks: int, row_bytes: int) -> str:
    """Return why kernels cannot exchange such rows through peer memory; "": they can."""
    if peer_limits(ranks) is None:
        return f"{ranks} tensor ranks; they sum over at most {PEER_LIMITS[-1].ranks}"
    if row_bytes % 16 or row_bytes > PEER_ROW_BYTES:
        return f"rows of {row_bytes:,} bytes; it takes multiples of 16 up to {PEER_ROW_BYTES:,}"
    return ""


def peer_bytes(ranks: int, max_tokens: int, row_bytes: int) -> int:
    """Return tridecode_peer_bytes for these rows: what a rank allocates to sum them through peer memory; 0 if
    it cannot.
    """
    if peers_unsupported(ranks, row_bytes):
        return 0
    limits = peer_limits(ranks)
    assert limits is not None
    return _PEER_HEADER + 2 * (ranks - 1) * plan_peers(limits, ranks, max_tokens, row_bytes).slot_bytes
