"""`tridecode bench beside`: every engine answers the same job, and the figures follow from the rounds."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.checkpoints import save, tiny_llama
from tridecode.tools.bench.beside import CTRANSLATE2, ENGINE, SERVER, TRANSFORMERS, Ratio, run_beside
from tridecode.tools.bench.ctranslate2_bench import bench_ctranslate2
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.neighbours import Neighbours


def test_a_ratio_is_of_one_rounds_tokens_a_second() -> None:
    one = {
        ENGINE: {
            "batches": [{"batch": 1, "total_tokens_per_s": 50.0}, {"batch": 16, "total_tokens_per_s": 400.0}]
        },
        TRANSFORMERS: {"batches": [{"batch": 1, "total_tokens_per_s": 20.0}]},
        CTRANSLATE2: {"error": "ctranslate2 is not installed"},
    }
    assert Ratio((ENGINE, 16), (ENGINE, 1)).of(one) == 8.0
    assert Ratio((ENGINE, 1), (TRANSFORMERS, 1)).of(one) == 2.5
    assert Ratio((ENGINE, 16), (TRANSFORMERS, 16)).of(one) is None
    assert Ratio((ENGINE, 1), (CTRANSLATE2, 1)).of(one) is None


BURN = "import time; end = time.time() + {seconds}\nwhile time.time() < end: pass"


def test_neighbours_are_others_and_not_our_children() -> None:
    command = [sys.executable, "-c", BURN.format(seconds=1.5)]
    with Neighbours() as before:
        time.sleep(1.0)
    with Neighbours() as alone:
        subprocess.run(command, check=True)
    # a process whose parent ends at once is nobody's child
    orphan = f"import subprocess, sys; subprocess.Popen({command!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    with Neighbours() as disturbed:
        time.sleep(1.0)
    assert disturbed.cores > 0.5, disturbed.cores
    assert alone.cores < disturbed.cores or before.cores > 0.5  # somebody may really be busy here


@pytest.mark.server
@pytest.mark.slow
def test_a_report_has_every_engine_and_no_path(tmp_path) -> None:
    checkpoint = save(tiny_llama(), tmp_path / "tiny")
    job = Job(batches=(1, 2), prompt_tokens=8, output_tokens=4, repeats=1)
    run_beside(str(checkpoint), job, 1, 0.0, tmp_path / "cache", tmp_path / "results", "tiny")
    text = (tmp_path / "results" / "tiny.json").read_text()
    report = json.loads(text)
    assert str(tmp_path) not in text and len(report["results"]["rounds"]) == 1
    assert all(run["neighbours"] >= 0 for run in report["results"]["rounds"][0].values())
    medians = report["results"]["medians"]
    for engine in (ENGINE, SERVER, TRANSFORMERS):
        assert [row["batch"] for row in medians[engine]] == [1, 2]
        assert all(row["total_tokens_per_s"] > 0 for row in medians[engine])
    assert report["results"]["ratios"][f"{ENGINE} with 1 over {TRANSFORMERS} with 1"] > 0
    assert (tmp_path / "results" / "tiny.png").stat().st_size > 1000


@pytest.mark.slow
def test_ctranslate2_makes_the_forced_number_of_tokens_where_it_is_installed(tmp_path) -> None:
    checkpoint = save(tiny_llama(), tmp_path / "tiny")
    job = Job(directory=str(checkpoint), batches=(2,), prompt_tokens=8, output_tokens=4, repeats=1)
    found = bench_ctranslate2(job)
    assert found.get("error") == "ctranslate2 is not installed" or found["batches"][0]["step_ms"] > 0
