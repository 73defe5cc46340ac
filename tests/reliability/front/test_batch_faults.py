"""Kills while a batch runs; `python -m tests.reliability.front.batch_faults` kills every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.front.batch_faults import run

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_each_line_has_one_result_after_kills(tmp_path: Path) -> None:
    assert run(tmp_path, ("kill:front", "kill:batches"), 300, 60) == []
