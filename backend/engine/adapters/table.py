"""Tracks which LoRA adapters are loaded, and which requests wait for one. Host only: no torch.

An adapter is loaded, in another thread (`Loader`), when a request first names it, and stays until its place
is needed: then the least recently used adapter without an open request is evicted. A request whose adapter
must be loaded waits outside the planner's queue, so that it delays no other. If all places are in use, names
queue in order of arrival, and requests for loaded adapters queue too: otherwise an adapter that is always in
use would starve the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tridecode.backend.base.errors import RequestError, TridecodeError, UnsupportedError
from tridecode.backend.engine.schedule.sequence import SequenceGroup
from tridecode.backend.weights.lora import check_name

NO_ADAPTER = -1


class Loaded(NamedTuple):
    """The end of a load. error: the reason if it failed. digest: of the adapter's matrices; never b""."""

    number: int
    error: TridecodeError | None = None
    digest: bytes = b""


class Loader(Protocol):
    """Loads adapters in the background; every method returns at once."""

    max_loras: int

    def start(self, number: int, name: str) -> None:
        """Load the adapter `name` on every rank; plans will name it by `number`."""
        ...

    def finished(self) -> list[Loaded]:
        """Return the loads that have ended since the last call."""
        ...

    def has_finished(self) -> bool:
        """Return whether `finished` has something to return."""
        ...

    def changed(self) -> Iterable[str]:
        """Return loaded names whose directory has changed or gone since the last call."""
        ...


class NoLoader:
    """Loader of an engine that serves no adapters. why: error text for a request that names one."""

    max_loras = 0

    def __init__(self, why: str = "wanted none: this engine serves no adapters (lora_path in config.pbtxt)"):
        self.why = why

    def start(self, number: int, name: str) -> None:
        raise UnsupportedError(f"lora_name is {name!r}; {self.why}")

    def finished(self) -> list[Loaded]:
        return []

    def has_finished(self) -> bool:
        return False

    def changed(self) -> Iterable[str]:
        return ()


@dataclass(eq=False)
class _Resident:
    """One loaded state of an adapter's directory. users: groups that have not ended."""

    number: int
    name: str
    digest: bytes
    users: int = 0
    used: int = 0  # time of the last use


@dataclass(eq=False)
class _Load:
    number: int
    name: str
    is_stale: bool = False  # the directory has changed since it was loaded


@dataclass
class Adapters:
    """Used by the loop's thread. `group.adapter` is the number of a group's adapter once it is loaded."""

    loader: Loader = field(default_factory=NoLoader)

    def __post_init__(self) -> None:
        self._resident: dict[str, _Resident] = {}  # the newest state of each name
        self._by_number: dict[int, _Resident] = {}  # also older states that are in use
        self._loading: dict[int, _Load] = {}
        self._waiting: dict[str, list[SequenceGroup]] = {}
        self._line: deque[str] = deque()  # names that wait for a place
        self._ready: list[tuple[SequenceGroup, TridecodeError | None]] = []
        self._dropped: list[int] = []
        self._clock = 0
        self._last_number = NO_ADAPTER

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return sorted(self._resident)

    @property
    def num_waiting(self) -> int:
        """Groups whose adapter is not loaded yet."""
        return sum(bool(group.sequences) for groups in self._waiting.values() for group in groups)

    @property
    def has_news(self) -> bool:
        """Return whether `take_ready` has something to return."""
        return bool(self._ready) or self.loader.has_finished()

    def check(self, name: str) -> None:
        """Raise RequestError for a name that no adapter can have, UnsupportedError without a loader."""
        check_name(name)
        if isinstance(self.loader, NoLoader):
            self.loader.start(NO_ADAPTER, name)

    def want(self, group: SequenceGroup) -> bool:
        """Assign the group its adapter. False: `take_ready` returns the group once the adapter is loaded."""
        self._forget_changed()
        resident = self._resident.get(group.lora_name)
        if resident is not None and not self._line:
            self._hold(resident, group)
            return True
        groups = self._waiting.setdefault(group.lora_name, [])
        groups.append(group)
        if len(groups) == 1:
            self._line.append(group.lora_name)
            self._advance()
        return False

    def release(self, group: SequenceGroup) -> None:
        """Drop a group that has ended."""
        resident = self._by_number.get(group.adapter)
        if resident is not None:
            resident.users -= 1
            if not resident.users and self._resident.get(resident.name) is not resident:
                self._drop(resident)
        elif group in (groups := self._waiting.get(group.lora_name, [])):
            groups.remove(group)
            if not groups:
                self._leave_line(group.lora_name)
        self._advance()

    def take_ready(self) -> list[tuple[SequenceGroup, TridecodeError | None]]:
        """Return the groups whose adapter was loaded, or failed to load (with the reason), since the last
        call.
        """
        for loaded in self.loader.finished():
            self._finish(self._loading.pop(loaded.number), loaded)
        self._forget_changed()
        self._advance()
        ready, self._ready = self._ready, []
        return [(group, error) for group, error in ready if group.sequences]

    def take_dropped(self) -> list[int]:
        """Return the numbers of the adapters that no later plan names."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _hold(self, resident: _Resident, group: SequenceGroup) -> None:
        self._clock += 1
        resident.users, resident.used = resident.users + 1, self._clock
        group.adapter, group.adapter_digest = resident.number, resident.digest

    def _finish(self, load: _Load, loaded: Loaded) -> None:
        groups = self._waiting.pop(load.name, [])
        if load.name in self._line:  # its first requests were cancelled, and others arrived
            self._line.remove(load.name)
        if loaded.error is not None:
            self._dropped.append(load.number)  # a rank may have loaded it
            self._ready += [(group, loaded.error) for group in groups]
            return
        resident = _Resident(load.number, load.name, loaded.digest)
        self._by_number[load.number] = self._resident[load.name] = resident
        for group in groups:
            self._hold(resident, group)
            self._ready.append((group, None))
        if load.is_stale:
            self._forget(load.name)

    def _forget_changed(self) -> None:
        for name in self.loader.changed():
            for load in self._loading.values():
                load.is_stale = load.is_stale or load.name == name
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Make the next request for the name reread the directory; requests that have the old state keep
        it.
        """
        resident = self._resident.pop(name, None)
        if resident is not None and not resident.users:
            self._drop(resident)

    def _drop(self, resident: _Resident) -> None:
        del self._by_number[resident.number]
        self._dropped.append(resident.number)

    def _advance(self) -> None:
        """Serve the queue as far as there are places."""
        while self._line:
            name = self._line[0]
            resident = self._resident.get(name)
            if resident is not None:
                for group in self._waiting.pop(name):
                    self._hold(resident, group)
                    self._ready.append((group, None))
            elif not any(load.name == name for load in self._loading.values()):
                if not self._make_room():
                    return
                self._last_number += 1
                self._loading[self._last_number] = _Load(self._last_number, name)
                self.loader.start(self._last_number, name)
            self._line.popleft()

    def _make_room(self) -> bool:
        """Make a place for one more adapter; evict the least recently used one without users if necessary."""
        if len(self._by_number) + len(self._loading) < self.loader.max_loras:
            return True
        idle = [resident for resident in self._resident.values() if not resident.users]
        if not idle:
            return False
        oldest = min(idle, key=lambda resident: resident.used)
        del self._resident[oldest.name]
        self._drop(oldest)
        return True

    def _leave_line(self, name: str) -> None:
        """Remove a name that nobody waits for any more; a running load continues."""
        del self._waiting[name]
        if name in self._line:
            self._line.remove(name)


def unknown_adapter(name: str, available: Iterable[str], where: str) -> RequestError:
    """Return the error for a name without a directory. where: the adapters' folder."""
    names = sorted(available)
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20:,} more" if len(names) > 20 else "")
    return RequestError(f"lora_name is {name!r}; {where} has {shown or 'no adapters'}")
