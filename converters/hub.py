"""Downloads a checkpoint from the hub ($HF_ENDPOINT) into the hub's own cache."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from tridecode.backend.base.checkpoint_files import read_json
from tridecode.backend.base.errors import CheckpointError

ANSWER_S = 5.0  # seconds until a hub that does not answer counts as unreachable, including name resolution
_SETTINGS = ["*.json", "*.model", "*.txt", "*.jinja"]  # everything but the weights
_FOLDERS = ["*/*"]  # exports for other programs
#: transformers' order of preference; code in the second one is never run
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def download(repository: str, revision: str | None, hint: str = "") -> Path:
    """Return the folder of a repository's files in the hub's cache, after downloading those that it lacks.

    revision: a branch, a tag or a commit; None: the main branch. hint: a path that resembles the id, for
    errors. The names of the weight files are checked before they are downloaded. Where the hub cannot be
    reached, a complete copy in the cache is used, and stderr has one line about it. Raises CheckpointError.
    """
    from huggingface_hub import constants  # not needed for a path

    name = f"{repository}@{revision}" if revision else repository
    names, reason = None, "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        _say(f"{name}: no such folder{hint}; asking the hub…")
        names, reason = _file_names(repository, revision)
    try:
        if names is None:
            folder = _cached(repository, revision, name)
            _say(f"{name}: the copy in the hub's cache is used ({reason})")
            return folder
        return _fetch(repository, revision, name, names)
    except CheckpointError:
        raise
    except Exception as error:  # the hub's client raises types of four libraries
        reason = reason or _one_line(error)
        raise CheckpointError(
            f"{name!r} is not a file or folder{hint}, and the hub could not be reached or does not "
            f"have it: {reason}"
        ) from None


def _fetch(repository: str, revision: str | None, name: str, names: Collection[str]) -> Path:
    if "config.json" not in names:
        files = [one for one in sorted(names) if one.endswith(".gguf")]
        found = f" (download {files[0]!r} and name that file)" if files else ""
        raise CheckpointError(f"{name} has no config.json; wanted a checkpoint of transformers{found}")
    folder = _snapshot(repository, revision, _SETTINGS, name=name)
    weights = _weights(folder, names, name)
    return _snapshot(repository, folder.name, [*_SETTINGS, *weights], name=name)


def _cached(repository: str, revision: str | None, name: str) -> Path:
    """Return the folder of a complete copy. Raises CheckpointError, or an error of the hub's client without a
    copy."""
    folder = _snapshot(repository, revision, ["config.json"], name=name, local_files_only=True)
    _weights(folder, {path.name for path in folder.iterdir() if path.exists()}, f"the cached copy of {name}")
    return folder


def _snapshot(
    repository: str, revision: str | None, patterns: list[str], *, name: str, local_files_only: bool = False
) -> Path:
    """Download the files that match. A connection that breaks is resumed where it broke."""
    from huggingface_hub import snapshot_download  # as above
    from huggingface_hub.errors import EntryNotFoundError

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_FOLDERS,
            local_files_only=local_files_only,
        )
    except EntryNotFoundError as error:
        if local_files_only:
            raise
        found = f"the hub lists a file of {name} that it does not have"
        raise CheckpointError(f"{found}: {_one_line(error)}") from None
    return Path(folder)


def _weights(folder: Path, names: Collection[str], name: str) -> list[str]:
    """Return the names of the weight files. Raises CheckpointError if one of them is missing."""
    for weights in _WEIGHTS:
        if weights in names:
            return [weights]
        index = f"{weights}.index.json"
        if index in names:
            listed = read_json(folder / index).get("weight_map")
            shards = sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []
            missing = next((shard for shard in shards if shard not in names), None)
            if missing is not None:
                raise CheckpointError(f"{name} has no file {missing[:200]!r}, which {index} lists")
            return shards
    raise CheckpointError(f"{name} has no weights; wanted {' or '.join(_WEIGHTS)}, whole or in shards")


def _file_names(repository: str, revision: str | None) -> tuple[frozenset[str] | None, str]:
    """Return the names of a repository's files, or None and the reason.

    The limit also covers what the hub's own time-out does not: name resolution, retries, an answer that
    arrives byte by byte.
    """
    ended: queue.Queue[tuple[frozenset[str] | None, str]] = queue.Queue()

    def run() -> None:
        try:
            ended.put((_ask(repository, revision), ""))
        except Exception as error:  # as in download
            ended.put((None, _one_line(error) or type(error).__name__))

    threading.Thread(target=run, name="hub", daemon=True).start()
    try:
        return ended.get(timeout=ANSWER_S)
    except queue.Empty:
        return None, f"no answer within {ANSWER_S:g} s"


def _ask(repository: str, revision: str | None) -> frozenset[str]:
    from huggingface_hub import HfApi  # as above

    found = HfApi().model_info(repository, revision=revision, timeout=ANSWER_S)
    return frozenset(one.rfilename for one in found.siblings or ())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
