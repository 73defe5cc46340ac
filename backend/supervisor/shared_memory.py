"""Finds and removes shared memory of Triton's python stubs, which a killed server leaves in /dev/shm.

A stub's command line (python_backend, seen on Triton 2.51):
    .../triton_python_backend_stub MODEL.py REGION SIZE GROWTH SERVER_PID BACKEND_DIR HANDLE INSTANCE RUNTIME
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from tridecode.backend.supervisor import processes

SHM = "/dev/shm"
_STUB = "triton_python_backend_stub"


class Stub(NamedTuple):
    """A living python stub of a server."""

    process: processes.ProcessId
    model_file: str  # .../<model>/<version>/model.py
    region: str  # name in /dev/shm
    server_pid: int
    instance: str  # "<model>_<group>_<count>"


def stub_of(pid: int) -> Stub | None:
    """Return the stub with this pid, from its command line; None if it is not a living stub."""
    arguments = processes.command_line(pid)
    if len(arguments) < 9 or os.path.basename(arguments[0]) != _STUB or not arguments[5].isdigit():
        return None
    process = processes.identify(pid)
    return Stub(process, arguments[1], arguments[2], int(arguments[5]), arguments[8]) if process else None


def stubs_of(server_pid: int) -> list[Stub]:
    """Return the living stubs of a server, even if the server itself is gone."""
    pids = processes.children(server_pid) if processes.identify(server_pid) else processes.all_pids()
    found = (stub_of(pid) for pid in pids)
    return [stub for stub in found if stub is not None and stub.server_pid == server_pid]


def mapped_regions(pid: int, regions: Iterable[str]) -> set[str]:
    """Return which of the regions a process has mapped, including those under an unlinked name.

    Returns all of them if the mappings cannot be read: the process has ended or belongs to another user.
    """
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            text = file.read()
    except OSError:
        return set(regions)
    return {region for region in regions if region in text}


def unlink(region: str) -> None:
    """Remove one region by name; do nothing if it is gone or the name is empty."""
    if region and "/" not in region and region not in (".", ".."):
        try:
            os.unlink(os.path.join(SHM, region))
        except OSError:
            pass


def unlink_prefix(prefix: str) -> list[str]:
    """Remove all regions whose name starts with `prefix`; returns their names."""
    if not prefix or not os.path.isdir(SHM):
        return []
    names = [name for name in os.listdir(SHM) if name.startswith(prefix)]
    for name in names:
        unlink(name)
    return names
