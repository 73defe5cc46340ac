"""The supervisor's last message, as a file: for `tridecode serve`, health probes and operators.

The supervisor touches the file every TOUCH_S, so its modification time shows that the supervisor lives.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from tridecode.backend.wire.messages import EngineState

STATE = "state.json"
TOUCH_S = 1.0


class StateFile(msgspec.Struct, frozen=True):
    """state: as sent to doors. running, waiting: sequences in the engine. supervisor_pid: the writer. guests:
    front ends that Triton knows nothing of: workers of the OpenAI service."""

    state: EngineState
    engine_dir: str
    supervisor_pid: int
    running: int = 0
    waiting: int = 0
    guests: int = 0


def write(folder: Path, content: StateFile) -> None:
    """Replace the file atomically, so that a reader never sees half of it."""
    draft = folder / (STATE + ".new")
    draft.write_bytes(msgspec.json.encode(content))
    os.replace(str(draft), str(folder / STATE))


def touch(folder: Path) -> None:
    os.utime(str(folder / STATE))


def read(folder: Path) -> StateFile | None:
    """Return the content, or None."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=StateFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_all(base: Path) -> list[StateFile]:
    """The states of all engines whose runtime folders lie in `base`."""
    try:
        found = [read(folder) for folder in sorted(base.iterdir())]
    except FileNotFoundError:
        return []
    return [content for content in found if content is not None]


def silent_s(folder: Path) -> float:
    """Return the seconds since the supervisor last touched it; infinite if it never did."""
    try:
        return max(0.0, time.time() - os.stat(str(folder / STATE)).st_mtime)
    except FileNotFoundError:
        return float("inf")
