"""The models beside a door in its repository: for the list of tridecode_health, and for errors that name the
model that can do what this one cannot.

Files are read as text, each with a limit: an operator may have edited them, and no door fails because of
another's files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_DECOUPLED = re.compile(r"^[^#\n]*\bdecoupled\s*:\s*(true|True|t|1)\b", re.MULTILINE)
_DOOR = re.compile(r"tridecode\.backend\.doors\.(\w+) import")
_STAND_IN, _HEALTH = "absent", "health"
_MAX_BYTES = 262_144  # of a config.pbtxt
_MAX_MODELS = 1024


@dataclass(frozen=True)
class Sibling:
    """A model of the repository. door: module of its door, "" for an ensemble. streams: it is decoupled."""

    name: str
    door: str
    streams: bool


def siblings(repository: Path) -> list[Sibling]:
    """The models of a repository that clients may call, by name; without stand-ins and the health model."""
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
    """The model that streams and has the same door as the model `name`; "" if there is none.

    Of several, the one whose name has the most in common with `name`.
    """
    models = siblings(repository)
    mine = next((model.door for model in models if model.name == name), "")
    able = [model.name for model in models if model.streams and model.door == mine and mine]
    return max(able, key=lambda other: (_common(name, other), -len(other)), default="")


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
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
