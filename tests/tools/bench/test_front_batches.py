"""`tridecode bench batches` before a fake engine: phases, rates and ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tridecode.tools.bench.front.batches import BatchPlan, run_batches


@pytest.mark.slow
def test_clients_and_a_batch_are_measured_alone_and_together(tmp_path: Path) -> None:
    plan = BatchPlan(lines=5000, rate=20, seconds=2, prompt_tokens=8, output_tokens=20, slots=32)
    found = json.loads(run_batches(plan, None, tmp_path).read_text())["results"]
    clients, batch, both = found["rows"]
    assert [row["phase"] for row in found["rows"]] == ["clients alone", "batch alone", "both"]
    assert clients["requests"] > 5 and both["requests"] > 5 and batch["requests"] == 0
    assert batch["batch_tokens_s"] > 0 and both["batch_tokens_s"] > 0 and clients["batch_tokens_s"] == 0
    (ratios,) = found["ratios"]
    assert ratios["batch"] == both["batch_tokens_s"] / batch["batch_tokens_s"]
    assert ratios["first_p95"] == both["first_p95_ms"] / clients["first_p95_ms"]
