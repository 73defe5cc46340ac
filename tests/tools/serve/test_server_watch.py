"""Requests that cannot end because their door died: when the server is killed for them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tridecode.backend.supervisor import state_file
from tridecode.backend.wire.messages import EngineState
from tridecode.tools.serve import server_watch
from tridecode.tools.serve.door_watch import Orphans
from tridecode.tools.serve.options import ServeOptions
from tridecode.tools.serve.server_watch import ServerWatch


class Server:
    """What ServerWatch uses of a GuardedServer, without a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid, self.kills = folder, os.getpid(), 0

    def mend(self) -> bool:
        return False

    def kill_server(self) -> None:
        self.kills += 1


@pytest.fixture
def died_at(tmp_path, monkeypatch):
    """Seconds after a door's death at which the server is killed for its requests; None: not within 8 s."""
    monkeypatch.setattr(server_watch.ports, "connections", lambda ports: 1)

    def run(
        orphans: str, running: int, dead: bool = True, count: int | None = 1, busy: bool = False
    ) -> float | None:
        server = Server(tmp_path)
        watch = ServerWatch(ServeOptions(tmp_path, orphans=orphans), server, None)
        state = state_file.StateFile(EngineState(1, "ready", "", ""), "engine", 0, running)
        monkeypatch.setattr(server_watch.state_file, "read_all", lambda folder: [state] if dead else 1 / 0)
        for step in range(int(8 / server_watch.WATCH_S)):
            now = step * server_watch.WATCH_S
            watch.doors = SimpleNamespace(
                tick=lambda now: None,
                has_orphans=dead,
                busy=busy,
                orphans=lambda now: [Orphans("toy", 0.0, 0.0, count)] if dead and now > 2.2 else [],
            )
            watch.tick(now)
            if server.kills:
                assert watch.killed_for_orphans
                return now
        return None

    return run


def test_an_idle_server_is_killed_as_soon_as_the_requests_are_known_to_be_orphans(died_at):
    assert died_at("3.5", running=0) == died_at("idle", running=0) == 2.25


def test_a_busy_server_is_killed_after_the_given_seconds(died_at):
    assert died_at("3.5", running=4) == 3.75
    assert died_at("idle", running=4) is None
    assert died_at("leave", running=0) is None


def test_without_a_dead_door_no_state_file_is_read(died_at):
    assert died_at("idle", running=0, dead=False) is None  # reading one would fail


def test_a_reload_that_takes_long_delays_only_what_is_not_known_to_be_open(died_at):
    assert died_at("3.5", running=4, busy=True) == 3.75
    assert died_at("3.5", running=4, busy=True, count=None) is None
    assert died_at("3.5", running=4, count=None) == 3.75
