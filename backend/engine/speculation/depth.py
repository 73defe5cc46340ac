"""Chooses how many drafts of each row a step verifies, by what they are worth and what they cost. No torch.

A draft is worth the probability that it is accepted, which is learned; a step costs its measured time. Rows
of one step share a padded number of tokens, so the choice is one width: the rows then take as many drafts as
fit. At high load the cost of every width exceeds its worth, and no row gets drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tridecode.backend.engine.speculation.records import (
    FIRST_CHANCES,
    NEVER,
    SEARCHES,
    DraftRecord,
)
from tridecode.backend.engine.speculation.step_times import Shape, StepTimes

#: moving-average weight of a new result: for a sequence, and for all sequences with drafts of its kind
_OWN_WEIGHT, _SHARED_WEIGHT = 0.1, 0.02
#: number of results for which the initial chance of a kind counts: its first results have more weight
_FIRST_RESULTS = 8
#: share by which the chance of one sequence moves back to that of all sequences in a step in which it could
#: have planned drafts and gets none
_OWN_RECOVERY = 1 / 4
#: a width must promise this many times the tokens per second of a plain step: costs vary from step to step
_LEAST_GAIN = 1.03
#: a chance at most this high: a draft behind many accepted ones is never certain
_MOST_CHANCE = 0.98


class Widths(NamedTuple):
    """The widths of a step. padded: its rows. plain: seconds of a step without drafts. several: each width
    with drafts, and its seconds; []: the step can have no drafts."""

    padded: int
    plain: float
    several: list[tuple[int, float]]


@dataclass(frozen=True)
class StepCosts:
    """Seconds per step of decode rows, measured at start-up. plain: padded rows -> seconds of a step without
    drafts. several: (padded rows, tokens per row) -> seconds of a step that verifies drafts, including the
    time in which a planned drafter computes them. searched: as `several`, without the time of the planned
    drafter, if the engine also searches for drafts."""

    plain: Mapping[int, float]
    several: Mapping[tuple[int, int], float]
    searched: Mapping[tuple[int, int], float] | None = None

    def widths(self, rows: int, searched: bool = False) -> Widths:
        """Return the widths of a step of `rows` rows. searched: whether the drafts are those of a search."""
        sizes = sorted({size for size, _ in self.several})
        place = bisect_left(sizes, rows)
        plains = sorted(self.plain)
        plain = bisect_left(plains, rows)
        if place == len(sizes) or plain == len(plains):
            return Widths(rows, 0.0, [])
        padded = sizes[place]
        costs = self.searched if searched and self.searched is not None else self.several
        found = [(width, cost) for (size, width), cost in costs.items() if size == padded]
        return Widths(padded, self.plain[plains[plain]], sorted(width for width in found if width[0] > 1))


@dataclass
class DepthPolicy:
    """Learns the chances of drafts, and chooses the width of steps.

    A sequence that gets no drafts soon has the chance of all sequences again: a draft costs little, and the
    text may have changed. Learning decides when chances and times with which no sequence gets drafts are
    forgotten.

    costs: None: a row with a match gets all drafts that it may have. most: drafts per row (max_draft_tokens).
    times: what steps take in service.
    """

    costs: StepCosts | None
    most: int
    times: StepTimes = field(default_factory=StepTimes)
    _shared: list[float] = field(default_factory=lambda: list(FIRST_CHANCES))
    _results: list[int] = field(default_factory=lambda: [_FIRST_RESULTS] * len(FIRST_CHANCES))
    _widths: dict[tuple[int, bool], Widths] = field(default_factory=dict)
    #: by rows and width of a step: its padded shape and cost
    _shapes: dict[tuple[int, int], tuple[Shape | None, float]] = field(default_factory=dict)

    def may_widen(self, rows: int) -> bool:
        """Return whether a step of this many rows can have drafts."""
        return self.costs is None or bool(self._widths_of(rows).several)

    def choose(
        self,
        records: Sequence[DraftRecord | None],
        mosts: Sequence[int],
        searched: bool = False,
        mask_s: float = 0.0,
    ) -> list[int]:
        """Return the number of drafts of each row of a step.

        records: of the rows, None for one without drafts. mosts: the most drafts that each may have.
        searched: whether no planned drafter has computed drafts for the step. mask_s: seconds for which the
        step waits for the mask of each draft of a row.
        """
        mosts = [min(most, self.most) for most in mosts]
        chances = [self.chance(record) for record in records]
        mosts = [most if chance > 0 else 0 for most, chance in zip(mosts, chances)]
        if self.costs is None or not any(mosts):
            return mosts
        padded, plain, widths = self._widths_of(len(records), searched)
        if not widths:
            return [0] * len(mosts)
        seconds = self.times.seconds
        best, best_width = _LEAST_GAIN * len(mosts) / seconds((padded, 1), plain), 1
        expected, drafts, powers = float(len(mosts)), 0, [1.0] * len(mosts)
        for width, cost in widths:
            while drafts < width - 1:  # the draft is accepted if all before it are, too
                drafts += 1
                powers = [
                    power * chance if most >= drafts else 0.0
                    for power, chance, most in zip(powers, chances, mosts)
                ]
                expected += sum(powers)
            rate = expected / (seconds((padded, width), cost) + mask_s * (width - 1))
            if rate > best:
                best, best_width = rate, width
        return [min(most, best_width - 1) for most in mosts]

    def took(self, rows: int, width: int, now: float) -> None:
        """Note when the result of a step came. rows: 0 for a step with prompts. width: tokens of its longest
        row. now: seconds."""
        if self.costs is None:
            return
        known = self._shapes.get((rows, width))
        if known is None:
            known = self._shapes[rows, width] = self._shape_of(rows, width)
        self.times.take(rows, known[0], now, known[1])

    def _shape_of(self, rows: int, width: int) -> tuple[Shape | None, float]:
        """Return the padded shape and the cost of a step; None and 0.0 if it was not measured."""
        found = self._widths_of(rows)
        sizes = [(1, found.plain), *found.several] if rows and found.plain else []
        padded = next((one for one in sizes if one[0] >= width), None)
        return (None, 0.0) if padded is None else ((found.padded, padded[0]), padded[1])

    def chance(self, record: DraftRecord | None) -> float:
        """Return the probability that the next draft of a row is right."""
        if record is None or not record.kind:
            return 0.0
        shared = self._shared[record.kind]
        if record.chance < 0:
            return shared
        return min((record.chance + shared) / 2, _MOST_CHANCE)

    def learn(self, record: DraftRecord, drafted: int, accepted: int) -> None:
        """Take the result of a row: `accepted` of its `drafted` drafts were right, the next one was not."""
        place = record.kind
        if not place or not drafted:
            return
        if record.chance < 0:
            record.chance = self._shared[place]
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            record.chance += _OWN_WEIGHT * (right - record.chance)
            weight = max(_SHARED_WEIGHT, 1 / (self._results[place] + 1))
            self._results[place] += 1
            self._shared[place] += weight * (right - self._shared[place])

    def forget(self, source: int) -> None:
        """Forget the chance of a planned drafter and the times of steps with drafts, so that drafts that were
        not worth their time are tried again. source: 0 for no planned drafter."""
        kind = DraftRecord(source=source).kind
        self._shared[kind], self._results[kind] = FIRST_CHANCES[kind], _FIRST_RESULTS
        self.times.forget()

    def rest(self, record: DraftRecord) -> None:
        """Move the chance of a sequence towards that of all sequences, in a step in which it could have
        planned drafts and gets none: the drafter may be right for the text that follows."""
        if record.chance >= 0:
            record.chance += _OWN_RECOVERY * (self._shared[record.kind] - record.chance)

    def least_match(self, source: int) -> int:
        """Return the length from which the drafts of a match are right at least as often as those of a
        planned drafter; NEVER if they never are."""
        chance = self._shared[DraftRecord(source=source).kind]
        lengths = (2 ** (kind - 1) for kind in range(2, SEARCHES) if self._shared[kind] >= chance)
        return next(lengths, NEVER)

    def _widths_of(self, rows: int, searched: bool = False) -> Widths:
        found = self._widths.get((rows, searched))
        if found is None:
            assert self.costs is not None
            found = self._widths[rows, searched] = self.costs.widths(rows, searched)
        return found
