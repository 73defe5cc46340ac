"""Thin grids of parameters that prove the same: `make test` runs a part that has every pair of values.

`make nightly` runs the rest. The marker `pairwise` names such a grid. The part finds a mistake that depends
on one parameter or on two together; the rest finds one that needs three values at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

Case = Mapping[str, object]  # value by parameter


def pairs_of(case: Case) -> set[tuple]:
    """All pairs of (parameter, value) of a case; of a case with one parameter, that one."""
    values = sorted(case.items(), key=lambda item: item[0])
    return set(combinations(values, 2)) or set(values)


def covering(cases: Sequence[Case]) -> list[int]:
    """The numbers of cases that together have every pair of the grid, in order.

    Greedy: cases that add the most pairs come first.
    """
    pairs = [pairs_of(case) for case in cases]
    seen: set[tuple] = set()
    kept: set[int] = set()
    for wanted in range(max(map(len, pairs), default=0), 0, -1):
        for number, found in enumerate(pairs):
            if number not in kept and len(found - seen) >= wanted:
                kept.add(number)
                seen |= found
    return sorted(kept) if seen else list(range(len(cases)))


def diagonal(rows: Iterable, columns: Iterable, step: int, whole: Container = ()) -> list:
    """Return all pairs for parametrize: `make nightly` has most of them to itself.

    `make test` runs each `step`-th diagonal, and all columns of the rows in `whole`: so each row and each
    column has a few cases. Use it for two parameters if a quicker test proves what they have in common;
    `pairwise` would keep every pair.
    """
    columns = list(columns)
    return [
        (row, column)
        if (i + j) % step == 0 or row in whole
        else pytest.param(row, column, marks=pytest.mark.nightly)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def by_text(parameters: Mapping[str, object]) -> Case:
    """Replace values by their text, because some have no hash."""
    return {name: repr(value) for name, value in parameters.items()}


def thin(items: Sequence[pytest.Item]) -> None:
    """Give the marker `nightly` to what the grids of the marker `pairwise` can do without."""
    grids: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            grids[item.nodeid.partition("[")[0], item.name.partition("[")[0]].append(item)
    for grid in grids.values():
        kept = set(covering([by_text(item.callspec.params) for item in grid]))
        for number, item in enumerate(grid):
            if number not in kept:
                item.add_marker("nightly")
