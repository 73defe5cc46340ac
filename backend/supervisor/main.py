"""The supervisor: one process per engine that starts the ranks, reports the engine's state to the doors, and
cleans up.

It lives as long as one tritonserver: when that is gone, however it ended, the supervisor ends the remaining
ranks and stubs, and removes the server's shared memory, the sockets and the runtime folder.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from tridecode.backend.base.pauses import PauseWatch
from tridecode.backend.nodes.supervising import Nodes
from tridecode.backend.supervisor import processes, ranks, runtime_dir, shared_memory, state_file
from tridecode.backend.supervisor.door_book import DoorBook
from tridecode.backend.supervisor.engine_life import EngineLife
from tridecode.backend.supervisor.engine_settings import (
    EngineSettings,
    fingerprint,
    host_cache_bytes,
    read_engine_settings,
)
from tridecode.backend.supervisor.front_process import FrontProcess
from tridecode.backend.supervisor.host_cache import HostCache
from tridecode.backend.wire.messages import (
    BEAT_S,
    EngineState,
    Goodbye,
    Hello,
    Ping,
    Stop,
    ToSupervisor,
    Unknown,
    decode,
    encode,
)

TICK_S = 0.1  # interval at which processes are checked
STOP_GRACE_S = 2.0  # time that ranks have to exit by themselves
STUBS_EVERY_S = 2.0  # interval at which the server's stubs and their shared memory are listed
PLACE_EVERY_S = 1.0  # interval at which the runtime folder and the socket are checked

_log = logging.getLogger("tridecode.supervisor")


@dataclass
class Place:
    """The arguments of the supervisor's process: its owner, its engine and its folder."""

    engine_dir: str
    folder: Path
    lock_fd: int
    # process on whose life the engine depends: tritonserver, or the guard that restarts it
    server: processes.ProcessId
    rank_command: list[str]  # command before the options; tests pass a rank without torch
    number: int = 0  # of the engine among those of instance_group


def default_rank_command() -> list[str]:
    override = os.environ.get("TRIDECODE_RANK_COMMAND")
    return shlex.split(override) if override else [sys.executable, "-m", "tridecode.backend.engine"]


class Supervisor:
    """One event loop over one ROUTER socket that doors and ranks connect to."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.control = runtime_dir.endpoint(place.folder / runtime_dir.CONTROL)
        now = time.monotonic()
        last = runtime_dir.read_owner(place.folder)
        self.owner = runtime_dir.owner_of(place.server)
        self.owner.holder_pid = os.getpid()
        self.owner.epoch = last.epoch if last else 0
        self._complaints: dict[str, str] = {}  # subject -> last error logged for it
        self._write_owner()
        ranks.kill_strays(self.control)
        self.nodes = Nodes(place.engine_dir, place.server, place.folder.parent)
        self._host_cache = HostCache()
        self.life = self.nodes.lender(self._rank_options, self._host_options) or EngineLife(
            self._read_settings,
            lambda: fingerprint(place.engine_dir),
            self._start_ranks,
            self._engine_endpoint,
            self.owner.epoch,
            self.nodes.waits_for,
        )
        self.doors = DoorBook(now)
        self.front = FrontProcess(place.engine_dir, place.server, follows=last is not None, now=now)
        self._stubs: dict[int, shared_memory.Stub] = {}
        self._rank_identities: set[bytes] = set()
        self._sent_state: EngineState | None = None
        self._sent_at = -1e9
        self._written: state_file.StateFile | None = None
        self._touched_at = 0.0
        self._stubs_at = -1e9
        self._place_at = now
        self._stop_reason = ""
        self._signalled = False
        self._write_state(now)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 100)  # a frozen door loses states instead of filling our memory
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.bind(self.control)

    def run(self) -> None:
        """Serve until the server is gone, no door is left, or a stop signal arrives; then clean up."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        watch = PauseWatch(time.monotonic(), TICK_S)
        while not self._stop_reason:
            self._socket.poll(int(TICK_S * 1000))
            now = time.monotonic()
            if pause := watch.turn(now):
                _log.warning("the supervisor itself was paused for %.1f s", pause)
                self.life.forgive(now, pause)
                self.doors.forgive(now)
            self._receive(now)
            self.nodes.tick(now, self.life)
            self.life.tick(now)
            self._tell(now)
            self._look_around(now)
            self._keep_place(now)
        self._end()

    def _on_signal(self, signum: int, _frame: object) -> None:
        self._signalled = True
        self._stop_reason = self._stop_reason or f"the supervisor got {signal.Signals(signum).name}"

    # ------------------------------------------------------------ receiving

    def _receive(self, now: float) -> None:
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            try:
                message: ToSupervisor = decode(frames[-1], ToSupervisor)
            except (msgspec.DecodeError, IndexError) as error:
                _log.warning("a message that is none of ours: %s", error)
                continue
            if isinstance(message, Hello):
                self._hello(identity, message, now)
            elif isinstance(message, Ping):
                if not self.doors.ping(identity, now):
                    self._send(identity, Unknown())
            elif isinstance(message, Goodbye):
                self.doors.goodbye(identity, now)
            else:
                self._rank_identities.add(identity)
                self.life.hear(message, now)

    def _hello(self, identity: bytes, hello: Hello, now: float) -> None:
        alone = len(self.doors) == 0
        if self.doors.hello(identity, hello, now):
            _log.info("door %s (pid %d) has come", hello.door, hello.pid)
            self.life.new_door(now, alone)
        if self.place.number == 0:  # only this supervisor starts and ends it
            self.front.hear(hello)
        self._send(identity, self._state())

    # ------------------------------------------------------------ sending

    def _send(self, identity: bytes, message: msgspec.Struct) -> None:
        self._socket.send_multipart([identity, encode(message)])

    def _state(self) -> EngineState:
        return msgspec.structs.replace(self.life.state, draining=self._draining())

    def _draining(self) -> bool:
        return (self.place.folder.parent / runtime_dir.DRAINING).exists()

    def _tell(self, now: float) -> None:
        state = self._state()
        if state == self._sent_state and now - self._sent_at < BEAT_S:
            return
        if self._sent_state is None or (state.phase, state.epoch) != (
            self._sent_state.phase,
            self._sent_state.epoch,
        ):
            level = logging.WARNING if state.phase in ("down", "failed") else logging.INFO
            _log.log(level, "engine epoch %d is %s: %s", state.epoch, state.phase, state.detail)
        for identity in [*self.doors.identities, *self._rank_identities]:
            self._send(identity, state)
        self._sent_state, self._sent_at = state, now
        self._write_state(now)

    def _write_state(self, now: float) -> None:
        running, waiting = self.life.load
        content = state_file.StateFile(
            self._state(), self.place.engine_dir, os.getpid(), running, waiting, self.doors.guests
        )
        if content == self._written and now - self._touched_at <= state_file.TOUCH_S:
            return
        try:
            if content != self._written:
                state_file.write(self.place.folder, content)
            else:
                state_file.touch(self.place.folder)
        except OSError as error:
            self._complain("the state file", error)
            self._written = None  # incomplete: to be rewritten once that works again
        else:
            self._written = content
            self._complaints.pop("the state file", None)
        self._touched_at = now

    def _write_owner(self) -> None:
        try:
            runtime_dir.write_owner(self.place.lock_fd, self.owner)
        except OSError as error:
            self._complain("the record of the runtime folder", error)

    def _complain(self, what: str, error: OSError) -> None:
        """Log once that a file could not be written; the engine keeps serving without it."""
        if self._complaints.get(what) != str(error):
            self._complaints[what] = str(error)
            _log.error("%s cannot be written (%s); serving continues without it", what, error)

    # ------------------------------------------------------------ the runtime folder

    def _keep_place(self, now: float) -> None:
        """Recreate the runtime folder and the socket if they were deleted."""
        if now - self._place_at < PLACE_EVERY_S or self._stop_reason:
            return
        self._place_at = now
        try:
            if not runtime_dir.holds(self.place.folder, self.place.lock_fd):
                self._restore_folder()
            control = self.place.folder / runtime_dir.CONTROL
            if not self._stop_reason and not control.exists():  # set if restoring failed
                self._socket.bind(self.control)  # the old connections stay open
                _log.warning("the socket %s was deleted and has been recreated", control)
        except (OSError, zmq.ZMQError) as error:
            self._complain(f"the runtime folder {self.place.folder}", OSError(str(error)))

    def _restore_folder(self) -> None:
        fd = runtime_dir.restore(self.place.folder)
        if fd is None:
            self._stop_reason = f"{self.place.folder} was deleted and another supervisor has taken its place"
            return
        os.close(self.place.lock_fd)
        self.place.lock_fd = fd
        self._written = None
        self._write_owner()
        _log.warning("the runtime folder %s was deleted and has been recreated", self.place.folder)

    # ------------------------------------------------------------ the ranks

    def _engine_endpoint(self, epoch: int) -> str:
        return runtime_dir.endpoint(self.place.folder / f"engine-{epoch}.sock")

    def _read_settings(self) -> EngineSettings:
        self.nodes.check()
        settings = read_engine_settings(self.place.engine_dir, self.place.number, self.nodes.size)
        if self.place.number == 0:  # one service for all engines of the model
            self.front.want(settings.front)
        return settings

    def _rank_options(self, epoch: int) -> list[str]:
        """Return the command of a rank, before the options that differ between ranks."""
        options = ["--engine-dir", self.place.engine_dir, "--control", self.control, "--epoch", str(epoch)]
        return [*self.place.rank_command, *options, "--endpoint", self._engine_endpoint(epoch)]

    def _host_options(self, rank: int, node_ranks: int) -> list[str]:
        """Return the options that give a rank of this node its part of the host tier."""
        total = host_cache_bytes(self.place.engine_dir)
        return self._host_cache.options(rank, node_ranks, total)

    def _start_ranks(self, epoch: int, settings: EngineSettings, now: float) -> ranks.RankGroup:
        self.owner.epoch = epoch
        self._write_owner()
        self._rank_identities.clear()
        for old in self.place.folder.glob("engine-*"):
            old.unlink(missing_ok=True)
        options = [*self._rank_options(epoch), "--world", str(settings.world), *settings.device_options]
        here = settings.world // self.nodes.size
        commands = [
            [*options, "--rank", str(rank), *(self._host_options(rank, here) if rank < here else ())]
            for rank in range(settings.world)
        ]
        return self.nodes.start_ranks(commands, settings, epoch, now) or ranks.RankGroup(commands, now)

    # ------------------------------------------------------------ the server and its stubs

    def _look_around(self, now: float) -> None:
        self.front.look(now)
        if not processes.alive(self.place.server):
            self._stop_reason = self._stop_reason or f"the server (pid {self.place.server.pid}) is gone"
        elif now - self._stubs_at > STUBS_EVERY_S:
            self._stubs_at = now
            self._stubs = {stub.process.pid: stub for stub in self._find_stubs()} or self._stubs
            self.doors.look(now)
            # the doors leave when a drain begins, and the engine stays for the open requests of guests
            if self.doors.abandoned(now) and not (self.doors.guests and self._draining()):
                self._stop_reason = "no door is left"

    def _find_stubs(self) -> list[shared_memory.Stub]:
        """Return the living stubs of the server, and of each server that a door has named."""
        servers = {self.place.server.pid, *(door.hello.server_pid for door in self.doors.doors)}
        return [stub for server in servers for stub in shared_memory.stubs_of(server)]

    def _end(self) -> None:
        """Ask the ranks to stop, kill those that remain, then remove all files."""
        _log.info("stopping: %s", self._stop_reason)
        with_server = (self.place.folder.parent / runtime_dir.STOPPING).exists()
        self.life.stop(self._stop_reason, with_server)
        self._tell(time.monotonic())
        for identity in self._rank_identities:
            self._send(identity, Stop())
        deadline = time.monotonic() + STOP_GRACE_S
        while not self.life.gone() and time.monotonic() < deadline:
            self.nodes.tick(time.monotonic(), self.life)
            time.sleep(0.02)
        if left := self.life.living():
            # no door is left that could have an open request
            _log.info("ranks still ran %g s after the stop, and end now: %s", STOP_GRACE_S, left)
        if not self._signalled or with_server or not processes.alive(self.place.server):
            self.front.end()  # else it starts the next supervisor, as a door would
        self.life.kill()
        while not self.life.gone():
            self.nodes.tick(time.monotonic(), self.life)
            time.sleep(0.02)
        self._host_cache.close()
        self.nodes.close()
        if not processes.alive(self.place.server):
            self._clean_after_server()
        self._socket.close()
        self._context.term()
        runtime_dir.leave(self.place.folder, self.place.lock_fd)

    def _clean_after_server(self) -> None:
        """Clean up after a killed server: hanging stubs, and the shared memory of all its stubs."""
        stubs = [*self._stubs.values(), *self._find_stubs()]
        for stub in stubs:
            if processes.alive(stub.process):
                _log.warning("killing stub %d, whose server is gone", stub.process.pid)
                processes.kill(stub.process)
        for region in {stub.region for stub in stubs} | {door.hello.shm_region for door in self.doors.doors}:
            shared_memory.unlink(region)
