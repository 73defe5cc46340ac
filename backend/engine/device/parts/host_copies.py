"""Copies of cache blocks to the host tier and from it, on the device."""

from __future__ import annotations

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.parts.host_copies import Copied, HostCopies
from tridecode.backend.engine.ranks.exchange import waiting
from tridecode.backend.engine.ranks.parallel import GPU


class HostCopiesRun(PartRun[HostCopies]):
    def before(self) -> None:
        store = self.state.host
        assert store is not None, "this rank has no host tier"
        self._transfer = store.begin(self.part)

    def result(self) -> Copied:
        """Collective if blocks came in: one is intact if all ranks' parts of it are."""
        store = self.state.host
        assert store is not None
        with waiting(self.state.ranks, GPU):
            intact = store.end(self._transfer)
        if intact:
            intact = self.state.ranks.all_true(intact)
        return Copied(intact, self._transfer.seconds)
