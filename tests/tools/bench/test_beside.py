"""`tridecode bench beside`: every engine answers the same job, and the figures follow from the rounds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoints import save, tiny_llama
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


class FakeProc:
    """A machine with known figures: `/proc` in the form of proc(5), and a clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.seconds = directory, 100.0
        monkeypatch.setattr(neighbours, "_PROC", str(directory))
        monkeypatch.setattr(neighbours, "_TICK_S", 3600.0)  # the block's two ends are the only looks
        monkeypatch.setattr(neighbours, "time", SimpleNamespace(monotonic=lambda: self.seconds))

    def machine(self, **ticks: int) -> None:
        names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
        line = " ".join(str(ticks.get(name, 0)) for name in names)
        (self.directory / "stat").write_text(f"cpu  {line}\ncpu0 {line}\n")

    def process(self, pid: int, parent: int, user: int, system: int = 0, name: str = "a) R (b") -> None:
        (self.directory / str(pid)).mkdir(exist_ok=True)
        rest = f"R {parent} {pid} {pid} 0 -1 4194304 1 2 3 4 {user} {system} 99 98 20 0 1 0 5 6 7"
        (self.directory / str(pid) / "stat").write_text(f"{pid} ({name}) {rest}\n")


def test_neighbours_are_others_and_not_our_descendants(tmp_path, monkeypatch) -> None:
    hz = os.sysconf("SC_CLK_TCK")
    ours, child, grandchild, other = os.getpid(), 4_000_001, 4_000_002, 4_000_003
    proc = FakeProc(tmp_path, monkeypatch)
    proc.machine(user=1000 * hz, idle=5000 * hz)
    proc.process(ours, 1, 10 * hz)
    proc.process(child, ours, 20 * hz)
    proc.process(other, 1, 30 * hz)
    with Neighbours() as found:
        # eight seconds of four: two ours, one of the child, two of a grandchild that is new, three another's
        proc.seconds += 4.0
        proc.machine(user=1005 * hz, system=2 * hz, softirq=1 * hz, idle=5004 * hz, iowait=4 * hz)
        proc.process(ours, 1, 11 * hz, 1 * hz)
        proc.process(child, ours, 20 * hz, 1 * hz)
        proc.process(grandchild, child, 1 * hz, 1 * hz)
        proc.process(other, 1, 33 * hz)
    assert found.cores == pytest.approx(3 / 4)


def test_a_descendant_whose_parent_ends_is_still_ours(tmp_path, monkeypatch) -> None:
    hz = os.sysconf("SC_CLK_TCK")
    proc = FakeProc(tmp_path, monkeypatch)
    proc.machine()
    proc.process(os.getpid(), 1, 0)
    proc.process(4_000_001, os.getpid(), 0)
    with Neighbours() as found:
        proc.seconds += 2.0
        proc.machine(user=3 * hz)
        proc.process(4_000_001, 1, 2 * hz)
    assert found.cores == pytest.approx(1 / 2)


def test_this_machine_s_figures_are_read() -> None:
    with Neighbours() as found:
        pass
    assert found.cores >= 0.0


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.nightly
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
    assert medians[ENGINE][0]["steady_step_ms"] > 0 and medians[TRANSFORMERS][0]["steady_step_ms"] is None
    assert report["results"]["ratios"][f"{ENGINE} with 1 over {TRANSFORMERS} with 1"] > 0
    assert (tmp_path / "results" / "tiny.png").stat().st_size > 1000


@pytest.mark.slow
def test_ctranslate2_makes_the_forced_number_of_tokens(tmp_path) -> None:
    pytest.importorskip("ctranslate2")
    checkpoint = save(tiny_llama(), tmp_path / "tiny")
    job = Job(directory=str(checkpoint), batches=(2,), prompt_tokens=8, output_tokens=4, repeats=1)
    (row,) = ctranslate2.bench_ctranslate2(job)["batches"]  # asserts each length
    assert row["batch"] == 2 and row["total_tokens_per_s"] > 0
