"""The other models of a door's repository, for tridecode_health and for errors that name a better model.

Files are read as text, up to a size limit: an operator may have edited them, and one model's files must not
make another's door fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_DECOUPLED = re.compile(r"^[^#\n]*\bdecoupled\s*:\s*(true|True|t|1)\b", re.MULTILINE)
_DOOR = re.compile(r"tridecode\.backend\.doors\.(\w+) import")
_STAND_IN, _HEALTH = "absent", "health"
_MAX_BYTES = 262_144  # bytes of a config.pbtxt
_MAX_MODELS = 1024


@dataclass(frozen=True)
class Sibling:
    """A model of the repository. door: module of its door, "" for an ensemble. streams: it is decoupled."""

    name: str
    door: str
    streams: bool


def siblings(repository: Path) -> list[Sibling]:
    """Return the models that clients may call, by name, without placeholders and the health model."""
    found = []
    for folder in sorted(_folders(repository)):
        config = _text(folder / "config.pbtxt")
        if config is None:
            continue
        door = _DOOR.search(_text(folder / "1" / "model.py") or "")
        kind = door[1] if door else ""
        if kind not in (_STAND_IN, _HEALTH):
            found.append(Sibling(folder.name, kind, bool(_DECOUPLED.search(config))))
    return found


def streaming_sibling(repository: Path, name: str) -> str:
    """Return the streaming model with the same door as the model `name`; "" if there is none.

    If there are several, choose the one that shares the longest prefix with `name`.
    """
    models = siblings(repository)
    mine = next((model.door for model in models if model.name == name), "")
    able = [model.name for model in models if model.streams and model.door == mine and mine]
    return max(able, key=lambda other: (_common(name, other), -len(other)), default="")


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _folders(repository: Path) -> list[Path]:
    try:
        return [folder for folder in repository.iterdir() if folder.is_dir()][:_MAX_MODELS]
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
