"""Finds the checkpoint that an argument names: a file or folder of this machine, or a repository of the hub.

Imports neither torch nor transformers, so that a wrong name is refused before they are loaded.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from tridecode.backend.base.errors import CheckpointError
from tridecode.converters import hub

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}")
_FILES = (".gguf", ".nemo")


def find_model(model: str | Path) -> Path:
    """Return the path of a checkpoint, downloaded if no path has this name and the hub has a repository.

    model: a path, or the id of a repository, with @REVISION for a branch, a tag or a commit. Raises
    CheckpointError: at once for a path that does not exist, after hub.ANSWER_S at most for a repository that
    the hub does not have or that cannot be reached and is not in the hub's cache.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if not is_hub_id(str(model)):
        kind = "file" if path.suffix in _FILES else "file or folder"
        raise CheckpointError(f"{path}: no such {kind}{_missing(path) or _nearest(path)}")
    repository, _, revision = str(model).partition("@")
    return hub.download(repository, revision or None, _nearest(path))


def is_hub_id(model: str) -> bool:
    """Return whether `model` can be the id of a repository on the hub: NAME or ORGANISATION/NAME, and
    @REVISION behind it.

    Absolute paths, ./x, ../x, ~/x, a/b/c, a/ and names of .gguf and .nemo files cannot.
    """
    name, at, revision = model.partition("@")
    return (
        _HUB_ID.fullmatch(name) is not None
        and not name.endswith((*_FILES, ".git", ".", "-"))
        and not re.search(r"--|\.\.", name)
        and (not at or (_REVISION.fullmatch(revision) is not None and not re.search(r"\.\.|//", revision)))
    )


def _missing(path: Path) -> str:
    """Return the first missing folder on the way to `path`; "" if only its last name is missing."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    return "" if missing == path else f" ({missing} does not exist)"


def _nearest(path: Path) -> str:
    """A name in the same folder that resembles the missing one; "" without one."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.parent / found[0]}?)" if found else ""
