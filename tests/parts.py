"""Runs the suite in two parts with one closing line: `python -m tests.parts [arguments of pytest]`.

The first part, `parallel`, is CPU-bound: pytest-xdist runs one file at a time on each processor. The second
part, `timed`, has the tests with time limits for a real server and the tests that kill or stop processes;
TIMED lists them. They mostly wait. LANES processes run them; one of these loads the machine. The first part
runs at the same time with a low priority, so that the second gets a processor whenever it needs one.

`--nightly` runs the tests that `make test` omits: those marked `nightly`, here or by thinning.py.

If a part has at most AGAIN failures and fixture errors, they run again alone after both parts, because load
on the machine can make a few tests exceed their limits. A test that then passes is named in the output,
counts as passed, and as a "rerun" in the closing line. A test that fails twice has failed.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("parallel", "timed")
#: folders and files of the second part, below tests/
TIMED = (
    "backend/chat/test_async_templates.py",
    "backend/doors/test_real_server.py",
    "backend/front/batches/test_lives.py",
    "backend/front/test_triton_servers.py",
    "backend/nodes/test_two_supervisors.py",
    "backend/supervisor",
    "integration/test_instances.py",
    "integration/test_nodes.py",
    "integration/test_supervision.py",
    "integration/test_survived_requests.py",
    "reliability",
    "tools/batch/test_batch.py",
    "tools/bench/test_load.py",
    "tools/serve",
)
#: folder of the tests that load the machine themselves: one process takes all of them
LOADED = "reliability"
#: files whose tests share nothing that is slow to make: a process takes one test at a time
SINGLE = (
    "backend/supervisor/test_supervisor.py",
    "integration/test_supervision.py",
)
AGAIN = 3  # more failures are not a coincidence
MAX_WORKERS = 8  # each has torch and transformers in memory: 1 GB
NICE = 10  # a process of the timed part gets nine times the CPU share of one in the other part
LANES = 3  # processes of the timed part: one computes (LOADED), the others mostly wait

Closing = tuple[dict[str, int], float]  # counts and seconds of a closing line

_COUNTS = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors", "rerun")
_CLOSING = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+|no tests ran) in ([\d.]+)s\b.*$")
_NOTHING = 5  # pytest's exit code where no test was selected


def part_of(path: Path) -> str:
    """Return the part of a test file or a folder of tests."""
    name = path.relative_to(ROOT / "tests").as_posix()
    return "timed" if any(name == one or name.startswith(one + "/") for one in TIMED) else "parallel"


def is_single(path: Path) -> bool:
    return path.is_relative_to(ROOT / "tests") and path.relative_to(ROOT / "tests").as_posix() in SINGLE


def counts_of(line: str) -> Closing | None:
    """Counts and seconds of pytest's closing line; None for any other line."""
    found = _CLOSING.match(re.sub(r"\x1b\[[\d;]*m", "", line.strip()))
    if found is None:
        return None
    counts: dict[str, int] = {}
    for number, word in re.findall(r"(\d+) (\w+)", found[1]):
        plural = word + "s" if word in ("warning", "error") else word
        counts[plural] = counts.get(plural, 0) + int(number)
    return (counts, float(found[2])) if set(counts) <= set(_COUNTS) else None


def closing_line(parts: Sequence[dict[str, int]], seconds: float) -> str:
    """Return the sum of the counts, in pytest's form."""
    total = {name: sum(counts.get(name, 0) for counts in parts) for name in _COUNTS}
    words = [
        f"{count} {name[:-1] if count == 1 and name in ('warnings', 'errors') else name}"
        for name, count in total.items()
        if count
    ]
    clock = (
        f" ({int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02})"
        if seconds >= 60
        else ""
    )
    return f"{', '.join(words) or 'no tests ran'} in {seconds:.2f}s{clock}"


def exit_code(codes: Sequence[int]) -> int:
    """The first failure; a part without a selected test is none, unless both are."""
    failures = [code for code in codes if code not in (0, _NOTHING)]
    return failures[0] if failures else 0 if 0 in codes else _NOTHING


@functools.cache
def group_of(file: str) -> str:
    """Name the group of a file, below the root: one process runs all tests of a group."""
    if file.startswith(f"tests/{LOADED}/"):
        return LOADED
    return "desk" if "desk: Desk" in (ROOT / file).read_text(encoding="utf-8") else file


def processes(part: str) -> int:
    cores = len(os.sched_getaffinity(0))
    return min(cores, MAX_WORKERS) if part == "parallel" else min(LANES, 2 * cores - 1)


def command(
    part: str, given: Sequence[str], cache: str, again: bool = False, nightly: bool = False
) -> list[str]:
    """Return pytest's command line.

    cache: a directory where pytest notes what failed. again: only that, in one process. nightly: only what
    `make test` leaves out.
    """
    words = [sys.executable, "-m", "pytest", "--part", part, "--nightly", "only" if nightly else "leave"]
    words += ["-m", "not gpu", "-o", f"cache_dir={cache}"]
    words += ["-n", os.environ.get("WORKERS") or str(processes(part)), "--no-loadscope-reorder"]
    if sys.stdout.isatty():
        words.append("--color=yes")
    return [*words, *given, *(["-n", "0", "--last-failed", "-v"] if again else [])]


def run(words: Sequence[str], part: str, beside: bool = False) -> tuple[int, Closing, bytes]:
    """Return exit code, counts and seconds of pytest, and its output if another part runs next to this one
    and prints; the output goes to ours as it comes otherwise."""
    environment = dict(os.environ)
    # hundreds of processes import our modules: compile each once
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if part == "parallel":
        environment.setdefault("OMP_NUM_THREADS", "1")  # every worker has a processor of its own
    closing: Closing = ({}, 0.0)
    kept = bytearray()
    if beside and part == "parallel":
        words = ["nice", "-n", str(NICE), *words]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        line = b""
        while piece := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            if beside and part == "timed":
                kept += piece
            else:
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
            *ended, line = (line + piece).split(b"\n")
            for one in ended:
                closing = counts_of(one.decode(errors="replace")) or closing
    return process.returncode, closing, bytes(kept)


def after_second_run(first: Closing, second: Closing) -> Closing:
    """The counts of a part whose failures ran again."""
    counts = dict(first[0])
    passed = second[0].get("passed", 0)
    counts |= {name: second[0].get(name, 0) for name in ("failed", "errors")}
    counts["passed"] = counts.get("passed", 0) + passed
    counts["rerun"] = passed
    return counts, first[1] + second[1]


def run_parts(
    chosen: Sequence[str], given: Sequence[str], nightly: bool = False
) -> list[tuple[int, Closing]]:
    """Run the parts, at the same time if there are two, then what failed; a code and counts of each."""
    beside = len(chosen) > 1 and processes("parallel") > 1 and not os.environ.get("WORKERS")
    with ExitStack() as stack:
        caches = [stack.enter_context(tempfile.TemporaryDirectory(prefix="tests-")) for _ in chosen]

        def first_run(part: str, cache: str) -> tuple[int, Closing, bytes]:
            return run(command(part, given, cache, nightly=nightly), part, beside)

        with ThreadPoolExecutor(len(chosen) if beside else 1) as pool:
            firsts = list(pool.map(first_run, chosen, caches))
        for *_, output in firsts:
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
        return [
            run_again(code, closing, part, command(part, given, cache, True, nightly))
            for part, cache, (code, closing, _) in zip(chosen, caches, firsts)
        ]


def run_again(code: int, closing: Closing, part: str, words: Sequence[str]) -> tuple[int, Closing]:
    """Run a few failures of a part a second time, by the command `words`; return the result of the part."""
    failed = closing[0].get("failed", 0) + closing[0].get("errors", 0)
    if code != 1 or not 0 < failed <= AGAIN:
        return code, closing
    print(f"\n{failed} failed: run again, alone", flush=True)
    code, second, _ = run(words, part)
    if second[0].get("passed", 0) > failed:  # not what failed: believe the first run
        return 1, closing
    print(f"{second[0].get('passed', 0)} of {failed} failed once and passed alone", flush=True)
    return code, after_second_run(closing, second)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--nightly", action="store_true", help="only what `make test` leaves out")
    chosen, given = parser.parse_known_args(arguments)
    began = time.monotonic()
    ended = run_parts([chosen.part] if chosen.part else PARTS, given, chosen.nightly)
    codes = [code for code, _ in ended]
    print(closing_line([counts for _, (counts, _) in ended], time.monotonic() - began), flush=True)
    return exit_code(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
