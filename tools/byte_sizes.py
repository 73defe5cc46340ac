"""Formats and parses sizes in bytes."""

from __future__ import annotations

import re

from tridecode.backend.base.errors import ConfigError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def in_words(size: int) -> str:
    """Return a size as text, such as "1.50 GiB"; -1 is unlimited."""
    if size < 0:
        return "unlimited"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def parse_bytes(text: str, name: str) -> int:
    """Return the bytes of a size: 80GiB, 80G, 500 MiB and 1073741824 are powers of 1024; GB, MB and KB of
    1000.

    Raises ConfigError that begins with `name`.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", text.lower())
    if not found or (found[3] == "ib" and not found[2]) or found[3] == "i":
        raise ConfigError(f"{name} is {text[:40]!r}; wanted a size, e.g. 80GiB")
    scale = _UNITS[found[2]]
    if found[3] == "b" and found[2]:
        scale = 1000 ** " kmgt".index(found[2])
    size = int(float(found[1]) * scale)
    if not 0 < size < 1 << 60:
        raise ConfigError(f"{name} is {text[:40]!r}; wanted 1 byte to 2^60")
    return size
