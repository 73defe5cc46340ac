"""tritonserver's own log, without noise: wide tables, and errors that are harmless without a GPU.

tritonserver writes into memory of this process (--log-file), never into a pipe: its reader may be
frozen or dead, and tritonserver must not wait. The doors and the engine write to stderr as ever.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from tridecode.backend.base import log_format

_EVERY_S = 0.1
_READ_BYTES = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate: free the memory of what was read

#: a line of Triton's log without a message: a table follows
_TABLE = re.compile(r"[IWE]\d{4} \S+ \d+ \S+\] ?$")
_LINE = re.compile(r"([IWE])\d{4} \S+ \d+ (\S+\] .*)", re.DOTALL)
_LEVELS = {"I": "info", "W": "warning", "E": "error"}
#: errors that Triton logs on a machine without a GPU
_WITHOUT_GPU = re.compile(r"CudaDriverHelper has not been initialized|unable to create stream for \S+: CUDA")
#: failures of models to load, which `serve` reports with their reason
_LOAD_FAILURE = re.compile(
    r"^[IE]\d{4} .*(ERROR: Failed to create instance: |Failed to initialize Python stub: |failed to load '|"
    r"depends on '.* which has no loaded version|failed to load all models)"
)


def as_json(line: str) -> str:
    """A line of Triton's log as our JSON lines are."""
    found = _LINE.match(line)
    letter, message = found.groups() if found else ("I", line)
    fields = {"time": log_format.timestamp(time.time()), "level": _LEVELS[letter], "logger": "tritonserver"}
    return json.dumps({**fields, "message": message})


class LogFilter:
    """Chooses lines. starting: failures to load are held back, because `serve` reports them."""

    def __init__(self, has_gpu: bool) -> None:
        self.starting = True
        self.held: list[str] = []
        self._has_gpu = has_gpu
        self._in_table = False

    def shown(self, line: str) -> bool:
        """Return whether to print a line of Triton's log."""
        if self._in_table and (not line.strip() or line[0] in "+|"):
            return False
        self._in_table = bool(_TABLE.match(line))
        if self._in_table or (not self._has_gpu and _WITHOUT_GPU.search(line)):
            return False
        if self.starting and _LOAD_FAILURE.match(line):
            self.held.append(line)
            return False
        return True


class ServerLog:
    """A context manager that prints the log of one tritonserver after another to `out` (stderr).

    arguments: for tritonserver. Empty where its own arguments choose a log (--log-...): all of it is wanted,
    and tritonserver writes it itself.
    """

    def __init__(self, triton_args: Sequence[str] = (), out: TextIO | None = None) -> None:
        self.arguments: list[str] = []
        self.filter = LogFilter(has_gpu=shutil.which("nvidia-smi") is not None)
        self._out = out or sys.stderr
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-log", daemon=True)
        self._fd = -1
        self._read, self._freed, self._rest = 0, 0, b""
        self._wanted = not any(argument.startswith("--log-") for argument in triton_args)

    def __enter__(self) -> ServerLog:
        if self._wanted:
            self._fd = os.memfd_create("tritonserver-log", os.MFD_CLOEXEC)
            self.arguments = [f"--log-file=/proc/{os.getpid()}/fd/{self._fd}"]
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.arguments:
            self._ended.set()
            self._thread.join()
            os.close(self._fd)

    def show_held(self) -> None:
        """Print the failures to load that were held back: `serve` does not report them."""
        held, self.filter.held = self.filter.held, []
        self._print(held)

    def started(self, reported: bool) -> None:
        """Note the end of the first start. reported: whether `serve` has said which models failed to load."""
        self.filter.starting = False
        if reported:
            self.filter.held = []
        self.show_held()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._copy()
        self._copy()
        self._print([self._rest.decode(errors="replace")] if self._rest else [])

    def _copy(self) -> None:
        """Print what tritonserver has written since the last call."""
        while part := os.pread(self._fd, _READ_BYTES, self._read):
            self._read += len(part)
            self._free()
            *lines, self._rest = (self._rest + part).split(b"\n")
            texts = [line.decode(errors="replace") for line in lines]
            self._print([text for text in texts if self.filter.shown(text)])

    def _print(self, lines: Sequence[str]) -> None:
        if lines:
            shown = map(as_json, lines) if log_format.chosen() == "json" else lines
            try:
                self._out.write("\n".join(shown) + "\n")
                self._out.flush()
            except (OSError, ValueError):
                pass  # nobody reads stderr any more

    def _free(self) -> None:
        """Give back the memory of whole pages that were read, once it is worth a call."""
        size = (self._read - self._freed) // mmap.PAGESIZE * mmap.PAGESIZE
        if size >= _READ_BYTES:
            start, self._freed = self._freed, self._freed + size
            mode = _KEEP_SIZE | _PUNCH_HOLE
            ctypes.CDLL(None).fallocate(self._fd, mode, ctypes.c_int64(start), ctypes.c_int64(size))
