"""The long run: faults under 80 streams, fuzz next to traffic, slow readers, floods, and a leak test.

    python -m tests.reliability.soak --minutes 60 --seed 1 --report soak.json --report soak.md

Another seed is another schedule: the order of the faults, their moments, the prompts, the requests of the
fuzzer. The exit code is 1 if anything failed. A report ending in .md holds the tables alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.reliability import faults, fuzz, load
from tests.reliability.front import faults as front_faults
from tests.reliability.front.fuzz import FrontFuzz
from tests.reliability.front.fuzz import report as fuzz_report
from tests.reliability.service import Service, build_repository, end_on_sigterm
from tests.reliability.traffic import Clients, Crowd, mixture

#: shares of the time
FAULTS, FUZZ, FRONT, LEAK, RANKS = 0.35, 0.15, 0.15, 0.25, 0.10
MIN_LEAK_S = 120.0


@dataclass
class Report:
    """The results of a run; `sections` has its tables by title."""

    command: str
    seed: int
    minutes: float
    started: str
    machine: str
    commit: str
    sections: dict[str, str] = field(default_factory=dict)
    complaints: dict[str, list[str]] = field(default_factory=dict)

    def add(self, title: str, text: str, complaints: list[str]) -> None:
        self.sections[title] = text
        if complaints:
            self.complaints[title] = complaints
        print(f"\n## {title}\n\n{text}\n", flush=True)

    def markdown(self) -> str:
        lines = [
            f"Measured {self.started} on {self.machine}, commit {self.commit}, by",
            f"`{self.command}`.",
            "",
        ]
        for title, text in self.sections.items():
            lines += [f"### {title}", "", text, ""]
        failed = sum(map(len, self.complaints.values()))
        lines += [f"{failed} complaints." if failed else "No complaint."]
        for title, complaints in self.complaints.items():
            lines += ["", f"{title}:", "", *(f"- {one}" for one in complaints[:60])]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        text = self.markdown() if path.suffix == ".md" else json.dumps(asdict(self), indent=1)
        path.write_text(text, encoding="utf-8")


def describe_machine() -> str:
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({model or platform.machine()}), the model on the CPU"


def commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


class Soak:
    """One run; each phase starts its own server on the shared repositories."""

    def __init__(self, seed: int, minutes: float, streams: int, folder: Path) -> None:
        command = f"python -m tests.reliability.soak --minutes {minutes:g} --seed {seed} --streams {streams}"
        self.report = Report(
            command,
            seed,
            minutes,
            time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            describe_machine(),
            commit(),
        )
        self._seed, self._seconds, self._streams = seed, 60 * minutes, streams
        self._folder = folder

    def run(self) -> Report:
        repository = self._build(1)
        self._faults("Faults", repository, 1, FAULTS * self._seconds)
        self._fuzz(repository, FUZZ * self._seconds)
        self._front(FRONT * self._seconds)
        self._lethal(repository)
        self._loads(repository)
        self._leaks(repository, max(MIN_LEAK_S, LEAK * self._seconds))
        self._faults("Faults with two ranks", self._build(2), 2, RANKS * self._seconds)
        return self.report

    def _build(self, ranks: int) -> Path:
        folder = self._folder / str(ranks)
        folder.mkdir()
        return build_repository(folder, ranks)

    def _faults(self, title: str, repository: Path, ranks: int, seconds: float) -> None:
        """Every fault once, in an order of the seed, and again with other moments while there is time."""
        deadline = time.monotonic() + seconds
        chosen = faults.schedule(ranks)
        if ranks > 1:
            chosen = [fault for fault in chosen if "rank" in fault.name or fault.name.startswith("pause:all")]
        strikes = faults.Range(repository, self._seed, self._streams)
        round_ = 0
        try:
            while time.monotonic() < deadline:
                random.Random(f"{self._seed} {round_}").shuffle(chosen)
                strikes.seed = self._seed + 1000 * round_
                for fault in chosen:
                    if time.monotonic() > deadline:
                        break
                    row = strikes.strike(fault)
                    print(" | ".join(faults.cells(row)), *row.complaints, sep="\n    ", flush=True)
                round_ += 1
            left = strikes.stop()
        finally:
            strikes.close()
        found = [f"{row.fault}: {one}" for row in strikes.rows for one in row.complaints]
        if left:
            found.append(f"left behind at the end: {left}")
        self.report.add(title, strikes.table(), found)

    @contextlib.contextmanager
    def _service(self, title: str, repository: Path):
        """A server for one phase; what it leaves behind is a complaint of the phase."""
        service = Service(repository)
        try:
            yield service
            if not service.ended() and (left := service.stop()):
                self.report.complaints.setdefault(title, []).append(f"left behind: {left}")
        finally:
            service.close()

    def _fuzz(self, repository: Path, seconds: float) -> None:
        with self._service("Fuzz", repository) as service:
            clients = Clients(service.grpc, service.http)
            asks = mixture(self._seed, 12, 48, 64)
            crowd = Crowd(clients, asks, 8, self._seed, clients.digests(asks), pause_s=0.2)
            fuzzer = fuzz.Fuzzer(service, clients, self._seed)
            result = fuzzer.run(10**7, seconds)
            crowd.stop(20)
            clients.close()
            complaints = result.complaints() + [
                f"wrong tokens beside the fuzz: {name}" for name in crowd.wrong
            ]
            self.report.add("Fuzz", result.table(), complaints)

    def _front(self, seconds: float) -> None:
        """Fuzz and faults of the OpenAI service: a third of the time is the fuzz's."""
        folder, deadline = self._folder / "front", time.monotonic() + seconds
        folder.mkdir()
        strikes = front_faults.Range(folder, self._streams, self._seed)
        draw = random.Random(self._seed)
        try:
            strikes.start()
            fuzz_until, outcomes = time.monotonic() + seconds / 3, []
            sender = FrontFuzz(strikes.address)
            cases = list(sender.all_cases(1000, self._seed))
            while time.monotonic() < fuzz_until:
                outcomes += sender.run(draw.sample(cases, 64))
            found = [f"{one.case}: {one.complaint}" for one in outcomes if one.complaint] + sender.changed
            self.report.add("Fuzz of the OpenAI service", fuzz_report(outcomes).split("\n##")[0], found)
            for fault in draw.sample(front_faults.FAULTS, len(front_faults.FAULTS)):
                if time.monotonic() < deadline:
                    print(" | ".join(strikes.strike(fault).cells()), flush=True)
            left = strikes.stop()
        finally:
            strikes.close()
        found = [f"{row.fault}: {one}" for row in strikes.rows for one in row.complaints]
        found += [f"left behind at the end: {left}"] if left else []
        self.report.add("Faults under streams of the OpenAI service", strikes.table(), found)

    def _lethal(self, repository: Path) -> None:
        title = "Requests that abort Triton"
        with self._service(title, repository) as service:
            rows = fuzz.send_lethal(service)
            found = [f"{row.name}: {row.complaint}" for row in rows if row.complaint]
            self.report.add(title, fuzz.lethal_table(rows), found)

    def _loads(self, repository: Path) -> None:
        with self._service("Flood", repository) as service:
            slow = load.slow_readers(service)
            self.report.add("Clients that do not read", slow.table(), slow.complaints)
            flood = load.flood(service, self._seed)
            self.report.add("Flood", flood.table(), flood.complaints)

    def _leaks(self, repository: Path, seconds: float) -> None:
        with self._service("Leaks", repository) as service:
            warm = min(300.0, seconds / 3)
            result = load.leaks(service, self._seed, warm, seconds - warm, 1.0, resolution_mib=1.0)
            self.report.add("Leaks", result.table(), result.complaints)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=80)
    parser.add_argument("--report", action="append", type=Path, default=[], help="FILE.json or FILE.md")
    arguments = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tdsoak") as folder:
        soak = Soak(arguments.seed, arguments.minutes, arguments.streams, Path(folder))
        try:
            soak.run()
        finally:
            for path in arguments.report:
                soak.report.write(path)
    print(soak.report.markdown())
    return 1 if soak.report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
