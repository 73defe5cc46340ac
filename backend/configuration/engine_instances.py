"""The engines of one model: one per instance in `instance_group` of its config.pbtxt.

A door of the model uses the engine of its own instance. A door of another model that names it as
`engine_model` uses the engine with the same index, modulo the number of engines. Doors import this module, so
it needs neither torch nor gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format


@dataclass(frozen=True)
class InstanceGroup:
    """A group of instances: count engines.

    gpus: indices within CUDA_VISIBLE_DEVICES, those of the first engine first; (): no list.
    """

    count: int = 1
    gpus: tuple[int, ...] = ()


def num_engines(groups: Sequence[InstanceGroup]) -> int:
    return sum(group.count for group in groups)


def read_groups(engine_dir: Path) -> tuple[InstanceGroup, ...]:
    """Return the groups in `<engine_dir>/config.pbtxt`.

    An unreadable file counts as one engine, whose supervisor reports why it does not start.
    """
    config = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("tridecode.ModelConfig"))()
    try:
        text = (engine_dir / "config.pbtxt").read_text(encoding="utf-8")
        text_format.Parse(text, config, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError):
        return (InstanceGroup(),)
    found = [InstanceGroup(max(1, one.count), tuple(one.gpus)) for one in config.instance_group]
    return tuple(found) or (InstanceGroup(),)


def instance_number(instance: str, config: Mapping[str, Any]) -> int:
    """Return the index of a door among the instances of its model, from 0; 0 if its name has another form.

    instance: Triton's name, `<group>_<number>`; in a group with several GPUs it is the same for each GPU.
    config: the model's configuration, as passed by Triton to initialize().
    """
    before = 0
    for group in config.get("instance_group") or []:
        count = max(1, int(group.get("count", 1)))
        name, _, number = instance.rpartition("_")
        if name == group.get("name") and number.isdigit():
            return before + int(number) % count
        before += count
    return 0


def _pool() -> descriptor_pool.DescriptorPool:
    """Return a pool with the part of Triton's ModelConfig that is read here, with its field numbers.

    tritonclient has the whole message, but importing it loads gRPC into every door: 0.2 s and its threads.
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
