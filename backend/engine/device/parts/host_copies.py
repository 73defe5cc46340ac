"""Copies of cache blocks to the host tier and from it, on the device."""

from __future__ import annotations

from tridecode.backend.engine.device.parts.part_run import PartRun
from tridecode.backend.engine.host_tier.readiness import SHARES
from tridecode.backend.engine.parts.host_copies import Copied, HostCopies
from tridecode.backend.engine.ranks.exchange import waiting
from tridecode.backend.engine.ranks.parallel import GPU
from tridecode.kernels.operands import CacheLayer


class HostCopiesRun(PartRun[HostCopies]):
    def before(self) -> None:
        store = self.state.host
        assert store is not None, "this rank has no host tier"
        self._transfer = store.begin(self.part)

    def caches(self, caches: list[CacheLayer]) -> list[CacheLayer]:
        return self._transfer.caches(caches)

    @property
    def is_done(self) -> bool:
        return self._transfer.is_done

    def result(self) -> Copied:
        """Collective if the plan copies blocks in or asks. A block is intact if all ranks' parts are."""
        store = self.state.host
        assert store is not None
        with waiting(self.state.ranks, GPU):
            intact = store.end(self._transfer)
        own = store.pinning.shares
        asked = [own >= share for share in range(SHARES + 1)] if self.part.asks else []
        if asked or intact:
            both = self.state.ranks.all_true([*asked, *intact])
            asked, intact = both[: len(asked)], both[len(asked) :]
        shares = sum(asked) - 1 if asked else 0
        if shares < 0:
            store.leave()
        return Copied(intact, self._transfer.seconds, shares)
