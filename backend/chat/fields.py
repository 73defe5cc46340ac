"""Errors about a field of a chat request."""

from __future__ import annotations

import json
from typing import Any

from tridecode.backend.base.errors import RequestError, UnsupportedError

_SHOWN = 60


class FieldError(RequestError):
    """A field has a wrong value. param: the field's path, as messages[2].content."""

    def __init__(self, param: str, text: str):
        super().__init__(f"{param} {text}")
        self.param = param


class UnsupportedField(UnsupportedError):
    """A field has a value that is not implemented. param: as in FieldError."""

    def __init__(self, param: str, text: str):
        super().__init__(f"{param} {text}")
        self.param = param


def shown(value: Any) -> str:
    """A value as JSON, at most 60 characters."""
    if isinstance(value, (list, dict)) and len(value) > 8:
        return f"a {'list' if isinstance(value, list) else 'JSON object'} of {len(value):,} items"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
