"""The metadata of a GGUF file: scalars, and arrays that are decoded when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf

from tridecode.backend.base.errors import CheckpointError


class GgufMetadata(Mapping[str, Any]):
    """Values by key. Raises CheckpointError for one that cannot be decoded, when it is read."""

    def __init__(self, fields: Mapping[str, gguf.ReaderField], path: Path):
        self._fields, self._path = fields, path
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            field = self._fields[key]
            try:
                self._decoded[key] = field.contents()
            except Exception as error:  # gguf checks little
                raise CheckpointError(f"{self._path}: {key[:80]} cannot be decoded: {error}") from None
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)
