"""What `make clients` makes of a program's output, and of a program that is not there."""

from __future__ import annotations

import sys
import time

import pytest

from tests.clients import environments, run
from tests.clients.environments import Environment
from tests.clients.judge import LOSES_LAST, PROMPT_FIRST, Expected, Verdict, judge, reason
from tests.clients.program import Program

EXPECTED = Expected("The capital of France is", " Paris, a city of")
ANSWERS = Program("a client", "a way", answers=True)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (" Paris, a city of", Verdict(True)),
        ("Paris, a city of", Verdict(True)),
        ("The capital of France is Paris, a city of", Verdict(True, PROMPT_FIRST)),
        (" Paris, a city", Verdict(True, LOSES_LAST)),
    ],
)
def test_an_answer_is_compared_with_the_servers_own(answer, verdict) -> None:
    assert judge(ANSWERS, 0, f'a log line\nANSWER "{answer}"\n', EXPECTED) == verdict


@pytest.mark.parametrize("output", ['ANSWER "Lyon"', 'ANSWER ""', 'ANSWER " Paris"', "", "all is well"])
def test_another_answer_or_none_does_not_pass(output) -> None:
    assert not judge(ANSWERS, 0, output, EXPECTED).works


def test_exit_code_forbidden_words_and_the_time_limit_count_against_a_program() -> None:
    program = Program("a client", "a way", shows=r"count: [1-9]", never="(?i)refused", limit_s=7.0)
    assert judge(program, 0, "count: 20", EXPECTED).works
    assert judge(program, 1, "count: 20\nValueError: no server", EXPECTED).note == "ValueError: no server"
    assert judge(program, 0, "count: 20\nrequest refused: beams", EXPECTED).note == "request refused: beams"
    assert "no end after 7 s" in judge(program, None, "count: 20", EXPECTED).note
    assert "count: [1-9]" in judge(program, 0, "count: 0", EXPECTED).note


def test_a_reason_is_one_line_without_paths() -> None:
    output = "Traceback\n  File '/usr/lib/python3.11/x.py'\nOSError: /usr/lib/python3.11/lib.so failed\n\n"
    assert reason(output) == "OSError: lib.so failed"


def test_a_program_is_ended_at_its_time_limit_with_its_children(tmp_path) -> None:
    code = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    started = time.monotonic()
    status, output = run._bounded([sys.executable, "-c", code], tmp_path, {"PATH": "/usr/bin:/bin"}, 2.0)
    assert status is None and output == "begun\n" and time.monotonic() - started < 20


def test_an_environment_that_cannot_be_made_is_a_reason_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    nothing = Environment("nothing", ("nothing @ file:///does/not/exist.whl",), 60.0)
    monkeypatch.setitem(environments.ENVIRONMENTS, "nothing", nothing)
    found = environments.install("nothing", tmp_path)
    assert found.python is None and "exist.whl" in found.failure
    assert list((tmp_path / "environments").iterdir()) == []


def test_the_verdict_names_the_option_that_a_program_needs() -> None:
    program = Program("a client", "a way", ("x",), options=("--plain-text",), flag="`dep<2`")
    failed = run.Attempt(program, "1.0", Verdict(False, "no"))
    worked = run.Attempt(program, "1.0", Verdict(True))
    assert run.row_of(failed, (("--plain-text",), worked)).verdict == "works with `dep<2` and `--plain-text`"
    assert run.row_of(failed, (("--plain-text",), failed)).verdict == "does not: no"
    assert run.row_of(worked, None).verdict == "works with `dep<2`"
