"""How an engine is spread over nodes: the ranks of each, their GPUs, and the port of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.errors import ConfigError
from tridecode.backend.nodes.meeting import NUM_PORTS


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of a node. machine, visible: equal for nodes that see the same ones. count: 0 on a CPU."""

    name: str
    machine: str
    visible: str
    count: int


def first_devices(nodes: Mapping[int, NodeGpus], per_node: int) -> dict[int, int]:
    """The first device of each node: nodes that see the same GPUs of one machine take turns.

    Raises ConfigError where a node has GPUs, but too few, or where only some nodes have any.
    """
    taken: dict[tuple[str, str], int] = {}
    firsts = {}
    some = any(node.count for node in nodes.values())
    for index, node in sorted(nodes.items()):
        place = (node.machine, node.visible)
        first = taken.get(place, 0)
        if some and first + per_node > node.count:
            before = f", {first} of them for nodes before it" if first else ""
            raise ConfigError(
                f"{node.name} shows {node.count} GPU(s){before}; its {per_node} rank(s) want one each: "
                f"tensor_para_size x pipeline_para_size may be {_most(nodes)} at most, or show it more GPUs "
                "(CUDA_VISIBLE_DEVICES)"
            )
        firsts[index] = first
        taken[place] = first + per_node
    return firsts


def _most(nodes: Mapping[int, NodeGpus]) -> int:
    """Ranks that fit: as many on each node as the one with the fewest GPUs has for itself."""
    places = [(node.machine, node.visible) for node in nodes.values()]
    shares = [node.count // places.count((node.machine, node.visible)) for node in nodes.values()]
    return min(shares) * len(nodes)


def ranks_per_node(world: int, nodes: int) -> int:
    """Raises ConfigError where the ranks cannot be spread evenly."""
    if world % nodes:
        raise ConfigError(
            f"tensor_para_size x pipeline_para_size is {world}, and the job has {nodes} nodes; wanted a "
            f"multiple of {nodes}, the same number of ranks on each node"
        )
    return world // nodes


def engine_index(engine_dir: str) -> int:
    """The number of an engine among those of its repository, in the order of their names: its port's offset.

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
