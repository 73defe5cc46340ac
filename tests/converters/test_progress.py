"""Progress without a terminal: lines of a log."""

from __future__ import annotations

from tridecode.converters import progress


def test_a_log_gets_a_line_at_the_start_and_one_in_every_period(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.byte_progress("writing", 2_000_000_000) as advance:
        for second in range(1, 66):
            clock[0] = 100.0 + second
            advance(10_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "writing: 2,000,000,000 bytes",
        "writing: 15%, 300,000,000 bytes, 10 MB/s, about 2:50 left",
        "writing: 30%, 600,000,000 bytes, 10 MB/s, about 2:20 left",
    ]


def test_slow_work_has_a_share_and_an_end_and_no_bytes(monkeypatch, capsys):
    """A layer takes minutes, and 8,000 s are left after the first."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.work_progress("calibrating int4-awq", 9000) as advance:
        clock[0] = 1000.0
        advance(1000)
        clock[0] = 3000.0
        advance(3500)
    assert capsys.readouterr().err.splitlines() == [
        "calibrating int4-awq",
        "calibrating int4-awq: 11%, about 2:13:20 left",
        "calibrating int4-awq: 50%, about 50:00 left",
    ]


def test_a_terminal_shows_the_time_that_slow_work_has_left(monkeypatch):
    column = progress._LeftColumn()

    class Slow:  # as rich's Task, whose speed is None without a step in the last 30 s
        completed, total, elapsed = 1.0, 4.0, 120.0

    assert column.render(Slow()).plain == "6:00 left"
    Slow.completed = 0.0
    assert column.render(Slow()).plain == "-:-- left"
