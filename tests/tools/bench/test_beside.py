"""`tridecode bench beside`: every engine answers the same job, and the figures follow from the rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.checkpoints import save, tiny_llama
from tests.waiting import wait_until
from tridecode.tools.bench import neighbours
from tridecode.tools.bench.beside import ENGINE, SERVER, Ratio, run_beside
from tridecode.tools.bench.engines import ctranslate2, transformers
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.neighbours import Neighbours

TRANSFORMERS, CTRANSLATE2 = transformers.ENGINE.name, ctranslate2.ENGINE.name


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


def processor_s(pid: int) -> float:
    """Seconds of a processor that a process has used."""
    return sum(psutil.Process(pid).cpu_times()[:2])


BURN = "print('up', flush=True)\nwhile True: pass"
# a process whose parent ends at once is nobody's child
ORPHAN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {BURN!r}], stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
"""


def test_neighbours_are_others_and_not_our_children(monkeypatch) -> None:
    """The machine of this test runs three processes: this one, a child, and somebody else's."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=True)
    other = psutil.Process(int(done.stdout))
    child = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE)
    try:
        everybody = (os.getpid(), child.pid, other.pid)
        monkeypatch.setattr(neighbours, "_busy_s", lambda: sum(map(processor_s, everybody)))
        assert child.stdout.readline() == b"up\n"
        child_before, other_before, began = processor_s(child.pid), processor_s(other.pid), time.monotonic()
        with Neighbours() as found:
            wait_until(lambda: processor_s(child.pid) - child_before > 0.4, 60, "work of the child")
            wait_until(lambda: processor_s(other.pid) - other_before > 0.4, 60, "work of the other process")
        share = (processor_s(other.pid) - other_before) / (time.monotonic() - began)
        assert found.cores == pytest.approx(share, rel=0.2), "the child's work is not among it"
    finally:
        for process in (child, other):
            process.kill()
        child.communicate()


@pytest.mark.server
@pytest.mark.slow
def test_a_report_has_every_engine_and_no_path(tmp_path) -> None:
    checkpoint = save(tiny_llama(), tmp_path / "tiny")
    job = Job(batches=(1, 2), prompt_tokens=8, output_tokens=4, repeats=1)
    run_beside(str(checkpoint), job, 1, 0.0, tmp_path / "cache", tmp_path / "results", "tiny")
    text = (tmp_path / "results" / "tiny.json").read_text()
    report = json.loads(text)
    assert str(tmp_path) not in text and len(report["results"]["rounds"]) == 1
    runs = report["results"]["rounds"][0]
    assert set(runs) == {ENGINE, SERVER, TRANSFORMERS, CTRANSLATE2}
    assert all(isinstance(run["neighbours"], float) for run in runs.values())
    medians = report["results"]["medians"]
    for engine in (ENGINE, SERVER, TRANSFORMERS):
        assert [row["batch"] for row in medians[engine]] == [1, 2]
        assert all(row["total_tokens_per_s"] > 0 for row in medians[engine])
    assert report["results"]["ratios"][f"{ENGINE} with 1 over {TRANSFORMERS} with 1"] > 0
    assert (tmp_path / "results" / "tiny.png").stat().st_size > 1000


@pytest.mark.slow
def test_ctranslate2_makes_the_forced_number_of_tokens(tmp_path) -> None:
    pytest.importorskip("ctranslate2")
    checkpoint = save(tiny_llama(), tmp_path / "tiny")
    job = Job(directory=str(checkpoint), batches=(2,), prompt_tokens=8, output_tokens=4, repeats=1)
    (row,) = ctranslate2.bench_ctranslate2(job)["batches"]  # asserts each length
    assert row["batch"] == 2 and row["total_tokens_per_s"] > 0
