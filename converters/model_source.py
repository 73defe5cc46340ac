"""Finds the checkpoint that an argument names: a file or folder of this machine, or a repository of the hub.

Imports neither torch nor transformers, so that a wrong name is refused before they are loaded.
"""

from __future__ import annotations

import difflib
import os
import queue
import re
import sys
import threading
from pathlib import Path
from typing import Callable

from tridecode.backend.base.errors import CheckpointError

ANSWER_S = 5.0  # seconds until a hub that does not answer counts as unreachable, including name resolution
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")
_FILES = (".gguf", ".nemo")
_HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # next to the weights
_HUB_WEIGHTS = ["*.safetensors"], ["*.bin"]  # the second pattern is used if no file matches the first


def find_model(model: str | Path) -> Path:
    """The path of the checkpoint `model`, downloaded if no path has this name and the hub has a repository.

    Raises CheckpointError: at once for a path that does not exist, after ANSWER_S at most for a repository
    that the hub does not have or that cannot be reached and is not in the hub's cache.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if not is_hub_id(str(model)):
        kind = "file" if path.suffix in _FILES else "file or folder"
        raise CheckpointError(f"{path}: no such {kind}{_missing(path) or _nearest(path)}")
    return _from_hub(str(model), _nearest(path))


def is_hub_id(model: str) -> bool:
    """Whether `model` can be the id of a repository on the hub, `name` or `organisation/name`.

    Absolute paths, ./x, ../x, ~/x, a/b/c, a/ and names of .gguf and .nemo files cannot.
    """
    return (
        _HUB_ID.fullmatch(model) is not None
        and not model.endswith((*_FILES, ".git", ".", "-"))
        and not re.search(r"--|\.\.", model)
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


def _from_hub(repository: str, hint: str) -> Path:
    from huggingface_hub import constants, snapshot_download  # not needed for a path

    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        print(f"{repository}: no such folder{hint}; asking the hub…", file=sys.stderr, flush=True)
        reason = _refusal(lambda: _ask(repository))
    try:
        for weights in _HUB_WEIGHTS:
            patterns = [*_HUB_FILES, *weights]
            if reason:
                path = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
            else:
                path = Path(snapshot_download(repository, allow_patterns=patterns))
            if any(path.glob(weights[0])):
                break
        return path
    except Exception as error:  # the hub's client raises types of four libraries
        reason = reason or _one_line(error)
        raise CheckpointError(
            f"{repository!r} is not a file or folder{hint}, and the hub could not be reached or does not "
            f"have it: {reason}"
        ) from None


def _ask(repository: str) -> object:
    from huggingface_hub import HfApi  # as above

    return HfApi().model_info(repository, timeout=ANSWER_S)


def _refusal(call: Callable[[], object]) -> str:
    """Return why `call` failed; "" if it succeeded.

    The limit also covers what the hub's own time-out does not: name resolution, retries, an answer that
    arrives byte by byte.
    """
    ended: queue.Queue[str] = queue.Queue()

    def run() -> None:
        try:
            call()
            ended.put("")
        except Exception as error:  # as in _from_hub
            ended.put(_one_line(error) or type(error).__name__)

    threading.Thread(target=run, name="hub", daemon=True).start()
    try:
        return ended.get(timeout=ANSWER_S)
    except queue.Empty:
        return f"no answer within {ANSWER_S:g} s"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
