"""Runs a Slurm cluster of one node on this machine, with its own ports and files (make slurm installs it)."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until
from tridecode.tools.serve.ports import free_ports

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo", "scancel")
_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=tests Nodes={host} Default=YES State=UP OverSubscribe=FORCE:8
"""


def missing() -> str:
    """Return why Slurm cannot run here; "" if it can."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"no Slurm here (make slurm): {', '.join(absent)}"
    return "" if os.getuid() == 0 else "Slurm's daemons start steps as root only"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run Slurm's daemons during the block; yields the environment for its programs."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    controller, daemon = free_ports(2)
    place = {
        "host": socket.gethostname().partition(".")[0],
        "user": getpass.getuser(),
        "cpus": os.cpu_count(),
    }
    text = _CONF.format(folder=folder, controller=controller, daemon=daemon, **place)
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = []
    try:
        for name in ("slurmctld", "slurmd"):
            with (folder / f"{name}.log").open("wb") as log:
                command = [_program(name) or name, "-D", "-f", str(folder / "slurm.conf")]
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        wait_until(lambda: _is_idle(environment), 20, "an idle node of Slurm")
        yield environment
    finally:
        for process in reversed(daemons):
            process.terminate()
            process.wait(20)
        print(*(log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log")), sep="\n")


def _is_idle(environment: dict[str, str]) -> bool:
    command = [_program("sinfo") or "sinfo", "--noheader", "--format=%T"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() == "idle"


def cancel(job: object, environment: dict[str, str]) -> None:
    """Cancel all jobs with SIGTERM and time to end; `srun` itself would kill them at once."""
    command = [_program("scancel") or "scancel", "--user", getpass.getuser()]
    subprocess.run(command, env=environment, timeout=20, check=True)


def srun(kind: str) -> list[str]:
    """Return the command of a step of two tasks. kind: value of --mpi."""
    return [_program("srun") or "srun", f"--mpi={kind}", "--ntasks=2", "--overcommit"]
