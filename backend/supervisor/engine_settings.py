"""The settings of an engine that the supervisor reads before it starts the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.config import EngineConfig, check_heads, check_stages, read_engine_config
from tridecode.backend.engine_config_file import FILE, checkpoint_dir, read_engine_parameters
from tridecode.backend.engine_instances import engine_gpus, num_engines, read_groups
from tridecode.backend.errors import TridecodeError
from tridecode.backend.models.config_ini import read_ini
from tridecode.backend.nodes.devices import count_visible


@dataclass(frozen=True)
class EngineSettings:
    """world: rank processes. start_timeout_s, step_timeout_s: as in EngineConfig. device_options: of each
    rank where the model has several engines: which GPUs are this one's."""

    world: int = 1
    start_timeout_s: float = 900.0
    step_timeout_s: float = 60.0
    device_options: tuple[str, ...] = ()


def read_engine_settings(engine_dir: str, number: int = 0) -> EngineSettings:
    """From `<engine_dir>/config.pbtxt`. number: of the engine among those of instance_group.

    Raises ConfigError or UnsupportedError, also if so many ranks cannot share the model, or so many engines
    the GPUs.
    """
    config = read_engine_config(read_engine_parameters(engine_dir), str(Path(engine_dir) / FILE))
    world = config.tensor_para_size * config.pipeline_para_size
    if world > 1:
        check_shares(engine_dir, config)
    options = device_options(engine_dir, config, number, world)
    return EngineSettings(world, config.start_timeout_s, config.step_timeout_s, options)


def device_options(engine_dir: str, config: EngineConfig, number: int, world: int) -> tuple[str, ...]:
    """The options that name the GPUs of engine `number` to its ranks; () where config alone does."""
    groups = read_groups(Path(engine_dir))
    listed = any(group.gpus for group in groups)
    if config.device == "cpu" or (num_engines(groups) == 1 and not listed):
        return ()
    gpus = engine_gpus(groups, number, world, config.devices, count_visible())
    if gpus:
        return "--devices", ",".join(map(str, gpus))
    return "--first-device", str(number * world)


def check_shares(engine_dir: str, config: EngineConfig) -> None:
    """Raises ConfigError if heads or layers of config.ini do not suit the numbers of ranks.

    For the time before any process starts, without torch. A file that this cannot read is for the ranks,
    which know every family; they check again.
    """
    try:
        ini = Path(checkpoint_dir(engine_dir)) / "config.ini"
        sections = [s for s in read_ini(ini).values() if {"head_num", "num_layer"} <= set(s.items)]
        if len(sections) != 1:
            return
        heads = sections[0].integer("head_num", minimum=1)
        layers = sections[0].integer("num_layer", minimum=1)
        kv_heads = sections[0].integer("kv_head_num", heads, minimum=1)
    except TridecodeError:
        return
    check_stages(layers, config.pipeline_para_size, str(ini))
    if "head_num_per_layer" not in sections[0].items:  # pruned layers have heads of their own
        check_heads(heads, kv_heads, config.tensor_para_size, str(ini))


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
