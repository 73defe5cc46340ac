"""The repository that `tridecode serve` serves: the one named, or one made from the checkpoint named."""

from __future__ import annotations

import logging
from pathlib import Path

from tridecode.backend.base.errors import CheckpointError, ConfigError
from tridecode.converters.model_source import find_model
from tridecode.tools.build_repo.build_entry import build_entry, check_conversion
from tridecode.tools.build_repo.cache import Conversion, RepositoryCache

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.nemo", "*.pt", "config.json", "config.ini", "*/config.ini")
_log = logging.getLogger("tridecode.serve")


def is_checkpoint(model: str) -> bool:
    """Return whether the argument names something to convert: a file, a checkpoint's folder, or a hub id.

    A folder with models is a repository. So is one with neither, which the check of repositories refuses.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        return True
    if any(path.glob("*/config.pbtxt")):
        return False
    return any(True for pattern in _WEIGHTS for _ in path.glob(pattern))


def find_repository(model: str, conversion: Conversion, cache: Path | None = None) -> Path:
    """Return the repository to serve; a checkpoint is converted unless the cache has it.

    The entry of the cache stays locked until this process ends. Raises ConfigError for a path or a hub id
    that does not exist and for options that do not fit, CheckpointError where the conversion fails.
    """
    if not is_checkpoint(model):
        if given := conversion.options() or (["--cache"] if cache else []):
            raise ConfigError(
                f"{given[0]} with {model}, which is a model repository; wanted a checkpoint, or no {given[0]}"
            )
        return Path(model)
    check_conversion(conversion)
    repositories = RepositoryCache(cache)
    repositories.check()
    try:
        checkpoint = find_model(model)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    repository, existed = repositories.find_or_build(checkpoint, conversion, build_entry)
    _log.info("%s: %s", "found in the cache" if existed else "converted", repository)
    return repository
