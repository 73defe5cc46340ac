"""Finds the address at which the supervisors of a job meet, and their secret, over MPI or from the
environment.

A runtime folder keeps the result of the MPI exchange for the life of the server, because MPI can exchange it
only once. A supervisor that replaces a killed one reads it there.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from tridecode.backend.base.errors import ConfigError, EngineDownError, TridecodeError
from tridecode.backend.nodes import addresses, mpi_library
from tridecode.backend.nodes.launchers import SECRET_FILE, NodePlace, inherited_fds
from tridecode.backend.supervisor import processes, runtime_dir

# address of node 0, if others reach it by an address unknown to its kernel
ADDRESS = "TRIDECODE_NODE_ADDRESS"
PORT = "TRIDECODE_NODES_PORT"  # port of node 0's first engine, with MPI
FIRST_PORT = 7117  # first port of the search for free ports
NUM_PORTS = 8  # largest number of engines of one repository that span nodes
EXCHANGE_S = 600.0  # time for all nodes to start: MPI waits for the last one
MIN_SECRET = 16  # characters
KEEP_S = 1.0  # interval between checks for the record

_RECORD = "meeting.json"
_log = logging.getLogger("tridecode.nodes")


class Meeting(msgspec.Struct, frozen=True):
    """The meeting of a job. address, port: those of node 0's first engine. secret: the job's. hosts: those of
    the nodes, or only node 0's.
    """

    address: str
    port: int
    secret: str
    hosts: tuple[str, ...]

    def name(self, node: int) -> str:
        return f"node {node} ({self.hosts[node]})" if node < len(self.hosts) else f"node {node}"


def find(place: NodePlace, server: processes.ProcessId, base: Path) -> Meeting:
    """Return the meeting of this server's job. With MPI, block until all nodes have joined.

    base: the folder of the runtime folders. Raises ConfigError or EngineDownError.
    """
    return _over_mpi(place, server, base) if place.by_mpi else _from_environment(place)


def _from_environment(place: NodePlace) -> Meeting:
    try:
        secret = Path(place.secret_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{SECRET_FILE} names {place.secret_file}, which cannot be read: {error}") from None
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"{place.secret_file} ({SECRET_FILE}) holds {len(secret)} characters; wanted {MIN_SECRET} or "
            "more, as from: openssl rand -hex 32"
        )
    return Meeting(place.hosts[0], place.port, secret, place.hosts)


def _over_mpi(place: NodePlace, server: processes.ProcessId, base: Path) -> Meeting:
    folder = base / f"nodes-{server.pid}-{server.start}"
    deadline = time.monotonic() + EXCHANGE_S
    while True:
        known = _read(folder)
        if known is not None:
            return known
        fd = runtime_dir.lock(folder)
        if fd is not None:
            break
        if time.monotonic() > deadline:
            raise EngineDownError(f"another engine's exchange over MPI has not ended for {EXCHANGE_S:g} s")
        time.sleep(0.05)
    try:
        runtime_dir.write_owner(fd, runtime_dir.owner_of(server))
        meeting = _read(folder) or _ask_mpi(place, server.pid)
        _write(folder, meeting)
        return meeting
    finally:
        os.close(fd)


def _write(folder: Path, meeting: Meeting) -> None:
    draft = folder / (_RECORD + ".new")
    draft.touch(mode=0o600)
    draft.write_bytes(msgspec.json.encode(meeting))
    os.replace(str(draft), str(folder / _RECORD))


def _read(folder: Path) -> Meeting | None:
    try:
        return msgspec.json.decode((folder / _RECORD).read_bytes(), type=Meeting)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _ask_mpi(place: NodePlace, server: int) -> Meeting:
    """Exchange over MPI. server: pid of the server, which the launcher has started."""
    command = [sys.executable, "-m", "tridecode.backend.nodes.mpi_exchange"]
    command += ["--index", str(place.index), "--size", str(place.size)]
    if place.libraries:
        command += ["--library", place.libraries[0]]
    helper = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=inherited_fds(os.environ),
        env={**os.environ, **mpi_library.chosen(place.libraries, server, os.environ)},
    )
    try:
        output, errors = helper.communicate(timeout=EXCHANGE_S)
    except subprocess.TimeoutExpired:
        helper.kill()
        helper.communicate()
        raise EngineDownError(
            f"not all of the {place.size} nodes of {place.launcher} have met over MPI within {EXCHANGE_S:g} s"
        ) from None
    try:
        return msgspec.json.decode(output.strip().rpartition("\n")[2], type=Meeting)
    except msgspec.DecodeError:
        lines = [line for line in errors.strip().splitlines() if line.strip()]
        said = lines[-1] if len(lines) < 2 else f"{lines[0]} … {lines[-1]}"
        raise ConfigError(
            f"node {place.index} of {place.size} ({place.launcher}): the exchange over MPI ended with exit "
            f"code {helper.returncode}: {said or 'no message'} "
            "(docs/guides/nodes.md names the way without MPI)"
        ) from None


def keep(meeting: Meeting, server: processes.ProcessId, base: Path) -> bool:
    """Rewrite the record if it was deleted, since MPI can exchange it only once. Return whether it was."""
    folder = base / f"nodes-{server.pid}-{server.start}"
    if (folder / _RECORD).exists():
        return False
    try:
        fd = runtime_dir.restore(folder)
        if fd is None:
            return False  # another engine's supervisor is about to write it
        try:
            runtime_dir.write_owner(fd, runtime_dir.owner_of(server))
            _write(folder, meeting)
        finally:
            os.close(fd)
    except OSError:
        return False  # a full disk: the next check tries again
    return True


def clean(server: processes.ProcessId, base: Path) -> None:
    """Remove the record of a server that has ended."""
    folder = base / f"nodes-{server.pid}-{server.start}"
    if folder.exists():
        runtime_dir.remove(folder)


class Search:
    """Runs `find` on a separate thread, because the supervisor must answer its doors meanwhile.

    meeting: set once found. own_address, is_ours: node 0's, see addresses.own_address. error: why it cannot
    be found; `again` retries.
    """

    def __init__(self, place: NodePlace, server: processes.ProcessId, base: Path) -> None:
        self._arguments = (place, server, base)
        self.own_address, self.is_ours = "", False
        self._kept_at = 0.0
        self.meeting: Meeting | None = None
        self.error: TridecodeError | None = None
        self.again()

    def again(self) -> None:
        self.error = None
        threading.Thread(target=self._run, name="nodes-meeting", daemon=True).start()

    def keep(self, now: float) -> None:
        """Check the record every KEEP_S; may be called often."""
        place, server, base = self._arguments
        if self.meeting is None or not place.by_mpi or now - self._kept_at < KEEP_S:
            return
        self._kept_at = now
        if keep(self.meeting, server, base):
            _log.warning("the record of the nodes' meeting was deleted and has been rewritten")

    def _run(self) -> None:
        try:
            meeting = find(*self._arguments)
            if self._arguments[0].index == 0:
                self.own_address, self.is_ours = addresses.own_address(meeting.address)
            self.meeting = meeting
        except TridecodeError as error:
            self.error = error
        except Exception as error:  # shown to the doors like any other reason
            self.error = EngineDownError(f"the nodes cannot meet: {type(error).__name__}: {error}")
