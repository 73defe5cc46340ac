"""Compiles each grammar in a separate process first (checker_child.py). No torch.

The library's compiler cannot be interrupted, and its own limits do not bound its time and memory:
{"multipleOf": 999983} alone takes minutes and gigabytes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from tridecode.backend.base import child_frames
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.wire.structured_output import StructuredOutput

_CHILD = Path(__file__).with_name("checker_child.py")
#: for the start of the processes: half a second on an idle machine
_START_S = 60.0
#: wall-clock limit of a compilation: a constant, plus this multiple of its CPU time
_WALL_S, _WALL_FACTOR = 15.0, 50.0
#: time from the wall-clock limit to the answer
_GRACE_S = 5.0
#: memory limit of a compilation
MEMORY_BYTES = 512 << 20
#: kinds whose compilation time is bounded by their length
_TRUSTED = ("json", "choice")

#: errors of a connection whose other end is gone, or that another thread has closed
_GONE = (OSError, EOFError, ValueError)


class CheckerDown(TridecodeError):
    """The processes that check grammars cannot be used. The grammar is not the cause."""

    code = "UNAVAILABLE"


class GrammarChecker:
    """The processes of one engine, started by `start` or the first check. Each thread has a connection.

    folder, vocab_size, end_ids: arguments of read_vocabulary. cpu_ms, memory: limits for a compilation with
    its first mask; memory in bytes.
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
        self.cpu_ms, self.memory = cpu_ms, memory
        self._lock = threading.Lock()
        self._count = connections
        self._processes: _Processes | None = None

    def start(self) -> None:
        """Start the processes, without waiting for them. Raises CheckerDown."""
        self.processes()

    def processes(self) -> _Processes:
        """Return the processes; start them if necessary. Raises CheckerDown."""
        with self._lock:
            if self._processes is None:
                self._processes = _Processes(self._arguments, self._count)
            return self._processes

    def begin(self, output: StructuredOutput, connection: int, cpu_ms: float | None = None) -> Check:
        """Begin to compile a grammar. One thread at a time uses a connection, for one Check at a time.

        cpu_ms: limit instead of the checker's, if lower. Raises CheckerDown, GrammarFault.
        """
        return Check(self, output, connection, min(cpu_ms or self.cpu_ms, self.cpu_ms))

    def check(
        self, output: StructuredOutput, connection: int, cpu_ms: float | None = None
    ) -> StructuredOutput:
        """Compile a grammar and return Check.result()."""
        return self.begin(output, connection, cpu_ms).result()

    def drop(self, processes: _Processes | None) -> None:
        """End processes that can no longer be used; the next check starts new ones."""
        with self._lock:
            if self._processes is processes:
                self._processes = None
        if processes is not None:
            processes.close()

    def close(self) -> None:
        """End the processes. A check that another thread waits for raises CheckerDown."""
        self.drop(self._processes)


class Check:
    """A grammar that the process of a connection is compiling."""

    def __init__(self, checker: GrammarChecker, output: StructuredOutput, number: int, cpu_ms: float):
        self._checker, self._output = checker, output
        self._number, self._cpu_ms = number, cpu_ms
        self._wall_s = _WALL_S + _WALL_FACTOR * cpu_ms / 1e3
        self._connection: _Connection | None = None
        self._is_second_try = False
        if output.kind not in _TRUSTED:
            self._send()

    def wait(self, seconds: float) -> bool:
        """Return whether `result` can return within this time."""
        return self._connection is None or self._connection.has_answer(seconds)

    def result(self) -> StructuredOutput:
        """Return the output for the engine to compile, after it has compiled within its limits;
        schemas.prepare may have changed it.

        Raises GrammarFault if it does not compile, CheckerDown if the processes cannot be used. Killed
        processes are restarted once, because a grammar can only end the worker that compiles it.
        """
        if self._connection is None:
            return self._output
        while True:
            try:
                answer = self._connection.receive(self._begun + self._wall_s + _GRACE_S)
                break
            except _GONE as error:
                self._send_again(error)
        if "ended" in answer:
            raise self._ended(answer["ended"])
        fault = answer.get("fault")
        if fault:
            text = fault if answer.get("whole") else self._refused(fault)
            raise GrammarFault(text, str(answer.get("reason", "refused")))
        text = answer.get("text")
        return self._output if text is None else StructuredOutput(self._output.kind, text)

    def _send(self) -> None:
        self._processes = self._checker.processes()
        self._connection = self._processes.connections[self._number]
        request = {"kind": self._output.kind, "text": self._output.text}
        try:
            fault = self._connection.wait_started()
            if fault:
                raise GrammarFault(self._refused(f"it cannot be checked: {fault}"), "internal")
            self._begun = time.monotonic()
            self._connection.send({**request, "cpu_ms": self._cpu_ms, "wall_s": self._wall_s})
        except _GONE as error:
            self._send_again(error)

    def _send_again(self, error: Exception) -> None:
        self._checker.drop(self._processes)
        if self._is_second_try:
            raise CheckerDown(f"the process that checks grammars has ended: {error!r}") from None
        self._is_second_try = True
        self._send()

    def _ended(self, code: int) -> TridecodeError:
        """Return why the process that compiled the grammar ended. code: as in subprocess."""
        limit = f"{self._cpu_ms:g} ms of CPU time"
        if -code in (signal.SIGPROF, signal.SIGXCPU):
            wanted = f"this model accepts {limit} (grammar_cpu_ms in config.pbtxt)"
            return GrammarFault(self._refused(f"its compilation takes too long; {wanted}"), "time")
        if -code == signal.SIGALRM:
            found = f"its compilation has not had {limit} in {self._wall_s:g} s"
            return CheckerDown(
                f"structured_output ({self._output.kind}): {found}: this machine is overloaded"
            )
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        found = f"its compilation ends the process that does it ({name})"
        return GrammarFault(
            self._refused(f"{found}; it has {self._checker.memory >> 20} MiB of memory"), "memory"
        )

    def _refused(self, why: str) -> str:
        return f"structured_output ({self._output.kind}) is refused: {why}"


class _Processes:
    """The processes of one start, and the engine's side of their connections."""

    def __init__(self, arguments: list[str], count: int):
        """Start the processes without waiting for them. Raises CheckerDown."""
        pairs = [socket.socketpair() for _ in range(count)]
        fds = [other.fileno() for _, other in pairs]
        # the child searches only the folders of this process
        folders = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        environment.update({name: "1" for name in ("RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS")})
        try:
            self.process: subprocess.Popen[bytes] = child_frames.start_child(
                _CHILD, [folders, *arguments, *map(str, fds)], fds, environment
            )
        except OSError as error:
            for mine, _ in pairs:
                mine.close()
            raise CheckerDown(f"the process that checks grammars does not start: {error}") from None
        finally:
            for _, other in pairs:
                other.close()
        self.connections = [_Connection(mine) for mine, _ in pairs]

    def close(self) -> None:
        """End the processes. Any thread may call it, more than once."""
        for one in self.connections:
            one.close()
        self.process.terminate()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Connection:
    """The engine's side of a connection, for one thread at a time; others may close it. Raises _GONE."""

    def __init__(self, own: socket.socket):
        self._socket = own
        self._is_started = False
        # a descriptor that is closed during a read may already belong to another file
        self._in_use = threading.Lock()

    def wait_started(self) -> str:
        """Wait until the process accepts grammars; return why it cannot, or ""."""
        if not self._is_started:
            fault = self.receive(time.monotonic() + _START_S)["fault"]
            self._is_started = not fault
            return str(fault)
        return ""

    def send(self, request: dict[str, Any]) -> None:
        with self._in_use:
            self._socket.settimeout(_WALL_S)
            child_frames.send(self._socket, request)

    def has_answer(self, seconds: float) -> bool:
        """Wait up to `seconds` for an answer, or for the end of the connection."""
        with self._in_use:
            if self._socket.fileno() < 0:
                return True
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            return bool(waiting.poll(1e3 * seconds))

    def receive(self, deadline: float) -> dict[str, Any]:
        with self._in_use:
            return child_frames.receive(self._socket, deadline)

    def close(self) -> None:
        """Wake the thread that uses the connection, and close it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with self._in_use:
            self._socket.close()
