"""Reads quantization_config of a config.json as data and checks every value before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import CheckpointError, UnsupportedError

#: published groups are at most as long as a row of the matrix
_MAX_GROUP = 1 << 20


class Settings:
    """One JSON object of quantization_config. title: its name in errors; where: its file."""

    def __init__(self, held: Any, title: str, where: Path):
        if not isinstance(held, dict):
            raise CheckpointError(f"{where} has {title} = {shown(held)}; wanted an object")
        self.held: Mapping[str, Any] = held
        self.title, self.where = title, where

    def choice(self, key: str, supported: tuple, default: Any) -> Any:
        """Return the value of `key`, one of `supported`; `default` if it is absent or null.

        Raises UnsupportedError with the value and the supported ones.
        """
        found = self.held.get(key)
        if found is None:
            found = default
        for value in supported:
            if type(found) is type(value) and found == value:
                return value
        wanted = ", ".join(str(value) for value in supported)
        raise UnsupportedError(
            f"{self.where} says {self.title} with {key} = {shown(found)}; this version reads {wanted}"
        )

    def group_size(self, default: int | None = None) -> int:
        """Return the number of consecutive inputs that share a scale; 0: all, stored as -1 or null."""
        found = self.held.get("group_size", default)
        if found is None or found == -1:
            return 0
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= _MAX_GROUP:
            self.refuse("group_size", found, f"-1, or 1 to {_MAX_GROUP:,}")
        return found

    def block(self, key: str) -> tuple[int, int] | None:
        """Return rows and columns of the blocks that share a scale; None if absent or null."""
        found = self.held.get(key)
        if found is None:
            return None
        sizes = found if isinstance(found, list) else []
        fits = [type(size) is int and 0 < size <= _MAX_GROUP for size in sizes]
        if len(fits) != 2 or not all(fits):
            self.refuse(key, found, f"two sizes of 1 to {_MAX_GROUP:,}")
        return sizes[0], sizes[1]

    def section(self, key: str) -> Settings:
        return Settings(self.held.get(key), f"{self.title}, {key}", self.where)

    def refuse(self, key: str, found: Any, wanted: str) -> None:
        raise CheckpointError(f"{self.where} has {self.title} with {key} = {shown(found)}; wanted {wanted}")

    def unknown(self, *known: str) -> list[str]:
        """Return, as text, the keys that are neither in `known` nor null."""
        found = sorted(set(self.held) - set(known))
        return [key[:80] for key in found if self.held[key] is not None][:20]


def shown(value: Any) -> str:
    """Return a value of a config.json as a short text for an error."""
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) and len(value) > 8 else repr(value)[:80]
