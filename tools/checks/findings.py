"""Faults of a repository, as printed by `check` and `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MAX_SHOWN = 500  # characters of each part of a finding


@dataclass(frozen=True)
class Finding:
    """severity: "error" (it does not load, or its answers are wrong) or "warning". The others are texts."""

    severity: str
    where: str
    found: str
    wanted: str
    fix: str

    def __str__(self) -> str:
        where, found, wanted = (one_line(text) for text in (self.where, self.found, self.wanted))
        return f"{self.severity}: {where}: found {found}; wanted {wanted}. {self.fix}"


def one_line(text: str) -> str:
    """Text from a file without line breaks and terminal control characters, cut to _MAX_SHOWN."""
    text = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def no_repository(path: str | Path) -> Finding:
    """The fault of a path that is not a folder."""
    return Finding("error", str(path), "no directory", "a model repository", "Build one with build-repo.")
