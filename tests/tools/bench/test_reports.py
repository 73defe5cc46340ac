"""Plots and report files."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from tests.tools.bench.pictures import ink
from tridecode.tools.bench.load.command import LoadPlan, _Target, _title
from tridecode.tools.bench.load.summary import summarise
from tridecode.tools.bench.load.worker import Record
from tridecode.tools.bench.reports import plots
from tridecode.tools.bench.reports.plots import plot_batches, plot_load
from tridecode.tools.bench.reports.report import command
from tridecode.tools.bench.shapes.presets import preset
from tridecode.tools.bench.shapes.random_repo import write_random_repository


def test_pictures_are_png_files_with_curves(tmp_path) -> None:
    rows = [{"batch": batch, "step_ms": 3.0 + batch, "tokens_per_s": 300.0 * batch} for batch in (1, 8, 64)]
    empty = plot_batches(tmp_path / "empty.png", "", {"none": []})
    drawn = plot_batches(tmp_path / "batches.png", "decoding", {"ours": rows, "theirs": rows[:2]})
    assert ink(drawn) > ink(empty) > 0
    records = [Record(n, 0.0, 1.0, [(0.1 * n, 1), (0.5 + 0.1 * n, 2)]) for n in range(3)]
    assert ink(plot_load(tmp_path / "sub" / "load.png", "load", {"3 at a time": records})) > 0.01
    failed = [Record(1, 0.0, 1.0, [], "refused")]
    assert ink(plot_load(tmp_path / "none.png", "", {"1 at a time": failed, "2 at a time": []})) > 0


def test_a_report_says_the_command_without_this_machines_folders() -> None:
    typed = ["/opt/x/tridecode/tools/cli.py", "bench", "engine", "--output", "/tmp/a b", "--preset", "toy"]
    assert command(typed) == "tridecode bench engine --output 'a b' --preset toy"
    assert command(["tools/bench/gpu_report.py", "--name", "h200"]) == "tools/bench/gpu_report.py --name h200"


def test_load_is_drawn_on_logarithmic_axes_with_what_was_measured_in_its_title(tmp_path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, title, path: drawn.append((figure, title)) or path)
    records = [Record(n, 0.0, 1.0, [(0.1 * n, 1), (0.1 * n, 2), (0.5 + 0.1 * n, 2)]) for n in range(1, 4)]
    plots.plot_load(tmp_path / "x.png", "a title", {"3 at a time": records})
    ((figure, title),) = drawn
    rates, *axes = figure.axes
    assert title == "a title" and [one.get_xscale() for one in axes] == ["log", "log"]
    assert min(axes[1].lines[0].get_xdata()) > 0  # merged responses have gaps of 0
    report = summarise(records)
    assert [bar.get_height() for bar in rates.patches] == [report.tokens_per_s]
    for one, figures in zip(axes, (report.first_token_ms, report.inter_token_ms)):
        marked = [(*line.get_xdata(), *line.get_ydata()) for line in one.lines if line.get_marker() in "oD"]
        wanted = [(figures["p50"], 0.5), (figures["p99"], 0.99)]
        assert np.allclose(marked, wanted, atol=0.02)  # 0 ms is drawn as 0.01
        assert len(one.xaxis.get_minorticklocs()) == 0 and len(one.get_yticks()) == 3
    repository = write_random_repository(tmp_path / "models", preset("toy").model, {"device": "cpu"})
    plan = LoadPlan("localhost:8001", None, False, (1,), (), None, 48, 7, None, None, 0, True, None, 9, 9, 0)
    target = _Target("tensorrt_llm_bls", "INT32", repository)
    told = _title(plan, target)
    assert "toy" in told and f"({os.cpu_count()} cores)" in told
    assert "prompts of 48 tokens, 7 new tokens" in told
    assert "server there:8001" in _title(replace(plan, url="there:8001"), replace(target, repository=None))
