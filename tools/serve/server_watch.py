"""Watches a running tritonserver for `tridecode serve`: doors, stopped server, runtime folder, orphans."""

from __future__ import annotations

import logging
import time

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.base.pauses import PauseWatch
from tridecode.backend.supervisor import processes, state_file
from tridecode.tools.serve import ports
from tridecode.tools.serve.door_watch import DoorWatch, Orphans
from tridecode.tools.serve.drain import IDLE_S
from tridecode.tools.serve.guarded_server import GuardedServer
from tridecode.tools.serve.options import ServeOptions
from tridecode.tools.serve.triton_http import TritonHttp

WATCH_S = 0.25  # interval of `tick`
_MEND_S = 2.0  # interval of checks of the runtime folder
_UNLOAD_S = 20.0  # a door is certainly unloaded after this time, even if its reload takes longer
_FROZEN_S = 3.0  # a tritonserver stopped by a signal for longer is killed and restarted

_log = logging.getLogger("tridecode.serve")


class ServerWatch:
    """Watches one tritonserver from its start to its end; `tick` is called every WATCH_S."""

    def __init__(self, options: ServeOptions, server: GuardedServer, http: TritonHttp) -> None:
        self._server = server
        self._orphans_s = options.orphans_s()
        self._client_ports = [port for name, port in options.ports().items() if name != "metrics"]
        self.doors = DoorWatch(server.pid, http)
        #: whether the server was killed because requests could not end
        self.killed_for_orphans = False
        self._frozen_since: float | None = None
        self._pauses = PauseWatch(time.monotonic(), WATCH_S)
        self._idle_since = 0.0  # since when the engines have no work, while there are orphans
        self._mended_at = 0.0

    def tick(self, now: float) -> None:
        """now: monotonic seconds."""
        self.doors.tick(now)
        self._look_at_server(now)
        self._look_at_folder(now)
        self._look_at_orphans(now)

    def _look_at_server(self, now: float) -> None:
        """Kill a server that stays stopped, because it answers no requests. The time of a pause of `serve`
        itself does not count, because everything may have been paused.
        """
        paused_s = self._pauses.turn(now)
        pid = self._server.pid
        if processes.state(pid) != "T":
            if self._frozen_since is not None:
                _log.warning("tritonserver %d runs again", pid)
            self._frozen_since = None
        elif self._frozen_since is None:
            _log.error("tritonserver %d is stopped by a signal", pid)
            self._frozen_since = now
        elif paused_s:
            self._frozen_since += paused_s
        elif now - self._frozen_since > _FROZEN_S:
            _log.error("tritonserver %d has been stopped for %g s: killing it", pid, _FROZEN_S)
            self._server.kill_server()

    def _look_at_folder(self, now: float) -> None:
        if now - self._mended_at < _MEND_S:
            return
        self._mended_at = now
        try:
            if self._server.mend():
                _log.warning("%s, or something in it, was removed: recreated", self._server.folder)
        except (OSError, TridecodeError) as error:
            _log.error("%s cannot be recreated: %s", self._server.folder, error)

    def _look_at_orphans(self, now: float) -> None:
        """Restart the server for requests that were open at a dead door: Triton can end them in no other
        way."""
        if self._orphans_s is None or not self.doors.has_orphans:
            self._idle_since = now
            return
        if any(engine.running or engine.waiting for engine in state_file.read_all(self._server.folder)):
            self._idle_since = now
        orphans = [one for one in self.doors.orphans(now) if not self._uncertain(one, now)]
        if not orphans or not ports.connections(self._client_ports):
            return  # without a connection no client waits for them
        waited = now - min(one.since for one in orphans)
        idle = now - self._idle_since > IDLE_S
        if idle or waited > self._orphans_s:
            _log.warning(
                "%s, which Triton cannot end: restarting tritonserver, since %s",
                "; ".join(map(str, orphans)),
                "nothing else is open" if idle else f"they are {waited:.0f} s old (--orphans)",
            )
            self.killed_for_orphans = True
            self._server.kill_server()

    def _uncertain(self, orphans: Orphans, now: float) -> bool:
        """Return whether a foreign door, which does not count its requests, is still being unloaded."""
        return orphans.count is None and self.doors.busy and now - orphans.noticed < _UNLOAD_S
