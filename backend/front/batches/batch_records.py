"""Records of batches in the store. Everything here blocks for the disk.

A worker creates a record and may mark it as cancelled; the process of the batches writes its state. So no two
processes write the same file.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection

import msgspec

from tridecode.backend.front.batches.objects import (
    BATCH,
    ENDPOINTS,
    FINAL,
    Batch,
    BatchRequest,
    FileObject,
    State,
    is_batch_id,
    is_file_id,
    new_batch_id,
)
from tridecode.backend.front.batches.store import Store, encoded, read_as, sync_folder, write_whole
from tridecode.backend.front.errors import ApiError, bad_request, shown

MAX_RECORDS = 1000
#: batches that are not finished
MAX_OPEN = 100
#: of a batch's metadata, as OpenAI has them
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MAX_WINDOW_S = 30 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,7})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def window_seconds(text: str) -> int:
    """Return the seconds of a completion_window. Raises ApiError."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        text = f"completion_window is {shown(text)}; wanted 24h, or another time up to 30d"
        raise bad_request(text, "completion_window")
    return seconds


def create_batch(store: Store, wanted: BatchRequest) -> Batch:
    """Raises ApiError for a request that is wrong, and where too many batches are open."""
    seconds = window_seconds(wanted.completion_window)
    if wanted.endpoint not in ENDPOINTS:
        text = f"endpoint is {shown(wanted.endpoint)}; wanted {', '.join(ENDPOINTS)}"
        raise bad_request(text, "endpoint")
    _check_metadata(wanted.metadata)
    now = int(time.time())
    made = Batch(
        id=new_batch_id(),
        endpoint=wanted.endpoint,
        input_file_id=wanted.input_file_id,
        completion_window=wanted.completion_window,
        created_at=now,
        expires_at=now + seconds,
        metadata=wanted.metadata,
    )
    with store.locked():
        _check_input(store, wanted.input_file_id)
        _make_room(store)
        folder, draft = store.batches / made.id, store.batches / f".{made.id}"
        draft.mkdir(mode=0o700)
        write_whole(draft / "batch.json", encoded(made))
        os.rename(draft, folder)
        sync_folder(store.batches)
    return made


def _check_input(store: Store, file_id: str) -> None:
    found = read_as(store.card(file_id), FileObject) if is_file_id(file_id) else None
    if found is None:
        text = f"input_file_id is {shown(file_id)}; wanted the id of a file of /v1/files"
        raise bad_request(text, "input_file_id")
    if found.purpose != BATCH:
        text = f"the purpose of {file_id} is {shown(found.purpose)}; wanted {BATCH}"
        raise bad_request(text, "input_file_id")


def _check_metadata(metadata: dict[str, str] | None) -> None:
    metadata = metadata or {}
    if len(metadata) > _MAX_METADATA:
        text = f"metadata has {len(metadata):,} entries; wanted {_MAX_METADATA} at most"
        raise bad_request(text, "metadata")
    for key, value in metadata.items():
        if not (key + value).isprintable():
            raise bad_request(f"metadata.{shown(key)} has characters that cannot be shown", "metadata")
        if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            text = f"metadata.{shown(key)} has {len(key)} and {len(value):,} characters"
            raise bad_request(f"{text}; wanted {_MAX_KEY} and {_MAX_VALUE} at most", "metadata")


def _make_room(store: Store) -> None:
    """Remove the oldest finished records beyond the limit; their results stay. Hold the lock."""
    found = all_batches(store)
    finished = [batch for batch in found if batch.status in FINAL]
    if len(found) - len(finished) >= MAX_OPEN:
        text = f"{MAX_OPEN} batches are not finished, which is the limit; wait or cancel some"
        raise ApiError(
            429, text, kind="rate_limit_error", code="too_many_batches", headers={"retry-after": "60"}
        )
    for batch in finished[: max(0, len(found) - MAX_RECORDS + 1)]:
        shutil.rmtree(store.batches / batch.id, ignore_errors=True)


def find_batch(store: Store, batch_id: str) -> Batch:
    """Raises ApiError 404."""
    found = read_batch(store, batch_id) if is_batch_id(batch_id) else None
    if found is None:
        raise ApiError(404, f"the batch {shown(batch_id)} does not exist", param="batch_id", code="not_found")
    return found


def read_batch(store: Store, batch_id: str) -> Batch | None:
    """Return the record as clients see it: as it was requested, with its state; None if it does not exist."""
    folder = store.batches / batch_id
    found = read_as(folder / "batch.json", Batch)
    if found is None:
        return None
    cancelled = read_as(folder / "cancel", int)  # before the state, which may become final meanwhile
    found = msgspec.structs.replace(found, **msgspec.structs.asdict(read_state(store, batch_id)))
    if cancelled is None:
        return found
    status = found.status if found.status in FINAL else "cancelling"
    return msgspec.structs.replace(found, status=status, cancelling_at=cancelled)


def read_state(store: Store, batch_id: str) -> State:
    return read_as(store.batches / batch_id / "state.json", State) or State()


def write_state(store: Store, batch_id: str, state: State, sync: bool = True) -> None:
    """sync: whether it must survive a power cut."""
    write_whole(store.batches / batch_id / "state.json", encoded(state), sync)


def all_batches(store: Store, skipped: Collection[str] = ()) -> list[Batch]:
    """Return all records, the oldest first. skipped: ids of records that are not read."""
    names = [name for name in os.listdir(store.batches) if is_batch_id(name) and name not in skipped]
    found = [read_batch(store, name) for name in names]
    return sorted((one for one in found if one is not None), key=lambda one: (one.created_at, one.id))


def is_cancelled(store: Store, batch_id: str) -> bool:
    return (store.batches / batch_id / "cancel").exists()


def cancel_batch(store: Store, batch_id: str) -> Batch:
    """Request the end of a batch. Raises ApiError 404, and 409 for one that has ended."""
    with store.locked():
        found = find_batch(store, batch_id)
        if found.status in FINAL:
            text = f"the batch {batch_id} is {found.status}; wanted one that is not finished"
            raise ApiError(409, text, code="invalid_state")
        if found.cancelling_at is None:
            write_whole(store.batches / batch_id / "cancel", encoded(int(time.time())))
        return find_batch(store, batch_id)


def is_input_of_open_batch(store: Store, file_id: str) -> bool:
    return any(one.input_file_id == file_id and one.status not in FINAL for one in all_batches(store))
