"""The settings of an engine that the supervisor reads before it starts the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config
from tridecode.backend.configuration.engine_config_file import FILE, checkpoint_dir, read_engine_parameters
from tridecode.backend.configuration.engine_instances import InstanceGroup, num_engines, read_groups
from tridecode.backend.configuration.model_config import check_heads, check_stages
from tridecode.backend.configuration.rank_gpus import Demand, engine_gpus, shown_here
from tridecode.backend.models.config_ini import read_ini
from tridecode.backend.nodes.devices import count_visible
from tridecode.backend.supervisor.front_process import FrontOptions, options_with_environment


@dataclass(frozen=True)
class EngineSettings:
    """demand: GPUs of all engines of the model. devices, start_timeout_s, step_timeout_s: as in EngineConfig.
    on_cpu: whether its ranks need no GPU. device_options: for a model with several engines, the rank options
    that select this engine's GPUs. front: of the OpenAI service.
    """

    demand: Demand = Demand(1, 1)
    devices: str = "auto"
    on_cpu: bool = False
    start_timeout_s: float = 900.0
    step_timeout_s: float = 60.0
    device_options: tuple[str, ...] = ()
    front: FrontOptions = FrontOptions()

    @property
    def world(self) -> int:
        """Rank processes of this engine."""
        return self.demand.ranks


def read_engine_settings(engine_dir: str, number: int = 0, nodes: int = 1) -> EngineSettings:
    """Read the settings of `<engine_dir>/config.pbtxt`. number: the engine's index in instance_group. nodes:
    number of nodes of the job; the leader checks the GPUs of all.

    Raises ConfigError or UnsupportedError, also if the model cannot be split over the ranks, or a rank has no
    GPU.
    """
    config = read_engine_config(read_engine_parameters(engine_dir), str(Path(engine_dir) / FILE))
    groups = read_groups(Path(engine_dir))
    demand = Demand(config.tensor_para_size, config.pipeline_para_size, num_engines(groups))
    if demand.ranks > 1:
        check_shares(engine_dir, config)
    on_cpu = config.device == "cpu"
    options: tuple[str, ...] = ()
    if nodes > 1 and any(group.gpus for group in groups):
        raise ConfigError(
            f"instance_group of {engine_dir} lists gpus, and the job has {nodes} nodes; wanted the parameter "
            "devices, the GPUs of each node"
        )
    if not on_cpu and nodes == 1:
        options = device_options(groups, config, demand, number)
    return EngineSettings(
        demand,
        config.devices,
        on_cpu,
        config.start_timeout_s,
        config.step_timeout_s,
        options,
        front_options(engine_dir, config),
    )


def host_cache_bytes(engine_dir: str) -> int:
    """Return the parameter of that name; 0 if the engine has no host tier. Raises ConfigError."""
    config = read_engine_config(read_engine_parameters(engine_dir), str(Path(engine_dir) / FILE))
    return config.host_cache_bytes if config.has_host_tier else 0


def front_options(engine_dir: str, config: EngineConfig) -> FrontOptions:
    """Return the options of the OpenAI service, with the port and address of `tridecode serve`."""

    def path(text: str) -> str:
        return text if text == "none" else str(Path(engine_dir) / text)

    return options_with_environment(
        FrontOptions(
            config.openai_port or 0,
            config.openai_address,
            config.openai_workers,
            config.openai_model_name,
            path(config.openai_api_key_file),
            path(config.openai_chat_template),
            config.openai_tool_call_parser,
            config.openai_cors,
            path(config.openai_batch_dir),
        )
    )


def device_options(
    groups: Sequence[InstanceGroup], config: EngineConfig, demand: Demand, number: int
) -> tuple[str, ...]:
    """Return the rank options that select the GPUs of engine `number`; () if the config alone does.

    Raises ConfigError if this node has too few GPUs.
    """
    visible = count_visible()
    gpus = engine_gpus(groups, number, demand, config.devices, visible, shown_here(visible))
    if demand.engines == 1 and not any(group.gpus for group in groups):
        return ()
    if gpus:
        return "--devices", ",".join(map(str, gpus))
    return "--first-device", str(number * demand.ranks)


def check_shares(engine_dir: str, config: EngineConfig) -> None:
    """Raise ConfigError if heads or layers of config.ini cannot be split over the ranks.

    This check needs no torch and runs before any process starts. A file that it cannot read is left to the
    ranks, which know every family and check again.
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
    """Return a value that changes with config.pbtxt or the model's config.ini: size and modification time of
    each.
    """
    files = [Path(engine_dir) / FILE]
    try:
        files.append(Path(checkpoint_dir(engine_dir)) / "config.ini")
    except TridecodeError:
        pass  # a broken config.pbtxt is identified by its own size and time
    return tuple((str(file), *_size_and_time(file)) for file in files)


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
