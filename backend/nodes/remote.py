"""Node 0's view of the ranks on other nodes, made from the reports of these nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tridecode.backend.nodes.node_messages import NodeReport, RankLife
from tridecode.backend.supervisor.blame import Failure
from tridecode.backend.supervisor.rank import LocalProcess, RankProcess
from tridecode.backend.supervisor.ranks import RankGroup
from tridecode.backend.wire.messages import SILENCE_S

FRESH_S = 1.5  # six heartbeats: a node that reported within this time is present
_KILLED = -9


@dataclass
class Node:
    """Another node, as seen by node 0. Times are monotonic seconds."""

    index: int
    name: str
    identity: bytes = b""  # id of its connection
    report: NodeReport | None = None
    heard_at: float = -1e9
    lost: bool = False  # silent for SILENCE_S
    refusal: str = ""

    def here(self, now: float) -> bool:
        return self.report is not None and now - self.heard_at < FRESH_S

    def life_of(self, life: str, epoch: int, rank: int) -> RankLife | None:
        """Return the node's latest report of a rank; None if it has no rank of that epoch."""
        report = self.report
        if report is None or report.life != life or report.epoch != epoch:
            return None
        return next((one for one in report.ranks if one.rank == rank), None)


class RemoteProcess:
    """A rank's process on another node, as reported by that node's supervisor; see ranks.RankProcess."""

    def __init__(self, node: Node, epoch: int, rank: int) -> None:
        assert node.report is not None
        self._node, self._life, self._epoch, self._rank = node, node.report.life, epoch, rank
        self._killed = False

    def _seen(self) -> RankLife | None:
        return self._node.life_of(self._life, self._epoch, self._rank)

    @property
    def pid(self) -> int:
        seen = self._seen()
        return seen.pid if seen else 0

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs.

        After `kill`, a process counts as ended if its node no longer reports it or is lost, because a node
        that does not hear node 0 ends its ranks.
        """
        seen = self._seen()
        if seen is not None and not (self._killed and self._node.lost):
            return seen.code
        return _KILLED if self._killed else None

    def state(self) -> str:
        seen = self._seen()
        return seen.state if seen else ""

    def kill(self) -> None:
        """Omit the epoch from the next order to the node, which then ends the process."""
        self._killed = True


class NodeRankGroup(RankGroup):
    """The ranks of one epoch over all nodes: those of node 0 are its own processes.

    nodes: the others, by index. pass_fd: for rank 0.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        now: float,
        epoch: int,
        nodes: dict[int, Node],
        pass_fd: int,
    ) -> None:
        self._epoch, self._nodes, self._pass_fd = epoch, nodes, pass_fd
        self._per_node = len(commands) // (len(nodes) + 1)
        self._lives = {index: node.report.life for index, node in nodes.items() if node.report}
        self._failed_at: float | None = None
        self.killed = False
        super().__init__(commands, now)

    def ranks_of(self, node: int) -> list[int]:
        return list(range(node * self._per_node, (node + 1) * self._per_node))

    def start(self, index: int, command: Sequence[str]) -> RankProcess:
        node = index // self._per_node
        if node == 0:
            return LocalProcess(command, (self._pass_fd,) if index == 0 else ())
        return RemoteProcess(self._nodes[node], self._epoch, index)

    def check(self, now: float, start_timeout_s: float, step_timeout_s: float) -> Failure | None:
        """Check the ranks of all nodes. A lost node is reported first, because ranks that communicate with it
        fail as well. A failure therefore counts only after every node has reported again or is lost.
        """
        lost = self._lost(now)
        if lost is not None:
            return lost
        failure = super().check(now, start_timeout_s, step_timeout_s)
        if failure is None:
            self._failed_at = None
            return None
        if self._failed_at is None:
            self._failed_at = now
        if any(node.heard_at <= self._failed_at for node in self._nodes.values()):
            return None
        return Failure(self._with_nodes(failure.reason), failure.fatal)

    def _lost(self, now: float) -> Failure | None:
        for index, node in self._nodes.items():
            silent, report = now - node.heard_at, node.report
            label = f"{node.name} with {_ranks_in_words(self.ranks_of(index))}"
            if silent > SILENCE_S:
                return Failure(
                    f"{label} has been silent for {silent:.1f} s: its supervisor is dead or stopped, or the "
                    "network to it is cut"
                )
            if report is not None and report.life != self._lives.get(index):
                return Failure(f"the supervisor of {label} was restarted")
            if report is not None and report.epoch == self._epoch and report.error:
                return Failure(f"{label}: {report.error}")
        return None

    def _with_nodes(self, reason: str) -> str:
        """Add the node's name to ranks that are not on node 0."""
        found = re.match(r"ranks? (\d+(?:(?:, | and | to )\d+)*)(?= |:)", reason)
        if found is None:
            return reason
        nodes = {int(number) // self._per_node for number in re.findall(r"\d+", found[1])}
        if len(nodes) == 1 and (node := self._nodes.get(nodes.pop())):
            return f"{found[0]} on {node.name}{reason[found.end() :]}"
        return reason

    def kill(self) -> None:
        self.killed = True
        super().kill()

    def forgive(self, now: float, pause_s: float) -> None:
        super().forgive(now, pause_s)
        for node in self._nodes.values():
            node.heard_at = max(node.heard_at, now)


def _ranks_in_words(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]} to {numbers[-1]}"
