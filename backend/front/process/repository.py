"""The settings that a model repository decides, read once, before the workers start."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.door_parameters import DOOR_PARAMETERS
from tridecode.backend.configuration.engine_config import read_engine_config
from tridecode.backend.configuration.engine_config_file import (
    ENGINE_MODEL,
    FILE,
    checkpoint_dir,
    read_engine_parameters,
    text_models,
)
from tridecode.backend.configuration.engine_instances import num_engines, read_groups
from tridecode.backend.models.config_ini import read_ini
from tridecode.backend.supervisor import processes, runtime_dir, state_file

MANIFEST, INI = "manifest.json", "config.ini"
_ROWS = {row.name: row for row in DOOR_PARAMETERS}
#: parameters of a text model that hold for the front, too
_OF_TEXTS = (
    "stop_ids",
    "add_special_tokens",
    "skip_special_tokens",
    "resume_within_s",
    "max_prompt_bytes",
    "max_request_bytes",
)


def find_engine_dir(repository: Path, model: str = ENGINE_MODEL) -> Path:
    """The engine's model folder. repository: or that folder itself. Raises ConfigError."""
    repository = repository.absolute()
    if (repository / model / FILE).is_file():
        return repository / model
    if (repository / FILE).is_file():
        return repository
    raise ConfigError(f"{repository} has no {model}/{FILE}; wanted a model repository")


def read_repository(engine_dir: Path) -> dict[str, Any]:
    """Return the settings that the repository decides. Raises ConfigError and other TridecodeErrors."""
    parameters = read_engine_parameters(str(engine_dir))
    config = read_engine_config(parameters, str(engine_dir / FILE))
    values: dict[str, Any] = {
        "engine_dir": str(engine_dir),
        "num_engines": num_engines(read_groups(engine_dir)),
    }
    found = text_models(engine_dir)
    if not found:
        raise ConfigError(
            f"no model in {engine_dir.parent} names a tokenizer (parameter tokenizer_dir in its {FILE}); the "
            "OpenAI service needs one"
        )
    texts = found[0]
    for name in _OF_TEXTS:
        text = texts.get(name, "").strip()
        if text not in ("", "auto"):
            values[name] = _ROWS[name].convert(text)
    values["tokenizer_dir"] = str(engine_dir.parent / texts["tokenizer_dir"])
    if config.lora_path != "none":
        values["lora_dir"] = str(engine_dir / config.lora_path)
    values["fingerprint"], values["created"] = _fingerprint(engine_dir)
    return values


def _fingerprint(engine_dir: Path) -> tuple[str, int]:
    """system_fingerprint, of the manifest and the engine's settings, and the manifest's time."""
    digest = hashlib.sha256((engine_dir / FILE).read_bytes())
    created = int((engine_dir / FILE).stat().st_mtime)
    folder = Path(checkpoint_dir(str(engine_dir)))
    for name in (MANIFEST, INI):
        file = folder / name
        if file.is_file():
            digest.update(file.read_bytes())
            created = int(file.stat().st_mtime)
            break
    return f"fp_{digest.hexdigest()[:12]}", created


def read_vocab_size(engine_dir: Path) -> int:
    """Return the vocabulary of the weights in the repository; 0: it has none. Raises ConfigError."""
    file = Path(checkpoint_dir(str(engine_dir))) / INI
    sections = read_ini(file) if file.is_file() else {}
    found = next((section for section in sections.values() if "vocab_size" in section.items), None)
    return found.integer("vocab_size", minimum=1) if found is not None else 0


def find_server(engine_dir: Path) -> processes.ProcessId | None:
    """The server whose engine of this folder runs; its runtime folder becomes this process's. None: none
    does."""
    base = runtime_dir.base_dir()
    wanted = os.path.realpath(engine_dir)
    for state in [*base.glob("*/state.json"), *base.glob("*/*/state.json")]:
        content = state_file.read(state.parent)
        owner = runtime_dir.read_owner(state.parent)
        if content is None or owner is None or os.path.realpath(content.engine_dir) != wanted:
            continue
        server = processes.ProcessId(owner.server_pid, owner.server_start)
        if processes.alive(server):
            os.environ["TRIDECODE_RUNTIME_DIR"] = str(state.parent.parent)
            return server
    return None
