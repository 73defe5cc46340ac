"""A plan as bytes, for the ranks that did not make it: MessagePack around raw little-endian arrays.

Nothing in a frame is executed. `decode` checks every length before an array is used, so that a damaged frame
raises an error instead of reading out of bounds.
"""

from __future__ import annotations

from typing import Annotated, Optional

import msgspec
import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.prompt_tables.plan import StepPrompts, check_prompts
from tridecode.backend.engine.step.plan import BeamRows, LogitRows, SlotStart, StepPlan
from tridecode.backend.wire.sampling_params import MAX_BEAMS, SamplingParams

#: 64 sequences that start with 128k tokens each need 33 MB, tables of prompts 128; a larger size is damaged
MAX_BYTES = 1 << 28

_INT = np.dtype("<i4")
_Index = Annotated[int, msgspec.Meta(ge=0)]


class _Start(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    slot: int
    params: SamplingParams
    history: bytes
    generated: int
    top_p: float


class _Beams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    num_rows: _Index
    width: Annotated[int, msgspec.Meta(ge=1, le=2 * MAX_BEAMS)]
    rows: bytes
    slots: bytes
    tokens: bytes


class _LogitRows(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    row: _Index
    first: _Index
    count: _Index
    targets: bytes | None


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    step: int
    num_tokens: int
    num_rows: int
    num_columns: int  # of block_tables
    num_decodes: int
    token_ids: bytes
    positions: bytes
    kv_slots: bytes
    block_tables: bytes
    context_lens: bytes
    query_starts: bytes
    slots: bytes
    samples: bytes
    starts: list[_Start]
    embeds: list[tuple[int, int]]
    logit_rows: list[_LogitRows]
    logit_samples: list[_Index]
    slot_copies: list[tuple[_Index, _Index]]
    block_copies: list[tuple[_Index, _Index]]
    adapters: bytes | None
    drop_adapters: list[int]
    top_log_probs: bytes | None
    beams: _Beams | None
    prompts: Optional[StepPrompts]  # noqa: UP045  msgspec evaluates it, on Python 3.9 too


_decoder = msgspec.msgpack.Decoder(_Frame)


def encode(plan: StepPlan) -> bytes:
    """The plan without `sequences`, which stay on rank 0. Raises TridecodeError beyond MAX_BYTES."""
    starts = [_Start(s.slot, s.params, _ints(s.history), s.generated, s.top_p) for s in plan.starts]
    frame = msgspec.msgpack.encode(
        _Frame(
            step=plan.step,
            num_tokens=plan.num_tokens,
            num_rows=plan.num_rows,
            num_columns=plan.block_tables.shape[1],
            num_decodes=plan.num_decodes,
            token_ids=_ints(plan.token_ids),
            positions=_ints(plan.positions),
            kv_slots=_ints(plan.kv_slots),
            block_tables=_ints(plan.block_tables),
            context_lens=_ints(plan.context_lens),
            query_starts=_ints(plan.query_starts),
            slots=_ints(plan.slots),
            samples=_ints(plan.samples),
            starts=starts,
            embeds=plan.embeds,
            logit_rows=[_LogitRows(w.row, w.first, w.count, _optional(w.targets)) for w in plan.logit_rows],
            logit_samples=plan.logit_samples,
            slot_copies=plan.slot_copies,
            block_copies=plan.block_copies,
            adapters=_optional(plan.adapters),
            drop_adapters=plan.drop_adapters,
            top_log_probs=None if plan.top_log_probs is None else _ints(plan.top_log_probs),
            beams=None if plan.beams is None else _beam_bytes(plan.beams),
            prompts=plan.prompts,
        )
    )
    check_size(len(frame))
    return frame


def decode(frame: bytes) -> StepPlan:
    """The plan of a frame, with read-only arrays. Raises TridecodeError that names the fault."""
    check_size(len(frame))
    try:
        found = _decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise TridecodeError(f"a plan of {len(frame):,} bytes from rank 0 cannot be read: {error}") from None
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
        starts=[_start(found, start) for start in found.starts],
        embeds=found.embeds,
        logit_rows=[_logit_rows(found, wanted) for wanted in found.logit_rows],
        logit_samples=found.logit_samples,
        slot_copies=found.slot_copies,
        block_copies=found.block_copies,
        adapters=None if found.adapters is None else _array(found, "adapters", rows),
        drop_adapters=found.drop_adapters,
        top_log_probs=None if found.top_log_probs is None else _array(found, "top_log_probs", rows),
        prompts=found.prompts,
    )
    _check_rows(plan)
    if found.beams is not None:
        plan.beams = _beam_rows(found.beams, plan)
    if plan.prompts is not None:
        check_prompts(plan.prompts, plan.num_tokens, f"plan {plan.step} from rank 0")
    return plan


def check_size(size: int) -> None:
    """Raises TridecodeError for a size that no plan has, before memory is allocated for it."""
    if not 0 < size <= MAX_BYTES:
        raise TridecodeError(f"a plan has {size:,} bytes; wanted 1 to {MAX_BYTES:,}")


def _ints(values: np.ndarray) -> bytes:
    assert values.dtype == np.int32, values.dtype
    return values.astype(_INT, copy=False).tobytes()


def _optional(values: np.ndarray | None) -> bytes | None:
    return None if values is None else _ints(values)


def _array(frame: _Frame, name: str, count: int) -> np.ndarray:
    return _checked(getattr(frame, name), count, f"plan {frame.step} from rank 0: {name}")


def _checked(data: bytes, count: int, where: str) -> np.ndarray:
    if len(data) != count * _INT.itemsize:
        raise TridecodeError(
            f"{where} has {len(data):,} bytes; {count:,} values of {_INT} need {count * _INT.itemsize:,}"
        )
    return np.frombuffer(data, _INT)


def _start(frame: _Frame, start: _Start) -> SlotStart:
    where = f"plan {frame.step} from rank 0: history of slot {start.slot}"
    history = _checked(start.history, len(start.history) // _INT.itemsize, where)
    return SlotStart(start.slot, start.params, history, start.generated, start.top_p)


def _beam_bytes(beams: BeamRows) -> _Beams:
    return _Beams(len(beams.rows), beams.width, _ints(beams.rows), _ints(beams.slots), _ints(beams.tokens))


def _beam_rows(found: _Beams, plan: StepPlan) -> BeamRows:
    """The beams of a frame; their indices lie within the plan."""
    where, count = f"plan {plan.step} from rank 0: beams", found.num_rows
    rows = _checked(found.rows, count, f"{where}: rows")
    slots = _checked(found.slots, count, f"{where}: slots")
    tokens = _checked(found.tokens, count, f"{where}: tokens")
    if (rows < 0).any() or (rows >= plan.num_samples).any():
        raise TridecodeError(f"{where}: rows are not within the {plan.num_samples} samples of the plan")
    if (slots < 0).any() or len(set(slots.tolist())) < count:
        raise TridecodeError(f"{where}: slots are {slots.tolist()}; wanted different slots from 0 on")
    return BeamRows(rows, found.width, slots, tokens)


def _logit_rows(frame: _Frame, wanted: _LogitRows) -> LogitRows:
    where = f"plan {frame.step} from rank 0: targets of row {wanted.row}"
    targets = None if wanted.targets is None else _checked(wanted.targets, wanted.count, where)
    return LogitRows(wanted.row, wanted.first, wanted.count, targets)


def _check_rows(plan: StepPlan) -> None:
    """query_starts cuts the tokens into rows of one token or more; all that is wanted is within the rows."""
    queries = np.diff(plan.query_starts)
    if plan.query_starts[0] != 0 or plan.query_starts[-1] != plan.num_tokens or (queries < 1).any():
        raise TridecodeError(
            f"plan {plan.step} from rank 0: query_starts does not cut {plan.num_tokens} tokens into "
            f"{plan.num_rows} rows"
        )
    if (plan.samples < 0).any() or (plan.samples > queries).any():
        raise TridecodeError(f"plan {plan.step} from rank 0: samples are not within the tokens of their rows")
    for row, count in plan.embeds:
        if not (0 <= row < plan.num_rows and 0 <= count <= queries[row]):
            raise TridecodeError(
                f"plan {plan.step} from rank 0: embeds has {count} tokens of row {row}; the plan has "
                f"{plan.num_rows} rows"
            )
    for wanted in plan.logit_rows:
        if not (wanted.row < plan.num_rows and wanted.first + wanted.count <= queries[wanted.row]):
            raise TridecodeError(
                f"plan {plan.step} from rank 0: logit_rows has tokens {wanted.first} to "
                f"{wanted.first + wanted.count} of row {wanted.row}, which the plan does not have"
            )
    if plan.logit_samples and max(plan.logit_samples) >= plan.num_samples:
        raise TridecodeError(
            f"plan {plan.step} from rank 0: logit_samples has {max(plan.logit_samples)}; the plan has "
            f"{plan.num_samples} samples"
        )
