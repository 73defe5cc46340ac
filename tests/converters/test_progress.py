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
        "writing: 15%, 300,000,000 bytes, 10 MB/s",
        "writing: 30%, 600,000,000 bytes, 10 MB/s",
    ]
