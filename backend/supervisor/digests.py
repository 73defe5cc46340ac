"""Compare the digests that the ranks of an epoch send (RankDigest), to detect ranks that diverged."""

from __future__ import annotations

from collections import Counter

from tridecode.backend.supervisor.blame import Failure, ranks_text
from tridecode.backend.wire.messages import BEAT_S, RankDigest

DIGEST_GRACE_S = 2.5 * BEAT_S  # all ranks have reported the same step within this time
_KEPT_DIGESTS = 64


class Digests:
    """Compares the digests that ranks report (RankDigest)."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], dict[int, int]] = {}  # (steps, stage) -> rank -> digest
        self._found: tuple[dict[int, int], str, int] | None = None  # the first difference found
        self._found_at: float | None = None

    def hear(self, digest: RankDigest) -> None:
        self._note((digest.steps, -1), digest.rank, digest.tokens, "sampled other tokens")
        if digest.state >= 0:
            self._note((digest.steps, digest.stage), digest.rank, digest.state, "computed another state")

    def _note(self, key: tuple[int, int], rank: int, value: int, what: str) -> None:
        values = self._held.setdefault(key, {})
        values[rank] = value
        while len(self._held) > _KEPT_DIGESTS:
            del self._held[next(iter(self._held))]
        if self._found is None and len(set(values.values())) > 1:
            self._found = values, what, key[0]

    def cause(self, now: float) -> Failure | None:
        """Return the first difference, once the other ranks have had time to report which side they agree
        with.
        """
        if self._found is None:
            return None
        if self._found_at is None:
            self._found_at = now
        return Failure(_difference(*self._found)) if now - self._found_at >= DIGEST_GRACE_S else None


def _difference(values: dict[int, int], what: str, steps: int) -> str:
    usual, count = Counter(values.values()).most_common(1)[0]
    odd = [rank for rank, value in values.items() if value != usual]
    same = [rank for rank, value in values.items() if value == usual]
    value = values[odd[0]]
    if len(odd) < count:
        return (
            f"{ranks_text(odd)} {what} than {ranks_text(same)} within {steps} steps: digest {value:08x}, "
            f"wanted {usual:08x}"
        )
    return (
        f"{ranks_text(same)} and {ranks_text(odd)} disagree: they {what} within {steps} steps, digests "
        f"{usual:08x} and {value:08x}"
    )
