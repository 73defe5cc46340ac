"""Grammars whose compilation takes too long or too much memory end alone, and no other one waits for them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.backend.engine.grammar_models import END, constrained_engine, sampled, tokenizer_folder
from tests.checkpoints import TINY_VOCAB, tiny_tokenizer
from tests.waiting import wait_until
from tridecode.backend.base.errors import RequestError, TridecodeError
from tridecode.backend.engine.grammars.checker import GrammarChecker
from tridecode.backend.engine.grammars.guidance import Guidance
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.wire.structured_output import StructuredOutput

PROMPT = [5, 6, 7]
REGEX = StructuredOutput("regex", "[a-c]{3,5}")


def endless(number: int = 999_983) -> StructuredOutput:
    """Return a schema of one line whose automaton has as many states as the number, a prime."""
    return StructuredOutput("json_schema", json.dumps({"type": "integer", "multipleOf": number}))


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(tokenizer_folder(), TINY_VOCAB, [END], 400.0, 2)
    yield made
    made.close()


def test_a_compilation_that_takes_too_long_is_refused_by_name(checker: GrammarChecker) -> None:
    checker.check(REGEX, 0)
    with pytest.raises(GrammarFault) as caught:
        checker.check(endless(), 0)
    assert caught.value.reason == "time"
    assert re.fullmatch(
        r"structured_output \(json_schema\) is refused: its compilation takes too long; this model accepts "
        r"400 ms of CPU time \(grammar_cpu_ms in config.pbtxt\)",
        str(caught.value),
    )
    checker.check(REGEX, 0)  # the process lives
    with pytest.raises(GrammarFault, match="accepts 30 ms of CPU time"):
        checker.check(endless(), 1, 30.0)


def test_a_compilation_that_fills_the_memory_is_refused_by_name() -> None:
    checker = GrammarChecker(tokenizer_folder(), TINY_VOCAB, [END], 60_000.0, 1, memory=48 << 20)
    try:
        with pytest.raises(GrammarFault, match="ends the process that does it.*it has 48 MiB") as caught:
            checker.check(endless(99_999_989), 0)
        assert caught.value.reason == "memory"
        checker.check(REGEX, 0)
    finally:
        checker.close()


@pytest.mark.parametrize(
    ("output", "reason", "text"),
    [
        (StructuredOutput("regex", "(a"), "refused", "unclosed group"),
        (StructuredOutput("json_schema", '{"$ref": "#"}'), "refused", "no finite value satisfies it"),
        (StructuredOutput("grammar", "start: start"), "answer", "allows no token"),
        (StructuredOutput("grammar", "root ::= " + "(" * 9000), "refused", "EBNF"),
    ],
)
def test_a_fault_has_the_words_of_the_compiler(
    checker: GrammarChecker, output: StructuredOutput, reason: str, text: str
) -> None:
    with pytest.raises(GrammarFault) as caught:
        checker.check(output, 1)
    assert caught.value.reason == reason and text in str(caught.value)


def processes_of(checker: GrammarChecker) -> list[psutil.Process]:
    assert checker._processes is not None
    first = psutil.Process(checker._processes.process.pid)
    return [first, *first.children(recursive=True)]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_processes_that_were_killed_are_started_again(checker: GrammarChecker) -> None:
    checker.check(REGEX, 0)
    checker.check(REGEX, 1)
    before = processes_of(checker)
    assert len(before) == 4  # a worker for each connection, one that waits, and their parent
    for process in before:
        process.kill()
    checker.check(REGEX, 1)
    assert {one.pid for one in before}.isdisjoint({one.pid for one in processes_of(checker)})


def test_processes_end_with_the_engine(checker: GrammarChecker) -> None:
    checker.check(REGEX, 0)
    held = processes_of(checker)
    checker.close()
    wait_until(lambda: all(has_ended(one.pid) for one in held))
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tridecode.backend.engine.grammars.checker import GrammarChecker\n"
        "from tridecode.backend.wire.structured_output import StructuredOutput\n"
        "made = GrammarChecker(Path(sys.argv[1]), int(sys.argv[2]), [2], 1000.0, 2)\n"
        "made.check(StructuredOutput('regex', 'a'), 1)\n"
        "print(made._processes.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", program, str(tokenizer_folder()), str(TINY_VOCAB)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    wait_until(lambda: has_ended(pid))


def test_everyday_grammars_do_not_wait_for_endless_ones() -> None:
    """Two endless grammars are 1.5 s of CPU time each for one thread; the other thread has 20 ms for them."""
    offline = constrained_engine(grammar_cpu_ms=1500.0)
    grammars = offline.scheduler.grammars
    for number in (999_983, 999_979):
        offline.submit(PROMPT, sampled(), structured_output=endless(number))
    number = offline.submit(PROMPT, sampled(seed=1), structured_output=REGEX)
    again = offline.submit(PROMPT, sampled(seed=2), structured_output=REGEX)
    errors = []
    while offline.scheduler.has_work:
        try:
            offline.step()
        except TridecodeError as error:
            errors.append((str(error), offline.generations[number].finish, offline.generations[again].finish))
    assert len(errors) == 2 and all("accepts 1500 ms of CPU time" in text for text, _, _ in errors)
    assert errors[0][1:] == errors[1][1:] == ("end_id", "end_id")
    for one in (number, again):
        text = tiny_tokenizer().decode(offline.generations[one].tokens[:-1])
        assert re.fullmatch(REGEX.text, text)
    begun = time.thread_time()
    with pytest.raises(RequestError, match="accepts 1500 ms"):  # it is not compiled again
        offline.submit(PROMPT, sampled(), structured_output=endless())
        offline.run()
    assert time.thread_time() - begun < 1.0
    counts = grammars.counts
    assert counts.compiled == 1 or counts.hits == 0  # the second request may arrive before the first is known
    assert counts.failures["time"] == 3 and counts.seconds > 0.0 and counts.masks > 4
    grammars.close()


def test_totals_of_grammars_are_metrics() -> None:
    offline = constrained_engine()
    for seed in range(3):
        offline.submit(PROMPT, sampled(seed=seed), structured_output=REGEX)
        offline.run()
    for output in (StructuredOutput("regex", "(a"), StructuredOutput("regex", r"a[^\x00-\U0010FFFF]")):
        with pytest.raises(RequestError):
            offline.submit(PROMPT, sampled(), structured_output=output)
            offline.run()
    tokens = sum(len(one.tokens) for one in offline.generations)
    found = offline.scheduler.grammars.counts.metrics()
    assert found.pop("grammar_compile_seconds") > 0.0
    assert found == {
        "grammar_compilations": 1,
        "grammar_cache_hits": 2,
        "grammar_masks": tokens - 3,  # the first mask of an answer comes with its grammar
        "grammar_late_masks": 0,
        'grammar_failures{reason="refused"}': 1,
        'grammar_failures{reason="time"}': 0,
        'grammar_failures{reason="memory"}': 0,
        'grammar_failures{reason="answer"}': 1,
        'grammar_failures{reason="internal"}': 0,
    }
    offline.scheduler.grammars.close()


def test_a_preempted_sequence_that_waits_for_its_mask_lets_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask comes when the other request has ended."""
    offline, advance = constrained_engine(max_sequences=2), Guidance.advance
    scheduler = offline.scheduler
    open_gate, waits = threading.Event(), threading.Event()
    open_gate.set()

    def slow(self: Guidance, *given: object) -> object:
        if not open_gate.is_set():
            waits.set()
            open_gate.wait(300)
        return advance(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Guidance, "advance", slow)
    number = offline.submit(PROMPT, sampled(seed=1), structured_output=StructuredOutput("regex", "[a-z]{30}"))
    while not offline.generations[number].tokens:
        offline.step()
    try:
        open_gate.clear()
        while not waits.is_set():
            offline.step()
        (sequence,) = [one for group in scheduler.requests.of_request((b"offline", number))
                       for one in group.sequences]  # fmt: skip
        assert not sequence.may_continue
        scheduler.planner.preempt(sequence)
        other = offline.submit(PROMPT, sampled(seed=2, max_tokens=5, end_id=-1, more_end_ids=[]))
        while not offline.generations[other].finish:  # fails if it waits for the mask of the first request
            offline.step()
        assert not offline.generations[number].finish
    finally:
        open_gate.set()
    offline.run()
    answer = offline.generations[number]
    assert answer.finish == "end_id" and len(tiny_tokenizer().decode(answer.tokens[:-1])) == 30
    scheduler.grammars.close()
