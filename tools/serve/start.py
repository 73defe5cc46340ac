"""Waits until tritonserver serves every model, and reports the progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tridecode.backend.base.errors import TridecodeError
from tridecode.backend.supervisor import shared_memory, state_file
from tridecode.backend.wire.messages import EngineState
from tridecode.tools.progress import Progress
from tridecode.tools.serve import ports
from tridecode.tools.serve.guarded_server import GuardedServer
from tridecode.tools.serve.triton_http import ModelState, TritonHttp, TritonHttpError

TICK_S = 0.1


class StartError(TridecodeError):
    """The server does not become ready; the text has the cause."""


class Start:
    """One start of a server. models: must become ready. ports: name -> port on which it must listen."""

    def __init__(
        self, server: GuardedServer, http: TritonHttp, models: Sequence[str], ports: dict[str, int]
    ) -> None:
        self._server = server
        self._http = http
        self._models = models
        self._ports = ports
        self._doing = "starting tritonserver"
        self._moved_at = time.monotonic()

    def wait(self, timeout_s: float, goes_on: Callable[[], bool]) -> list[ModelState]:
        """Return the state of each model once the server answers for all of them, READY or failed; empty if
        goes_on turned false. timeout_s: longest time without progress. Raises StartError, with the step that
        did not end, at the timeout, and if another process listens on a port.
        """
        with Progress() as progress:
            while goes_on():
                rows = self._look()
                if rows is not None:
                    self._check_ports()
                    return rows
                silent_s = time.monotonic() - self._moved_at
                if silent_s > timeout_s and not self._lending():
                    raise StartError(
                        f"the server was not ready: no progress for {timeout_s:g} s (--start-timeout-s) "
                        f"while {self._doing}"
                    )
                progress.show(self._doing)
                time.sleep(TICK_S)
        return []

    def _look(self) -> list[ModelState] | None:
        """Return the models' states when all are known and no engine is still starting; None before."""
        late = [
            content.state
            for content in state_file.read_all(self._server.folder)
            if content.state.phase != "ready"
        ]
        rows = self._rows()
        if rows is None:
            self._say(self._loading() if not late else _engine(late[0]))
            return None
        # Triton answers after it has tried every model; an ensemble with a failed member has no state
        failed = [row for row in rows if row.state in ("UNAVAILABLE", "")]
        waiting = [row.name for row in rows if row.state in ("LOADING", "UNLOADING")]
        if waiting:
            self._say(f"loading {', '.join(waiting)}")
        elif late and not failed:
            if late[0].phase == "failed":
                raise StartError(f"the engine cannot start: {late[0].detail}")
            self._say(_engine(late[0]))
        else:
            return rows
        return None

    def _lending(self) -> bool:
        """Return whether this node lends its GPUs to node 0: it never becomes ready."""
        states = [content.state for content in state_file.read_all(self._server.folder)]
        return any(state.phase == "lending" for state in states)

    def _rows(self) -> list[ModelState] | None:
        """Return the states of our models, once our server answers; no other process gets the key."""
        port = self._ports["http"]
        if not ports.listens(self._server.pid, port) and ports.inodes_listening(port):
            return None
        try:
            found = {row.name: row for row in self._http.index()}
        except TritonHttpError:
            return None
        return [
            found.get(name, ModelState(name, "UNAVAILABLE", "Triton does not list it"))
            for name in self._models
        ]

    def _loading(self) -> str:
        doors = {
            Path(stub.model_file).parent.parent.name for stub in shared_memory.stubs_of(self._server.pid)
        }
        return f"loading models; python processes so far: {', '.join(sorted(doors)) or 'none'}"

    def _say(self, doing: str) -> None:
        if doing != self._doing:
            self._doing, self._moved_at = doing, time.monotonic()

    def _check_ports(self) -> None:
        """Raises StartError if another process took a port between our check and Triton's start."""
        for name, port in self._ports.items():
            others = ports.who_listens(port)
            if others and self._server.pid not in others and self._server.running():
                holders = ", ".join(map(ports.in_words, others))
                raise StartError(f"{name} port {port} is served by {holders}, not by our tritonserver")


def _engine(state: EngineState) -> str:
    """Describe the engine's phase; the reason of a failure is reported with the models that could not be
    loaded.
    """
    return f"engine {state.phase}" if state.phase == "failed" else f"engine {state.phase}: {state.detail}"
