"""Finds unknown `parameters` of a config.pbtxt, and the nearest known name."""

from __future__ import annotations

from collections.abc import Iterable

from tridecode.backend.configuration import door_parameters
from tridecode.backend.configuration.engine_config import engine_parameters


def _known(engine: bool) -> set[str]:
    """engine: of the engine's model, else of another door."""
    return door_parameters.known_names(row.name for row in engine_parameters() if engine)


def unknown(names: Iterable[str], engine: bool) -> list[str]:
    """Return unknown parameters: a model that has one does not load."""
    return sorted(set(names) - _known(engine))


def nearest(name: str, engine: bool) -> str | None:
    """Return the known name that a misspelt one probably means."""
    return door_parameters.nearest(name, _known(engine))


def advice(name: str, engine: bool) -> str:
    """Advise what to do about an unknown name."""
    meant = nearest(name, engine)
    return f"Nothing reads it; did you mean {meant}?" if meant else "Nothing reads it; remove it."
