"""Has each grammar compiled in a process of its own first (checker_child.py). No torch.

The library's compiler cannot be interrupted, and takes time and memory that no limit of its own bounds:
{"multipleOf": 999983} alone is minutes and gigabytes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.wire.structured_output import StructuredOutput

_CHILD = Path(__file__).with_name("checker_child.py")
_LENGTH = 8  # of a frame, see checker_child.py
#: for the start of the processes: half a second on an idle machine
_START_S = 60.0
#: more than checker_child.py waits for a fork
_ANSWER_S = 40.0
#: for one compilation
MEMORY_BYTES = 512 << 20
#: kinds that compile in a time that their length bounds
_TRUSTED = ("json", "choice")


#: what a connection raises whose other end is gone, or that another thread has closed
_GONE = (OSError, EOFError, ValueError, IndexError)


class CheckerDown(TridecodeError):
    """The processes that check grammars cannot be used: the grammar is not to blame."""

    code = "UNAVAILABLE"


class GrammarChecker:
    """The processes of one engine, started by `start` or the first check. Each thread has a connection.

    folder, vocab_size, end_ids: of read_vocabulary. cpu_ms, memory: limits of a compilation with its first
    mask, memory in bytes.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        end_ids: Items[int],
        cpu_ms: float,
        connections: int,
        memory: int = MEMORY_BYTES,
    ):
        ends = ",".join(map(str, end_ids))
        self._arguments = [str(folder), str(vocab_size), ends, str(memory)]
        self._cpu_ms = cpu_ms
        self._lock = threading.Lock()
        self._count = connections
        self._sockets: list[socket.socket] = []
        self._ready: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the processes, without waiting for them. Raises CheckerDown."""
        with self._lock:
            if self._process is None:
                self._start()

    def check(
        self, output: StructuredOutput, connection: int, cpu_ms: float | None = None
    ) -> StructuredOutput:
        """Return what is to be compiled, which has compiled within its limits: the output, or what
        schemas.prepare makes of it. One thread at a time uses a connection.

        cpu_ms: another limit than that of the checker, if it is less.
        Raises GrammarFault if it does not compile, CheckerDown if the processes cannot be used. Those that
        are gone are started again: no grammar ends them, because each compiles in a fork.
        """
        if output.kind in _TRUSTED:
            return output
        limit = self._cpu_ms if cpu_ms is None else cpu_ms
        try:
            answer = self._ask(output, connection, limit)
        except _GONE:
            self.close()
            try:
                answer = self._ask(output, connection, limit)
            except _GONE as error:
                self.close()
                raise CheckerDown(f"the process that checks grammars has ended: {error!r}") from None
        fault = answer.get("fault")
        if fault:
            text = fault if answer.get("whole") else f"structured_output ({output.kind}) is refused: {fault}"
            raise GrammarFault(text, str(answer.get("reason", "refused")))
        text = answer.get("text")
        return output if text is None else StructuredOutput(output.kind, text)

    def close(self) -> None:
        """End the processes. A check that another thread waits for raises CheckerDown."""
        with self._lock:
            process, self._process = self._process, None
            sockets, self._sockets = self._sockets, []
            self._ready.clear()
        for one in sockets:
            _shut(one)
        if process is not None:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(self._count)]
        theirs = [pair[1] for pair in pairs]
        fds = [one.fileno() for one in theirs]
        # -I: the child searches the folders of this process and nothing else
        folders = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
        command = [sys.executable, "-I", str(_CHILD), folders, *self._arguments, *map(str, fds)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            )
        except OSError as error:
            for mine, other in pairs:
                mine.close()
                other.close()
            raise CheckerDown(f"the process that checks grammars does not start: {error}") from None
        for one in theirs:
            one.close()
        self._sockets = [pair[0] for pair in pairs]

    def _ask(self, output: StructuredOutput, connection: int, cpu_ms: float) -> dict[str, Any]:
        self.start()
        one = self._sockets[connection]
        if connection not in self._ready:
            started = _receive(one, time.monotonic() + _START_S)
            if started.get("fault"):
                return {"fault": f"it cannot be checked: {started['fault']}", "reason": "internal"}
            self._ready.add(connection)
        limit = min(cpu_ms, self._cpu_ms)
        data = json.dumps({"kind": output.kind, "text": output.text, "cpu_ms": limit}).encode("ascii")
        one.settimeout(_ANSWER_S)
        one.sendall(len(data).to_bytes(_LENGTH, "little") + data)
        return _receive(one, time.monotonic() + _ANSWER_S)


def _shut(one: socket.socket) -> None:
    """Close a socket, also under a thread that reads from it."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()


def _receive(one: socket.socket, deadline: float) -> dict[str, Any]:
    """Return one frame. Raises TimeoutError at the deadline, EOFError or OSError if the process has gone."""
    length = int.from_bytes(_read(one, _LENGTH, deadline), "little")
    return json.loads(_read(one, length, deadline))


def _read(one: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        one.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = one.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
