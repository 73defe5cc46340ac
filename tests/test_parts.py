"""The two parts of the suite: every file is in one, and their closing lines are summed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import parts

ROOT = parts.ROOT


def test_every_name_of_the_timed_part_is_a_file_or_folder_of_tests():
    files = list((ROOT / "tests").rglob("test_*.py"))
    for name in parts.TIMED:
        assert [
            path
            for path in files
            if parts.part_of(path) == "timed" and path.is_relative_to(ROOT / "tests" / name)
        ]
    assert parts.part_of(ROOT / "tests" / "reliability_of_another_name.py") == "parallel"


def test_the_parts_have_all_tests_and_none_twice():
    """Over a folder that has files of both."""
    folders = ("tests/tools/serve", "tests/test_parts.py")
    found = {}
    for part in (*parts.PARTS, None):
        options = ["--part", part] if part else []
        listed = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, *folders],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        ).stdout  # fmt: skip
        found[part] = {line for line in listed.splitlines() if "::" in line}
    assert found["parallel"] and found["timed"] and not found["parallel"] & found["timed"]
    assert found["parallel"] | found["timed"] == found[None]


@pytest.mark.parametrize(
    ("line", "counts", "seconds"),
    [
        ("5206 passed, 1 warning in 12.50s", {"passed": 5206, "warnings": 1}, 12.5),
        (
            "=== 2 failed, 3 passed, 1 error in 75.00s (0:01:15) ===",
            {"failed": 2, "passed": 3, "errors": 1},
            75.0,
        ),
        ("\x1b[32m===== \x1b[1m3 passed\x1b[0m in 0.10s =====\x1b[0m", {"passed": 3}, 0.1),
        ("no tests ran in 0.01s", {}, 0.01),
        ("100 passed, 20 deselected in 2.00s", {"passed": 100, "deselected": 20}, 2.0),
    ],
)
def test_a_closing_line_is_read(line, counts, seconds):
    assert parts.counts_of(line) == (counts, seconds)


@pytest.mark.parametrize(
    "line", ["", "........ [ 55%]", "3 requests in 0.5s", "FAILED tests/a.py::test_b - 3 passed"]
)
def test_another_line_is_none(line):
    assert parts.counts_of(line) is None


def test_the_sum_has_pytests_form_and_is_read_by_the_same_rule():
    line = parts.closing_line([{"passed": 3, "warnings": 1}, {"failed": 1, "passed": 2}], 3661.5)
    assert line == "1 failed, 5 passed, 1 warning in 3661.50s (1:01:01)"
    assert parts.counts_of(line) == ({"failed": 1, "passed": 5, "warnings": 1}, 3661.5)
    assert parts.closing_line([{}, {}], 0.5) == "no tests ran in 0.50s"


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0), 0), ((0, 5), 0), ((5, 0), 0), ((5, 5), 5), ((0, 1), 1), ((5, 4), 4), ((2, 1), 2)],
)
def test_a_failure_of_either_part_is_one_of_the_whole(codes, code):
    assert parts.exit_code(codes) == code


def test_the_runner_prints_what_pytest_prints_and_ends_with_its_line():
    selected = "tests/test_parts.py::test_a_failure_of_either_part_is_one_of_the_whole"
    done = subprocess.run(
        [sys.executable, "-m", "tests.parts", "-q", "-n", "0", "--color=no", selected],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"7 passed, 7 deselected in [\d.]+s", done.stdout.splitlines()[-1]), done.stdout
    nothing = subprocess.run(
        [sys.executable, "-m", "tests.parts", "-q", "-n", "0", selected, "-k", "nosuchtest"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert nothing.returncode == 5


#: the first test fails once, the second always, the third never, and the fourth's fixture fails once
TRIES = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("tries", [2, 9, 1])
def test_of(tries):
    path = Path({counts!r}) / str(tries)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    assert len(path.read_text()) >= tries

@pytest.fixture
def late():
    path = Path({counts!r}) / "late"
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    assert len(path.read_text()) >= 2

def test_late(late):
    pass
"""


@pytest.mark.parametrize(
    ("chosen", "code", "counts"),
    [
        ((2, 1), 0, {"failed": 0, "passed": 2, "errors": 0, "rerun": 1}),
        ((9, 1), 1, {"failed": 1, "passed": 1, "errors": 0, "rerun": 0}),
        (("late", 1), 0, {"failed": 0, "passed": 2, "errors": 0, "rerun": 1}),
    ],
)
def test_what_fails_runs_again_alone_and_fails_if_it_does_twice(
    tmp_path, monkeypatch, capfd, chosen, code, counts
):
    (tmp_path / "test_tries.py").write_text(TRIES.format(counts=str(tmp_path)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # not the project's
    names = [
        f"{tmp_path}/test_tries.py::" + ("test_late" if tries == "late" else f"test_of[{tries}]")
        for tries in chosen
    ]
    words = parts.command

    def of_these_tests(part, given, cache, again=False, nightly=False):
        kept = words(part, given, cache, again)
        ours = ("--part", part, "--nightly", "leave", "--no-loadscope-reorder")
        kept = [word for word in kept if word not in ours]
        return [*kept, "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path), "-n", "0"]

    monkeypatch.setattr(parts, "command", of_these_tests)
    ((found_code, _),) = parts.run_parts(["parallel"], ["-q", "--color=no", *names])
    assert found_code == code
    printed = capfd.readouterr().out
    assert "1 failed: run again, alone" in printed
    found = re.search(r"(\d) of 1 failed once and passed alone", printed)
    assert found and int(found[1]) == 1 - code
    first = ({"errors" if "late" in chosen else "failed": 1, "passed": 1}, 1.0)
    second = ({"passed": 1} if code == 0 else {"failed": 1}, 0.5)
    assert parts.after_second_run(first, second) == (counts, 1.5)
    assert ("1 rerun in" in parts.closing_line([counts], 1.5)) == (code == 0)


#: each part waits for the other, and notes its priority
MEETING = """
import os, time
from pathlib import Path

def test_meets_the_other_part():
    folder = Path({folder!r})
    (folder / {part!r}).write_text(str(os.nice(0)))
    began = time.monotonic()
    while not (folder / {other!r}).exists():
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    print("met", {other!r})
"""


def test_the_parts_run_beside_each_other_and_the_timed_one_comes_first(tmp_path, monkeypatch, capfdbinary):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for part, other in (parts.PARTS, reversed(parts.PARTS)):
        text = MEETING.format(folder=str(tmp_path), part=part, other=other)
        (tmp_path / f"test_{part}.py").write_text(text)
    monkeypatch.setattr(parts, "processes", lambda part: 2)
    monkeypatch.delenv("WORKERS", raising=False)
    monkeypatch.setattr(
        parts,
        "command",
        lambda part, given, cache, again=False, nightly=False: [
            *(sys.executable, "-m", "pytest", "-q", "-s", "--color=no", "-c", str(tmp_path / "pytest.ini")),
            str(tmp_path / f"test_{part}.py"),
        ],
    )
    ended = parts.run_parts(parts.PARTS, [])
    assert [(code, counts) for code, (counts, _) in ended] == [(0, {"passed": 1})] * 2
    printed = capfdbinary.readouterr().out.decode()
    assert printed.index("met timed") < printed.index("met parallel"), "the timed part prints at the end"
    usual, low = (int((tmp_path / part).read_text()) for part in ("timed", "parallel"))
    assert low == min(usual + parts.NICE, 19)
