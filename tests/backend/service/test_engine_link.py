"""The link between a door and the engine, against the fake engine and supervisor over real sockets."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from tests.fake_engine import LIMITS, FakeEngine, FakeSupervisor, toy_tokens
from tests.waiting import wait_until
from tridecode.backend.base.errors import ConfigError, EngineDownError, RequestError
from tridecode.backend.service.engine_link import EngineLink
from tridecode.backend.service.owner import Owner
from tridecode.backend.supervisor.processes import identify
from tridecode.backend.wire import messages as m


class Collector:
    """A sink that can wait for the end of its request."""

    def __init__(self, sequences: int = 1):
        self.events: list[m.Event] = []
        self._left, self._done = sequences, threading.Event()

    def __call__(self, event: m.Event) -> None:
        assert not self._done.is_set(), f"an event after the end: {event}"
        self.events.append(event)
        self._left -= bool(event.finish)
        if event.finish in ("error", "cancelled", "deadline") or not self._left:
            self._done.set()

    def wait(self, timeout_s: float = 60.0) -> list[m.Event]:
        assert self._done.wait(timeout_s), f"no end after {timeout_s} s; so far {self.events}"
        return self.events

    def tokens(self, sequence: int = 0) -> list[int]:
        return [token for e in self.events if e.sequence == sequence for token in e.tokens]


def sequence(prompt: list[int], **params) -> m.SequenceRequest:
    return m.SequenceRequest(np.array(prompt, "<i4").tobytes(), m.SamplingParams(**params))


def new_link(ensure: Callable[..., str], **options) -> EngineLink:
    return EngineLink("/models/toy", "test", Owner.this_process(), ensure=ensure, **options).start()


def link_to(supervisor: FakeSupervisor, **options) -> EngineLink:
    return new_link(lambda *_: supervisor.endpoint, **options)


@pytest.fixture()
def engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture()
def supervisor(engine):
    with FakeSupervisor(engine) as supervisor:
        yield supervisor


@pytest.fixture()
def link(supervisor):
    link = link_to(supervisor)
    link.wait_ready(60)
    yield link
    link.close()


def test_limits_come_from_the_engine(link):
    assert link.limits() == LIMITS
    assert link.state().phase == "ready"


def test_the_door_introduces_itself_to_supervisor_and_engine(link, engine, supervisor):
    hello = supervisor.hellos[0]
    assert hello.door.startswith("test:") and hello.server_pid > 0
    assert engine.hellos == [hello]


def test_a_request_gets_the_tokens_of_its_prompt(link):
    done = Collector()
    link.submit(link.reserve(), [sequence([5, 6, 7], max_tokens=9)], done)
    done.wait()
    assert done.tokens() == toy_tokens([5, 6, 7], 9, m.SamplingParams(), LIMITS.vocab_size)
    assert [e.finish for e in done.events] == [""] * 8 + ["length"]


def test_many_threads_may_submit_at_once(link):
    collectors: dict[int, Collector] = {}

    def submit(start: int) -> None:
        for i in range(start, start + 20):
            collectors[i] = Collector()
            link.submit(link.reserve(), [sequence([i], max_tokens=5)], collectors[i])

    threads = [threading.Thread(daemon=True, target=submit, args=(20 * t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, done in collectors.items():
        done.wait()
        assert done.tokens() == toy_tokens([i], 5, m.SamplingParams(), LIMITS.vocab_size)


def test_a_cancelled_request_is_forgotten_by_link_and_engine(link, engine):
    engine.step_s = 0.01
    seen = []
    request = link.reserve()
    link.submit(request, [sequence([4], max_tokens=400)], seen.append)
    wait_until(lambda: seen)
    link.cancel(request)
    wait_until(lambda: engine.running == 0)
    count = len(seen)
    time.sleep(0.05)
    assert len(seen) == count and engine.cancels == [request]


def test_a_refusal_of_the_engine_reaches_the_sink():
    full = msgspec.structs.replace(LIMITS, max_queued_requests=0)
    with FakeEngine(limits=full) as engine, FakeSupervisor(engine) as supervisor:
        link, done = link_to(supervisor), Collector(2)
        link.submit(link.reserve(), [sequence([4], max_tokens=1), sequence([5], max_tokens=1)], done)
        (event,) = done.wait()
        assert (event.finish, event.code) == ("error", "UNAVAILABLE")
        link.close()


def test_one_failed_sequence_ends_its_request_and_the_other_sequences():
    def fails_for_five(history: list[int], *_) -> int:
        return -1 if history[0] == 5 else 7

    with FakeEngine(next_token=fails_for_five, step_s=0.005) as engine, FakeSupervisor(engine) as supervisor:
        link, done = link_to(supervisor), Collector(2)
        link.submit(link.reserve(), [sequence([4], max_tokens=400), sequence([5], max_tokens=400)], done)
        assert done.wait()[-1].error == "the toy model failed"
        wait_until(lambda: engine.cancels and engine.running == 0)
        link.close()


def test_events_of_another_epoch_are_ignored(link, engine):
    seen = []
    engine.epoch = 9
    link.submit(link.reserve(), [sequence([4], max_tokens=3)], seen.append)
    wait_until(lambda: engine.submits and engine.running == 0)
    time.sleep(0.1)
    assert not seen


def test_requests_of_a_dead_engine_end_with_the_supervisors_reason(link, engine, supervisor):
    engine.step_s = 0.01
    done = Collector(2)
    link.submit(link.reserve(), [sequence([4], max_tokens=400), sequence([5], max_tokens=400)], done)
    wait_until(lambda: done.events)
    engine.stop()
    supervisor.set_phase("down", "rank 0 was killed by signal 9")
    last = done.wait()[-1]
    assert (last.finish, last.code) == ("error", "UNAVAILABLE")
    assert "rank 0 was killed by signal 9" in last.error


def test_a_rebuilt_engine_serves_again(link, engine, supervisor):
    engine.stop()
    supervisor.set_phase("down", "rank 0 died")
    wait_until(lambda: link.state().phase == "down")
    refused = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=1)], refused)
    assert "rank 0 died" in refused.wait(0.5)[0].error
    with FakeEngine(epoch=2) as rebuilt:
        supervisor.set_ready(rebuilt)
        link.wait_ready(60)
        done = Collector()
        link.submit(link.reserve(), [sequence([4], max_tokens=2)], done)
        done.wait()
        assert done.tokens() == toy_tokens([4], 2, m.SamplingParams(), LIMITS.vocab_size)


def test_a_new_epoch_without_notice_fails_the_requests_of_the_old_one(link, engine, supervisor):
    engine.step_s = 0.01
    done = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=400)], done)
    wait_until(lambda: done.events)
    with FakeEngine(epoch=2) as rebuilt:
        supervisor.set_ready(rebuilt)
        assert "rebuilt" in done.wait()[-1].error


def test_a_request_waits_for_an_engine_that_is_starting():
    with FakeSupervisor() as supervisor, FakeEngine() as engine:
        link = link_to(supervisor, hold_s=5)
        done = Collector()
        link.submit(link.reserve(), [sequence([9], max_tokens=2)], done)
        time.sleep(0.1)
        assert not done.events
        supervisor.set_ready(engine)
        assert done.wait()[-1].finish == "length"
        link.close()


def test_a_held_request_is_refused_after_hold_s():
    with FakeSupervisor() as supervisor:
        link = link_to(supervisor, hold_s=0.1)
        done = Collector()
        link.submit(link.reserve(), [sequence([9], max_tokens=2)], done)
        error = done.wait(60)[0]
        assert error.code == "UNAVAILABLE" and "the engine is loading" in error.error
        link.close()


def test_wait_ready_gives_the_reason_of_a_failed_engine():
    with FakeSupervisor() as supervisor:
        link = link_to(supervisor)
        supervisor.set_phase("failed", "config.ini: section [gpt] has no head_num")
        with pytest.raises(EngineDownError, match=r"section \[gpt\] has no head_num"):
            link.wait_ready(60)
        link.close()


def test_wait_ready_is_bounded_and_gives_the_last_state():
    with FakeSupervisor() as supervisor:
        link = link_to(supervisor)
        with pytest.raises(EngineDownError, match="not ready after 0 s: starting"):
            link.wait_ready(0.3)
        link.close()


def test_a_setting_that_no_supervisor_can_run_with_fails_at_once():
    def ensure(engine_dir: str, *_) -> str:
        raise ConfigError("no python3 on PATH")

    link = new_link(ensure)
    with pytest.raises(EngineDownError, match="no python3 on PATH"):
        link.wait_ready(60)
    link.close()


def test_silence_of_both_fails_open_requests_and_starts_a_new_search(engine, supervisor):
    calls = []

    def ensure(engine_dir: str, *_) -> str:
        calls.append(engine_dir)
        return supervisor.endpoint

    link = new_link(ensure, silent_s=0.6, engine_silent_s=0.8)
    link.wait_ready(60)
    engine.freeze()
    supervisor.silence()
    done = Collector()
    started = time.monotonic()
    link.submit(link.reserve(), [sequence([4], max_tokens=4)], done)
    assert "silent" in done.wait()[-1].error
    assert time.monotonic() - started < 2
    engine.thaw()
    supervisor.silence(False)
    link.wait_ready(60)
    assert len(calls) >= 2
    link.close()


def test_a_silent_supervisor_alone_does_not_hurt_running_requests(engine, supervisor):
    link = new_link(lambda *_: supervisor.endpoint, silent_s=0.6)
    link.wait_ready(60)
    engine.step_s = 0.01
    supervisor.silence()
    done = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=120)], done)
    assert done.wait()[-1].finish == "length"
    link.close()


def test_an_engine_of_another_protocol_is_refused():
    with FakeEngine() as engine, FakeSupervisor(engine) as supervisor:
        engine.protocol = m.PROTOCOL + 1
        link = link_to(supervisor)
        with pytest.raises(EngineDownError, match="protocol"):
            link.wait_ready(60)
        link.close()


def test_an_endpoint_that_is_not_valid_is_survived(engine, supervisor):
    link = link_to(supervisor)
    link.wait_ready(60)
    valid = engine.endpoint
    engine.endpoint, engine.epoch = "no endpoint", 2
    supervisor.set_ready(engine)
    wait_until(lambda: link.state().epoch == 2)
    engine.endpoint, engine.epoch = valid, 3
    supervisor.set_ready(engine)
    wait_until(lambda: link.state().epoch == 3 and link.state().phase == "ready")
    link.close()


def test_closing_says_goodbye_and_fails_what_is_open(engine, supervisor):
    engine.step_s = 0.01
    link = link_to(supervisor)
    link.wait_ready(60)
    done = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=400)], done)
    wait_until(lambda: done.events)
    link.close()
    assert "unloaded" in done.wait()[-1].error
    wait_until(lambda: engine.goodbyes and supervisor.goodbyes)
    with pytest.raises(EngineDownError):
        link.submit(link.reserve(), [sequence([4])], done)


def test_an_idle_link_does_not_spin(link):
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.3  # including the polling of the fakes


def test_a_door_whose_server_is_gone_ends_itself():
    door = textwrap.dedent(
        """
        import os, time
        from tridecode.backend.doors.triton_owner import TritonOwner
        from tridecode.backend.service.engine_link import EngineLink
        owner = TritonOwner.of_this_stub()
        link = EngineLink("/models/toy", "orphan", owner, ensure=lambda *_: time.sleep(60)).start()
        print(os.getpid(), flush=True)
        time.sleep(60)
        """
    )
    server = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {door!r}]); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_until(lambda: identify(pid) is None, what="the end of the door")


def test_a_door_that_the_engine_has_dropped_ends_its_requests_and_says_hello_again(link, engine):
    engine.step_s = 0.01
    lost = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=400)], lost)
    wait_until(lambda: lost.events)
    engine.forget_doors()
    assert "cancelled its requests; send it again" in lost.wait(m.PING_S + 1)[-1].error
    done = Collector()
    link.submit(link.reserve(), [sequence([5], max_tokens=3)], done)
    assert done.wait()[-1].finish == "length"
    assert len(engine.hellos) == 2


def test_a_door_that_the_supervisor_does_not_know_says_hello_again(link, engine, supervisor):
    supervisor.forget_doors()
    wait_until(lambda: len(supervisor.hellos) == 2, m.PING_S + 1, "the second Hello")
    supervisor.set_phase("down", "rank 0 was killed")
    wait_until(lambda: link.state().phase == "down")


def test_a_silent_engine_is_connected_again_while_its_supervisor_speaks(engine, supervisor):
    link = link_to(supervisor, engine_silent_s=0.8)
    link.wait_ready(60)
    engine.step_s = 0.01
    lost = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=400)], lost)
    wait_until(lambda: lost.events)
    engine.freeze()
    assert "the engine has been silent for" in lost.wait(60)[-1].error
    assert link.state().phase == "starting"
    engine.thaw()
    done = Collector()
    link.wait_ready(60)
    link.submit(link.reserve(), [sequence([5], max_tokens=3)], done)
    assert done.wait()[-1].finish == "length"
    link.close()


@pytest.mark.parametrize("priority", [10**30, 1.5, "high", float("nan")])
def test_a_request_that_cannot_be_encoded_is_refused_alone(link, engine, priority):
    engine.step_s = 0.005
    others = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=100)], others)
    with pytest.raises(RequestError, match="cannot be sent to the engine"):
        link.submit(link.reserve(), [sequence([5])], Collector(), priority=priority)
    with pytest.raises(RequestError, match="cannot be sent to the engine"):
        link.submit(link.reserve(), [sequence([5], seed=2**65)], Collector())
    assert others.wait()[-1].finish == "length"


def test_a_request_that_the_engine_lost_ends_after_its_deadline(link, engine, monkeypatch):
    monkeypatch.setattr("tridecode.backend.service.open_requests._OVERDUE_S", 0.2)
    monkeypatch.setattr(engine, "_submit", lambda *_: None)  # an engine that loses requests
    lost = Collector()
    link.submit(link.reserve(), [sequence([4], max_tokens=4)], lost, timeout_s=0.3)
    assert "after its deadline" in lost.wait(60)[-1].error


def test_a_pause_of_the_door_itself_is_not_a_silence_of_its_peers():
    """The door's process is stopped for longer than its limits of silence, then continued."""
    door = textwrap.dedent(
        """
        import sys, time
        from tridecode.backend.service.engine_link import EngineLink
        from tridecode.backend.service.owner import Owner
        silences = {"silent_s": 1.0, "engine_silent_s": 1.2}
        owner = Owner.this_process()
        link = EngineLink("/models/toy", "paused", owner, ensure=lambda *_: sys.argv[1], **silences).start()
        link.wait_ready(60)
        print("ready", flush=True)
        for line in sys.stdin:
            print(link.state().phase, flush=True)
        """
    )
    with FakeEngine() as engine, FakeSupervisor(engine) as supervisor:
        process = subprocess.Popen(
            [sys.executable, "-c", door, supervisor.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        process.stdin.write("?\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        assert len(engine.hellos) == 1, "the connection was kept"
        process.kill()
        process.communicate()
