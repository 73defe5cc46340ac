"""Which `parameters` of a config.pbtxt somebody reads, and the nearest of them to one that nobody does."""

from __future__ import annotations

from collections.abc import Iterable

from tridecode.backend.configuration import door_parameters
from tridecode.backend.configuration.engine_config import engine_parameters


def _known(engine: bool) -> set[str]:
    """engine: of the engine's model, else of another door."""
    return door_parameters.known_names(row.name for row in engine_parameters() if engine)


def unknown(names: Iterable[str], engine: bool) -> list[str]:
    """Those that nobody reads: a model that has one does not load."""
    return sorted(set(names) - _known(engine))


def nearest(name: str, engine: bool) -> str | None:
    """The known name that a misspelt one was probably meant to be."""
    return door_parameters.nearest(name, _known(engine))


def advice(name: str, engine: bool) -> str:
    """Advise what to do about an unknown name."""
    meant = nearest(name, engine)
    return f"Nothing reads it; did you mean {meant}?" if meant else "Nothing reads it; remove it."
