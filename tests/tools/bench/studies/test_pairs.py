"""Studies alternate two measurements and report the medians and the median of the ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tridecode.tools.bench.studies.pairs import Pairs, study_parser


def test_measurements_alternate_and_the_ratio_is_the_median_of_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    plain, special = iter([1.0, 4.0, 2.0]), iter([3.0, 4.0, 3.0])

    def measure(name: str, values) -> float:
        calls.append(name)
        return next(values)

    found = Pairs(3)
    found.compare(
        {"table": "rows", "case": "all"}, lambda: measure("a", plain), lambda: measure("b", special)
    )
    assert calls == ["a", "b"] * 3
    assert "x 1.5000" in capsys.readouterr().out
    found.write(tmp_path / "found.json")
    wanted = {"table": "rows", "case": "all", "plain_ms": 2.0, "ms": 3.0, "ratio": 1.5}
    assert json.loads((tmp_path / "found.json").read_text()) == [wanted]


def test_studies_share_their_options() -> None:
    arguments = study_parser("A study.").parse_args(["--rows", "8", "--output", "found.json"])
    assert (arguments.rows, arguments.repeats, arguments.output) == (8, 3, Path("found.json"))
