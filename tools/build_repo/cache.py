"""A bounded cache of model repositories, made from checkpoints on first use.

An entry is named by the checkpoint's content, the options of the conversion and the converter's code, so
that the same command finds it again and a changed checkpoint makes another one. Entries appear whole
(staging.py). A process that uses an entry holds a lock on it, and the entry is not evicted meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import ConfigError
from tridecode.tools.build_repo.checkpoint_digest import checkpoint_digest, converter_digest
from tridecode.tools.build_repo.staging import check_output
from tridecode.tools.byte_sizes import parse_bytes

FOLDER_VARIABLE = "TRIDECODE_CACHE"
BYTES_VARIABLE = "TRIDECODE_CACHE_BYTES"
DEFAULT_BYTES = 200_000_000_000
RECORD = ".cache-entry.json"
_DIGESTS = "digests.json"
_ENTRY = re.compile(r"[a-z0-9][a-z0-9.-]*-[0-9a-f]{16}")


@dataclass(frozen=True)
class Conversion:
    """The options of a conversion, as `build-repo` takes them.

    contracts: (): the default ones. settings: NAME=VALUE, of the engine. dtype: None: the checkpoint's with a
    GPU, fp32 without.
    """

    quantize: str | None = None
    tp: int = 1
    contracts: tuple[str, ...] = ()
    for_clients: str | None = None
    settings: tuple[str, ...] = ()
    pp: int = 1
    dtype: str | None = None

    def options(self) -> list[str]:
        """Return the options that differ from the defaults, as on a command line."""
        values = {
            "--quantize": self.quantize,
            "--tp": None if self.tp == 1 else str(self.tp),
            "--pp": None if self.pp == 1 else str(self.pp),
            "--dtype": self.dtype,
            "--contract": ",".join(self.contracts) or None,
            "--for": self.for_clients,
        }
        words = [word for name, value in values.items() if value is not None for word in (name, value)]
        return words + [word for setting in self.settings for word in ("--set", setting)]


@dataclass(frozen=True)
class Entry:
    """One repository of the cache. used: seconds since the Unix epoch. source: the checkpoint's path."""

    path: Path
    bytes: int
    used: float
    source: str
    options: str


#: (checkpoint, output, conversion): writes a repository
Build = Callable[[str, Path, Conversion], object]


class RepositoryCache:
    """folder: created with the first entry. max_bytes: of all entries; one larger than that is kept alone."""

    def __init__(self, folder: Path | None = None, max_bytes: int | None = None):
        self.folder = (folder or default_folder()).absolute()
        self._max_bytes = size_limit() if max_bytes is None else max_bytes
        self._held: list[int] = []  # descriptors of entries in use; closed with the process

    def find_or_build(self, checkpoint: Path, conversion: Conversion, build: Build) -> tuple[Path, bool]:
        """Return the repository of a checkpoint, and whether the cache had it.

        The entry stays locked until this process ends. Raises ConfigError for a folder that cannot be used,
        and what `build` raises.
        """
        self._make()
        try:
            digest = checkpoint_digest(checkpoint, self.folder / _DIGESTS)
        except OSError as error:
            raise ConfigError(f"{error.filename or checkpoint} cannot be read: {error.strerror}") from None
        path = self.folder / f"{_plain(checkpoint)}-{_key(digest, conversion)}"
        with self._building(path):
            if path.is_dir() and self._hold(path):
                return path, True
            build(str(checkpoint), path, conversion)
            entry = Entry(path, _bytes(path), 0.0, str(checkpoint.absolute()), " ".join(conversion.options()))
            _write_record(entry)
            self._hold(path)
        self._remove_outdated(entry)
        self.evict()
        return path, False

    def check(self) -> None:
        """Raise ConfigError for a folder that cannot be used; nothing is created."""
        check_output(self.folder / "entry", overwrite=False)

    def entries(self) -> list[Entry]:
        """Return the entries, the one used last first."""
        found = [_entry(path) for path in self._paths()]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def evict(self) -> list[Path]:
        """Remove the entries used longest ago until the rest fits; return them. Those in use stay."""
        room, removed = self._max_bytes, []
        for number, entry in enumerate(self.entries()):
            room -= entry.bytes
            if room < 0 and number > 0 and self.remove(entry.path):
                removed.append(entry.path)
                room += entry.bytes
        return removed

    def remove(self, path: Path) -> bool:
        """Remove an entry; return False for one that a process uses."""
        with _locked(path, fcntl.LOCK_EX) as locked:
            if locked:
                gone = path.with_name(f".{path.name}.removed-{os.getpid()}")
                path.rename(gone)  # no half-removed entry can be found
                shutil.rmtree(gone, ignore_errors=True)
            return locked

    def _remove_outdated(self, newest: Entry) -> None:
        """Remove the entries of the same checkpoint and options that it replaces."""
        for entry in self.entries():
            same = (entry.source, entry.options) == (newest.source, newest.options)
            if same and entry.path != newest.path:
                self.remove(entry.path)

    @contextlib.contextmanager
    def _building(self, path: Path) -> Iterator[None]:
        """Wait until no other process builds this entry."""
        with open(self.folder / f".{path.name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _paths(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in self.folder.iterdir():
                if _ENTRY.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    yield path

    def _make(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the cache {self.folder} cannot be made: {error.strerror}; name another by --cache"
            ) from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigError(f"the cache {self.folder} cannot be written to; name another by --cache")
        for path in self.folder.glob(".*.removed-*"):  # a killed process has left them
            shutil.rmtree(path, ignore_errors=True)

    def _hold(self, path: Path) -> bool:
        """Lock an entry against eviction; False if it has just been removed."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not os.path.exists(path) or os.stat(path).st_ino != os.fstat(descriptor).st_ino:
            os.close(descriptor)
            return False
        self._held.append(descriptor)
        with contextlib.suppress(OSError):
            os.utime(path / RECORD)
        return True


def default_folder() -> Path:
    """Return $TRIDECODE_CACHE, else tridecode in the user's cache folder."""
    if found := os.environ.get(FOLDER_VARIABLE):
        return Path(found).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tridecode"


def size_limit() -> int:
    """Return $TRIDECODE_CACHE_BYTES, else DEFAULT_BYTES. Raises ConfigError."""
    text = os.environ.get(BYTES_VARIABLE, "").strip()
    if not text:
        return DEFAULT_BYTES
    return parse_bytes(text, BYTES_VARIABLE)


def _key(digest: str, conversion: Conversion) -> str:
    has_gpu = shutil.which("nvidia-smi") is not None  # decides the weights' type
    parts: dict[str, Any] = {**asdict(conversion), "gpu": has_gpu, "code": converter_digest()}
    return hashlib.sha256(f"{digest} {json.dumps(parts, sort_keys=True)}".encode()).hexdigest()[:16]


def _plain(checkpoint: Path) -> str:
    """Return a name for an entry; that of a hub's snapshot is a commit, so its repository names it."""
    parts = checkpoint.absolute().parts
    name = checkpoint.name.removesuffix(".gguf").removesuffix(".nemo")
    if len(parts) > 3 and parts[-2] == "snapshots":
        name = parts[-3].removeprefix("models--").rpartition("--")[2]
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:60] or "model"


def _entry(path: Path) -> Entry:
    record = path / RECORD
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        used = record.stat().st_mtime
        return Entry(path, int(found["bytes"]), used, str(found["source"]), str(found["options"]))
    except (OSError, ValueError, TypeError, KeyError):  # its process was killed before it wrote the record
        return Entry(path, _bytes(path), path.stat().st_mtime if path.exists() else time.time(), "", "")


def _write_record(entry: Entry) -> None:
    values = {"source": entry.source, "options": entry.options, "bytes": entry.bytes}
    (entry.path / RECORD).write_text(json.dumps(values), encoding="utf-8")


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[bool]:
    """Yield True if the lock was free, False if it was not or the folder is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)
