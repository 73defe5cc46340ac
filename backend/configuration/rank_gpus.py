"""Assigns GPUs to the ranks of an engine: one rule for one node, for several instances, and for several
nodes.

No torch: supervisors check before any rank starts. Two ranks may share a GPU for trials only: it time-slices
them, and each holds its part of the memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_instances import InstanceGroup, num_engines

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARE = "TRIDECODE_SHARE_GPUS"  # 1: a GPU that config.pbtxt names twice runs several ranks


@dataclass(frozen=True)
class Demand:
    """The GPUs needed by `engines` engines on one node, or by one engine over `nodes` nodes: one per rank.

    tensor, stages: tensor_para_size and pipeline_para_size.
    """

    tensor: int
    stages: int
    engines: int = 1
    nodes: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks of one engine."""
        return self.tensor * self.stages

    @property
    def per_node(self) -> int:
        return self.engines * self.ranks // self.nodes

    def check(self, count: int, found: str) -> None:
        """Raise ConfigError if a node has fewer GPUs than ranks.

        count: its GPUs. found: as text, such as "this node has 2".
        """
        if count < self.per_node:
            raise ConfigError(f"{self}; {found}: {self._fitting(count)}")

    def __str__(self) -> str:
        """Return the demand of a node as the subject of a sentence."""
        degree = f"tensor_para_size {self.tensor} x pipeline_para_size {self.stages}"
        number = f"{self.per_node} GPU" + ("s" if self.per_node > 1 else "")
        if self.engines > 1:
            return f"{self.engines} engines (instance_group) of {degree} need {number}"
        where = f" on each of {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{degree} needs {number}{where}"

    def _fitting(self, count: int) -> str:
        """Suggest what would fit into `count` GPUs of each node: fewer engines, or a divisor of the degree,
        over which heads and layers can be split as well.
        """
        found = []
        if self.engines > 1 and count >= self.ranks:
            found.append(f"{count // self.ranks} instance(s)")
        room = count * self.nodes // self.engines
        parts = [
            (tensor * stages, tensor, stages)
            for tensor in _divisors(self.tensor)
            for stages in _divisors(self.stages)
            if tensor * stages <= room and tensor * stages % self.nodes == 0
        ]
        if parts:
            found.append(self._in_words(*max(parts)[1:]))
        return f"{' or '.join(found)} would fit" if found else f"wanted more GPUs ({VISIBLE})"

    def _in_words(self, tensor: int, stages: int) -> str:
        """Describe only what differs from this demand."""
        changes = [] if tensor == self.tensor else [f"tensor_para_size {tensor}"]
        changes += [] if stages == self.stages else [f"pipeline_para_size {stages}"]
        return " x ".join(changes)


def engine_gpus(
    groups: Sequence[InstanceGroup], number: int, demand: Demand, devices: str, visible: int, shown: str
) -> tuple[int, ...]:
    """Return the GPUs of engine `number` on this node in rank order; (): those from `number` * demand.ranks
    on.

    demand: that of all engines of instance_group. devices: the parameter of that name. visible: this node's
    visible GPUs; 0: a CPU, or not known. shown: that number as text. Raises ConfigError, which suggests what
    fits, if a rank has no GPU of its own.
    """
    assert demand.engines == num_engines(groups)
    if any(group.gpus for group in groups):
        gpus = _listed(groups, demand.ranks, devices)
        check_named("instance_group", gpus, visible, shown)
    else:
        gpus = node_gpus(demand, devices, visible, shown)
        if demand.engines == 1:
            return gpus
    return gpus[number * demand.ranks : (number + 1) * demand.ranks]


def node_gpus(demand: Demand, devices: str, visible: int, shown: str) -> tuple[int, ...]:
    """Return the GPUs that `devices` names for a node's ranks; () for "auto".

    Raises ConfigError, see engine_gpus.
    """
    if devices == "auto":
        if visible:
            demand.check(visible, shown)
        return ()
    named = tuple(int(part) for part in devices.split(","))
    demand.check(len(named), f"parameter devices names {len(named)}")
    check_named(f"parameter devices is {devices}, which", named, visible, shown)
    return named


def check_named(where: str, gpus: Sequence[int], visible: int, shown: str) -> None:
    """Raise ConfigError if a GPU is missing, or named twice unless SHARE allows it.

    where: the source of the names.
    """
    missing = [gpu for gpu in gpus if visible and gpu >= visible]
    if missing:
        raise ConfigError(
            f"{where} names GPU {missing[0]}; {shown}; wanted numbers from 0 to {visible - 1}, as CUDA "
            f"numbers those of {VISIBLE}"
        )
    twice = [gpu for gpu, times in Counter(gpus).items() if times > 1]
    if twice and not may_share():
        raise ConfigError(
            f"{where} names GPU {twice[0]} twice; wanted a GPU for each rank ({SHARE}=1 lets ranks share "
            "one, for trials)"
        )


def may_share() -> bool:
    return os.environ.get(SHARE) == "1"


def shown_here(visible: int) -> str:
    """Return the number of this node's GPUs as text."""
    named = os.environ.get(VISIBLE)
    return f"this node has {visible}" if named is None else f"{VISIBLE} ({named}) shows {visible}"


def _listed(groups: Sequence[InstanceGroup], ranks: int, devices: str) -> tuple[int, ...]:
    """Return the concatenated lists of instance_group."""
    if devices != "auto":
        raise ConfigError("both parameter devices and gpus of instance_group are given; wanted one of them")
    for group in groups:
        if len(group.gpus) != group.count * ranks:
            raise ConfigError(
                f"a group of instance_group lists {len(group.gpus)} GPU(s) for {group.count} engine(s) of "
                f"{ranks} rank(s) (tensor_para_size x pipeline_para_size); wanted {group.count * ranks} gpus"
            )
    return tuple(gpu for group in groups for gpu in group.gpus)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
