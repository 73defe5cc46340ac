"""The drafts of one sequence, as the scheduler knows them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: values of DraftRecord.source: those of a search (kernels/draft_history.py), then the planned drafters, then
#: a grammar
DRAFT_MODEL, HEADS, GLIDE, GRAMMAR = 4, 5, 6, 7
#: DraftRecord.source -> name of the drafter in metrics
DRAFTERS = ("lookup", "lookup", "lookup", "client", "draft", "heads", "glide", "grammar")
#: DraftRecord.kind -> initial probability of a draft
FIRST_CHANCES = (0.0, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.6, 0.5, 0.6, 0.98)
#: number of kinds of a search
SEARCHES = 7
#: a length of a match that no match has
NEVER = 33
#: value of Sequence.draft_gap: the drafter's cache has all tokens
NO_GAP = np.iinfo(np.int32).max


@dataclass
class DraftRecord:
    """The drafts of one sequence.

    source: the drafter. matched: tokens that the newest search with a known result has matched.
    ahead: drafts that a planned drafter (part Drafting) computes after the newest step. chance: learned
    probability that a draft is right if the drafts before it are; below 0: nothing learned yet. drafted,
    accepted: totals. verified: source of the drafts that were counted last. scopes: search scopes of answers
    and of the client's drafts; -1: none. proposed: found drafts of a sequence that obeys a grammar, whose
    masks are not computed yet. drafts: the drafts after the newest token, from a drafter on the host.
    planned: in an engine that searches and has a planned drafter, the record of the latter's drafts.
    is_planned: whether the drafts after the newest step with a known result are its drafts.
    """

    matched: int = 0
    source: int = 0
    planned: DraftRecord | None = None
    is_planned: bool = False
    ahead: int = 0
    chance: float = -1.0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    scopes: tuple[int, int] = (-1, -1)
    proposed: list[int] = field(default_factory=list)
    drafts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def kind(self) -> int:
        """Return the class of drafts with similar acceptance: by the length of the match (0 for none,
        then 1, 2 - 3, 4 - 7, 8 - 15, 16 - 31, more), or by the planned drafter or the grammar; 0: no
        drafts."""
        if self.source >= DRAFT_MODEL:
            return SEARCHES + self.source - DRAFT_MODEL
        return min(self.matched.bit_length(), SEARCHES - 1)
