"""How a door finds the supervisor of its engine, or starts one. Imports the standard library, zmq's users and
msgspec only.

The runtime folder's lock is held by the supervisor for as long as it lives. Whoever gets the lock starts a
new supervisor and hands the lock over to it, so that two doors never start two.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from pathlib import Path

from tridecode.backend.errors import ConfigError, EngineDownError
from tridecode.backend.supervisor import processes, runtime_dir, state_file

START_S = 20.0  # a supervisor answers within so long: a python start and four imports
FROZEN_S = 5.0  # a supervisor whose state file is older is looked at again,
FROZEN_CHECK_S = 2.0  # and replaced if it has not touched the file after so long

_log = logging.getLogger("tridecode.launch")
_started: list[subprocess.Popen] = []  # kept to be reaped, so that a killed supervisor leaves no zombie


def ensure(engine_dir: str, server_pid: int) -> str:
    """The control endpoint of the supervisor for `engine_dir`, which is started if none runs.

    engine_dir: the model directory that holds config.pbtxt and the version folders. server_pid: the
    tritonserver whose life the engine shares. Any number of doors may call at once. A door that gets no
    EngineState for SILENCE_S should call again and reconnect: the supervisor was killed, frozen or about to
    leave. Blocks for as long as a supervisor takes to start, START_S at most. Raises EngineDownError if it
    does not start or the server is stopping, ConfigError if the setting is wrong.
    """
    given = os.environ.get("TRIDECODE_CONTROL_ENDPOINT")
    if given:
        return given
    _started[:] = [process for process in _started if process.poll() is None]
    engine_dir = os.path.abspath(engine_dir)
    server = runtime_dir.server_identity(server_pid)
    folder = runtime_dir.engine_dir_path(engine_dir, server)
    control = runtime_dir.endpoint(folder / runtime_dir.CONTROL)
    deadline = time.monotonic() + START_S
    while True:
        fd = runtime_dir.lock(folder)
        if fd is not None:
            try:
                if (folder.parent / runtime_dir.STOPPING).exists():
                    runtime_dir.remove(folder)
                    raise EngineDownError("the server is stopping; no engine is started")
                return _start(folder, fd, engine_dir, server, control, deadline)
            finally:
                os.close(fd)
        if _answers(folder):
            return control
        if time.monotonic() > deadline:
            raise EngineDownError(f"the supervisor in {folder} has not answered for {START_S:.0f} s")
        time.sleep(0.02)


def _answers(folder: Path) -> bool:
    """Whether the supervisor that holds the folder's lock serves doors; one that is frozen is killed."""
    if not (folder / runtime_dir.CONTROL).exists():
        return False  # starting, or just leaving
    owner = runtime_dir.read_owner(folder)
    if owner is None or processes.identify(owner.holder_pid) is None:
        return False  # killed, and about to let go of the lock
    if state_file.silent_s(folder) < FROZEN_S:
        return True
    time.sleep(FROZEN_CHECK_S)  # all of us may have been frozen: it gets the time to speak
    if state_file.silent_s(folder) < FROZEN_S:
        return True
    holder = processes.identify(owner.holder_pid)
    if holder is not None:
        _log.warning("supervisor %d is frozen (%s): replacing it", holder.pid, processes.state(holder.pid))
        processes.kill(holder)
    return False


def _start(
    folder: Path, fd: int, engine_dir: str, server: processes.ProcessId, control: str, deadline: float
) -> str:
    """Start a supervisor that takes the lock `fd` over; returns when its socket is bound."""
    _clear(folder)
    command = [engine_python(), "-m", "tridecode.backend.supervisor"]
    command += ["--engine-dir", engine_dir, "--runtime-dir", str(folder), "--lock-fd", str(fd)]
    command += ["--server", f"{server.pid}:{server.start}"]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
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
    """Remove what a killed supervisor left, save the record of its epochs."""
    for entry in folder.iterdir():
        if entry.name != runtime_dir.OWNER:
            entry.unlink(missing_ok=True)  # its last rank may be at the same work


def engine_python() -> str:
    """The python that runs supervisor and engine: $TRIDECODE_ENGINE_PYTHON, else the first python3 on PATH.

    Not sys.executable: in Triton's stub it names the door's python, or nothing.
    """
    path = os.environ.get("TRIDECODE_ENGINE_PYTHON") or shutil.which("python3")
    if not path:
        raise ConfigError(
            "no python3 on PATH and TRIDECODE_ENGINE_PYTHON is not set; the engine needs one of them"
        )
    return path


def engine_environment() -> dict[str, str]:
    """The engine's environment: ours, with the variables that `tridecode serve` had to change for the doors
    set back.

    TRIDECODE_ENGINE_<NAME> holds the value for PATH and LD_LIBRARY_PATH; an empty one unsets the variable.
    """
    environment = dict(os.environ)
    for name in ("PATH", "LD_LIBRARY_PATH"):
        original = environment.pop(f"TRIDECODE_ENGINE_{name}", None)
        if original:
            environment[name] = original
        elif original == "":
            environment.pop(name, None)
    return environment
