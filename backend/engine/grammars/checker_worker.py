"""A process that compiles one grammar after the other, each within limits that the kernel enforces."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from typing import Any

import numpy as np

from tridecode.backend.base import child_frames
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.engine.grammars.schemas import prepare
from tridecode.backend.engine.grammars.warm_up import warm_up
from tridecode.backend.wire.structured_output import StructuredOutput

#: exit code of a worker that should be replaced
RECYCLED = 3
#: growth of a worker's memory, and number of grammars, after which it is replaced
_MOST_GROWTH, _MOST_GRAMMARS = 64 << 20, 1000
_LIMITS = (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU)


class Worker:
    """Compiles the grammars of a connection.

    memory: bytes of a compilation, in addition to the memory that the process has.
    """

    def __init__(self, compiler: Guidance, vocab_size: int, memory: int):
        self._compiler, self._vocab_size, self._memory = compiler, vocab_size, memory
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)

    def warm_up(self) -> None:
        """Compile a few grammars, without limits."""
        warm_up(self._compiler, self._vocab_size)

    def serve(self, connection: socket.socket, lifeline: int) -> None:
        """Answer requests until the connection or the pipe `lifeline` ends.

        A request is {"kind", "text", "cpu_ms", "wall_s"}; the answer is {"fault", "reason"}, or {"text"} of a
        schema to compile instead. Exits with RECYCLED if another worker should replace this one.
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LIMITS)
        for number in (*_LIMITS, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        largest = child_frames.memory_held() + _MOST_GROWTH
        child_frames.limit_memory(_MOST_GROWTH + self._memory)
        waiting = select.poll()
        waiting.register(connection, select.POLLIN)
        waiting.register(lifeline, select.POLLIN)
        for _ in range(_MOST_GRAMMARS):
            if any(fd == lifeline for fd, _ in waiting.poll()):
                return
            try:
                request = child_frames.receive(connection)
            except EOFError:
                return
            child_frames.send(connection, self._limited(request))
            if child_frames.memory_held() > largest:
                break
        os._exit(RECYCLED)

    def _limited(self, request: dict[str, Any]) -> dict[str, Any]:
        output = StructuredOutput(request["kind"], request["text"])
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (min(child_frames.memory_held() + self._memory, most), most))
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
        signal.setitimer(signal.ITIMER_PROF, request["cpu_ms"] / 1e3)
        answer = self._answer(output)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return answer

    def _answer(self, output: StructuredOutput) -> dict[str, Any]:
        """Compile a grammar and its first mask."""
        try:
            prepared = prepare(output)
            self._compiler.compile(prepared).fill(self._mask)
        except GrammarFault as fault:
            return {"fault": str(fault), "reason": fault.reason, "whole": True}
        return {"fault": "", "text": None if prepared is output else prepared.text}
