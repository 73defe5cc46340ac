"""Report files and tables; every report has the machine, versions and command of its figures."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from tridecode.backend.base.errors import ConfigError

_PACKAGES = (
    "tridecode",
    "torch",
    "transformers",
    "vllm",
    "ctranslate2",
    "numpy",
    "tokenizers",
    "tritonclient",
    "grpcio",
    "nvidia-pytriton",
)


def environment() -> dict[str, Any]:
    """Machine, versions and command, as a JSON object."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def command(arguments: Sequence[str]) -> str:
    """The command line without this machine's folders: absolute paths are cut to their last part."""
    program, *rest = (Path(part).name if part.startswith("/") else part for part in arguments)
    return shlex.join(["tridecode" if program in ("cli.py", "__main__.py") else program, *rest])


def check_output(folder: Path) -> None:
    """Raises ConfigError if files cannot be written into `folder`."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ConfigError(f"--output {folder}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {folder}: no permission to write to {nearest}")


def write_report(path: Path, kind: str, settings: Mapping[str, Any], results: Any) -> Path:
    """Write {"kind", "environment", "settings", "results"} to `path`, whose folder is made. Returns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"kind": kind, "environment": environment(), "settings": dict(settings), "results": results}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table for a terminal: numbers with four significant digits, None as a dash; a column without a title
    is aligned left."""
    out = Table(title=title)
    for column in columns:
        out.add_column(column, justify="right" if column else "left")
    for row in rows:
        out.add_row(*(_cell(value) for value in row))
    return out


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str:
    """The output of a program; empty if it is absent or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> str:
    return _run("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")


def _gpus() -> list[dict[str, str]]:
    fields = ("name", "driver_version", "memory.total")
    lines = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader").splitlines()
    return [dict(zip(fields, (part.strip() for part in line.split(",")))) for line in lines]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
