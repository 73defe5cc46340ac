"""The settings of an engine that the supervisor reads before it starts the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.config import read_engine_config
from tridecode.backend.engine_config_file import FILE, checkpoint_dir, read_engine_parameters
from tridecode.backend.errors import TridecodeError


@dataclass(frozen=True)
class EngineSettings:
    """world: rank processes. start_timeout_s, step_timeout_s: as in EngineConfig."""

    world: int = 1
    start_timeout_s: float = 900.0
    step_timeout_s: float = 60.0


def read_engine_settings(engine_dir: str) -> EngineSettings:
    """From `<engine_dir>/config.pbtxt`. Raises ConfigError or UnsupportedError."""
    config = read_engine_config(read_engine_parameters(engine_dir), str(Path(engine_dir) / FILE))
    return EngineSettings(
        config.tensor_para_size * config.pipeline_para_size, config.start_timeout_s, config.step_timeout_s
    )


def fingerprint(engine_dir: str) -> tuple:
    """Changes when config.pbtxt or the model's config.ini changes: size and modification time of each."""
    files = [Path(engine_dir) / FILE]
    try:
        files.append(Path(checkpoint_dir(engine_dir)) / "config.ini")
    except TridecodeError:
        pass  # a broken config.pbtxt is told by its own size and time
    return tuple((str(file), *_size_and_time(file)) for file in files)


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
