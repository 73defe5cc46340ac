"""A thinned grid has every pair of values; what `make test` leaves out, `make nightly` runs."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, product

import pytest

from tests import parts
from tests.thinning import covering, diagonal


@pytest.mark.parametrize("sizes", [(1, 1), (5,), (9, 7), (9, 7, 3), (2, 2, 3, 8, 3), (24, 5, 3, 2)])
def test_a_part_of_a_grid_has_every_pair_and_little_more(sizes):
    grid = [dict(zip("abcde", numbers)) for numbers in product(*map(range, sizes))]
    kept = [grid[number] for number in covering(grid)]
    for first, second in combinations("abcde"[: len(sizes)], 2):
        wanted = {(case[first], case[second]) for case in grid}
        assert {(case[first], case[second]) for case in kept} == wanted
    smallest = max((one * other for one, other in combinations(sizes, 2)), default=sizes[0])
    assert len(kept) <= 1.5 * smallest


def test_a_grid_with_holes_keeps_the_pairs_that_it_has():
    grid = [dict(a=a, b=b, c=c) for a, b, c in product(range(4), repeat=3) if (a + b + c) % 3]
    kept = [grid[number] for number in covering(grid)]
    for first, second in combinations("abc", 2):
        assert {(case[first], case[second]) for case in kept} == {
            (case[first], case[second]) for case in grid
        }
    assert len(kept) < len(grid)


def test_without_parameters_everything_is_kept():
    assert covering([{}]) == [0]


def test_diagonals_have_each_row_and_column_and_whole_rows():
    pairs = diagonal("abcdef", range(7), 3, whole="b")
    kept = [pair for pair in pairs if type(pair) is tuple]  # not a ParameterSet
    assert len(pairs) == 6 * 7 and kept == [(r, c) for r, c in product("abcdef", range(7))
                                            if r == "b" or ("abcdef".index(r) + c) % 3 == 0]  # fmt: skip
    assert {row for row, _ in kept} == set("abcdef") and {column for _, column in kept} == set(range(7))


TESTS = """
import pytest

@pytest.mark.pairwise
@pytest.mark.parametrize("one", [[1], [2], [3]])
@pytest.mark.parametrize("other", ["x", "y", "z"])
@pytest.mark.parametrize("third", range(3))
def test_grid(one, other, third): ...

@pytest.mark.nightly
def test_slow(): ...

@pytest.mark.parametrize("number", [1, 2])
def test_quick(number): ...
"""


def collected(folder, *options: str) -> set[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-c",
        str(parts.ROOT / "pyproject.toml"),
    ]
    command += ["--rootdir", str(parts.ROOT), "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    listed = subprocess.run(
        [*command, str(folder)], cwd=parts.ROOT, capture_output=True, text=True, timeout=120
    ).stdout
    return {line.rpartition("::")[2] for line in listed.splitlines() if "::" in line}


def test_what_one_side_leaves_out_the_other_one_runs(tmp_path):
    (tmp_path / "test_made.py").write_text(TESTS)
    leave, only, both = (
        collected(tmp_path, *options) for options in (["--nightly", "leave"], ["--nightly", "only"], [])
    )
    assert not leave & only and leave | only == both and len(both) == 27 + 1 + 2
    assert "test_slow" in only and {"test_quick[1]", "test_quick[2]"} <= leave
    assert len([name for name in leave if name.startswith("test_grid")]) <= 12
