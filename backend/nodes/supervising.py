"""The supervisor's handling of other nodes; does nothing in a job of one node."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_instances import num_engines, read_groups
from tridecode.backend.nodes import rendezvous as meeting
from tridecode.backend.nodes.launchers import NodePlace, find_place
from tridecode.backend.nodes.leader import Leader
from tridecode.backend.nodes.lender import Lender
from tridecode.backend.supervisor import processes
from tridecode.backend.supervisor.engine_life import EngineLife
from tridecode.backend.supervisor.engine_settings import EngineSettings, fingerprint
from tridecode.backend.supervisor.ranks import RankGroup

Life = EngineLife | Lender


class Nodes:
    """base: the folder of the runtime folders, which stores the meeting for other engines of the server."""

    def __init__(self, engine_dir: str, server: processes.ProcessId, base: Path) -> None:
        self._engine_dir, self._server, self._base = engine_dir, server, base
        self._wrong: ConfigError | None = None
        self._leader: Leader | None = None
        self._lender: Lender | None = None
        self._place: NodePlace | None = None
        self._started_search: meeting.Search | None = None
        try:
            self._place = find_place(os.environ)
        except ConfigError as error:
            self._wrong = error
        engines = num_engines(read_groups(Path(engine_dir)))
        if self._place is not None and engines > 1:
            self._wrong = ConfigError(
                f"instance_group of {engine_dir} makes {engines} engines, and {self._place.launcher} "
                f"started a job of {self._place.size} nodes; wanted 1 instance (docs/guides/nodes.md)"
            )
            self._place = None
        if self._place is not None and self._place.index == 0:
            self._leader = Leader(self._place, engine_dir, self._search(self._place))

    def _search(self, place: NodePlace) -> meeting.Search:
        self._started_search = meeting.Search(place, self._server, self._base)
        return self._started_search

    def lender(
        self, command: Callable[[int], Sequence[str]], more: Callable[[int, int], Sequence[str]]
    ) -> Lender | None:
        """Return the Lender of a node other than node 0, else None. command(epoch): a rank's command.
        more(rank, ranks): options of one of this node's ranks.
        """
        if self._place is not None and self._leader is None:
            engine_dir, search = self._engine_dir, self._search(self._place)
            current = partial(fingerprint, engine_dir)
            self._lender = Lender(self._place, engine_dir, search, command, current, more)
        return self._lender

    def check(self) -> None:
        """Raise ConfigError if the launcher's variables are inconsistent."""
        if self._wrong is not None:
            raise self._wrong

    @property
    def size(self) -> int:
        """Nodes of the job."""
        return 1 if self._place is None else self._place.size

    def waits_for(self) -> str:
        return self._leader.waits_for() if self._leader else ""

    def tick(self, now: float, life: Life) -> None:
        """Exchange reports and orders with other nodes; called before the life's tick and while ranks end."""
        if self._started_search is not None:
            self._started_search.keep(now)
        if self._leader is not None and isinstance(life, EngineLife):
            for message in self._leader.tick(now, f"{life.phase}: {life.detail}", life.group):
                life.hear(message, now)

    def start_ranks(
        self, commands: Sequence[Sequence[str]], settings: EngineSettings, epoch: int, now: float
    ) -> RankGroup | None:
        """Start the ranks of an epoch over all nodes; return None in a job of one node."""
        return self._leader.start_ranks(commands, settings, epoch, now) if self._leader else None

    def close(self) -> None:
        for side in (self._leader, self._lender):
            if side is not None:
                side.close()
        if not processes.alive(self._server):
            meeting.clean(self._server, self._base)
