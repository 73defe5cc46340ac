"""Values of a setting, in config.ini and in config.pbtxt: the limits of one, and the spellings of a flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Accepted:
    """Limits of a value beyond its type. wanted: as text, for errors and reference/config_pbtxt.md."""

    wanted: str
    test: Callable[[Any], bool]


def parse_flag(text: str) -> bool:
    """A boolean in the spellings of INIReader.h. Raises ValueError for any other text."""
    lowered = text.lower()
    if lowered in ("true", "yes", "on", "1"):
        return True
    if lowered in ("false", "no", "off", "0"):
        return False
    raise ValueError(text)
