"""The processes that compile each grammar before the engine does: one that never ends harms only itself.

    python -I checker_child.py PATH FOLDER VOCAB_SIZE END_IDS MEMORY_BYTES FD...

PATH: the folders of sys.path of the engine's process. FOLDER: of the tokenizer. END_IDS: separated by
commas. FD: connected sockets, one process for each. A frame is a length of 8 bytes and JSON: {"kind",
"text", "cpu_ms"}, then {"fault", "reason"}, or the {"text"} of a schema to compile instead. The
vocabulary is read once. Each grammar is compiled in a fork, which the kernel ends at its limits.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:] = sys.argv.pop(1).split(os.pathsep)

import numpy as np

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.engine.grammars.schemas import prepare
from tridecode.backend.engine.grammars.vocabulary import read_vocabulary
from tridecode.backend.wire.structured_output import StructuredOutput

LENGTH = 8  # bytes of a frame's length, little end first
#: for a fork that the machine does not run: its limit is CPU time
_WALL_S = 20.0


def main(arguments: list[str]) -> None:
    folder, vocab_size, end_ids, memory = arguments[:4]
    connections = [socket.socket(fileno=int(fd)) for fd in arguments[4:]]
    try:
        vocabulary, encode = read_vocabulary(Path(folder), int(vocab_size), map(int, end_ids.split(",")))
        compiler = Guidance(vocabulary, encode, threads=0)
    except TridecodeError as error:
        for one in connections:
            _send(one, {"fault": str(error)})
        return
    mine = connections.pop(0)
    for one in connections:
        if os.fork() == 0:
            mine.close()
            mine = one
            break
    for one in connections:
        if one is not mine:
            one.close()
    checker = _Checker(compiler, int(vocab_size), int(memory))
    _send(mine, {"fault": ""})
    while (request := _receive(mine)) is not None:
        output = StructuredOutput(request["kind"], request["text"])
        _send(mine, checker.check(output, float(request["cpu_ms"])))


class _Checker:
    def __init__(self, compiler: Guidance, vocab_size: int, memory: int):
        """memory: bytes that a fork may have beyond what this process has."""
        self._compiler, self._words = compiler, -(-vocab_size // 32)
        self._memory = memory

    def check(self, output: StructuredOutput, cpu_ms: float) -> dict[str, Any]:
        """Return the answer to a request, whatever the grammar does."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._compile(output, cpu_ms, writer)
        os.close(writer)
        answer = b""
        try:
            if select.select([reader], [], [], _WALL_S)[0]:
                while piece := os.read(reader, 1 << 16):
                    answer += piece
            else:
                os.kill(child, signal.SIGKILL)
        finally:
            os.close(reader)
            _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and not os.WEXITSTATUS(status) and answer:
            return json.loads(answer)
        return self._killed(status, cpu_ms)

    def _killed(self, status: int, cpu_ms: float) -> dict[str, Any]:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in (signal.SIGPROF, signal.SIGXCPU):
            found = "its compilation takes too long"
            wanted = f"{cpu_ms:g} ms of CPU time (grammar_cpu_ms in config.pbtxt)"
            return {"fault": f"{found}; this model accepts {wanted}", "reason": "time"}
        if number == signal.SIGKILL:
            return {"fault": f"its compilation has not ended after {_WALL_S:g} s", "reason": "time"}
        name = signal.Signals(number).name if number else f"exit code {os.waitstatus_to_exitcode(status)}"
        found = f"its compilation ends the process that does it ({name})"
        return {"fault": f"{found}; it has {self._memory >> 20} MiB of memory", "reason": "memory"}

    def _compile(self, output: StructuredOutput, cpu_ms: float, writer: int) -> None:
        """Run in a fork, up to its end."""
        try:
            self._limit(cpu_ms)
            answer = self._answer(output)
            signal.setitimer(signal.ITIMER_PROF, 0)
            with os.fdopen(writer, "wb") as file:
                file.write(json.dumps(answer).encode("ascii"))
        except BaseException:
            os._exit(1)
        os._exit(0)

    def _limit(self, cpu_ms: float) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)  # the library writes panics there
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_ms / 1e3)
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        for kind, limit in (("RLIMIT_AS", held + self._memory), ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0)):
            resource.setrlimit(getattr(resource, kind), (limit, limit))

    def _answer(self, output: StructuredOutput) -> dict[str, Any]:
        try:
            prepared = prepare(output)
            self._compiler.compile(prepared).fill(np.zeros(self._words, np.int32))
        except GrammarFault as fault:
            return {"fault": str(fault), "reason": fault.reason, "whole": True}
        return {"fault": "", "text": None if prepared is output else prepared.text}


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode("ascii")
    connection.sendall(len(data).to_bytes(LENGTH, "little") + data)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return one frame; None at the end of the connection."""
    length = int.from_bytes(_read(connection, LENGTH), "little")
    return json.loads(_read(connection, length)) if length else None


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(1 << 20, size - len(data)))
        if not piece:
            return b""
        data += piece
    return bytes(data)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, KeyboardInterrupt):  # the engine is gone
        pass
    os._exit(0)
