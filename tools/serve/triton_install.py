"""Finds tritonserver and prepares what it needs to run our doors: backend directory, library path, PATH.

Two kinds of installation are supported: a tritonserver on PATH (NVIDIA's container), whose python backend has
one stub, and the nvidia-pytriton wheel, which ships a server and a stub per python version, but no backend
directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.serve.checks import is_plain_path

#: lower bound of requires-python in pyproject.toml
OLDEST_PYTHON = (3, 10)
_STUB = "triton_python_backend_stub"
_LEFT_OUT = ("AIP_MODE",)  # AIP_MODE=PREDICTION opens one more HTTP port, with an unrestricted control API

# Runs in the doors' Python, isolated like Triton's stub: without PYTHONPATH and the current folder.
_QUESTIONS = """
import importlib.metadata, importlib.util, json, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def place(name):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return list(spec.submodule_search_locations or [spec.origin])[0] if spec else None
wanted = ("tridecode.backend", "zmq", "msgspec", "numpy", "google.protobuf")
print(json.dumps({
    "path": sys.executable,
    "version": "%d.%d" % sys.version_info[:2],
    "libdir": sysconfig.get_config_var("LIBDIR") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None,
    "numpy": version("numpy"),
    "missing": [name for name in wanted if place(name) is None],
    "pytriton": place("pytriton"),
}))
"""


@dataclass(frozen=True)
class DoorPython:
    """The python of the doors.

    path: the executable itself, also if a shim was named. version: "3.11". libdir: folder of its shared
    libpython, if it has one. missing: packages that a door needs. pytriton: folder of that package, if
    installed.
    """

    path: str
    version: str
    libdir: str | None
    numpy: str | None
    missing: tuple[str, ...]
    pytriton: str | None


@dataclass(frozen=True)
class TritonInstall:
    """The command for tritonserver: the program, its first arguments, and its environment."""

    binary: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]


def inspect_door_python(path: str) -> DoorPython:
    """Inspect a python by running it. Raises ConfigError if it cannot be run."""
    try:
        answer = subprocess.run(
            [path, "-I", "-c", _QUESTIONS], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"the doors' python {path} cannot be run ({text.strip()}); name another with --door-python or "
            "TRIDECODE_DOOR_PYTHON"
        ) from None
    found = json.loads(answer.stdout)
    return DoorPython(**{**found, "missing": tuple(found["missing"])})


def prepare(folder: Path, door_python: str | None = None) -> TritonInstall:
    """Create the backend directory in `folder` for the doors' python; existing links stay.

    door_python: default TRIDECODE_DOOR_PYTHON, else the running python. Raises ConfigError, with the remedy,
    if there is no tritonserver or no stub for that python's version, or if that python lacks a package.
    """
    door = inspect_door_python(door_python or os.environ.get("TRIDECODE_DOOR_PYTHON") or sys.executable)
    _check_python(door)
    on_path = shutil.which("tritonserver")
    if on_path:
        return _from_path(Path(on_path).resolve(), door, folder)
    site = door.pytriton or inspect_door_python(sys.executable).pytriton
    if site is None:
        raise ConfigError(
            f"no tritonserver: neither on PATH, nor the package nvidia-pytriton in {sys.executable} or "
            f"{door.path}; pip install nvidia-pytriton, or run in NVIDIA's Triton container"
        )
    return _from_wheel(Path(site), door, folder)


def _check_python(door: DoorPython) -> None:
    if tuple(map(int, door.version.split("."))) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise ConfigError(
            f"the doors' python {door.path} is {door.version}; wanted {oldest} or later: "
            "name another with --door-python or TRIDECODE_DOOR_PYTHON"
        )
    if door.missing:
        raise ConfigError(
            f"the doors' python {door.path} cannot import {', '.join(door.missing)} "
            "(Triton's stub ignores PYTHONPATH); pip install tridecode there"
        )


def _from_path(binary: Path, door: DoorPython, folder: Path) -> TritonInstall:
    backends = binary.parent.parent / "backends"
    stub = backends / "python" / _STUB
    if not stub.exists():
        raise ConfigError(f"{binary} has no python backend; wanted {stub}")
    wanted = _stub_version(stub)
    if wanted and wanted != door.version:
        raise ConfigError(
            f"{stub} is built for python {wanted}; the doors' python {door.path} is {door.version}: "
            f"name a python {wanted} with --door-python or TRIDECODE_DOOR_PYTHON"
        )
    if not is_plain_path(backends):  # Triton hands it to bash
        backends = link(folder / "triton-backends", backends)
    return TritonInstall(binary, ("--backend-directory", str(backends)), _environment(door, folder, []))


def _stub_version(stub: Path) -> str | None:
    """Return the Python version that a stub is linked to, by the name of its libpython."""
    match = re.search(rb"libpython(3\.\d+)", stub.read_bytes())
    return match.group(1).decode() if match else None


def _from_wheel(site: Path, door: DoorPython, folder: Path) -> TritonInstall:
    server = site / "tritonserver"
    stubs = server / "python_backend_stubs"
    stub = stubs / door.version / _STUB
    if not stub.exists():
        known = ", ".join(sorted(path.name for path in stubs.glob("3.*"))) or "none"
        raise ConfigError(
            f"{site} has python stubs for {known}; the doors' python {door.path} is {door.version}: "
            "name one of those versions with --door-python or TRIDECODE_DOOR_PYTHON"
        )
    if door.numpy and int(door.numpy.split(".")[0]) >= 2:
        raise ConfigError(
            f"the doors' python {door.path} has numpy {door.numpy}; this server's python stubs "
            "need numpy < 2 (with numpy 2 every output is empty). Give them an environment of their own: "
            f"python{door.version} -m venv doors && doors/bin/pip install tridecode 'numpy<2', "
            "then --door-python doors/bin/python or TRIDECODE_DOOR_PYTHON"
        )
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True, exist_ok=True)
    shipped = server / "backends" / "python"
    for source in (shipped / "libtriton_python.so", shipped / "triton_python_backend_utils.py", stub):
        link(backend / source.name, source)
    arguments = ("--backend-directory", str(folder / "backends"), "--cache-directory", str(server / "caches"))
    libraries = [str(site.parent / "nvidia_pytriton.libs")]
    return TritonInstall(server / "bin" / "tritonserver", arguments, _environment(door, folder, libraries))


def _environment(door: DoorPython, folder: Path, libraries: list[str]) -> dict[str, str]:
    """The server's environment: the stub uses the first python3 on PATH, and libpython from LD_LIBRARY_PATH.

    The engine's own PATH, LD_LIBRARY_PATH and python are passed on in TRIDECODE_ENGINE_…, see
    supervisor/launch.py.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    for name in ("PATH", "LD_LIBRARY_PATH"):
        environment.setdefault(f"TRIDECODE_ENGINE_{name}", os.environ.get(name, ""))
    environment.setdefault("TRIDECODE_ENGINE_PYTHON", sys.executable)
    environment["PATH"] = os.pathsep.join(
        filter(None, [_folder_of_python3(door, folder), os.environ.get("PATH")])
    )
    if door.libdir:
        libraries = [door.libdir, *libraries]
    libraries = [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    if libraries:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    return environment


def _folder_of_python3(door: DoorPython, folder: Path) -> str:
    """Return a folder whose `python3` is the doors' Python: its own, or one with a link to it."""
    path = Path(door.path)
    beside = path.with_name("python3")
    if beside.exists() and beside.resolve() == path.resolve():
        return str(path.parent)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    link(folder / "bin" / "python3", path)
    return str(folder / "bin")


def link(path: Path, target: Path) -> Path:
    """Make `path` a symbolic link to `target`, replacing a file or link; returns `path`."""
    if not (path.is_symlink() and os.readlink(path) == str(target)):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    return path
