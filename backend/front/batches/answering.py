"""One batch, from its input file to the files of results. It continues wherever a killed process left it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.base.priority import LOWEST_PRIORITY
from tridecode.backend.batches.answer_files import AnswerFiles
from tridecode.backend.batches.lines import InputLines, Request, count_lines
from tridecode.backend.batches.meter import Meter
from tridecode.backend.batches.records import LineError, Response
from tridecode.backend.batches.runner import Runner, Sends
from tridecode.backend.front.batches import batch_records as records
from tridecode.backend.front.batches.files import publish
from tridecode.backend.front.batches.objects import (
    BATCH_OUTPUT,
    Batch,
    BatchError,
    BatchErrors,
    Counts,
    result_ids,
)
from tridecode.backend.front.batches.store import Store

_LOOK_S = 0.2
_log = logging.getLogger("tridecode.front.batches")


class BatchFailed(Exception):
    """The batch as a whole cannot be answered, or not to its end."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.error = BatchError(code=code, message=message)


class Expired:
    """Answers the lines that are left when the completion window has passed."""

    async def send(self, request: Request) -> Response:
        text = f"line {request.line} was not answered within the completion window"
        raise LineError(request.line, "batch_expired", text, custom_id=request.custom_id)


class Answering:
    """stop: set when the process ends; the batch is continued by the next one."""

    def __init__(self, store: Store, batch: Batch, sender: Sends, concurrency: int, stop: asyncio.Event):
        self._store, self._batch, self._sender = store, batch, sender
        self._concurrency, self._stop = concurrency, stop
        self._state = records.read_state(store, batch.id)
        self._halt = asyncio.Event()  # ends the run: stopped, cancelled, expired or failed
        self._failure: BatchFailed | None = None

    async def run(self) -> None:
        """Answer the batch to its end, or until `stop` is set."""
        try:
            status = await self._answer()
        except BatchFailed as failure:
            self._end("failed", errors=BatchErrors(data=[failure.error]))
        except (OSError, ConfigError) as error:
            text = getattr(error, "strerror", None) or str(error)
            found = BatchError(code="storage_error", message=f"the store of files failed: {text}")
            self._end("failed", errors=BatchErrors(data=[found]))
        except Exception:  # a mistake of ours: it may not keep the other batches from being answered
            _log.exception("%s failed", self._batch.id)
            found = BatchError(code="internal_error", message="the service failed; its log says more")
            self._end("failed", errors=BatchErrors(data=[found]))
        else:
            if status:
                self._write(status="finalizing", finalizing_at=_now())
                self._end(status)

    async def _answer(self) -> str:
        """Return how the batch ended; "": it was interrupted."""
        source = self._store.data(self._batch.input_file_id)
        meter = await self._counted(source)
        if self._state.in_progress_at is None:
            self._write(
                status="in_progress", in_progress_at=_now(), request_counts=Counts(total=meter.counted or 0)
            )
        await self._run(meter, self._sender, self._concurrency, self._halt)
        if self._failure is not None:
            raise self._failure
        if not self._halt.is_set():
            return "completed"
        if self._is_cancelled():
            return "cancelled"
        if not self._is_late():
            return ""
        await self._run(await self._counted(source), Expired(), 16, asyncio.Event())
        return "expired"

    async def _counted(self, source: Path) -> Meter:
        meter = Meter()
        try:
            meter.counted = await asyncio.to_thread(count_lines, source)
        except FileNotFoundError:
            raise BatchFailed("input_file_missing", "the input file does not exist any more") from None
        if not meter.counted:
            raise BatchFailed("empty_file", "the input file has no line; wanted one request a line")
        return meter

    async def _run(self, meter: Meter, sender: Sends, concurrency: int, halt: asyncio.Event) -> None:
        """Answer the lines that have no result yet."""
        source = self._store.data(self._batch.input_file_id)
        outputs = [self._store.data(one) for one in result_ids(self._batch.id)]
        with closing(InputLines(source, [self._batch.endpoint])) as lines:
            lines.priority, lines.overrides = LOWEST_PRIORITY, True
            with closing(await asyncio.to_thread(AnswerFiles, *outputs)) as files:
                watch = asyncio.create_task(self._watch())
                try:
                    await Runner(lines, files, meter).run(
                        sender, concurrency, halt, lambda: self._look(meter)
                    )
                finally:
                    watch.cancel()
                self._count(meter)

    # ------------------------------------------------------------ while it runs

    async def _watch(self) -> None:
        """End the run where it has to end."""
        while not self._halt.is_set():
            if self._stop.is_set() or self._is_cancelled() or self._is_late():
                self._halt.set()
            await asyncio.sleep(_LOOK_S)

    def _look(self, meter: Meter) -> None:
        self._count(meter)
        with self._store.locked():
            size = self._store.usage().bytes
        if size > self._store.max_bytes:
            text = (
                f"the store has {size:,} bytes and its limit is {self._store.max_bytes:,}; delete some files"
            )
            self._failure = BatchFailed("storage_full", text)
            self._halt.set()

    def _count(self, meter: Meter) -> None:
        totals = meter.totals
        counts = Counts(
            total=max(meter.lines or 0, totals.done), completed=totals.answers, failed=totals.errors
        )
        if counts != self._state.request_counts:
            self._write(sync=False, request_counts=counts)

    def _is_cancelled(self) -> bool:
        return records.is_cancelled(self._store, self._batch.id)

    def _is_late(self) -> bool:
        return time.time() >= self._batch.expires_at

    # ------------------------------------------------------------ its end

    def _end(self, status: str, errors: BatchErrors | None = None) -> None:
        answers, refused = result_ids(self._batch.id)
        name = self._batch.id
        with self._store.locked():
            changes: dict[str, Any] = {f"{status}_at": _now()}
            self._write(
                status=status,
                errors=errors,
                output_file_id=publish(self._store, answers, f"{name}_output.jsonl", BATCH_OUTPUT),
                error_file_id=publish(self._store, refused, f"{name}_error.jsonl", BATCH_OUTPUT),
                **changes,
            )
        counts = self._state.request_counts
        why = f": {errors.data[0].message}" if errors else ""
        _log.info("%s is %s with %d answers, %d errors%s", name, status, counts.completed, counts.failed, why)

    def _write(self, sync: bool = True, **changes: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        records.write_state(self._store, self._batch.id, self._state, sync)


def _now() -> int:
    return int(time.time())
