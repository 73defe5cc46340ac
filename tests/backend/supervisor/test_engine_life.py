"""When the engine is started again, and when it is given up: a fake clock and ranks that only answer."""

from __future__ import annotations

import pytest

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.supervisor.blame import Failure
from tridecode.backend.supervisor.engine_life import EngineLife
from tridecode.backend.supervisor.engine_settings import EngineSettings


class Group:
    """The ranks of one epoch as EngineLife sees them."""

    ranks = (None,)
    load = (5, 1)

    def __init__(self, now: float) -> None:
        self.started_at = now
        self.ready = False
        self.failure: Failure | None = None
        self.killed = False
        self.lingers = False

    def progress(self) -> str:
        return "loading"

    def check(self, *_limits: float) -> Failure | None:
        return self.failure

    def kill(self) -> None:
        self.killed = True

    def gone(self) -> bool:
        return self.killed and not self.lingers

    def pids(self) -> list[int]:
        return [4711]


class Engine:
    """An EngineLife with a clock of its own: seconds pass in ticks of 0.1."""

    def __init__(self) -> None:
        self.now = 100.0
        self.groups: list[Group] = []
        self.settings = 0
        self.error: ConfigError | None = None
        self.life = EngineLife(
            self._read, lambda: self.settings, self._start, lambda epoch: f"ipc://{epoch}", 7
        )

    def _read(self) -> EngineSettings:
        if self.error:
            raise self.error
        return EngineSettings()

    def _start(self, _epoch: int, _settings: EngineSettings, now: float) -> Group:
        self.groups.append(Group(now))
        return self.groups[-1]

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.life.tick(self.now)
            self.now += 0.1

    def crash(self) -> None:
        self.groups[-1].failure = Failure("rank 0 was killed by signal 9")
        self.run(0.1)

    def become_ready(self) -> None:
        self.groups[-1].ready = True
        self.run(0.1)


@pytest.fixture
def engine() -> Engine:
    made = Engine()
    made.run(0.1)
    return made


def test_epochs_go_on_from_the_last_supervisor(engine):
    assert (engine.life.epoch, engine.life.phase) == (8, "starting")
    engine.become_ready()
    assert engine.life.state.phase == "ready"
    assert engine.life.state.endpoint == "ipc://8"
    assert engine.life.load == (5, 1)


def test_pauses_after_the_death_of_a_ready_engine_stay_short(engine):
    pauses = []
    for _ in range(8):
        engine.become_ready()
        engine.crash()
        crashed = engine.now
        while engine.life.phase == "down":
            engine.run(0.1)
        pauses.append(engine.now - crashed)
    assert pauses == pytest.approx([0.5, 1, 2, 4, 4, 4, 4, 4], abs=0.25)


def test_pauses_between_failed_starts_double_up_to_half_a_minute(engine):
    pauses = []
    for _ in range(10):
        engine.crash()
        crashed = engine.now
        while engine.life.phase == "down":
            engine.run(0.1)
        pauses.append(engine.now - crashed)
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30], abs=0.25)


def test_an_engine_that_was_well_for_a_while_is_rebuilt_at_once(engine):
    for _ in range(6):
        engine.become_ready()
        engine.crash()
        engine.run(20)
    engine.become_ready()
    engine.run(31)
    engine.crash()
    crashed = engine.now
    engine.run(2)
    assert engine.groups[-1].started_at - crashed < 0.7


def test_failed_starts_are_tried_again_with_growing_pauses_and_the_reason_is_told(engine):
    for _ in range(5):
        assert engine.life.phase == "starting"
        engine.crash()
        engine.run(20)
    engine.crash()
    assert engine.life.phase == "down"
    wanted = "rank 0 was killed by signal 9 (6 starts in a row have failed; the next is in 16 s)"
    assert engine.life.detail == wanted
    for _ in range(20):
        engine.run(31)
        engine.crash()
    assert engine.life.phase == "down" and len(engine.groups) == 26
    engine.run(31)
    engine.become_ready()
    assert engine.life.phase == "ready"


def test_a_failure_that_would_come_again_is_looked_at_once_a_minute(engine):
    engine.groups[-1].failure = Failure("config.ini has no head_num", fatal=True)
    engine.run(50)
    assert engine.life.phase == "failed" and len(engine.groups) == 1
    for _ in range(3):
        engine.run(12)
        engine.groups[-1].failure = Failure("config.ini has no head_num", fatal=True)
        engine.run(50)
    assert len(engine.groups) == 4
    assert engine.life.detail == "config.ini has no head_num"


def test_crashes_after_ready_never_give_the_engine_up(engine):
    for _ in range(8):
        engine.become_ready()
        engine.crash()
        engine.run(31)
    assert engine.life.phase == "starting"


def test_a_new_epoch_waits_until_the_killed_ranks_are_gone(engine):
    engine.become_ready()
    engine.groups[0].lingers = True  # as one that a driver holds
    engine.crash()
    engine.run(20)
    assert engine.life.phase == "down" and len(engine.groups) == 1
    engine.groups[0].lingers = False
    engine.run(0.2)
    assert len(engine.groups) == 2


def test_an_unreadable_setting_is_a_failure_until_it_changes(engine):
    engine.error = ConfigError("config.pbtxt: parameter x")
    engine.crash()
    engine.run(1)
    assert (engine.life.phase, engine.life.detail) == ("failed", "config.pbtxt: parameter x")
    engine.error, engine.settings = None, 1
    engine.run(1.5)
    assert engine.life.phase == "starting"


def test_a_door_that_finds_others_leaves_the_engine_as_it_is(engine):
    engine.become_ready()
    engine.settings = 1
    engine.life.new_door(engine.now, alone=False)
    engine.run(1)
    assert engine.life.phase == "ready" and len(engine.groups) == 1
