"""The runtime folder of one engine: its sockets, its lock, and the record of its owner.

    <base>/<name>/owner          locked (flock) by the process that uses the folder; holds an Owner as JSON
                  control.sock   the supervisor's socket
                  engine-N.sock  rank 0 of epoch N
                  state.json     the supervisor's last message (state_file.py)

A lock is released when its process ends, however it ends, so "locked" means "running". Stdlib and msgspec
only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import msgspec

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.supervisor import shared_memory
from tridecode.backend.supervisor.processes import ProcessId, alive, identify

MAX_SOCKET_PATH = 107  # bytes that sockaddr_un.sun_path holds, less the terminating zero
OWNER = "owner"
OWNER_BYTES = 1024  # length of the record on disk
CONTROL = "control.sock"
UNWRITTEN_S = 60.0  # a folder without a record is stale after this time
SWEEP_S = 10.0  # a sweep holds the lock of a folder for less than this
STOPPING = "stopping"  # a file of this name in the parent: the server is shutting down, start nothing new
DRAINING = "draining"  # … the server ends its open requests; guests (the OpenAI service) take no new ones


class Owner(msgspec.Struct):
    """The folder's owner: the server process, and the boot and pid namespace in which its pid is valid."""

    server_pid: int
    server_start: int
    boot: str
    pid_namespace: int
    epoch: int = 0  # the last engine epoch that was started here; the next supervisor continues from it
    holder_pid: int = 0  # the process that holds the lock
    shm_prefix: str = ""  # shared memory regions to remove with the folder


def owner_of(server: ProcessId) -> Owner:
    boot, namespace = _this_host()
    return Owner(server.pid, server.start, boot, namespace)


def _this_host() -> tuple[str, int]:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat("/proc/self/ns/pid").st_ino


def base_dir() -> Path:
    """Return the parent of this user's runtime folders: mode 0700, created if missing.

    $TRIDECODE_RUNTIME_DIR (set by `tridecode serve`), else tridecode-<uid> in $XDG_RUNTIME_DIR or the folder
    for temporary files. Raises ConfigError if it belongs to another user.
    """
    given = os.environ.get("TRIDECODE_RUNTIME_DIR")
    if given:
        return _private(Path(given))
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK)):
        parent = tempfile.gettempdir()
    return _private(Path(parent) / f"tridecode-{os.getuid()}")


def _private(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(
            f"{path} is a symbolic link to {os.readlink(path)}; wanted a folder of our own, because the "
            f"link's creator decides where the sockets are placed (set TRIDECODE_RUNTIME_DIR to another "
            "folder)"
        )
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{path} has owner {status.st_uid} and mode {status.st_mode & 0o777:o}; "
            f"wanted owner {os.getuid()} and mode 700, for it holds the engine's sockets "
            "(set TRIDECODE_RUNTIME_DIR to another folder)"
        )
    return path


def engine_dir_path(engine_dir: str, server: ProcessId, number: int = 0) -> Path:
    """Return the path of the runtime folder of `engine_dir` (an absolute path) under that server; nothing is
    created.
    """
    key = f"{server.pid}:{server.start}:{os.path.realpath(engine_dir)}" + (f":{number}" if number else "")
    return base_dir() / hashlib.sha256(key.encode()).hexdigest()[:12]


def endpoint(path: Path) -> str:
    """The zmq address of a socket file. Raises ConfigError if the path is too long for a unix socket."""
    length = len(os.fsencode(str(path)))
    if length > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} has {length} bytes; a unix socket's path holds {MAX_SOCKET_PATH} "
            "(set TRIDECODE_RUNTIME_DIR or TMPDIR to a shorter folder)"
        )
    return f"ipc://{path}"


def lock(folder: Path) -> int | None:
    """Create the folder if necessary and lock it; return the lock's file descriptor, or None if it is taken.

    The lock belongs to the open file, so it can be handed to a child process with pass_fds.
    """
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(str(folder / OWNER), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # removed between the two calls
            continue
        if not _flock(fd):
            os.close(fd)
            return None
        if _is_still(folder, fd):
            return fd
        os.close(fd)


def holds(folder: Path, fd: int) -> bool:
    """Return whether `fd` is still the lock of `folder`; false once the folder or its record was deleted."""
    return _is_still(folder, fd)


def restore(folder: Path) -> int | None:
    """Recreate a deleted folder, with its parents, and lock it. None if another process has locked it.

    Raises OSError if it cannot be made.
    """
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return lock(folder)


def lock_new(folder: Path) -> int:
    """Lock a new folder with a unique name; a sweep that inspects it may hold its lock for a moment.

    Raises ConfigError if another process uses it.
    """
    deadline = time.monotonic() + SWEEP_S
    while (fd := lock(folder)) is None:
        if time.monotonic() > deadline:
            raise ConfigError(f"{folder} is locked by another process; wanted a folder of our own")
        time.sleep(0.01)
    return fd


def _lock_existing(folder: Path) -> int | None:
    """Lock the folder as `lock` does; None also if it no longer exists."""
    try:
        fd = os.open(str(folder / OWNER), os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if _flock(fd) and _is_still(folder, fd):
        return fd
    os.close(fd)
    return None


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(folder: Path, fd: int) -> bool:
    """Return whether the folder's record is still the opened file, rather than a new one of the same name."""
    try:
        return os.stat(str(folder / OWNER)).st_ino == os.fstat(fd).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return False


def write_owner(fd: int, owner: Owner) -> None:
    """Replace the record of a locked folder. Raises OSError; a full disk leaves the old record readable.

    The record is padded to a fixed length, so that rewriting it needs no new disk block.
    """
    data = msgspec.json.encode(owner).ljust(OWNER_BYTES)
    written = os.pwrite(fd, data, 0)
    if written != len(data):
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes of the record could be written")


def read_owner(folder: Path) -> Owner | None:
    """Return the record in the folder, or None."""
    try:
        return msgspec.json.decode((folder / OWNER).read_bytes(), type=Owner)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def remove(folder: Path) -> None:
    """Remove a folder whose lock the caller holds."""
    shutil.rmtree(str(folder), ignore_errors=True)


def sweep(base: Path) -> list[Path]:
    """Remove the folders in `base` that a killed server left, with their shared memory; returns what was
    removed.

    A folder stays while its lock is held, while its server lives, or if that cannot be determined (another
    pid namespace of the same boot).
    """
    return [folder for folder in sorted(base.iterdir()) if _sweep(folder)]


def _sweep(folder: Path) -> bool:
    """Remove one folder if a killed server left it; return whether it was removed."""
    fd = _lock_existing(folder)
    if fd is None:
        return False
    try:
        owner = read_owner(folder)
        if not _is_stale(folder, owner):
            return False
        remove(folder)
        shared_memory.unlink_prefix(owner.shm_prefix if owner else "")
        return True
    finally:
        os.close(fd)


def leave(folder: Path, fd: int) -> None:
    """Remove the runtime folder of an engine, whose lock is `fd`, and close the lock.

    The last engine also removes the folder of its server, if `serve` and its guard were killed together.
    """
    remove(folder)
    os.close(fd)
    parent = folder.parent
    with contextlib.suppress(OSError):  # another engine has just removed it
        if (parent / OWNER).exists() and not any(_in_use(child) for child in parent.iterdir()):
            _sweep(parent)


def _in_use(folder: Path) -> bool:
    fd = _lock_existing(folder)
    if fd is None:
        return (folder / OWNER).exists()
    os.close(fd)
    return False


def _is_stale(folder: Path, owner: Owner | None) -> bool:
    if owner is None:  # its creator was killed before it wrote the record, or is about to write it
        return time.time() - folder.stat().st_mtime > UNWRITTEN_S
    boot, namespace = _this_host()
    if owner.boot != boot:
        return True
    return owner.pid_namespace == namespace and not alive(ProcessId(owner.server_pid, owner.server_start))


def life_owner(server_pid: int) -> ProcessId:
    """Return the process on whose life the engine depends.

    $TRIDECODE_OWNER ("PID:START", set by `tridecode serve`) names the guard, which outlives each tritonserver
    that it restarts; otherwise it is tritonserver itself. Raises ConfigError if no such process runs.
    """
    given = os.environ.get("TRIDECODE_OWNER", "")
    if not given:
        return server_identity(server_pid)
    pid, _, start = given.partition(":")
    if not (pid.isdigit() and start.isdigit()):
        raise ConfigError(f"TRIDECODE_OWNER is {given!r}; wanted PID:START, as in 4711:123456")
    owner = ProcessId(int(pid), int(start))
    if not alive(owner):
        raise ConfigError(f"TRIDECODE_OWNER is {given}; that process no longer runs")
    return owner


def server_identity(server_pid: int) -> ProcessId:
    """Raises ConfigError if no such process runs."""
    server = identify(server_pid)
    if server is None:
        raise ConfigError(f"the server's process id is {server_pid}; no such process runs")
    return server
