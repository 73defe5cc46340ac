"""Encodes a plan as bytes, for the other ranks: MessagePack around raw little-endian arrays.

Nothing in a frame is executed. `decode` checks every length before an array is used, so that a damaged frame
raises an error instead of reading out of bounds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.parts.encoding import ints, read_ints
from tridecode.backend.engine.parts.table import PARTS
from tridecode.backend.engine.step.plan import MOST_QUERIES, LateSamples, PlanMessage, SlotStart, StepPlan
from tridecode.backend.wire.sampling_params import SamplingParams

#: 64 starting sequences of 128k tokens need 33 MB, prompt tables 128 MB; a larger size means a damaged frame
MAX_BYTES = 1 << 28

_INT = np.dtype("<i4")
_Index = Annotated[int, msgspec.Meta(ge=0)]


class _Start(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    slot: int
    params: SamplingParams
    history: bytes
    generated: int
    top_p: float
    masked: bool


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="plan"):
    step: int
    num_tokens: int
    num_rows: int
    num_columns: int  # columns of block_tables
    num_decodes: int
    queries: Annotated[int, msgspec.Meta(ge=0, le=MOST_QUERIES)]
    token_ids: bytes
    positions: bytes
    kv_slots: bytes
    block_tables: bytes
    context_lens: bytes
    query_starts: bytes
    slots: bytes
    samples: bytes
    starts: list[_Start]
    late: list[_Index]
    parts: list[tuple[str, msgspec.Raw]]  # (tag, value encoded by its class)


class _LateFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="late"):
    step: int
    rows: list[_Index]
    words: _Index
    masks: bytes


_decoder = msgspec.msgpack.Decoder(_Frame | _LateFrame)


def _encode_late(late: LateSamples) -> bytes:
    words = late.masks.shape[1] if late.rows else 0
    frame = msgspec.msgpack.encode(_LateFrame(late.step, late.rows, words, ints(late.masks)))
    check_size(len(frame))
    return frame


def encode(plan: PlanMessage) -> bytes:
    """Encode late samples, or a plan without the fields that stay on rank 0. Raises TridecodeError beyond
    MAX_BYTES.
    """
    if isinstance(plan, LateSamples):
        return _encode_late(plan)
    starts = [_Start(s.slot, s.params, ints(s.history), s.generated, s.top_p, s.masked) for s in plan.starts]
    frame = msgspec.msgpack.encode(
        _Frame(
            step=plan.step,
            num_tokens=plan.num_tokens,
            num_rows=plan.num_rows,
            num_columns=plan.block_tables.shape[1],
            num_decodes=plan.num_decodes,
            queries=plan.queries,
            token_ids=ints(plan.token_ids),
            positions=ints(plan.positions),
            kv_slots=ints(plan.kv_slots),
            block_tables=ints(plan.block_tables),
            context_lens=ints(plan.context_lens),
            query_starts=ints(plan.query_starts),
            slots=ints(plan.slots),
            samples=ints(plan.samples),
            starts=starts,
            late=plan.late,
            parts=[(part.tag, msgspec.Raw(msgspec.msgpack.encode(part.encode()))) for part in plan.parts],
        )
    )
    check_size(len(frame))
    return frame


def decode(frame: bytes) -> PlanMessage:
    """Return the plan or the late samples of a frame, with read-only arrays. Raises TridecodeError, which
    names the fault.
    """
    check_size(len(frame))
    try:
        found = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TridecodeError(f"a plan of {len(frame):,} bytes from rank 0 cannot be read: {error}") from None
    if isinstance(found, _LateFrame):
        return _late(found)
    tokens, rows = found.num_tokens, found.num_rows
    if not (0 <= found.num_decodes <= rows <= tokens and found.num_columns >= 0):
        raise TridecodeError(
            f"plan {found.step} from rank 0 has {found.num_decodes} decodes, {rows} rows, {tokens} tokens "
            f"and {found.num_columns} columns; wanted decodes <= rows <= tokens"
        )
    plan = StepPlan(
        step=found.step,
        token_ids=_array(found, "token_ids", tokens),
        positions=_array(found, "positions", tokens),
        kv_slots=_array(found, "kv_slots", tokens),
        block_tables=_array(found, "block_tables", rows * found.num_columns).reshape(rows, found.num_columns),
        context_lens=_array(found, "context_lens", rows),
        query_starts=_array(found, "query_starts", rows + 1),
        slots=_array(found, "slots", rows),
        samples=_array(found, "samples", rows),
        num_decodes=found.num_decodes,
        queries=found.queries,
        starts=[_start(found, start) for start in found.starts],
        late=found.late,
    )
    _check_rows(plan)
    for tag, data in found.parts:
        where = f"plan {plan.step} from rank 0: {tag[:40]}"
        if tag not in PARTS:
            raise TridecodeError(f"{where} is not a part of a plan; wanted one of {', '.join(PARTS)}")
        if plan.part(PARTS[tag]) is not None:
            raise TridecodeError(f"{where} comes twice")
        plan.parts.append(PARTS[tag].decode(data, plan, where))
    return plan


def _late(found: _LateFrame) -> LateSamples:
    where = f"late samples of plan {found.step} from rank 0"
    if found.rows != sorted(set(found.rows)):
        raise TridecodeError(f"{where} have a row twice, or rows out of order")
    masks = read_ints(found.masks, len(found.rows) * found.words, where)
    return LateSamples(found.step, found.rows, masks.reshape(len(found.rows), found.words))


def check_size(size: int) -> None:
    """Raise TridecodeError for an impossible size, before memory is allocated for it."""
    if not 0 < size <= MAX_BYTES:
        raise TridecodeError(f"a plan has {size:,} bytes; wanted 1 to {MAX_BYTES:,}")


def _array(frame: _Frame, name: str, count: int) -> np.ndarray:
    return read_ints(getattr(frame, name), count, f"plan {frame.step} from rank 0: {name}")


def _start(frame: _Frame, start: _Start) -> SlotStart:
    where = f"plan {frame.step} from rank 0: history of slot {start.slot}"
    history = read_ints(start.history, len(start.history) // _INT.itemsize, where)
    return SlotStart(start.slot, start.params, history, start.generated, start.top_p, start.masked)


def _check_rows(plan: StepPlan) -> None:
    """Check that query_starts cuts the tokens into rows of at least one token, with samples within the
    rows.
    """
    queries = np.diff(plan.query_starts)
    if plan.query_starts[0] != 0 or plan.query_starts[-1] != plan.num_tokens or (queries < 1).any():
        raise TridecodeError(
            f"plan {plan.step} from rank 0: query_starts does not cut {plan.num_tokens} tokens into "
            f"{plan.num_rows} rows"
        )
    if (plan.samples < 0).any() or (plan.samples > queries).any():
        raise TridecodeError(f"plan {plan.step} from rank 0: samples are not within the tokens of their rows")
    if plan.late and (
        plan.queries or plan.late != sorted(set(plan.late)) or plan.late[-1] >= plan.num_decodes
    ):
        found = f"late rows {plan.late[:8]} of {plan.num_decodes} decode rows, {plan.queries} queries"
        raise TridecodeError(
            f"plan {plan.step} from rank 0 has {found}; wanted ascending decode rows and no queries"
        )
    decodes, most = plan.num_decodes, max(plan.queries, 1)
    if plan.query_starts[decodes] > decodes * most or (plan.queries and not _verifies(plan, queries)):
        raise TridecodeError(
            f"plan {plan.step} from rank 0: its {decodes} decode rows have {plan.query_starts[decodes]} "
            f"tokens; wanted at most {most} in each, all sampled, and a slot of its own for each row"
        )


def _verifies(plan: StepPlan, counts: np.ndarray) -> bool:
    """Return whether the decode rows of a plan that verifies fit together. counts: tokens of each row."""
    decodes = plan.num_decodes
    slots = plan.slots[:decodes][plan.slots[:decodes] >= 0]
    return (
        bool((counts[:decodes] <= plan.queries).all())
        and np.array_equal(plan.samples[:decodes], counts[:decodes])
        and len(np.unique(slots)) == len(slots)
        and bool((plan.context_lens[:decodes] >= -1).all())
        and bool((plan.context_lens[decodes:] >= 0).all())
    )
