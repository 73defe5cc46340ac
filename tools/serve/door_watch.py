"""Reloads dead doors: Triton never restarts a python stub that died, and still reports its model as ready.

A dead stub stays a zombie of tritonserver. A stub that is stopped (SIGSTOP) is killed first: if it continued,
it would end the whole server (measured on Triton 2.51). In both cases the model is then unloaded and loaded.

Requests that were open at a stub when it died never end (python_backend 24.10 sends a response only when the
stub requests it). Triton keeps the unloaded model for them, and with it the dead stub's region of shared
memory: while the region exists, such requests may exist.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.supervisor import processes, shared_memory
from tridecode.tools.serve.triton_http import TritonHttp, TritonHttpError

STOPPED_S = 2.0  # a stub that is stopped for longer is killed
CONFIRM_S = 0.4  # a stub is briefly a zombie while its model is unloaded; only a longer death counts
FIRST_PAUSE_S = 1.0  # back-off before a second attempt; doubles up to
MAX_PAUSE_S = 30.0
ORPHANS_S = 2.2  # a dead stub's region that exists for longer has requests; else it goes within about 1 s
CALM_S = 60.0  # a door that lived this long has its back-off reset

_log = logging.getLogger("tridecode.serve")


@dataclass
class _Watched:
    model: str
    process: processes.ProcessId
    region: str
    dead_since: float | None = None
    stopped_since: float | None = None
    killed: bool = False  # by us


@dataclass
class _Reload:
    """Attempts to bring one model back."""

    attempts: int = 0
    last: float = 0.0
    next: float = 0.0
    needed: bool = False
    running: bool = False
    unloaded: bool = False  # by us, and not loaded again yet


class DoorWatch:
    """Looks at the stubs of one tritonserver whenever `tick` is called; loads in threads of its own."""

    def __init__(self, server_pid: int, http: TritonHttp) -> None:
        self._server_pid = server_pid
        self._http = http
        self._watched: dict[int, _Watched] = {}
        self._reloads: dict[str, _Reload] = {}
        # region of a dead stub -> model, time of its last activity, time at which its death was noticed
        self._dead: dict[str, tuple[str, float, float]] = {}

    @property
    def busy(self) -> bool:
        """Whether a door is being reloaded, or waits for its reload."""
        return any(reload.needed or reload.running for reload in self._reloads.values())

    @property
    def has_dead(self) -> bool:
        """Whether Triton still keeps the region of a dead door."""
        return bool(self._dead)

    def orphaned(self, now: float) -> dict[str, float]:
        """Models whose open requests cannot end because their door died: name -> time of the death."""
        return {model: idle for model, idle, dead in self._dead.values() if now - dead > ORPHANS_S}

    def bring_back(self, model: str) -> None:
        """Load a model that is not loaded; repeat until it is loaded."""
        self._reloads.setdefault(model, _Reload(unloaded=True)).needed = True

    def tick(self, now: float) -> None:
        """now: monotonic seconds."""
        for stub in shared_memory.stubs_of(self._server_pid):
            if stub.process.pid not in self._watched:
                model = Path(stub.model_file).parent.parent.name
                self._watched[stub.process.pid] = _Watched(model, stub.process, stub.region)
        for pid, door in list(self._watched.items()):
            if self._look(pid, door, now):
                del self._watched[pid]
        for region in [one for one in self._dead if not os.path.exists(os.path.join(shared_memory.SHM, one))]:
            del self._dead[region]
        for model, reload in self._reloads.items():
            if reload.needed and not reload.running and now >= reload.next:
                self._start(model, reload, now)

    def _look(self, pid: int, door: _Watched, now: float) -> bool:
        """Whether the watch of this stub is over: the door was unloaded, or its reload has been requested."""
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
        _log.warning("door %s (pid %d) has died: loading it again", door.model, pid)
        self._dead[door.region] = (door.model, door.stopped_since or door.dead_since, now)
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
                    _log.info("door %s is not loaded: leaving it so", model)
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
