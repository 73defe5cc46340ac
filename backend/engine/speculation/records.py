"""The drafts of one sequence, as the scheduler knows them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class DraftRecord:
    """The drafts of one sequence.

    matched, source: of the newest search for drafts whose result is known (kernels/draft_history.py). chance:
    learned probability that a draft is right while those before it are; below 0: nothing learned yet.
    drafted, accepted: totals. scopes: in which it finds answers, and its client's drafts; -1: none. drafts:
    of a drafter on the host, those behind the newest token.
    """

    matched: int = 0
    source: int = 0
    chance: float = -1.0
    drafted: int = 0
    accepted: int = 0
    scopes: tuple[int, int] = (-1, -1)
    drafts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
