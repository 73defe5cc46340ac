"""Checks the arguments of `build-repo` at once, without importing torch and transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.model_config import DTYPES
from tridecode.backend.weights.quantization import ROUNDED, Quantization
from tridecode.converters.model_source import find_model
from tridecode.converters.parity.grades import Floor
from tridecode.converters.quantize.method_names import DEFAULT_METHODS, METHODS, NEAREST
from tridecode.converters.quantize.texts import GivenText, read_given_text, read_texts
from tridecode.model_repo_templates.repository import engine_texts, repository_models
from tridecode.model_repo_templates.served import DEFAULT, PRESETS
from tridecode.tools.build_repo.staging import check_output

#: values of --quantize that round to nearest, and their formats
_ROUNDING = {NEAREST.get(name, name): found for name, found in ROUNDED.items()}
#: values of --quantize that use calibration texts
_CALIBRATED = (*DEFAULT_METHODS, *METHODS)


def check_repository(
    output: Path,
    overwrite: bool,
    dtype: str | None,
    models: Mapping[str, Any],
    settings: Mapping[str, object],
) -> None:
    """Raise ConfigError if the repository cannot be written. models: arguments of repository_models.
    settings: the engine's."""
    check_output(output, overwrite)
    repository_models(**models)
    check_dtype(dtype)
    engine_texts(settings, "engine settings")


def check_dtype(dtype: str | None) -> None:
    """Raise ConfigError for an unknown type of weights; None: the default."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; wanted one of {', '.join(DTYPES)}")


def check_models(contracts: list[str], ensemble_owner: str) -> None:
    """Raise ConfigError for unknown contracts, or contracts that cannot be combined."""
    repository_models(contracts=contracts, ensemble_owner=ensemble_owner)


def check_settings(settings: Mapping[str, object]) -> None:
    """Raise ConfigError for unknown engine parameters, or wrong values."""
    engine_texts(settings, "engine settings")


def check_sources(options: Mapping[str, Path | None], prompts: Iterable[Path]) -> None:
    """Raise ConfigError for a file or folder that does not exist. options: path by option name."""
    named = [*options.items(), *(("--prompts", path) for path in prompts)]
    for option, path in named:
        if path is not None and not path.exists():
            raise ConfigError(f"{option} {path}: no such file or folder")


def source_path(model: str) -> str:
    """Return the path of a checkpoint, downloaded if it is on the hub. Raises CheckpointError if there is
    none."""
    return str(find_model(model))


def contracts_of(preset: str | None, contracts: list[str], ensemble_owner: str) -> tuple[list[str], str]:
    """Return --contract and --ensemble-owner: those of `--for preset`, else the given ones or DEFAULT."""
    if preset is None:
        return contracts or list(DEFAULT), ensemble_owner
    if preset not in PRESETS:
        raise ConfigError(f"--for {preset}: wanted one of {', '.join(PRESETS)}")
    if contracts or ensemble_owner:
        given = "--contract" if contracts else "--ensemble-owner"
        raise ConfigError(f"--for {preset} sets {PRESETS[preset].options()}; leave {given} out, or --for")
    return list(PRESETS[preset].contracts), PRESETS[preset].ensemble_owner


def quantization_of(name: str | None, group: int) -> Quantization | None:
    """Return the format of --quantize; None for a calibrated one and for "none"."""
    if name is None or name in ("none", *_CALIBRATED):
        return None
    if name not in _ROUNDING:
        wanted = ", ".join((*DEFAULT_METHODS, *_ROUNDING, *METHODS))
        raise ConfigError(f"--quantize {name}: wanted one of {wanted}, none")
    found = _ROUNDING[name]
    return replace(found, group=group) if found.weights == "int4" else found


def calibration_texts(name: str | None, file: Path | None) -> list[str] | None:
    """Return the texts of --calibrate; None without a file."""
    if file is None:
        return None
    if name not in _CALIBRATED:
        wanted = ", ".join(_CALIBRATED)
        raise ConfigError(f"--calibrate {file} with --quantize {name}; wanted one of {wanted}")
    return read_texts(file)


def given_text(file: Path | None, parity: bool) -> GivenText | None:
    """Return the texts of --parity-text; None without a file."""
    if file is None:
        return None
    if not parity:
        raise ConfigError(f"--parity-text {file} with --no-parity: nothing would be compared")
    return read_given_text(file)


def floor_of(text: str) -> Floor:
    """Return the value of --quantize-floor."""
    try:
        mean_kl, agreement = map(float, text.split(","))
    except ValueError:
        mean_kl = agreement = -1.0
    if not (mean_kl >= 0 and 0 <= agreement <= 1):
        wanted = "KL,SHARE with KL in nats from 0 and SHARE from 0 to 1, e.g. 0.5,0.5"
        raise ConfigError(f"--quantize-floor {text}: wanted {wanted}")
    return Floor(mean_kl, agreement)


def names(texts: Iterable[str] | None) -> list[str]:
    """Return the names in options such as `--contract a,b --contract c`."""
    return [name.strip() for text in texts or [] for name in text.split(",") if name.strip()]


def settings_of(texts: Iterable[str] | None) -> dict[str, str]:
    """Return the values of --set KEY=VALUE."""
    settings = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text}: wanted KEY=VALUE, e.g. --set max_sequences=128")
        settings[key.strip()] = value.strip()
    return settings
