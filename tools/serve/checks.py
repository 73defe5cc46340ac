"""Checks before `tridecode serve` starts anything: the repository, its names, and tritonserver's flags.

Triton starts a model's process with `bash -c` and quotes nothing (python_backend, stub_launcher.cc), so
blanks, quotes and $(...) in a path or a name are split or executed. A path is therefore passed as a link with
a plain name; names inside the repository are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.model_repo_templates.pbtxt import parse_model_config, string_parameters
from tridecode.tools.serve import triton_access

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.+,:@=/-]+")
_ENVIRONMENT = "EXECUTION_ENV_PATH"
_ENVIRONMENT_PREFIX = "$$TRITON_MODEL_DIRECTORY"  # Triton replaces it by the model's path

# Flags that `serve` sets itself -> what to use instead.
_OURS = {
    "model-repository": "the argument REPOSITORY",
    "model-store": "the argument REPOSITORY",
    "http-port": "--http-port before --",
    "grpc-port": "--grpc-port before --",
    "metrics-port": "--metrics-port before --",
    "http-address": "--address before --",
    "grpc-address": "--address before --",
    "metrics-address": "--metrics-address before --",
    "load-model": "nothing: serve loads every model of the repository",
    "model-control-mode": "nothing: a door that died is loaded again through explicit control",
    "allow-http": "nothing: serve itself needs the server's HTTP port",
}
# Flags that open further ports with control APIs, which Triton's restrictions do not cover.
_OPENING = ("allow-sagemaker", "allow-vertex-ai", "sagemaker-port", "vertex-ai-port")

_log = logging.getLogger("tridecode.serve")


def repositories(arguments: Sequence[str]) -> list[str]:
    """The model repositories that a command line of tritonserver names."""
    return [
        path
        for flag in ("model-repository", "model-store")
        for path in triton_access.values_of(arguments, flag)
    ]


def is_plain_path(path: Path) -> bool:
    """Return whether bash takes the path literally, without quotes."""
    return _PLAIN_PATH.fullmatch(str(path)) is not None


def check_plain_path(path: Path, what: str, fix: str) -> None:
    """Raises ConfigError for a path that Triton's `bash -c` would split or execute."""
    if not is_plain_path(path):
        raise ConfigError(
            f"{what} is {str(path)!r}; Triton hands it to bash unquoted, so only letters, digits and "
            f"_.+,:@=/- are safe ({fix})"
        )


def check_repository(repository: Path) -> list[str]:
    """The names of the models in a repository.

    Raises ConfigError for a repository without models, and for a name or setting that Triton's `bash -c`
    would execute.
    """
    try:
        return _check_models(repository)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None


def _check_models(repository: Path) -> list[str]:
    if not repository.is_dir():
        raise ConfigError(f"{repository} is not a directory; wanted a model repository")
    names = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not names:
        raise ConfigError(
            f"{repository} has no model, which is a folder with a config.pbtxt; "
            "tridecode build-repo writes a repository"
        )
    for folder in sorted(path.name for path in repository.iterdir() if path.is_dir()):
        if folder in names:
            _check_model(repository, folder)
        elif not folder.startswith("."):
            _log.warning("%s has no config.pbtxt; it is not served", repository / folder)
    return names


def _check_model(repository: Path, name: str) -> None:
    if not _PLAIN_NAME.fullmatch(name):
        raise ConfigError(
            f"{repository} holds a model folder {name!r}; Triton hands the name to bash unquoted, so only "
            "letters, digits and _.+- are safe: rename it"
        )
    where = f"{name}/config.pbtxt"
    text = (repository / name / "config.pbtxt").read_text(encoding="utf-8", errors="replace")
    config = parse_model_config(text, where)
    words = {"default_model_filename": [config.default_model_filename]}
    words["instance_group name"] = [group.name for group in config.instance_group]
    words["name"] = [config.name]
    for field, values in words.items():
        for value in values:
            if value and not _PLAIN_NAME.fullmatch(value):
                raise ConfigError(
                    f"{where}: {field} is {value!r}; Triton hands it to bash unquoted, so only letters, "
                    "digits and _.+- are safe"
                )
    environment = string_parameters(config).get(_ENVIRONMENT, "").removeprefix(_ENVIRONMENT_PREFIX)
    if environment:
        check_plain_path(Path(environment), f"{where}: {_ENVIRONMENT}", "move the environment")


def check_triton_arguments(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a flag after -- that serve sets; warns of one that opens a control API."""
    for name, ours in _OURS.items():
        if triton_access.has_flag(arguments, name):
            raise ConfigError(f"--{name} after -- would be overridden or mislead serve; use {ours}")
    if any(
        "shm-region-prefix-name" in value for value in triton_access.values_of(arguments, "backend-config")
    ):
        raise ConfigError(
            "shm-region-prefix-name after -- hides the stubs' memory; use nothing: serve sets it"
        )
    for name in _OPENING:
        values = triton_access.values_of(arguments, name)
        if values and values[-1].lower() not in ("false", "0"):
            _log.warning(
                "--%s opens one more HTTP port; its model control is not restricted: put it behind a gateway",
                name,
            )
