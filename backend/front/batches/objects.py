"""OpenAI's objects of files and batches, as clients read them and as the store keeps them."""

from __future__ import annotations

import hashlib
import re
import secrets
import time

import msgspec

from tridecode.backend.batches.lines import URLS

#: statuses after which a batch does not change any more
FINAL = ("completed", "failed", "expired", "cancelled")
BATCH, BATCH_OUTPUT = "batch", "batch_output"

_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class FileObject(msgspec.Struct, kw_only=True, frozen=True):
    """bytes: its length. created_at: seconds since the epoch. filename: the client's, of no meaning here."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None
    status_details: str | None = None


class FileList(msgspec.Struct, kw_only=True):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class Counts(msgspec.Struct, kw_only=True, frozen=True):
    """Lines of a batch. total grows until all lines have been counted."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, kw_only=True, frozen=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True, frozen=True):
    data: list[BatchError]
    object: str = "list"


class State(msgspec.Struct, kw_only=True, frozen=True):
    """The changing part of a batch. Times are seconds since the epoch."""

    status: str = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    request_counts: Counts = Counts()


class Batch(State, kw_only=True, frozen=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    cancelling_at: int | None = None
    metadata: dict[str, str] | None = None
    object: str = "batch"


class BatchList(msgspec.Struct, kw_only=True):
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


ENDPOINTS = URLS


def new_file_id() -> str:
    return f"file-{_in_order()}"


def new_batch_id() -> str:
    return f"batch_{_in_order()}"


def _in_order() -> str:
    """Return 32 digits that nobody guesses; later ones are greater, from one millisecond to the next."""
    return f"{time.time_ns() // 10**6:012x}{secrets.token_hex(10)}"


def result_ids(batch_id: str) -> tuple[str, str]:
    """Return the ids of the files of answers and of errors. They follow from the batch's id, so that a batch
    that is continued writes the same files."""
    digests = (hashlib.sha256(f"{batch_id} {name}".encode()).hexdigest() for name in ("answers", "errors"))
    answers, errors = (f"file-{digest[:32]}" for digest in digests)
    return answers, errors


def is_file_id(text: str) -> bool:
    """Return whether it has the form of an id. Nothing else becomes a part of a path."""
    return _FILE_ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    return _BATCH_ID.fullmatch(text) is not None
