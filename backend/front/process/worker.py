"""One worker of the front: python -m tridecode.backend.front.process.worker NUMBER SOCKET_FD COUNTS_FD PARENT

Reads FrontSettings as JSON from its standard input. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from typing import Any

import msgspec
import uvicorn
import uvloop

from tridecode.backend.base import log_format
from tridecode.backend.front.access import Keys
from tridecode.backend.front.app import application
from tridecode.backend.front.batches.store import Store
from tridecode.backend.front.model import ServedModel
from tridecode.backend.front.process.beats import Beats
from tridecode.backend.front.process.counts import Counts, shared_beats
from tridecode.backend.front.process.http_protocol import protocol
from tridecode.backend.front.reading import Bells
from tridecode.backend.front.service import FrontService
from tridecode.backend.front.settings import FrontSettings
from tridecode.backend.service.monitoring.request_log import RequestLog
from tridecode.backend.supervisor import processes

#: seconds that open requests get after SIGTERM
DRAIN_S = 20
_CONNECTIONS_EVERY_S = 1.0
_BEAT_S = 1.0
#: file descriptors of a worker for everything but accepted clients, with room for those being refused
_OTHER_FILES = 256
#: seconds that a thread keeps the interpreter while another waits for it: the engine link's thread and the
#: event loop take turns for each step
_SWITCH_S = 0.001


_log = logging.getLogger("tridecode.front")


async def serve(settings: FrontSettings, number: int, listening: socket.socket, counts_fd: int) -> None:
    model = ServedModel.connect(settings, Bells(asyncio.get_running_loop()))
    try:
        front = FrontService(
            settings,
            model,
            Keys(settings.key_digests, settings.key_file),
            RequestLog("openai").start(),
            Counts(counts_fd, number, settings.workers),
            Store.of(settings),
        )
        server = uvicorn.Server(config(settings, application(front)))
        _end_by_signals(server)
        watch = asyncio.create_task(_watch(front, server))
        alive = asyncio.create_task(_beat(shared_beats(counts_fd, settings.workers), number))
        prepared = asyncio.create_task(model.prepare())
        await server.serve(sockets=[listening])
        watch.cancel()
        alive.cancel()
        prepared.cancel()
        front.log.close()
    finally:
        model.close()


def _end_by_signals(server: uvicorn.Server) -> None:
    """Let signals end the server and nothing else: uvicorn's own handling would then kill the process, before
    it has said goodbye to the engine."""
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, server.handle_exit, signum, None)


def config(settings: FrontSettings, app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(settings.idle_s),
        timeout_graceful_shutdown=DRAIN_S,
    )


async def _watch(front: FrontService, server: uvicorn.Server) -> None:
    """Report connections."""
    while True:
        front.counts.connections(len(server.server_state.connections))
        await asyncio.sleep(_CONNECTIONS_EVERY_S)


async def _beat(beats: Beats, number: int) -> None:
    """Show the first process that the event loop turns."""
    while True:
        beats.beat(number)
        await asyncio.sleep(_BEAT_S)


def _within_file_limit(settings: FrontSettings) -> FrontSettings:
    """Lower max_connections to what the system allows this process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY or files - _OTHER_FILES >= settings.max_connections:
        return settings
    most = max(1, files - _OTHER_FILES)
    _log.warning("at most %d connections, because this process may have %d open files", most, files)
    return msgspec.structs.replace(settings, max_connections=most)


def main() -> None:
    number, socket_fd, counts_fd, parent = map(int, sys.argv[1:5])
    processes.end_with(parent)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontSettings)
    log_format.configure(f"openai {number}" if settings.workers > 1 else "openai")
    settings = _within_file_limit(settings)
    sys.setswitchinterval(_SWITCH_S)
    os.environ.setdefault("TRIDECODE_OWNER", settings.owner)
    listening = socket.socket(fileno=socket_fd)
    uvloop.run(serve(settings, number, listening, counts_fd))


if __name__ == "__main__":
    main()
