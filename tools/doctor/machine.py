"""The facts of this machine that a server depends on. Reads only; starts nvidia-smi and the doors' python."""

from __future__ import annotations

import glob
import os
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.supervisor import processes
from tridecode.kernels.build import LIBRARY
from tridecode.kernels.library import KernelError, Library
from tridecode.tools.doctor.gpus import Cuda, inspect_cuda
from tridecode.tools.serve import triton_install
from tridecode.tools.serve.ports import in_words, inodes_listening, who_listens

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
#: files that python_backend leaves in /dev/shm when a server is killed
_REGIONS = "/dev/shm/triton_python_backend_shm_region_*"
_UNLIMITED = -1
_TRITON_OF_WHEEL = {"0.7.0": "2.51.0"}  # nvidia-pytriton -> tritonserver


@dataclass(frozen=True)
class Doors:
    """The Python of the doors, and the tritonserver that would run them. error: why it could not; else "".
    pythonpath: PYTHONPATH is set, which Triton's stub ignores.
    """

    python: str = ""
    python_version: str = ""
    numpy: str | None = None
    server: str = ""
    server_version: str = ""
    error: str = ""
    pythonpath: bool = False


@dataclass(frozen=True)
class Kernels:
    """The library of CUDA kernels. info: architectures, compiler and sources; error: why it does not load."""

    path: str
    info: str = ""
    error: str = ""


@dataclass(frozen=True)
class Machine:
    """Bytes, CPU counts, and limits as reported by the kernel; -1: unlimited.

    memory_limit: the cgroup's, or None. cpu_limit: CPUs that the cgroup grants.
    """

    cuda: Cuda = field(default_factory=Cuda)
    memory: int = 0
    memory_available: int = 0
    memory_limit: int | None = None
    cpus: int = 1
    cpu_limit: float | None = None
    shm_total: int = 0
    shm_free: int = 0
    shm_leftovers: int = 0
    nofile: int = 0
    memlock: int = _UNLIMITED
    infiniband: bool = False
    disk_free: int | None = None
    disk_total: int | None = None
    doors: Doors = field(default_factory=Doors)
    kernels: Kernels = field(default_factory=lambda: Kernels(""))
    ports_taken: dict[str, str] = field(default_factory=dict)
    python: str = ""
    torch: str = ""


def inspect_machine(repository: Path | None = None, ports: dict[str, int] | None = None) -> Machine:
    """Inspect this machine. repository: its disk is inspected; ports: name -> number, default Triton's."""
    memory = _meminfo()
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    disk = shutil.disk_usage(repository) if repository is not None and repository.exists() else None
    cuda = inspect_cuda()
    return Machine(
        cuda=cuda,
        memory=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        memory_limit=_cgroup_memory(),
        cpus=len(os.sched_getaffinity(0)),
        cpu_limit=_cgroup_cpus(),
        shm_total=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free=shm.f_frsize * shm.f_bavail if shm else 0,
        shm_leftovers=0 if _server_runs() else len(glob.glob(_REGIONS)),
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=os.path.isdir("/dev/infiniband"),
        disk_free=disk.free if disk else None,
        disk_total=disk.total if disk else None,
        doors=inspect_doors(),
        kernels=inspect_kernels(),
        ports_taken=_taken(PORTS if ports is None else ports),
        python=".".join(map(str, sys.version_info[:3])),
        torch=metadata.version("torch"),
    )


def inspect_doors() -> Doors:
    """Inspect the doors as `tridecode serve` would prepare them, in a temporary folder."""
    path = os.environ.get("TRIDECODE_DOOR_PYTHON") or sys.executable
    pythonpath = bool(os.environ.get("PYTHONPATH"))
    try:
        door = triton_install.inspect_door_python(path)
    except ConfigError as error:
        return Doors(path, error=str(error), pythonpath=pythonpath)
    known = Doors(door.path, door.version, door.numpy, pythonpath=pythonpath)
    try:
        with tempfile.TemporaryDirectory(prefix="tridecode-doctor-") as folder:
            binary = triton_install.prepare(Path(folder), path).binary
    except ConfigError as error:
        return replace(known, error=str(error))
    return replace(known, server=str(binary), server_version=_server_version(binary))


def _server_version(binary: Path) -> str:
    """Return Triton's version: NVIDIA's containers have a file TRITON_VERSION; for the wheel, only its own
    version is known.
    """
    named = binary.parent.parent / "TRITON_VERSION"
    if named.is_file():
        return named.read_text(errors="replace").strip()[:40]
    try:
        if "pytriton" not in binary.parts:
            return ""
        wheel = metadata.version("nvidia-pytriton")
        known = _TRITON_OF_WHEEL.get(wheel)
        return f"nvidia-pytriton {wheel}" + (f" (Triton {known})" if known else "")
    except metadata.PackageNotFoundError:
        return ""


def inspect_kernels(path: Path = LIBRARY) -> Kernels:
    if not path.exists():
        return Kernels(str(path), error="not built")
    try:
        return Kernels(str(path), info=Library(path).info)
    except (KernelError, OSError, AttributeError) as error:  # AttributeError: a function is missing
        return Kernels(str(path), error=str(error))


def _server_runs() -> bool:
    """Return whether a tritonserver runs here: the regions in /dev/shm are then in use."""
    return any("tritonserver" in " ".join(processes.command_line(pid)[:1]) for pid in processes.all_pids())


def _meminfo() -> dict[str, int]:
    """Bytes of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs if rest.strip().endswith("kB")}


def _first(*paths: str) -> str | None:
    for path in paths:
        try:
            return Path(path).read_text().strip()
        except OSError:
            continue
    return None


def _cgroup_memory() -> int | None:
    text = _first("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if text is None or not text.isdigit() or int(text) >= 1 << 60:  # version 1 writes "unlimited" as 2**63
        return None
    return int(text)


def _cgroup_cpus() -> float | None:
    text = _first("/sys/fs/cgroup/cpu.max")
    if text is None or len(text.split()) != 2 or text.startswith("max"):
        return None
    quota, period = map(int, text.split())
    return quota / period


def _taken(ports: dict[str, int]) -> dict[str, str]:
    """Map "8000 (http)" to the process that listens there."""
    found = {}
    for name, port in ports.items():
        if inodes_listening(port):
            holders = ", ".join(map(in_words, who_listens(port))) or "another user's process"
            found[f"{port} ({name})"] = holders
    return found
