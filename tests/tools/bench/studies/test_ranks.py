"""One GPU and several are measured alike, and one file has the figures of all runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.studies import ranks
from tridecode.tools.bench.studies.ranks import jobs_of, ratios


def test_several_gpus_are_measured_with_peer_memory_and_with_nccl() -> None:
    jobs = jobs_of(Job("toy", batches=(3,)), 4)
    found = {name: (job.tensor_para_size, job.enable_custom_all_reduce) for name, job in jobs.items()}
    assert found == {"tp 1": (1, True), "tp 4": (4, True), "tp 4, NCCL": (4, False)}
    assert list(jobs_of(Job("toy"), 1)) == ["tp 1"]


def test_ratios_are_of_steps_and_leave_out_runs_that_failed() -> None:
    found = {
        "tp 1": {"batches": [{"step_ms": 4.0}, {"step_ms": 9.0}]},
        "tp 2": {"batches": [{"step_ms": 2.0}, {"step_ms": 6.0}]},
        "tp 2, NCCL": {"error": "no"},
    }
    assert ratios(found) == {"tp 2": [2.0, 1.5]}
    assert ratios({"tp 1": {"error": "no"}, "tp 2": found["tp 2"]}) == {}


def test_one_file_has_the_figures_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "ranks.json"
    sizes = ["--batches", "1,2", "--prompt-tokens", "8", "--output-tokens", "5", "--repeats", "1"]
    options = ["--gpus", "1", "--device", "cpu", "--presets", "toy", *sizes, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["ranks.py", *options])
    assert ranks.main() == 0
    report = json.loads(out.read_text())
    assert (
        report["environment"]["command"].startswith("ranks.py --gpus 1") and "gpus" in report["environment"]
    )
    found = report["results"]["toy"]["tp 1"]
    assert [row["batch"] for row in found["batches"]] == [1, 2]
    assert "steps" not in found  # there is no timeline of a CPU
