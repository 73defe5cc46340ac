"""A process that serves keeps what it has loaded out of later collections."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tridecode.backend.base.garbage import freeze_objects
from tridecode.backend.engine import __main__ as engine_process


@pytest.fixture(autouse=True)
def thaw() -> Any:
    yield
    gc.unfreeze()


def test_frozen_objects_are_not_collected_again() -> None:
    kept: list[Any] = [[i] for i in range(20_000)]
    freeze_objects()
    assert gc.get_freeze_count() > len(kept)
    assert len(gc.get_objects()) < len(kept)
    cycle: list[Any] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1  # newer garbage is


def test_both_kinds_of_ranks_freeze_before_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    link = SimpleNamespace(ready=lambda: frozen.append(gc.get_freeze_count()), beat=None, status=None)
    ranks = SimpleNamespace(broadcast_plan=lambda plan: None)
    engine: Any = SimpleNamespace(
        state=SimpleNamespace(adapters=None),
        pin_host_memory=lambda *_: None,
        model_config=SimpleNamespace(model_name="m"),
        device="cpu",
        ranks=ranks,
        close=lambda: None,
    )
    grammars = SimpleNamespace(fault="", close=lambda: None)
    scheduler = SimpleNamespace(grammars=grammars, prompt_hasher=None)
    monkeypatch.setattr(engine_process, "make_scheduler", lambda *_, **__: scheduler)
    monkeypatch.setattr(engine_process, "tokenizer_dir", lambda folder: None)
    monkeypatch.setattr(engine_process, "door_limits", lambda *_: None)
    monkeypatch.setattr(engine_process, "follow", lambda *_: None)
    ended = SimpleNamespace(wake=None, close=lambda: None, stop=None, run=lambda: None)
    monkeypatch.setattr(engine_process, "DoorSocket", lambda *_: ended)
    monkeypatch.setattr(engine_process, "DecodeLoop", lambda *_: ended)
    arguments: Any = SimpleNamespace(engine_dir=".", endpoint="", epoch=0)
    link_of_any: Any = link
    engine_process.serve(arguments, engine, link_of_any)
    gc.unfreeze()
    engine_process.serve_as_follower(engine, link_of_any)
    assert len(frozen) == 2
    assert min(frozen) > len(sys.modules)
