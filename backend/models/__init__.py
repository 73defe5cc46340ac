"""Model families. A family is a module with `weight_specs(config)` and a class `Model`; this is the only
registry."""

from __future__ import annotations

import importlib
from types import ModuleType

from tridecode.backend.errors import UnsupportedError

FAMILIES = ("bloom", "gpt", "llama")


def family(name: str) -> ModuleType:
    """The module of a family. Raises UnsupportedError for a name that is none."""
    if name not in FAMILIES:
        raise UnsupportedError(f"model family {name!r} is none of {', '.join(FAMILIES)}")
    return importlib.import_module(f"tridecode.backend.models.{name}")
