"""Reloads dead doors: Triton never restarts a python stub that died, and still reports its model as ready.

A dead stub stays a zombie of tritonserver. A stub that is stopped (SIGSTOP) is killed first: if it continued,
it would end the whole server (measured on Triton 2.51). In both cases the model is then unloaded and loaded.

Requests that a stub had taken when it died never end (python_backend 24.10 sends a response only when the
stub requests it). Each of our doors counts them in memory that survives its death (taken_requests.py). Triton
keeps the unloaded model for them, and with it the dead stub's region of shared memory mapped. It also does so
for requests that it has answered with "Stub process … is not healthy", so the mapping alone decides only for
foreign models, which count nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.supervisor import processes, shared_memory
from tridecode.backend.wire import taken_requests
from tridecode.tools.serve.triton_http import TritonHttp, TritonHttpError

STOPPED_S = 2.0  # a stub that is stopped for longer is killed
CONFIRM_S = 0.4  # a stub is briefly a zombie while its model is unloaded; only a longer death counts
FIRST_PAUSE_S = 1.0  # back-off before a second attempt; doubles up to
MAX_PAUSE_S = 30.0
ORPHANS_S = 2.2  # without requests Triton unmaps a dead stub's region within about 1 s of the unload
CALM_S = 60.0  # a door that lived this long has its back-off reset

_log = logging.getLogger("tridecode.serve")


@dataclass
class _Watched:
    model: str
    process: processes.ProcessId
    region: str
    taken: taken_requests.TakenCount | None = None  # set once it is known
    dead_since: float | None = None
    stopped_since: float | None = None
    killed: bool = False  # by us


@dataclass
class Orphans:
    """Requests that cannot end because their door died. since: time of the death. count: None: not known."""

    model: str
    since: float
    noticed: float
    count: int | None

    def __str__(self) -> str:
        if self.count is None:
            return f"{self.model} died, perhaps with requests open"
        return f"{self.model} died with {self.count} request{'s' if self.count > 1 else ''} open"


@dataclass
class _Reload:
    """Attempts to bring one model back."""

    attempts: int = 0
    last: float = 0.0
    next: float = 0.0
    needed: bool = False
    running: bool = False
    unloaded: bool = False  # unloaded by us, and not yet reloaded


class DoorWatch:
    """Checks the stubs of one tritonserver whenever `tick` is called; reloads in separate threads."""

    def __init__(self, server_pid: int, http: TritonHttp) -> None:
        self._server_pid = server_pid
        self._http = http
        self._watched: dict[int, _Watched] = {}
        self._reloads: dict[str, _Reload] = {}
        self._orphans: dict[str, Orphans] = {}  # region of the dead stub -> orphans

    @property
    def busy(self) -> bool:
        """Return whether a door is being reloaded or waits for its reload."""
        return any(reload.needed or reload.running for reload in self._reloads.values())

    @property
    def has_orphans(self) -> bool:
        """Return whether requests of a dead door may still be open."""
        return bool(self._orphans)

    def orphans(self, now: float) -> list[Orphans]:
        """Requests that are still open ORPHANS_S after the death of their door was noticed."""
        return [one for one in self._orphans.values() if now - one.noticed > ORPHANS_S]

    def bring_back(self, model: str) -> None:
        """Load a model that is not loaded; repeat until it is loaded."""
        self._reloads.setdefault(model, _Reload(unloaded=True)).needed = True

    def tick(self, now: float) -> None:
        """now: monotonic seconds."""
        for stub in shared_memory.stubs_of(self._server_pid):
            door = self._watched.get(stub.process.pid)
            if door is None:
                model = Path(stub.model_file).parent.parent.name
                door = self._watched[stub.process.pid] = _Watched(model, stub.process, stub.region)
            if door.taken is None:
                door.taken = taken_requests.find_count(stub.process.pid)
        for pid, door in list(self._watched.items()):
            if self._look(pid, door, now):
                del self._watched[pid]
        if self._orphans:
            mapped = shared_memory.mapped_regions(self._server_pid, self._orphans)
            self._orphans = {region: one for region, one in self._orphans.items() if region in mapped}
        for model, reload in self._reloads.items():
            if reload.needed and not reload.running and now >= reload.next:
                self._start(model, reload, now)

    def _look(self, pid: int, door: _Watched, now: float) -> bool:
        """Return whether watching this stub can end: its door was unloaded, or its reload has been
        requested.
        """
        state = processes.state(pid)
        if state == "":
            return True
        if state == "T":
            door.stopped_since = door.stopped_since or now
            if now - door.stopped_since > STOPPED_S:
                _log.warning("door %s (pid %d) is stopped by a signal: killing it", door.model, pid)
                processes.kill(door.process)
                door.killed = True
            return False
        if state != "Z":
            door.stopped_since = None
            return False
        door.dead_since = door.dead_since or now
        if not door.killed and now - door.dead_since < CONFIRM_S:
            return False
        count = None if door.taken is None else door.taken.read()
        open_ = "" if count is None else f" with {count or 'no'} request{'' if count == 1 else 's'} open"
        _log.warning("door %s (pid %d) has died%s: reloading it", door.model, pid, open_)
        if count != 0:
            since = door.stopped_since or door.dead_since
            self._orphans[door.region] = Orphans(door.model, since, now, count)
        reload = self._reloads.setdefault(door.model, _Reload())
        if now - reload.last > CALM_S:
            reload.attempts = 0
        reload.needed = True
        return True

    def _start(self, model: str, reload: _Reload, now: float) -> None:
        reload.needed, reload.running = False, True
        pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**reload.attempts)
        reload.attempts, reload.last, reload.next = reload.attempts + 1, now, now + pause
        threading.Thread(
            target=self._reload, args=(model, reload), name=f"reload-{model}", daemon=True
        ).start()

    def _reload(self, model: str, reload: _Reload) -> None:
        start = time.monotonic()
        try:
            if not reload.unloaded:
                if all(row.state != "READY" for row in self._http.index() if row.name == model):
                    _log.info("door %s is not loaded and stays unloaded", model)
                    return
                self._http.unload(model)
                reload.unloaded = True
            self._http.load(model)
            reload.unloaded = False
            _log.info("door %s is back after %.1f s", model, time.monotonic() - start)
        except TritonHttpError as error:
            _log.error("door %s could not be loaded again: %s", model, error)
            reload.needed = True
        finally:
            reload.running = False
