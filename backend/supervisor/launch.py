"""Finds or starts the supervisor of an engine, for a door. Imports the standard library, zmq and msgspec
only.

The supervisor holds the runtime folder's lock for as long as it lives. The process that gets the lock starts
a new supervisor and hands the lock over to it, so that two doors never start two.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from tridecode.backend.base import cores, pauses
from tridecode.backend.base.errors import ConfigError, EngineDownError
from tridecode.backend.base.threads import spin_briefly
from tridecode.backend.nodes.launchers import inherited_fds
from tridecode.backend.supervisor import processes, runtime_dir
from tridecode.backend.wire import messages

START_S = 20.0  # a supervisor answers within this time: Python's start and four imports
ANSWER_S = 3.0  # a supervisor that has not answered a ping after this time is replaced,
STOPPED_S = 0.6  # and after this one if a signal has stopped it: it cannot be merely slow
_LOOK_S = 0.05  # poll interval while waiting for an answer
_ENDED = "the engine's supervisor has ended"

_log = logging.getLogger("tridecode.launch")
_started: list[subprocess.Popen] = []  # kept to be reaped, so that a killed supervisor leaves no zombie


def ensure(
    engine_dir: str,
    server_pid: int,
    number: int = 0,
    replacing: Callable[[str], None] = lambda reason: None,
) -> str:
    """Return the control endpoint of the supervisor for an engine of `engine_dir`; start one if none runs.

    engine_dir: the model directory that holds config.pbtxt and the version folders. server_pid: the
    tritonserver whose life the engine shares, unless TRIDECODE_OWNER names another process. number: index of
    the engine in instance_group. Any number of doors may call concurrently. A door that gets no EngineState
        for SILENCE_S should call again and reconnect: the supervisor was killed, is frozen or is about to
    exit. replacing(reason): called before a new supervisor is started instead of one that was killed or does
    not answer; its engine ends with it. Blocks for as long as a supervisor takes to start, START_S at most.
    Raises EngineDownError if it does not start or the server is stopping, ConfigError if the setting is
    wrong.
    """
    given = os.environ.get("TRIDECODE_CONTROL_ENDPOINT")
    if given:
        return given
    _started[:] = [process for process in _started if process.poll() is None]
    engine_dir = os.path.abspath(engine_dir)
    server = runtime_dir.life_owner(server_pid)
    folder = runtime_dir.engine_dir_path(engine_dir, server, number)
    control = runtime_dir.endpoint(folder / runtime_dir.CONTROL)
    deadline = time.monotonic() + START_S
    told = ""
    while True:
        fd = runtime_dir.lock(folder)
        if fd is not None:
            try:
                if (folder.parent / runtime_dir.STOPPING).exists():
                    runtime_dir.remove(folder)
                    raise EngineDownError("the server is stopping; no engine is started")
                if runtime_dir.read_owner(folder) is not None:
                    replacing(_ENDED)
                return _start(folder, fd, engine_dir, server, number, deadline)
            finally:
                os.close(fd)
        silence = _silence(folder)
        if silence is None:
            return control
        if silence and silence != told:
            replacing(silence)
            told = silence
        if time.monotonic() > deadline:
            raise EngineDownError(f"the supervisor in {folder} has not answered for {START_S:.0f} s")
        time.sleep(0.02)


def _silence(folder: Path) -> str | None:
    """Return None if the supervisor that holds the folder's lock answers; "" while it starts or exits.

    One that does not answer is killed, and the returned text says why.
    """
    control = folder / runtime_dir.CONTROL
    owner = runtime_dir.read_owner(folder)
    holder = processes.identify(owner.holder_pid) if owner else None
    if owner is not None and holder is None:
        return _ENDED  # killed: its lock is released, or its successor's start has begun
    if holder is None or not control.exists():
        return ""
    if _pings(holder, runtime_dir.endpoint(control)):
        return None
    if not processes.alive(holder) or not control.exists():
        return ""
    state = processes.state(holder.pid)
    why = processes.STATE_WORDS.get(state, f"process state {state}")
    _log.warning("supervisor %d does not answer (%s): replacing it", holder.pid, why)
    processes.kill(holder)
    return f"the engine's supervisor did not answer ({why}) and was replaced"


def _pings(holder: processes.ProcessId, control: str) -> bool:
    """Return whether the supervisor answers a ping. Pauses of this process do not count against it."""
    context: zmq.Context = zmq.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(control)
        # answered with Unknown, since this socket sends no Hello
        socket.send(messages.encode(messages.Ping()))
        began = time.monotonic()
        watch, stopped_since = pauses.PauseWatch(began, _LOOK_S), None
        while not socket.poll(int(1000 * _LOOK_S)):
            now = time.monotonic()
            if watch.turn(now):
                began, stopped_since = now, None
            stopped = processes.state(holder.pid) in ("T", "t")
            stopped_since = (stopped_since or now) if stopped else None
            if now - began > ANSWER_S or (stopped_since and now - stopped_since > STOPPED_S):
                return False
            if not processes.alive(holder):
                return False
        return True


def _start(
    folder: Path, fd: int, engine_dir: str, server: processes.ProcessId, number: int, deadline: float
) -> str:
    """Start a supervisor that inherits the lock `fd`; return when its socket is bound."""
    _clear(folder)
    control = runtime_dir.endpoint(folder / runtime_dir.CONTROL)
    command = [engine_python(), "-m", "tridecode.backend.supervisor"]
    command += ["--engine-dir", engine_dir, "--runtime-dir", str(folder), "--lock-fd", str(fd)]
    command += ["--server", f"{server.pid}:{server.start}", "--number", str(number)]
    cores.leave()  # this thread may be one that shares a core; the engine must not
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(fd, *inherited_fds(os.environ)),
            start_new_session=True,
            env=engine_environment(),
        )
    except OSError as error:
        raise ConfigError(
            f"cannot run {command[0]} (TRIDECODE_ENGINE_PYTHON, else python3 on PATH): {error}"
        ) from None
    _started.append(process)
    while not (folder / runtime_dir.CONTROL).exists():
        if process.poll() is not None:
            raise EngineDownError(
                f"the supervisor ended at once with exit code {process.returncode}; its log says why "
                f"(command: {' '.join(command)})"
            )
        if time.monotonic() > deadline:
            process.kill()
            raise EngineDownError(f"the supervisor has not opened {control} within {START_S:.0f} s")
        time.sleep(0.01)
    return control


def _clear(folder: Path) -> None:
    """Remove the files of a killed supervisor, except the record of its epochs."""
    for entry in folder.iterdir():
        if entry.name != runtime_dir.OWNER:
            entry.unlink(missing_ok=True)  # its last rank may be removing the same files


def engine_python() -> str:
    """Return the Python that runs supervisor and engine: $TRIDECODE_ENGINE_PYTHON, else the first python3 on
    PATH.

    Not sys.executable: in Triton's stub it is the door's Python, or empty.
    """
    path = os.environ.get("TRIDECODE_ENGINE_PYTHON") or shutil.which("python3")
    if not path:
        raise ConfigError(
            "no python3 on PATH and TRIDECODE_ENGINE_PYTHON is not set; the engine needs one of them"
        )
    return path


def engine_environment() -> dict[str, str]:
    """Return our environment, with the variables restored that `tridecode serve` had to change for the doors.

    TRIDECODE_ENGINE_<NAME> holds the original PATH or LD_LIBRARY_PATH; an empty one unsets the variable.
    """
    environment = dict(os.environ)
    for name in ("PATH", "LD_LIBRARY_PATH"):
        original = environment.pop(f"TRIDECODE_ENGINE_{name}", None)
        if original:
            environment[name] = original
        elif original == "":
            environment.pop(name, None)
    spin_briefly(environment)
    return environment
