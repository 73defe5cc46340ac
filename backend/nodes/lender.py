"""A node other than node 0: it runs ranks for node 0, and its doors refuse requests.

It takes the place of EngineLife in the supervisor, with the same methods. If node 0 is silent for SILENCE_S,
the ranks end and the node waits for new orders.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence

import msgspec
import zmq

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.configuration.rank_gpus import VISIBLE
from tridecode.backend.nodes import addresses, devices, link
from tridecode.backend.nodes.identity import identity
from tridecode.backend.nodes.launchers import NodePlace
from tridecode.backend.nodes.node_messages import NodeOrder, NodeReport, RankLife
from tridecode.backend.nodes.rank_spread import engine_index
from tridecode.backend.nodes.rendezvous import Search
from tridecode.backend.supervisor.rank import LocalProcess, RankMessage
from tridecode.backend.wire.messages import BEAT_S, SILENCE_S, EngineState, decode, encode

FAILED_RETRY_S = 60.0  # after an error that would recur; a new door shortens it
DOWN_RETRY_S = 5.0  # after any other
IDENTITY_S = 1.0  # interval between checks for changed files

_log = logging.getLogger("tridecode.nodes")


class Lender:
    """Times are monotonic seconds that the caller gives; nothing here sleeps or blocks.

    command(epoch): the argument list of a rank before the options of this module. more(rank, ranks):
    options of one of the ranks that run here.
    """

    def __init__(
        self,
        place: NodePlace,
        engine_dir: str,
        search: Search,
        command: Callable[[int], Sequence[str]],
        fingerprint: Callable[[], object],
        more: Callable[[int, int], Sequence[str]] = lambda rank, ranks: (),
    ) -> None:
        self.place = place
        self._engine_dir, self._search, self._command = engine_dir, search, command
        self._fingerprint, self._more = fingerprint, more
        self._life = secrets.token_hex(8)
        self._context: zmq.Context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._order = NodeOrder("")
        self._heard_at: float | None = None  # None: node 0 has not answered yet
        self._owner = ""  # life of the node 0 for which ranks run here
        self._ranks: dict[int, LocalProcess] = {}
        self._started = ("", 0)  # life and epoch of the last ranks that were started
        self._error = ""
        self._reported: object = None
        self._reported_at = self._looked_at = -1e9
        self._retry_at = 0.0
        self._told_error: TridecodeError | None = None
        self._seen: object = None
        self._identity: dict[str, str] = {}
        self._stopping = ""
        self.epoch = 0  # epoch of the ranks that run here
        self.phase, self.detail = "starting", "meeting the other nodes"

    # ------------------------------------------------------------ interface of EngineLife

    @property
    def state(self) -> EngineState:
        return EngineState(self.epoch, self.phase, self.detail, "")

    @property
    def load(self) -> tuple[int, int]:
        return 0, 0

    def tick(self, now: float) -> None:
        if self._stopping:
            return
        if self._socket is None:
            self._connect(now)
        else:
            self._receive(now)
            self._follow(now)
            self._report(now)
        self._describe(now)

    def hear(self, message: RankMessage, now: float) -> None:
        """Pass on the message of a local rank to node 0."""
        if message.epoch == self.epoch:
            self._send(message)

    def forgive(self, now: float, pause_s: float) -> None:
        if self._heard_at is not None:
            self._heard_at = now

    def new_door(self, now: float, alone: bool) -> None:
        self._retry_at = now

    def stop(self, detail: str, with_server: bool) -> None:
        """Request nothing more from node 0. A lending node has no open requests: `with_server` is unused."""
        self._stopping = detail
        self.phase, self.detail = "stopping", detail

    def kill(self) -> None:
        for process in self._ranks.values():
            process.kill()

    def gone(self) -> bool:
        return all(process.poll() is not None for process in self._ranks.values())

    def living(self) -> str:
        """The ranks that have not ended, in words."""
        living = [str(rank) for rank, process in self._ranks.items() if process.poll() is None]
        return f"ranks {', '.join(living)}" if living else ""

    def close(self) -> None:
        self._context.destroy(linger=200)

    # ------------------------------------------------------------ the link

    def _connect(self, now: float) -> None:
        meeting, error = self._search.meeting, self._search.error
        if meeting is not None:
            try:
                port = meeting.port + engine_index(self._engine_dir)
            except ConfigError as wrong:
                self.phase, self.detail = "failed", str(wrong)
                return
            self._socket = link.connect(self._context, meeting.address, port, meeting.secret)
        elif error is not None and error is not self._told_error:
            self._told_error = error
            settled = isinstance(error, ConfigError)
            self.phase, self.detail = "failed" if settled else "down", str(error)
            self._retry_at = now + (FAILED_RETRY_S if settled else DOWN_RETRY_S)
        elif error is not None and now >= self._retry_at:
            self.phase = "starting"
            self._search.again()

    def _receive(self, now: float) -> None:
        """Receive orders. Only the last one counts, since each is complete."""
        assert self._socket is not None
        frame = b""
        while self._socket.poll(0):
            frame = self._socket.recv()
            self._heard_at = now
        if frame:
            try:
                self._order = decode(frame, NodeOrder)
            except msgspec.DecodeError as error:
                _log.warning("an order of node 0 does not follow the protocol: %s", error)

    def _send(self, message: msgspec.Struct) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # node 0 is not connected; the next report repeats everything

    def _report(self, now: float) -> None:
        lives = [
            RankLife(rank, process.pid, process.poll(), process.state())
            for rank, process in self._ranks.items()
        ]
        content = (self.epoch, lives, self._error)
        if content == self._reported and now - self._reported_at < BEAT_S:
            return
        self._look_at_files(now)
        self._reported, self._reported_at = content, now
        self._send(
            NodeReport(
                node=self.place.index,
                size=self.place.size,
                life=self._life,
                host=socket.gethostname(),
                identity=self._identity,
                machine=addresses.machine_id(),
                visible=os.environ.get(VISIBLE, ""),
                devices=devices.count_visible(),
                epoch=self.epoch,
                ranks=lives,
                error=self._error,
            )
        )

    def _look_at_files(self, now: float) -> None:
        if now - self._looked_at < IDENTITY_S:
            return
        self._looked_at = now
        seen = self._fingerprint()
        if seen != self._seen or not self._identity:
            self._seen, self._identity = seen, identity(self._engine_dir)

    # ------------------------------------------------------------ the orders

    def _silent(self, now: float) -> float:
        """Return by how many seconds node 0's silence exceeds the limit, else 0.0."""
        if self._heard_at is None:
            return 0.0
        silent = now - self._heard_at
        return silent if silent > SILENCE_S else 0.0

    def _follow(self, now: float) -> None:
        """Run exactly the ranks of the order."""
        order = self._order
        wanted = (order.life, order.epoch) if order.epoch and not self._silent(now) else ("", 0)
        if wanted == (self._owner, self.epoch):
            return
        if self._ranks:
            self.kill()
            if not self.gone():
                return
            _log.info("the ranks of epoch %d have ended", self.epoch)
        self._ranks, self._error = {}, ""
        self._owner, self.epoch = wanted
        if not self.epoch:
            return
        if wanted == self._started:
            self._error = "its ranks have ended, because it did not hear node 0 for a while"
            return
        self._started = wanted
        self._start(order)

    def _start(self, order: NodeOrder) -> None:
        options = ["--world", str(order.world), "--meeting", order.meeting]
        options += ["--local-world", str(len(order.ranks)), "--first-device", str(order.first_device)]
        _log.info("starting ranks %s of epoch %d for node 0", order.ranks, order.epoch)
        try:
            for rank in order.ranks:
                command = [*self._command(order.epoch), *options, "--rank", str(rank)]
                command += self._more(rank, len(order.ranks))
                self._ranks[rank] = LocalProcess(command)
        except (OSError, TridecodeError) as error:
            self._error = f"its ranks cannot be started: {error}"

    # ------------------------------------------------------------ in words

    def _describe(self, now: float) -> None:
        """Describe the state for the local doors."""
        meeting = self._search.meeting
        if meeting is None or self._socket is None:
            return
        host = meeting.hosts[0]
        lead = f"node 0 ({host})" if host == meeting.address else f"node 0 ({host}, {meeting.address})"
        if self._order.refusal:
            self.phase, self.detail = "failed", self._order.refusal
            return
        self.phase = "lending"
        if self._heard_at is None:
            told = f"node 0 has not answered on {meeting.address} yet"
        elif self._silent(now):
            told = "node 0 is silent, waiting for it"
        else:
            told = f"its engine is {self._order.detail}"
        self.detail = (
            f"this is node {self.place.index} of {self.place.size}, which lends its GPUs: send requests to "
            f"{lead}; {told}"
        )
