"""The processes that check grammars are reused, replaced, killed and frozen, and leave nothing behind."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.backend.engine.grammar_models import END, tokenizer_folder
from tests.checkpoints import TINY_VOCAB
from tests.waiting import wait_until
from tridecode.backend.engine.grammars import checker as checkers
from tridecode.backend.engine.grammars.checker import CheckerDown, GrammarChecker
from tridecode.backend.engine.grammars.matcher import GrammarFault
from tridecode.backend.wire.structured_output import StructuredOutput

REGEX = StructuredOutput("regex", "[a-c]{3,5}")
ENDLESS = StructuredOutput("json_schema", json.dumps({"type": "integer", "multipleOf": 999_983}))
ONE_OF = StructuredOutput("json_schema", json.dumps({"oneOf": [{"type": "null"}, {"type": "string"}]}))


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(tokenizer_folder(), TINY_VOCAB, [END], 2000.0, 2)
    yield made
    made.close()


def server_of(checker: GrammarChecker) -> psutil.Process:
    return psutil.Process(checker.processes().process.pid)


def workers_of(checker: GrammarChecker) -> list[psutil.Process]:
    """Return the workers of the connections and the one that waits, once all are there."""
    found: list[psutil.Process] = []

    def are_there() -> bool:
        found[:] = server_of(checker).children()
        return len(found) == 3 and not any(one.status() == psutil.STATUS_ZOMBIE for one in found)

    wait_until(are_there, 60)
    return found


def runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended; one that its parent has not waited for has."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_no_grammar_costs_a_process(checker: GrammarChecker) -> None:
    for connection in (0, 1):
        checker.check(REGEX, connection)
    before = {one.pid for one in workers_of(checker)}
    for number in range(50):
        checker.check(StructuredOutput("regex", f"[a-c]{{{number}}}"), number % 2)
        with pytest.raises(GrammarFault, match="unclosed group"):
            checker.check(StructuredOutput("regex", f"(a{number}"), number % 2)
    assert {one.pid for one in workers_of(checker)} == before


def test_a_worker_that_a_limit_ends_is_replaced_by_the_one_that_waits(checker: GrammarChecker) -> None:
    for connection in (0, 1):
        checker.check(REGEX, connection)
    before = {one.pid for one in workers_of(checker)}
    for _ in range(3):
        with pytest.raises(GrammarFault, match="accepts 10 ms of CPU time"):
            checker.check(ENDLESS, 0, 10.0)
        checker.check(REGEX, 0)
    checker.check(REGEX, 1)
    after = {one.pid for one in workers_of(checker)}
    assert len(before & after) == 1  # that of the other connection


def test_a_check_that_is_not_waited_for_goes_on(checker: GrammarChecker) -> None:
    checker.check(ONE_OF, 0)
    check = checker.begin(ENDLESS, 0, 1000.0)
    assert not check.wait(0.001)
    assert json.loads(checker.check(ONE_OF, 1).text) == {"anyOf": [{"type": "null"}, {"type": "string"}]}
    with pytest.raises(GrammarFault, match="accepts 1000 ms"):
        check.result()
    trusted = StructuredOutput("choice", '["a"]')
    assert checker.begin(trusted, 0).wait(0.0) and checker.check(trusted, 0) is trusted


def test_a_thousand_grammars_leave_no_process_no_descriptor_and_no_memory(checker: GrammarChecker) -> None:
    """Hostile ones among them. A worker is replaced after a thousand, and no check notices it."""
    for connection in (0, 1):
        checker.check(REGEX, connection)
    own, server = psutil.Process(), server_of(checker)
    others = set(own.children())  # of earlier tests
    first = {one.pid for one in workers_of(checker)}
    before = own.num_fds(), server.num_fds(), sorted(one.num_fds() for one in workers_of(checker))
    for number in range(1050):
        checker.check(StructuredOutput("regex", f"[a-c]{{3}}{number}"), 0)
        if number % 50 == 0:
            with pytest.raises(GrammarFault, match="takes too long"):
                checker.check(ENDLESS, 1, 5.0)
    workers = workers_of(checker)
    assert server_of(checker) == server
    assert (own.num_fds(), server.num_fds(), sorted(one.num_fds() for one in workers)) == before
    assert first.isdisjoint(one.pid for one in workers)
    held = server.memory_info().rss
    assert all(one.memory_info().rss < held + (64 << 20) for one in workers)
    assert not [one for one in set(own.children()) - others if one.status() == psutil.STATUS_ZOMBIE]


def test_a_worker_has_its_own_connection_only(checker: GrammarChecker) -> None:
    """The sockets of others would keep a lost connection open."""
    for connection in (0, 1):
        checker.check(REGEX, connection)
    sockets = [
        sum(os.readlink(path).startswith("socket") for path in Path(f"/proc/{one.pid}/fd").iterdir())
        for one in workers_of(checker)
    ]
    assert sorted(sockets) == [1, 1, 2]  # the one that waits may get either


def test_a_compilation_that_the_machine_does_not_run_blames_no_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall-clock limit ends it before its CPU time is used up."""
    checker.check(REGEX, 0)
    monkeypatch.setattr(checkers, "_GRACE_S", 60.0)
    monkeypatch.setattr(checkers, "_WALL_S", 0.05)
    monkeypatch.setattr(checkers, "_WALL_FACTOR", 0.0)
    with pytest.raises(CheckerDown, match="has not had 2000 ms of CPU time in 0.05 s: this machine is overl"):
        checker.check(ENDLESS, 0)
    monkeypatch.undo()
    checker.check(REGEX, 0)


@pytest.mark.parametrize("who", ["worker", "server", "all"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_that_are_killed_or_frozen_are_replaced(
    checker: GrammarChecker, who: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkers, "_GRACE_S", 1.0)
    for connection in (0, 1):
        checker.check(REGEX, connection)
    server, workers = server_of(checker), workers_of(checker)
    chosen = {"worker": workers, "server": [server], "all": [server, *workers]}[who]
    for process in chosen:
        process.send_signal(number)
    if number == signal.SIGKILL:  # the others end with them
        wait_until(lambda: not any(map(runs, [server, *workers])), 60)
    try:
        with monkeypatch.context() as short:
            short.setattr(checkers, "_WALL_S", 5.0)
            short.setattr(checkers, "_WALL_FACTOR", 0.0)
            check = checker.begin(REGEX, 1)
        assert check.result() == checker.check(REGEX, 0) == REGEX
        assert set(workers_of(checker)).isdisjoint(workers) or who == "server"
        if who == "worker":  # their parent ends also those that are stopped
            wait_until(lambda: not any(map(runs, [server, *workers])), 60)
    finally:
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def test_kills_at_random_blame_no_grammar_and_leave_nothing(checker: GrammarChecker) -> None:
    """A check whose processes are killed twice ends as unavailable; each other one has its own result."""
    for connection in (0, 1):
        checker.check(REGEX, connection)
    own, draw = psutil.Process(), random.Random(5)
    before, stopped = own.num_fds(), threading.Event()
    wrong: list[str] = []
    counts = {"good": 0, "down": 0}

    def check(connection: int) -> None:
        while not stopped.is_set():
            try:
                if checker.check(REGEX, connection) != REGEX:
                    wrong.append("another result")
                counts["good"] += 1
                checker.check(ENDLESS, connection, 5.0)
                wrong.append("an endless grammar is accepted")
            except CheckerDown:
                counts["down"] += 1
            except GrammarFault as fault:
                if not re.search("takes too long", str(fault)):
                    wrong.append(str(fault))
            except BaseException as error:
                wrong.append(repr(error))

    def is_better_than(good: int) -> bool:
        return counts["good"] > good or bool(wrong)

    threads = [threading.Thread(target=check, args=(connection,), daemon=True) for connection in (0, 1)]
    for thread in threads:
        thread.start()
    seen: set[int] = set()
    try:
        for number in range(12):
            if number % 3:  # else at once again, perhaps while the processes start
                wait_until(functools.partial(is_better_than, counts["good"]), 120)
            time.sleep(draw.uniform(0.0, 0.1))
            with suppress(psutil.Error, CheckerDown):
                server = server_of(checker)
                seen.add(server.pid)
                draw.choice([server, *server.children()]).kill()
    finally:
        stopped.set()
        for thread in threads:
            thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong and counts["good"] > 0 and len(seen) > 1
    assert checker.check(REGEX, 0) == checker.check(REGEX, 1) == REGEX
    assert own.num_fds() == before
    checker.close()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in seen), 60)
