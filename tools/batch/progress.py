"""The progress of a batch on stderr: a bar on a terminal, plain lines without one."""

from __future__ import annotations

import time

from tridecode.backend.batches.meter import Meter
from tridecode.tools.progress import Bar

#: seconds between two plain lines
LINE_S = 15.0


class BatchProgress:
    """A context manager; `show` may be called at any rate."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._bar = Bar()
        self._shown_at = time.monotonic()

    def __enter__(self) -> BatchProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar; `print` may still be called."""
        self._bar.close()

    def show(self, absence: str) -> None:
        """absence: why the service does not answer; "": it does."""
        text = state_line(self._meter, absence, time.time())
        if self._bar.is_shown:
            self._bar.show(self._meter.totals.done, self._meter.lines, text)
        elif time.monotonic() - self._shown_at > LINE_S:
            self._shown_at = time.monotonic()
            self.print(text)

    def print(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


def state_line(meter: Meter, absence: str, now: float) -> str:
    """now: seconds since the Unix epoch; the end is a time of the local clock."""
    totals = meter.totals
    parts = [f"{totals.done:,} lines" if meter.lines is None else f"{totals.done:,} of {meter.lines:,} lines"]
    parts.append(f"{totals.errors:,} errors")
    tokens, name = meter.tokens
    parts.append(f"{tokens / max(1e-9, meter.elapsed_s):,.0f} {name}/s")
    left = meter.seconds_left()
    if absence:
        parts.append(f"waiting for the service ({absence})")
    elif left is not None:
        parts.append(f"{duration(left)} left, until {clock_time(now, left)}")
    return ", ".join(parts)


def summary(meter: Meter, errors: str, stopped: bool) -> str:
    """errors: name of the file of errors. stopped: by a signal, before the end."""
    totals = meter.totals
    parts = [f"{totals.answers:,} answers"]
    parts.append(f"{totals.errors:,} errors in {errors}" if totals.errors else "no errors")
    if totals.before:
        parts.append(f"{totals.before:,} of them done before")
    tokens, name = meter.tokens
    rate = tokens / max(1e-9, meter.elapsed_s)
    parts.append(f"{tokens:,} {name} in {duration(meter.elapsed_s)} ({rate:,.0f} {name}/s)")
    if not stopped:
        return f"{totals.done:,} lines: {', '.join(parts)}"
    of = "" if meter.lines is None else f" of {meter.lines:,}"
    return (
        f"stopped after {totals.done:,}{of} lines: {', '.join(parts)}; run the same command again to continue"
    )


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def clock_time(now: float, later_s: float) -> str:
    """Return the hour and minute in later_s seconds; with the date where that is another day."""
    then = time.localtime(now + later_s)
    is_today = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", then)
