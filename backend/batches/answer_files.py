"""The files that a batch writes. They are also its memory: a run that was killed continues from them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.batches.id_set import IdSet
from tridecode.backend.batches.records import LINE_START, NOT_SENT


class _Error(msgspec.Struct):
    code: str | None = None
    line: int | None = None


class _Record(msgspec.Struct):
    id: str
    custom_id: str | None
    response: msgspec.Raw
    error: _Error | None

    @property
    def unsent_line(self) -> int:
        """The number of a line that was never sent; 0: it was. A service may use the same codes."""
        if self.error is None or self.error.code not in NOT_SENT or bytes(self.response) != b"null":
            return 0
        return self.error.line or 0


_decode = msgspec.json.Decoder(_Record).decode


class AnswerFile:
    """One file of whole lines, locked against a second process.

    A last line that is not whole, which a killed process leaves, is cut off when the file is opened.
    """

    def __init__(self, path: Path):
        """Raises ConfigError for a file that another process writes or that no batch wrote, OSError."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            self._cut()
        except BaseException:
            os.close(self._fd)
            raise

    def records(self) -> Iterator[_Record]:
        """Yield the id, custom_id and error of each line. Raises ConfigError for a line of another format."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                try:
                    yield _decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    text = f"line {number} of {self.path} was not written by `tridecode batch`"
                    raise ConfigError(f"{text}; wanted its earlier output, or a new file") from None

    def append(self, lines: Sequence[bytes]) -> None:
        """Write whole lines and wait until the disk has them. After an OSError none of them remains."""
        begin = os.fstat(self._fd).st_size
        data = memoryview(b"".join(lines))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fdatasync(self._fd)
        except OSError as error:
            try:
                os.ftruncate(self._fd, begin)
            except OSError:  # the next run cuts the half line off
                pass
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self, keep_empty: bool = True) -> None:
        if not keep_empty and not os.fstat(self._fd).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process writes {self.path}; wait for its end") from None

    def _cut(self) -> None:
        with open(self._fd, "rb", closefd=False) as file:
            end = file.seek(0, os.SEEK_END)
            begin = _start_of_last_line(file, end)
            if begin == end:
                return
            file.seek(begin)
            start = file.read(len(LINE_START))
        if not LINE_START.startswith(start):
            text = f"the last line of {self.path} was not written by `tridecode batch`"
            raise ConfigError(f"{text}; wanted its earlier output, or a new file")
        os.ftruncate(self._fd, begin)


class AnswerFiles:
    """The file of answers, that of errors, and what both already have.

    answered: custom_ids with an answer. refused: custom_ids with an error. reported: numbers of lines that
    were not sent.
    """

    def __init__(self, answers: Path, errors: Path):
        """Raises what AnswerFile does."""
        self.answered, self.refused = IdSet(), IdSet()
        self.reported: set[int] = set()
        self.answers = AnswerFile(answers)
        try:
            self.errors = AnswerFile(errors)
        except BaseException:
            self.answers.close(keep_empty=False)
            raise
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        for record in self.answers.records():
            self.answered.add(record.custom_id or "")
        for record in self.errors.records():
            if record.unsent_line:
                self.reported.add(record.unsent_line)
            else:
                self.refused.add(record.custom_id or "")

    def close(self, keep_empty: bool = False) -> None:
        """keep_empty: the file of answers. An empty file of errors is always removed."""
        self.answers.close(keep_empty)
        self.errors.close(keep_empty=False)

    def __enter__(self) -> AnswerFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(keep_empty=kind is None)


def _start_of_last_line(file: BinaryIO, end: int, step: int = 1 << 16) -> int:
    """Return the offset after the last newline before `end`; 0 if there is none."""
    while end > 0:
        begin = max(0, end - step)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
