"""TCP ports: which are free, and which process listens on one, read from /proc (Linux)."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import logging
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.supervisor import processes
from tridecode.tools.serve.triton_access import LOOPBACK

#: where the OpenAI service of a checkpoint listens, unless an option says otherwise
OPENAI_PORT = 9000
#: free_ports searches from here, for each process at a distance from the others
_FIRST_PORT, _PORTS_PER_PROCESS = 12_000, 131
_searched = itertools.count()
_LISTEN, _ESTABLISHED = "0A", "01"  # states in /proc/net/tcp
_log = logging.getLogger("tridecode.serve")


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that are free now.

    They are below the ports that the kernel gives to connections: it could give one of those to somebody
    else before the server that needs it has started. Processes begin their search at different ports.
    """
    found: list[int] = []
    begin, span = _FIRST_PORT, _first_ephemeral_port() - _FIRST_PORT
    while len(found) < count:
        port = begin + (os.getpid() * _PORTS_PER_PROCESS + next(_searched)) % span if span > 0 else 0
        with socket.socket() as one:
            try:
                one.bind((LOOPBACK, port))
            except OSError:
                continue
            found.append(one.getsockname()[1])
    return found


def _first_ephemeral_port() -> int:
    """Return the first port that the kernel gives to connections; 0 if it is unknown."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 0


def inodes_listening(port: int) -> set[int]:
    """The inodes of the sockets that listen on `port`; empty also where /proc is not readable."""
    return {inode for at, state, inode in _sockets() if state == _LISTEN and at == port}


def connections(ports: Collection[int]) -> int:
    """The number of clients that are connected to one of our `ports`."""
    return sum(state == _ESTABLISHED and at in ports for at, state, _ in _sockets())


def _sockets() -> Iterator[tuple[int, str, int]]:
    """Local port, state and inode of every TCP socket."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, rows):
            yield int(fields[1].rpartition(":")[2], 16), fields[3], int(fields[9])


def sockets_of(pid: int) -> set[int]:
    """The inodes of a process' open sockets; empty where it has ended or belongs to another user."""
    found: set[int] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def listens(pid: int, port: int) -> bool:
    return bool(inodes_listening(port) & sockets_of(pid))


def who_listens(port: int) -> list[int]:
    """The processes that listen on `port`, those of other users left out."""
    inodes = inodes_listening(port)
    return [pid for pid in processes.all_pids() if inodes & sockets_of(pid)] if inodes else []


def in_words(pid: int) -> str:
    return f"process {pid} ({' '.join(processes.command_line(pid))[:80]})"


def check_free(setting: str, address: str, port: int) -> None:
    """Raises ConfigError, naming the setting, where a server cannot listen on address:port now."""
    if not 0 < port < 65536:
        raise ConfigError(f"{setting} is {port}; wanted 1 to 65535")
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"address {address!r}: {error.strerror}; wanted a local address") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not count
        try:
            probe.bind(place)
            probe.listen()
        except OSError as error:
            raise ConfigError(_why_not(setting, address, port, error)) from None


def _why_not(setting: str, address: str, port: int, error: OSError) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"{setting}: {address}:{port} cannot be opened: {error.strerror}"
    holder = ", ".join(map(in_words, who_listens(port))) or "another process"
    return f"port {port} on {address} is taken by {holder}; name a free one with {setting}"


def usual_openai_port(address: str) -> int | None:
    """Return OPENAI_PORT; None where its packages are not installed or the port is taken."""
    if any(importlib.util.find_spec(name) is None for name in ("uvicorn", "starlette")):
        _log.info("no OpenAI service: it needs pip install 'tridecode[front]'")
        return None
    try:
        check_free("openai", address, OPENAI_PORT)
    except ConfigError as error:
        _log.warning("no OpenAI service: %s", error)
        return None
    return OPENAI_PORT
