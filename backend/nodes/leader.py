"""Node 0: tracks the other nodes and spreads an engine's ranks over all of them.

Rank r runs on node r // (world / nodes). The supervisor of node 0 owns the epoch; the others run the ranks
that their orders name (lender.py). A node that is silent for SILENCE_S ends the epoch (remote.py), and the
next one waits until all nodes have come.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket as posix
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import zmq

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.rank_gpus import VISIBLE
from tridecode.backend.nodes import addresses, devices, link
from tridecode.backend.nodes.identity import difference, identity
from tridecode.backend.nodes.launchers import NodePlace
from tridecode.backend.nodes.node_messages import NODE_PROTOCOL, NodeOrder, NodeReport, ToLeader
from tridecode.backend.nodes.rank_spread import NodeGpus, engine_index, first_devices, ranks_per_node
from tridecode.backend.nodes.remote import Node, NodeRankGroup
from tridecode.backend.nodes.rendezvous import Search
from tridecode.backend.supervisor.engine_settings import EngineSettings
from tridecode.backend.supervisor.rank import RankMessage
from tridecode.backend.supervisor.ranks import RankGroup
from tridecode.backend.wire.messages import BEAT_S, SILENCE_S, decode, encode

RETRY_S = 1.0  # interval at which a port that is taken is tried again

_log = logging.getLogger("tridecode.nodes")


class Leader:
    """Node 0's side of the link. Nothing here blocks; `tick` is called by the supervisor's loop."""

    def __init__(self, place: NodePlace, engine_dir: str, search: Search) -> None:
        self.place = place
        self._engine_dir, self._search = engine_dir, search
        self._life = secrets.token_hex(8)
        self._nodes = {index: Node(index, f"node {index}") for index in range(1, place.size)}
        self._context: zmq.Context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._trouble = ""
        self._wrong: ConfigError | None = None
        self._next_bind = self._told_at = 0.0
        self._identity = identity(engine_dir)
        self._group: NodeRankGroup | None = None
        self._epoch, self._meeting_url, self._first_devices = 0, "", {0: 0}
        self._now = 0.0
        self._strangers: set[str] = set()

    # ------------------------------------------------------------ the supervisor's loop

    def tick(self, now: float, detail: str, group: RankGroup | None) -> list[RankMessage]:
        """Receive reports and send orders; return the messages of ranks on other nodes.

        detail: the engine's state as text. group: ranks of the running epoch; if it is killed or None, the
        nodes end their ranks.
        """
        self._now = now
        if self._socket is None:
            self._listen(now)
            return []
        words = self._receive(now)
        for node in self._nodes.values():
            node.lost = now - node.heard_at > SILENCE_S
        if now - self._told_at >= BEAT_S:
            self._told_at = now
            running = self._group is not None and group is self._group and not self._group.killed
            for node in self._nodes.values():
                self._order(node, detail, running)
        return words

    def waits_for(self) -> str:
        """Describe what delays the start, beginning with "waiting for"; "" if nothing does."""
        if self._search.error is not None:
            error, retry = self._search.error, self._search.again
            retry()
            raise error
        if self._wrong is not None:
            raise self._wrong
        if self._socket is None:
            return f"waiting for the other nodes of {self.place.launcher}{self._trouble}"
        missing = [node.name for node in self._nodes.values() if not node.here(self._now)]
        return f"waiting for {', '.join(missing)}" if missing else ""

    def close(self) -> None:
        """Tell the nodes that no epoch runs any more."""
        if self._socket is not None:
            for node in self._nodes.values():
                self._order(node, "node 0 is stopping", False)
            self._socket.close()
        self._context.destroy(linger=200)

    # ------------------------------------------------------------ the link

    def _listen(self, now: float) -> None:
        meeting = self._search.meeting
        if meeting is None or now < self._next_bind:
            return
        self._next_bind = now + RETRY_S
        try:
            port = meeting.port + engine_index(self._engine_dir)
            self._wrong = None
        except ConfigError as error:
            self._wrong = error
            return
        try:
            bind = self._search.own_address if self._search.is_ours else "0.0.0.0"
            self._socket = link.listen(self._context, bind, port, meeting.secret)
        except (zmq.ZMQError, OSError) as error:
            self._trouble = f", which cannot reach us: {meeting.address} port {port}: {error}"
            return
        for node in self._nodes.values():
            node.name = meeting.name(node.index)
        _log.info("node 0 of %d listens on %s port %d", self.place.size, meeting.address, port)

    def _receive(self, now: float) -> list[RankMessage]:
        assert self._socket is not None
        words: list[RankMessage] = []
        known = {node.identity for node in self._nodes.values()}
        while self._socket.poll(0):
            sender, frame = self._socket.recv_multipart()[:2]
            try:
                message = decode(frame, ToLeader)
            except msgspec.DecodeError as error:
                _log.warning("a message of a node does not follow the protocol: %s", error)
                continue
            if isinstance(message, NodeReport):
                self._take(sender, message, now)
                known.add(sender)
            elif sender in known:
                words.append(message)
        return words

    def _take(self, sender: bytes, report: NodeReport, now: float) -> None:
        node = self._nodes.get(report.node)
        if node is None or report.size != self.place.size or report.protocol != NODE_PROTOCOL:
            text = f"node {report.node} of {report.size} ({report.host}), protocol {report.protocol}"
            if text not in self._strangers:
                self._strangers.add(text)
                _log.error("%s is none of our %d nodes, protocol %d", text, self.place.size, NODE_PROTOCOL)
            return
        first = node.report is None or node.report.life != report.life
        node.name = f"node {report.node} ({report.host})"
        node.identity, node.report, node.heard_at = sender, report, now
        node.refusal = self._refusal(node)
        if first:
            _log.info("%s has come with %d GPU(s); %s", node.name, report.devices, node.refusal or "accepted")

    def _refusal(self, node: Node) -> str:
        other = difference(node.report.identity, self._identity) if node.report else ""
        return f"{node.name} has another repository than node 0: {other}; wanted the same" if other else ""

    def _order(self, node: Node, detail: str, running: bool) -> None:
        if not node.identity or self._socket is None:
            return
        order = NodeOrder(self._life, detail=detail, refusal=node.refusal)
        if running and self._group is not None and not node.refusal:
            order = NodeOrder(
                self._life,
                self._epoch,
                self._group.ranks_of(node.index),
                len(self._group.ranks),
                self._meeting_url,
                self._first_devices.get(node.index, 0),
                detail,
            )
        try:
            self._socket.send_multipart([node.identity, encode(order)], zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # its connection has just ended; it will report over the next one

    # ------------------------------------------------------------ a start

    def start_ranks(
        self, commands: Sequence[Sequence[str]], settings: EngineSettings, epoch: int, now: float
    ) -> RankGroup:
        """Start the ranks of an epoch; commands: as for one node. Raises ConfigError where the nodes cannot
        hold them, OSError where node 0 cannot listen for its ranks.
        """
        self._identity = identity(self._engine_dir)
        for node in self._nodes.values():
            node.refusal = self._refusal(node)
            if node.refusal:
                raise ConfigError(node.refusal)
        per_node = ranks_per_node(len(commands), self.place.size)
        demand = replace(settings.demand, nodes=self.place.size)
        self._first_devices = first_devices(self._gpus(settings.on_cpu), demand, settings.devices)
        address = self._search.own_address
        with _listener(address) as listener:
            port = listener.getsockname()[1]
            self._meeting_url = f"tcp://{addresses.bracketed(address)}:{port}"
            extended = []
            for rank, command in enumerate(commands):
                options = ["--meeting", self._meeting_url, "--local-world", str(per_node)]
                options += ["--meeting-fd", str(listener.fileno())] if rank == 0 else []
                extended.append([*command, *options, "--first-device", str(self._first_devices[0])])
            self._group = NodeRankGroup(extended, now, epoch, self._nodes, listener.fileno())
        self._epoch, self._told_at = epoch, 0.0
        return self._group

    def _gpus(self, on_cpu: bool) -> dict[int, NodeGpus]:
        """Return the GPUs of the nodes; none if config.pbtxt names a CPU."""
        visible = os.environ.get(VISIBLE, "")
        count = 0 if on_cpu else devices.count_visible()
        found = {0: NodeGpus("node 0", addresses.machine_id(), visible, count)}
        for index, node in self._nodes.items():
            if node.report is not None:
                report = node.report
                count = 0 if on_cpu else report.devices
                found[index] = NodeGpus(node.name, report.machine, report.visible, count)
        return found


def _listener(address: str) -> posix.socket:
    """Return a listening socket on which ranks join rank 0, bound to node 0's own address only."""
    family = posix.AF_INET6 if ":" in address else posix.AF_INET
    return posix.create_server((address, 0), family=family, backlog=1024)
