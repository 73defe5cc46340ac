"""Tracks the doors that use an engine: their identity, whether they live, and when none is left."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tridecode.backend.supervisor import processes
from tridecode.backend.wire.messages import Hello

FROZEN_S = 10.0  # a door without a ping for this long is logged as frozen
GOODBYE_GRACE_S = 2.0  # how long the engine outlives the last door that sent Goodbye
LOST_GRACE_S = 60.0  # … and the last door that died: `tridecode serve` brings it back
_KNOWN = 256  # door processes remembered before the dead are forgotten

_log = logging.getLogger("tridecode.supervisor")


@dataclass
class Door:
    hello: Hello
    process: processes.ProcessId | None
    heard_at: float
    frozen: bool = False


class DoorBook:
    """Times are monotonic seconds that the caller gives."""

    def __init__(self, now: float) -> None:
        self._doors: dict[bytes, Door] = {}
        self._known: set[tuple[int, int]] = (
            set()
        )  # pid and start of the door processes that live or died recently
        self._empty_since = now
        self._grace = LOST_GRACE_S

    def __len__(self) -> int:
        """Number of doors that the engine stays for."""
        return sum(not door.hello.guest for door in self._doors.values())

    @property
    def guests(self) -> int:
        """Number of front ends that the engine does not stay for."""
        return len(self._doors) - len(self)

    @property
    def identities(self) -> list[bytes]:
        return list(self._doors)

    @property
    def doors(self) -> list[Door]:
        return list(self._doors.values())

    def hello(self, identity: bytes, hello: Hello, now: float) -> bool:
        """Add a door; return True if its process is new, False if it only reconnects."""
        process = processes.identify(hello.pid)
        for other, door in list(self._doors.items()):  # its earlier connection
            if other != identity and door.process == process and door.hello.door == hello.door:
                del self._doors[other]
        self._doors[identity] = Door(hello, process, now)
        key = (hello.pid, process.start if process else 0)
        new = key not in self._known
        if len(self._known) > _KNOWN:
            self._known = {(pid, start) for pid, start in self._known if processes.identify(pid) is not None}
        self._known.add(key)
        return new

    def ping(self, identity: bytes, now: float) -> bool:
        """Return False if the sender is unknown: its Hello went to an earlier supervisor."""
        door = self._doors.get(identity)
        if door is None:
            return False
        door.heard_at = now
        if door.frozen:
            door.frozen = False
            _log.warning("door %s is back", door.hello.door)
        return True

    def goodbye(self, identity: bytes, now: float) -> None:
        door = self._doors.pop(identity, None)
        if door is not None:
            _log.info("door %s has left", door.hello.door)
            self._left(door, now, GOODBYE_GRACE_S)

    def look(self, now: float) -> None:
        """Remove dead doors, log frozen ones."""
        for identity, door in list(self._doors.items()):
            if door.process is None or not processes.alive(door.process):
                _log.warning("door %s (pid %d) died without Goodbye", door.hello.door, door.hello.pid)
                del self._doors[identity]
                self._left(door, now, LOST_GRACE_S)
            elif not door.frozen and now - door.heard_at > FROZEN_S:
                door.frozen = True
                state = processes.state(door.hello.pid)
                why = processes.STATE_WORDS.get(state, f"process state {state}")
                _log.warning("door %s has not pinged for %.0f s (%s)", door.hello.door, FROZEN_S, why)

    def forgive(self, now: float) -> None:
        for door in self._doors.values():
            door.heard_at = now

    def abandoned(self, now: float) -> bool:
        """Return whether all doors are gone and the grace period for their return is over."""
        return len(self) == 0 and now - self._empty_since > self._grace

    def _left(self, door: Door, now: float, grace: float) -> None:
        if not door.hello.guest:
            self._empty_since, self._grace = now, grace
