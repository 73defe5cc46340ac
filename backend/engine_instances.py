"""The engines of one model: one for each instance that `instance_group` of its config.pbtxt declares.

Doors of the model use the engine of their own instance. An instance of another model that names it as
`engine_model` uses the engine of the same number, modulo their number. Neither torch nor gRPC here: doors
import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from tridecode.backend.errors import ConfigError


@dataclass(frozen=True)
class InstanceGroup:
    """A group of instances: count engines. gpus: as CUDA numbers those of CUDA_VISIBLE_DEVICES, those of the
    first engine first; (): no list."""

    count: int = 1
    gpus: tuple[int, ...] = ()


def num_engines(groups: Sequence[InstanceGroup]) -> int:
    return sum(group.count for group in groups)


def read_groups(engine_dir: Path) -> tuple[InstanceGroup, ...]:
    """The groups in `<engine_dir>/config.pbtxt`; a file that cannot be read has one engine, whose supervisor
    says why it does not start."""
    config = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("tridecode.ModelConfig"))()
    try:
        text = (engine_dir / "config.pbtxt").read_text(encoding="utf-8")
        text_format.Parse(text, config, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError):
        return (InstanceGroup(),)
    found = [InstanceGroup(max(1, one.count), tuple(one.gpus)) for one in config.instance_group]
    return tuple(found) or (InstanceGroup(),)


def instance_number(instance: str, config: Mapping[str, Any]) -> int:
    """The place of a door among the instances of its model, from 0.

    instance: Triton's name of it, `<group>_<number>`; of a group with several GPUs the same for each GPU.
    config: the model's configuration as Triton hands it to initialize(). 0 for a name of another form.
    """
    before = 0
    for group in config.get("instance_group") or []:
        count = max(1, int(group.get("count", 1)))
        name, _, number = instance.rpartition("_")
        if name == group.get("name") and number.isdigit():
            return before + int(number) % count
        before += count
    return 0


def engine_gpus(
    groups: Sequence[InstanceGroup], number: int, ranks: int, devices: str, visible: int
) -> tuple[int, ...]:
    """The GPUs of engine `number` in rank order; (): those from `number` * `ranks` on.

    ranks: of each engine. devices: the parameter of that name. visible: GPUs that this node shows; 0: a CPU,
    or not known. Raises ConfigError, which says what would fit, where the engines do not have distinct GPUs.
    """
    named = tuple(int(part) for part in devices.split(",")) if devices != "auto" else ()
    engines = num_engines(groups)
    if any(group.gpus for group in groups):
        return _of_group(groups, number, ranks, named)
    needed, found = engines * ranks, len(named) or visible
    if engines > 1 and len(set(named)) < len(named):
        raise ConfigError(f"parameter devices is {devices}; wanted each GPU once for the {engines} engines")
    if engines > 1 and found and needed > found:
        shown = f"parameter devices names {found}" if named else f"this node shows {found}"
        raise ConfigError(
            f"instance_group makes {engines} engines of {ranks} rank(s) each, which take {needed} GPUs; "
            f"{shown}; wanted {_fitting(found, engines, ranks)}"
        )
    return named[number * ranks : (number + 1) * ranks] if engines > 1 else named


def _of_group(
    groups: Sequence[InstanceGroup], number: int, ranks: int, named: tuple[int, ...]
) -> tuple[int, ...]:
    """The GPUs that the list of the engine's group gives it."""
    if named:
        raise ConfigError("both parameter devices and gpus of instance_group are given; wanted one of them")
    gpus = [gpu for group in groups for gpu in group.gpus]
    if len(set(gpus)) < len(gpus):
        raise ConfigError(f"instance_group lists GPU {_twice(gpus)} twice; wanted each for one engine")
    for group in groups:
        if len(group.gpus) != group.count * ranks:
            raise ConfigError(
                f"a group of instance_group lists {len(group.gpus)} GPU(s) for {group.count} engine(s) of "
                f"{ranks} rank(s) (tensor_para_size x pipeline_para_size); wanted {group.count * ranks} gpus"
            )
    return tuple(gpus[number * ranks : (number + 1) * ranks])


def _fitting(gpus: int, engines: int, ranks: int) -> str:
    fitting = []
    if gpus >= ranks:
        fitting.append(f"{gpus // ranks} instance(s)")
    if gpus >= engines:
        fitting.append(f"tensor_para_size x pipeline_para_size of {gpus // engines} at most")
    return " or ".join(fitting) or "more GPUs (CUDA_VISIBLE_DEVICES)"


def _twice(numbers: Sequence[int]) -> int:
    return next(number for number in numbers if numbers.count(number) > 1)


def _pool() -> descriptor_pool.DescriptorPool:
    """The part of Triton's ModelConfig that is read here, with its field numbers.

    tritonclient has the whole message, but its import brings gRPC into every door: 0.2 s and its threads.
    """
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tridecode/instances.proto", package="tridecode")
    group = file.message_type.add(name="ModelInstanceGroup")
    group.field.add(name="count", number=2, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    group.field.add(name="gpus", number=3, type=kinds.TYPE_INT32, label=kinds.LABEL_REPEATED)
    config = file.message_type.add(name="ModelConfig")
    config.field.add(
        name="instance_group",
        number=7,
        type=kinds.TYPE_MESSAGE,
        type_name=".tridecode.ModelInstanceGroup",
        label=kinds.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()
