"""An engine whose start fails leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.llm import local_engine


class _Service:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("cause", ["second engine", "texts"])
def test_engines_that_were_opened_are_closed_after_an_error(cause: str, monkeypatch: Any) -> None:
    opened = list[_Service]()

    class Opens:
        @staticmethod
        def open(*_: object, **__: object) -> _Service:
            if cause == "second engine" and opened:
                raise ConfigError("broken")
            opened.append(_Service())
            return opened[-1]

    def texts(*_: object, **__: object) -> None:
        raise ConfigError("broken")

    values = {"tokenizer_dir": "tokenizer", "num_engines": 2}
    for name, stand_in in (
        ("find_engine_dir", lambda folder: folder),
        ("read_repository", lambda folder: values),
        ("TextTokenizer", lambda *_: None),
        ("EngineService", Opens),
        ("TextService", texts),
    ):
        monkeypatch.setattr(local_engine, name, stand_in)
    with pytest.raises(ConfigError, match="broken"):
        local_engine.LocalEngine(Path("repository"), None, 1.0)
    assert [service.closed for service in opened] == [1] * (1 if cause == "second engine" else 2)
