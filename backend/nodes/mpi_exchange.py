"""`python -m tridecode.backend.nodes.mpi_exchange`: one exchange over MPI, printed as JSON; then MPI ends.

It is a separate process, because MPI libraries abort their process on errors, which must not be Triton's or
an engine's. Node 0 offers its addresses, the others try each, and the first that all of them reach is chosen.
No pickles: each node's part is JSON in a buffer of fixed size.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
from typing import Any

from tridecode.backend.nodes import addresses, mpi_library
from tridecode.backend.nodes.rendezvous import ADDRESS, FIRST_PORT, NUM_PORTS, PORT

_PART_BYTES = 16 << 10
_PROBE_S = 2.0
_NONCE_BYTES = 16


def gather(communicator: Any, part: dict) -> list[dict]:
    """Return every node's part, by index."""
    data = json.dumps(part).encode()
    if len(data) > _PART_BYTES:
        raise ValueError(f"this node's part has {len(data)} bytes; wanted at most {_PART_BYTES}")
    received = bytearray(_PART_BYTES * communicator.size)
    communicator.Allgather(bytearray(data.ljust(_PART_BYTES)), received)
    parts = [received[start : start + _PART_BYTES] for start in range(0, len(received), _PART_BYTES)]
    return [json.loads(bytes(one)) for one in parts]


class Prober:
    """Node 0's listener during the exchange: proves to each client that it is node 0."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._socket = socket.create_server(("", 0), backlog=1024)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(_PROBE_S)
                try:
                    connection.sendall(_proof(self._secret, connection.recv(_NONCE_BYTES)))
                except OSError:
                    pass

    def close(self) -> None:
        self._socket.close()


def _proof(secret: str, nonce: bytes) -> bytes:
    return hmac.new(secret.encode(), nonce, hashlib.sha256).digest()


def is_node_0(address: str, port: int, secret: str) -> bool:
    """Return whether node 0 itself, not another machine with the same address, answers there."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        with socket.create_connection((address, port), _PROBE_S) as connection:
            connection.settimeout(_PROBE_S)
            connection.sendall(nonce)
            answer = connection.recv(32, socket.MSG_WAITALL)
    except OSError:
        return False
    return hmac.compare_digest(answer, _proof(secret, nonce))


def choose_address(offered: list[str], reached: list[list[str]], hosts: list[str]) -> str:
    """Return the first offered address that every node reaches.

    Raises ValueError that names a node without one.
    """
    for address in offered:
        if all(address in one for one in reached):
            return address
    for index, one in enumerate(reached):
        if not one:
            raise ValueError(
                f"node {index} ({hosts[index]}) reaches node 0 ({hosts[0]}) at none of its addresses, "
                f"{', '.join(offered)}; wanted a route and open ports, or {ADDRESS} on node 0"
            )
    raise ValueError(
        f"no address of node 0 ({hosts[0]}: {', '.join(offered)}) is reached by all nodes; wanted {ADDRESS}"
    )


def free_port() -> int:
    """Return the first of NUM_PORTS consecutive free ports. Raises ValueError."""
    if os.environ.get(PORT):
        return int(os.environ[PORT])
    for first in range(FIRST_PORT, FIRST_PORT + 100 * NUM_PORTS, NUM_PORTS):
        if all(map(_is_free, range(first, first + NUM_PORTS))):
            return first
    raise ValueError(f"no {NUM_PORTS} consecutive free ports from {FIRST_PORT} on; free some or set {PORT}")


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


def exchange(communicator: Any) -> dict:
    """Agree on address, port, secret and hosts, the same on all nodes.

    Raises ValueError with the reason for failure.
    """
    secret = secrets.token_hex(32)
    prober = Prober(secret) if communicator.rank == 0 else None
    mine: dict[str, Any] = {"host": socket.gethostname(), "machine": addresses.machine_id()}
    if prober is not None:
        named = os.environ.get(ADDRESS)
        offered = [named] if named else addresses.candidates()
        mine.update(secret=secret, probe=prober.port, addresses=offered)
        try:
            mine["port"] = free_port()
        except ValueError as error:
            mine["error"] = str(error)
    nodes = gather(communicator, mine)
    first, hosts = nodes[0], [node["host"] for node in nodes]
    if "error" in first:
        raise ValueError(f"node 0 ({hosts[0]}): {first['error']}")
    offered = first["addresses"]
    if len({node["machine"] for node in nodes}) == 1 and not os.environ.get(ADDRESS):
        offered = ["127.0.0.1"]
    mine = {"reached": [one for one in offered if is_node_0(one, first["probe"], first["secret"])]}
    reached = [node["reached"] for node in gather(communicator, mine)]
    if prober is not None:
        prober.close()
    address = choose_address(offered, reached, hosts)
    return {"address": address, "port": first["port"], "secret": first["secret"], "hosts": hosts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--library", default="", help="the name of the launcher's own MPI library")
    arguments = parser.parse_args()
    try:
        from mpi4py import MPI  # starts MPI, and ends this process if that fails
    except (ImportError, RuntimeError) as error:
        print(
            f"MPI cannot be loaded: {' '.join(str(error).split())}; {_wanted(arguments.library)}",
            file=sys.stderr,
        )
        return 1
    communicator = MPI.COMM_WORLD
    found, wanted = (communicator.rank, communicator.size), (arguments.index, arguments.size)
    if found != wanted:
        print(
            f"the launcher says node {wanted[0]} of {wanted[1]}, and MPI ({_library(MPI)}) says {found[0]} "
            f"of {found[1]}; {_wanted(arguments.library)}",
            file=sys.stderr,
        )
        return 1
    try:
        result = exchange(communicator)
    except ValueError as error:
        print(error, file=sys.stderr)
        MPI.Finalize()
        return 1
    MPI.Finalize()
    print(json.dumps(result), flush=True)
    return 0


def _wanted(library: str) -> str:
    """Advise what to do if the library is not the launcher's. library: name of the launcher's, "" if
    unknown.
    """
    if not library:
        return "wanted a launcher of the same MPI, e.g. srun --mpi=pmix"
    return (
        f"wanted {library}, the launcher's own MPI, e.g. by pip install {mpi_library.PACKAGES[library]}, or "
        f"its path in {mpi_library.LIBRARY}"
    )


def _library(mpi: Any) -> str:
    return mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")


if __name__ == "__main__":
    sys.exit(main())
