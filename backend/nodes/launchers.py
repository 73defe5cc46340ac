"""This node's place in its job, from the environment variables of its launcher. No torch.

Only one server per node counts as a node: `mpirun -n <nodes> tritonserver …`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.nodes.mpi_library import MPICH, OPEN_MPI

NODES = "TRIDECODE_NODES"  # host0:port,host1,… without MPI; "none": a single server, whatever launched it
NODE = "TRIDECODE_NODE"  # this node's index in it
SIZE = "TRIDECODE_NODES_SIZE"  # number of nodes, where TRIDECODE_NODES names node 0 only
SECRET_FILE = "TRIDECODE_NODES_SECRET_FILE"
MAX_NODES = 1024


@dataclass(frozen=True)
class NodePlace:
    """index: of this node, from 0. size: number of nodes. launcher: in words.

    hosts, port, secret_file: for a job without MPI, which the environment describes completely; else empty.
    hosts may name node 0 only. libraries: names of the MPI library, see mpi_library; (): not known.
    """

    index: int
    size: int
    launcher: str
    hosts: tuple[str, ...] = ()
    port: int = 0
    secret_file: str = ""
    libraries: tuple[str, ...] = ()

    @property
    def by_mpi(self) -> bool:
        return not self.hosts


class _Launcher(NamedTuple):
    """rank, sizes: names of variables; the first of `sizes` that is set is used. libraries: see NodePlace.
    needs: another variable that must be set.
    """

    name: str
    rank: str
    sizes: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    needs: str = ""


_STEP_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
#: the first launcher whose variables are set is used. srun sets SLURM_PROCID also for a batch script, which
#: is not a job step; `srun --mpi=pmix` sets PMIX_RANK and leaves the size to Slurm's own variables. Both MPIs
#: can speak PMI and PMIx: there the second library is used if the first is not installed
_LAUNCHERS = (
    _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), (OPEN_MPI,)),
    _Launcher("MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), (MPICH,)),
    _Launcher("MPICH's mpirun", "PMI_RANK", ("PMI_SIZE",), (MPICH, OPEN_MPI)),
    _Launcher("srun --mpi=pmix", "PMIX_RANK", _STEP_SIZES, (OPEN_MPI, MPICH), "SLURM_STEP_ID"),
    _Launcher("srun", "SLURM_PROCID", _STEP_SIZES, needs="SLURM_STEP_ID"),
)


def find_place(environment: Mapping[str, str]) -> NodePlace | None:
    """Return this node's place; None for a single server. Raises ConfigError for inconsistent values."""
    named = environment.get(NODES, "").strip()
    if named == "none":
        return None
    if named:
        return _named_place(named, environment)
    for launcher in _LAUNCHERS:
        rank = environment.get(launcher.rank)
        size = next((environment[name] for name in launcher.sizes if environment.get(name)), None)
        if rank is None or size is None or (launcher.needs and not environment.get(launcher.needs)):
            continue
        index, number = _number(launcher.rank, rank), _number(launcher.sizes[0], size)
        place = NodePlace(index, number, launcher.name, libraries=launcher.libraries)
        _check(place, launcher.rank)
        return place if place.size > 1 else None
    return None


def _named_place(named: str, environment: Mapping[str, str]) -> NodePlace | None:
    hosts = [part.strip() for part in named.split(",")]
    first, port = _host_and_port(hosts[0])
    names = (first, *(host.rsplit(":", 1)[0] if ":" in host else host for host in hosts[1:]))
    size = _number(SIZE, environment.get(SIZE, "")) if environment.get(SIZE) else len(names)
    if len(names) not in (1, size):
        raise ConfigError(f"{NODES} names {len(names)} hosts and {SIZE} is {size}; wanted as many, or node 0")
    index = _number(NODE, environment.get(NODE, ""))
    secret_file = environment.get(SECRET_FILE, "")
    place = NodePlace(index, size, NODES, names, port, secret_file)
    _check(place, NODE)
    if size > 1 and not secret_file:
        raise ConfigError(
            f"{NODES} is set and {SECRET_FILE} is not; wanted a file with the same content on all nodes"
        )
    return place if size > 1 else None


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{NODES} begins with {text!r}; wanted HOST:PORT of node 0, as in gpu-1:7117")
    return host.strip("[]"), int(port)


def _number(name: str, text: str) -> int:
    if not text.strip().isdigit():
        raise ConfigError(f"the environment has {name} = {text!r}; wanted a whole number")
    return int(text)


def _check(place: NodePlace, name: str) -> None:
    if not 1 <= place.size <= MAX_NODES:
        raise ConfigError(f"{place.launcher} started {place.size} nodes; wanted 1 to {MAX_NODES}")
    if place.index >= place.size:
        raise ConfigError(f"{name} is {place.index}; wanted less than the number of nodes, {place.size}")


def inherited_fds(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the file descriptor through which MPICH's mpirun serves the process, for our MPI helper to
    inherit.
    """
    text = environment.get("PMI_FD", "")
    if not text.isdigit():
        return ()
    try:
        os.fstat(int(text))
    except OSError:
        return ()  # not inherited: MPI_Init will report it
    return (int(text),)
