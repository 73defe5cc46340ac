"""Interpreters of other versions on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def find_python(version: str) -> str | None:
    """Return an interpreter of a version such as 3.12: on the PATH, or one that pyenv or uv installed."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in _candidates(version):
        try:
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[str]:
    for name in (f"python{version}", "python3"):
        if found := shutil.which(name):
            yield found
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    uv = Path.home() / ".local" / "share" / "uv" / "python"
    for folder, pattern in ((pyenv / "versions", f"{version}.*"), (uv, f"cpython-{version}.*")):
        for found in sorted(folder.glob(pattern)):
            yield str(found / "bin" / f"python{version}")
