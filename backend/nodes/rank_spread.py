"""Spreads an engine over nodes: the ranks of each node, their GPUs, and the engine's port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.rank_gpus import SHARE, VISIBLE, Demand, may_share, node_gpus
from tridecode.backend.nodes.rendezvous import NUM_PORTS


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of a node. machine, visible: equal for nodes that see the same ones. count: 0 on a CPU."""

    name: str
    machine: str
    visible: str
    count: int

    @property
    def place(self) -> tuple[str, str]:
        return self.machine, self.visible


def first_devices(nodes: Mapping[int, NodeGpus], demand: Demand, devices: str = "auto") -> dict[int, int]:
    """Return the first device of each node; nodes that see the same GPUs of one machine get consecutive ones.

    devices: the parameter of that name, whose GPUs each node uses in order. Raises ConfigError if a node has
    too few GPUs, or if only some nodes have any.
    """
    places = [node.place for node in nodes.values()]
    some = any(node.count for node in nodes.values())
    firsts = {}
    for number, (index, node) in enumerate(sorted(nodes.items())):
        sharers = places.count(node.place)
        _check_node(node, demand, devices, some, sharers)
        before = [earlier for _, earlier in sorted(nodes.items())[:number] if earlier.place == node.place]
        firsts[index] = demand.per_node * len(before)
    return firsts


def _check_node(node: NodeGpus, demand: Demand, devices: str, some: bool, sharers: int) -> None:
    """some: any node has GPUs. sharers: nodes that see the same GPUs as this one, itself included."""
    shown = f"{node.name} shows {node.count}" + (f" to {sharers} nodes" if sharers > 1 else "")
    if devices == "auto":
        if some:
            demand.check(node.count // sharers, shown)
        return
    node_gpus(demand, devices, node.count, shown)
    if some and sharers > 1 and not may_share():
        raise ConfigError(
            f"parameter devices is {devices}, which each of {sharers} nodes on one machine takes, "
            f"{node.name} among them; wanted auto, or another {VISIBLE} for each ({SHARE}=1 lets ranks share "
            "a GPU, for trials)"
        )


def ranks_per_node(world: int, nodes: int) -> int:
    """Return the ranks per node. Raises ConfigError if they cannot be spread evenly."""
    if world % nodes:
        raise ConfigError(
            f"tensor_para_size x pipeline_para_size is {world}, and the job has {nodes} nodes; wanted a "
            f"multiple of {nodes}, the same number of ranks on each node"
        )
    return world // nodes


def engine_index(engine_dir: str) -> int:
    """Return an engine's index among those of its repository, by name: the offset of its port.

    Raises ConfigError beyond NUM_PORTS.
    """
    folder = Path(engine_dir)
    names = []
    for config in sorted(folder.parent.glob("*/config.pbtxt")):
        try:
            text = config.read_text(errors="replace")
        except OSError:
            continue
        if '"tensor_para_size"' in text or config.parent.name == folder.name:
            names.append(config.parent.name)
    index = names.index(folder.name) if folder.name in names else 0
    if index >= NUM_PORTS:
        raise ConfigError(
            f"{folder} is engine {index} of its repository; wanted at most {NUM_PORTS} over nodes"
        )
    return index
