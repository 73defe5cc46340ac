"""Which of transformers' model types can be converted, and the module that holds each one's table."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from tridecode.backend.errors import UnsupportedError
from tridecode.converters import bloom, gpt, llama

#: transformers' model_type -> module with PREFIX, EMBEDDING, HEAD, IGNORED, model_config() and rules()
FAMILIES: dict[str, ModuleType] = {"bloom": bloom, "gpt2": gpt, "llama": llama}


def family_of(model_type: object, where: Path) -> ModuleType:
    """The module of a model type. Raises UnsupportedError naming it, where it stands, and those there are."""
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"{where} has model_type {model_type!r}; this version converts {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
