"""Digests of everything that must be equal on all nodes of an engine."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.configuration.engine_config_file import FILE, checkpoint_dir
from tridecode.backend.wire.messages import PROTOCOL

_DIGITS = 12


def identity(engine_dir: str) -> dict[str, str]:
    """Return by name: digests of config.pbtxt, config.ini and manifest.json ("missing" without the file), the
    engine's name, the version and the protocol.
    """
    files = {FILE: Path(engine_dir) / FILE}
    try:
        weights = Path(checkpoint_dir(engine_dir))
    except TridecodeError:
        pass  # reported when the settings are read
    else:
        files.update({name: weights / name for name in ("config.ini", "manifest.json")})
    return {
        "the engine's model": Path(engine_dir).name,
        "tridecode's version": _version(),
        "the protocol": str(PROTOCOL),
        **{name: _digest(path) for name, path in files.items()},
    }


def difference(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """Describe the first difference; "" if there is none."""
    for name in (*ours, *theirs):
        if theirs.get(name) != ours.get(name):
            return f"{name} is {theirs.get(name)} there and {ours.get(name)} on node 0"
    return ""


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
    except OSError:
        return "missing"


def _version() -> str:
    try:
        return metadata.version("tridecode")
    except metadata.PackageNotFoundError:
        return "unknown"
