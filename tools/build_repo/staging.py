"""The folder in which a repository is built: it becomes the output when everything is done.

A conversion that is interrupted after a GiB stays there, and the same command continues it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.weights.manifest import JOURNAL_FILE, MANIFEST_FILE
from tridecode.model_repo_templates.served import ENGINE_MODEL

#: less is reconverted within seconds, and not worth a hidden folder
_WORTH_KEEPING = 1 << 30


@contextmanager
def staged(output: Path, kept: Path) -> Iterator[Path]:
    """A folder next to `output` that is renamed to it when the block ends, and removed if it fails.

    kept: of the folder's contents, the weight directory. If it holds more than a GiB and the block is
    interrupted or the disk fails, it stays for the next call. Raises ConfigError if another process builds
    the same output.
    """
    made = _make_folders(output.parent)
    staging = _staging(output)
    try:
        staging.mkdir(exist_ok=True)
        with _locked(staging, output):
            _remove_all_but(staging, kept)
            if not any((staging / kept / name).is_file() for name in (JOURNAL_FILE, MANIFEST_FILE)):
                shutil.rmtree(staging / kept, ignore_errors=True)  # nothing describes its files
            yield staging
            _replace(output, staging)
    except _OtherProcess as error:
        raise ConfigError(str(error)) from None
    except BaseException as error:
        hint = _clean_up(output, kept, error)
        for folder in reversed(made):
            if not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, OSError) and error.errno is not None:
            where = f" ({error.filename})" if error.filename else ""
            raise ConfigError(f"{output} cannot be written: {error.strerror}{where}{hint}") from error
        if hint:
            print(f"interrupted{hint}", file=sys.stderr)
        raise


def check_output(output: Path, overwrite: bool) -> None:
    """ConfigError where a repository cannot be written at `output`; nothing is created."""
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise ConfigError(f"{output} exists and is not empty; name another output, or add --overwrite")
        if not (output / ENGINE_MODEL / "config.pbtxt").is_file():
            raise ConfigError(f"{output} is not a model repository of this tool; it is not overwritten")
    elif os.path.lexists(output) and not output.is_dir():
        raise ConfigError(f"{output} is not a folder; name another output")
    folder = existing_parent(output)
    if not folder.is_dir():
        raise ConfigError(f"{output} cannot be made: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{output} cannot be made: no permission to write to {folder}")


def staged_bytes(output: Path, kept: Path) -> int:
    """Return the bytes of the weight files that an earlier call has left."""
    return sum(path.stat().st_size for path in (_staging(output) / kept).glob("*.bin"))


def _staging(output: Path) -> Path:
    return output.parent / f".{output.name}.building"


def _clean_up(output: Path, kept: Path, error: BaseException) -> str:
    """Remove the folder, or report what stays and why."""
    if isinstance(error, (OSError, KeyboardInterrupt)) and staged_bytes(output, kept) >= _WORTH_KEEPING:
        return f"; run the same command again to go on, or remove {_staging(output)}"
    shutil.rmtree(_staging(output), ignore_errors=True)
    return ""


def _replace(output: Path, staging: Path) -> None:
    replaced = output.parent / f".{output.name}.replaced-{os.getpid()}"
    if output.exists():
        output.rename(replaced)
    try:
        staging.rename(output)
    except OSError:
        if replaced.exists():
            replaced.rename(output)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


class _OtherProcess(Exception):
    """The folder is in use."""


@contextmanager
def _locked(staging: Path, output: Path) -> Iterator[None]:
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _OtherProcess(f"{output} is being built by another process, in {staging}") from None
    try:
        yield
    finally:
        os.close(descriptor)


def _remove_all_but(folder: Path, kept: Path) -> None:
    """Empty `folder`, except for the folder `kept` in it."""
    for path in folder.iterdir():
        if path.name != kept.parts[0]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif len(kept.parts) > 1:
            _remove_all_but(path, Path(*kept.parts[1:]))


def existing_parent(path: Path) -> Path:
    """The nearest folder (or other file) above `path` that exists."""
    return next(parent for parent in path.absolute().parents if os.path.lexists(parent))


def _make_folders(folder: Path) -> list[Path]:
    """Create a folder and its parents; return the new ones, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None
    return missing
