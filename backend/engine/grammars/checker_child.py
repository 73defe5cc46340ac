"""The processes that compile each grammar before the engine, so that an endless one does no harm.

    python -I checker_child.py PATH FOLDER VOCAB_SIZE END_IDS MEMORY_BYTES FD...

PATH: the folders of sys.path of the engine's process. FOLDER: the tokenizer's. END_IDS: separated by
commas. FD: connected sockets (base/child_frames.py), each with a worker (checker_worker.py).

This process reads the vocabulary and forks the workers. A spare worker is warmed up and replaces a worker
that the kernel has ended at a limit, so that no grammar waits for a fork.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    sys.path[:] = sys.argv.pop(1).split(os.pathsep)

from tridecode.backend.base import child_frames
from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.engine.grammars.checker_worker import RECYCLED, Worker
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.grammars.vocabulary import read_vocabulary

#: signals from outside, which may interrupt a message; others come from a limit or a crash of the library
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(arguments: list[str]) -> None:
    folder, vocab_size, end_ids, memory = arguments[:4]
    connections = [socket.socket(fileno=int(fd)) for fd in arguments[4:]]
    try:
        vocabulary, encode = read_vocabulary(Path(folder), int(vocab_size), map(int, end_ids.split(",")))
        worker = Worker(Guidance(vocabulary, encode, threads=0), int(vocab_size), int(memory))
    except TridecodeError as error:
        for one in connections:
            child_frames.send(one, {"fault": str(error)})
        return
    worker.warm_up()
    gc.freeze()  # a collection in a fork would copy the pages of every object
    ForkServer(connections, worker).run()


class ForkServer:
    """Forks workers and waits for their exit. It holds all connections but does not read from them.

    Each child gets the reading end of a separate pipe: a byte names its connection, and the end of the
    pipe shows that this process has ended.
    """

    def __init__(self, connections: list[socket.socket], worker: Worker):
        self._connections, self._worker = connections, worker
        self._lifelines: dict[int, int] = {}  # process id -> pipe
        self._numbers: dict[int, int] = {}  # process id -> number of the connection
        self._spare: int | None = None

    def run(self) -> None:
        """Return when a worker has ended for a reason other than a grammar: the engine has gone, or it was
        killed.

        SIGTERM raises SystemExit. The workers end, too.
        """
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        try:
            for number in range(len(self._connections)):
                self._assign(number)
            for one in self._connections:
                child_frames.send(one, {"fault": ""})
            self._spare = self._fork()
            while self._has_ended(*os.waitpid(-1, 0)):
                pass
        finally:
            for one in self._connections:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for pid in self._lifelines:  # also one that is stopped
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _has_ended(self, pid: int, status: int) -> bool:
        """Replace a worker; return False if all workers should end."""
        os.close(self._lifelines.pop(pid))
        if pid == self._spare:  # the next one is forked when it is needed
            self._spare = None
            return True
        code, number = os.waitstatus_to_exitcode(status), self._numbers.pop(pid)
        if code == 0 or -code in _FROM_OUTSIDE:
            return False
        if code != RECYCLED:
            child_frames.send(self._connections[number], {"ended": code})
        self._assign(number)
        self._spare = self._fork()
        return True

    def _assign(self, number: int) -> None:
        """Give a connection to the spare worker, or to a new one."""
        pid, self._spare = self._spare or self._fork(), None
        self._numbers[pid] = number
        with suppress(BrokenPipeError):  # it was killed: run() notices
            os.write(self._lifelines[pid], bytes([number]))

    def _fork(self) -> int:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid:
            os.close(reader)
            self._lifelines[pid] = writer
            return pid
        self._run_worker(reader, writer)

    def _run_worker(self, reader: int, writer: int) -> NoReturn:
        """Wait for a connection in a fork, and serve it."""
        code = 0
        try:
            for fd in (writer, *self._lifelines.values()):
                os.close(fd)
            self._worker.warm_up()
            if number := os.read(reader, 1):
                code = 1  # if an exception ends the next line
                mine = self._connections.pop(number[0])
                for one in self._connections:
                    one.close()
                self._worker.serve(mine, reader)
                code = 0
        finally:
            os._exit(code)


if __name__ == "__main__":
    with suppress(OSError, KeyboardInterrupt):  # the engine is gone
        main(sys.argv[1:])
    os._exit(0)
