"""The messages between the supervisor of node 0 and those of the other nodes.

Each node reports its complete state every BEAT_S and at each change, and node 0 answers each report with a
complete order. So the next message replaces a lost one, after any break of the connection. Messages of ranks
(backend.wire.messages) are passed to node 0 unchanged.
"""

from __future__ import annotations

import msgspec

from tridecode.backend.wire.messages import EngineBeat, RankDigest, RankFailed, RankProgress, RankReady

NODE_PROTOCOL = 1


class RankLife(msgspec.Struct, frozen=True, array_like=True):
    """code: return code once the process has ended, as subprocess has it. state: the letter that ps shows."""

    rank: int
    pid: int
    code: int | None
    state: str


class NodeReport(msgspec.Struct, frozen=True, tag="node"):
    """A lending node, every BEAT_S. life: changes with each start of its supervisor. epoch: of its ranks, 0:
    none. machine, visible: identify nodes that share GPUs. error: why it could not start its ranks.
    """

    node: int
    size: int
    life: str
    host: str
    identity: dict[str, str]
    machine: str
    visible: str
    devices: int
    epoch: int = 0
    ranks: list[RankLife] = []
    error: str = ""
    protocol: int = NODE_PROTOCOL


class NodeOrder(msgspec.Struct, frozen=True, tag="order"):
    """Order of node 0. life: of its supervisor. epoch: the epoch whose ranks must run, 0: none. meeting: the
    address at which they join rank 0. first_device: of the node's first rank. detail: the engine's
    state, for the node's doors. refusal: why the node is not accepted.
    """

    life: str
    epoch: int = 0
    ranks: list[int] = []
    world: int = 0
    meeting: str = ""
    first_device: int = 0
    detail: str = ""
    refusal: str = ""


ToLeader = NodeReport | RankReady | RankProgress | RankFailed | RankDigest | EngineBeat
