"""The drafts of one sequence, as the scheduler knows them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: values of DraftRecord.source: those of a search (kernels/draft_history.py), then those of planned drafters
DRAFT_MODEL, HEADS = 4, 5
#: names of drafters in metrics, by DraftRecord.source
DRAFTERS = ("lookup", "lookup", "lookup", "client", "draft", "heads")
#: probability of a draft at first, by DraftRecord.kind
FIRST_CHANCES = (0.0, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.6, 0.5)
_LENGTHS = 7  # kinds of a search


@dataclass
class DraftRecord:
    """The drafts of one sequence.

    source: where its drafts come from. matched: tokens that the newest search with a known result has found.
    ahead: drafts that a planned drafter (part Drafting) computes behind the newest step. is_complete: whether
    the drafter's own cache has what its drafts need (DeviceDrafter.keeps_cache). chance: learned
    probability that a draft is right while those before it are; below 0: nothing learned yet. drafted,
    accepted: totals. scopes: in which it finds answers, and its client's drafts; -1: none. drafts: of a
    drafter on the host, those behind the newest token.
    """

    matched: int = 0
    source: int = 0
    ahead: int = 0
    is_complete: bool = True
    chance: float = -1.0
    drafted: int = 0
    accepted: int = 0
    scopes: tuple[int, int] = (-1, -1)
    drafts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def kind(self) -> int:
        """Return the class of drafts that are about as often right: by the length of a match (0 for none,
        then 1, 2 - 3, 4 - 7, 8 - 15, 16 - 31, more), or by the planned drafter; 0: there are no drafts."""
        if not self.is_complete:
            return 0
        if self.source >= DRAFT_MODEL:
            return _LENGTHS + self.source - DRAFT_MODEL
        return min(self.matched.bit_length(), _LENGTHS - 1)
