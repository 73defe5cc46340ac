"""Batches continue after the death of each process: no line is answered twice, none is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.json import encode

from tests.backend.front.batches.clients import create, ids_of, line, results, upload, wait
from tests.backend.front.fronts import Front
from tests.fake_engine import REASON, FakeEngine, FakeSupervisor
from tests.waiting import wait_until
from tridecode.backend.front.batches.objects import result_ids
from tridecode.backend.front.batches.store import Store
from tridecode.backend.front.settings import FrontSettings
from tridecode.backend.supervisor import processes

MODULES = {"batches": "tridecode.backend.front.batches.process", "worker": "front.process.worker"}


def children(front: Front, kind: str) -> list[int]:
    words = MODULES[kind]
    pids = processes.children(front.process.pid)
    return [pid for pid in pids if any(words in word for word in processes.command_line(pid))]


def done(folder: Path, batch_id: str) -> int:
    """Results that are on the disk."""
    found = 0
    for file_id in result_ids(batch_id):
        path = folder / "files" / f"{file_id}.data"
        found += path.read_bytes().count(b"\n") if path.exists() else 0
    return found


def kill(front: Front) -> None:
    """Kill the first process; its children end with it."""
    held = [processes.identify(pid) for pid in processes.children(front.process.pid)]
    front.process.kill()
    front.process.wait(30)
    for one in held:
        if one is not None:
            wait_until(lambda: not processes.alive(one), 30, "the end of a child")  # noqa: B023


def check(front: Front, batch_id: str, names: list[str], refused: list[str]) -> None:
    """Each line has exactly one result, and each answer belongs to its line."""
    ended = wait(front, batch_id)
    assert ended.status == "completed", ended
    answers = results(front, ended.output_file_id)
    assert ids_of(results(front, ended.error_file_id)) == refused
    assert ids_of(answers) == [name for name in names if name not in refused]
    for one in answers:
        assert one["response"]["body"]["choices"][0]["text"].startswith(one["custom_id"])
    counts = ended.request_counts
    assert counts is not None and counts.total == len(names)
    assert (counts.completed, counts.failed) == (len(answers), len(refused))


def lines_of(count: int) -> tuple[list[str], list[str], list[str]]:
    """Names, lines and the names of those with an unknown field, which are refused."""
    names = [f"line-{number:04d}" for number in range(count)]
    refused = names[7::20]
    return names, [line(name, **({"best": 1} if name in refused else {})) for name in names], refused


def test_a_front_that_is_killed_continues_its_batch(repo: Path, tmp_path: Path) -> None:
    names, lines, refused = lines_of(600)
    draw, folder = random.Random(4), tmp_path / "store"
    with FakeEngine(step_s=0.01) as engine, FakeSupervisor(engine) as supervisor:
        control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        batch_id, killed = "", 0
        for wanted in (1, 150, 300, 450):
            front = Front(repo, tmp_path / "log", "--batch-dir", str(folder), "--workers", "2", **control)
            try:
                batch_id = batch_id or create(front, lines).id
                wait_until(lambda: done(folder, batch_id) >= wanted, 120, f"{wanted} results")  # noqa: B023
                time.sleep(draw.uniform(0, 0.05))
            finally:
                kill(front)
            killed += done(folder, batch_id) < len(names)
            with (folder / "files" / f"{result_ids(batch_id)[0]}.data").open("ab") as file:
                file.write(b'{"id":"batch_req_'[: draw.randrange(1, 17)])  # as a power cut leaves it
        assert killed >= 2  # in the middle
        with Front(repo, tmp_path / "log", "--batch-dir", str(folder), **control) as front:
            check(front, batch_id, names, refused)


@pytest.mark.parametrize("kind", ["batches", "worker"])
def test_a_child_that_is_killed_is_started_again_and_the_batch_goes_on(
    repo: Path, tmp_path: Path, kind: str
) -> None:
    names, lines, refused = lines_of(400)
    folder = tmp_path / "store"
    with FakeEngine(step_s=0.01) as engine, FakeSupervisor(engine) as supervisor:
        control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        options = ("--batch-dir", str(folder), "--workers", "2", "--api-key", "secret")
        with Front(repo, tmp_path / "log", *options, **control) as front:
            front.http.headers["authorization"] = "Bearer secret"
            front.openai.api_key = "secret"
            batch_id = create(front, lines).id
            for wanted in (1, 100, 200):
                wait_until(lambda: done(folder, batch_id) >= wanted, 120, f"{wanted} results")  # noqa: B023
                for pid in children(front, kind)[:1]:
                    found = processes.identify(pid)
                    assert found is not None
                    processes.kill(found)
                count = 1 if kind == "batches" else 2
                wait_until(lambda: len(children(front, kind)) == count, 60, "a new child")  # noqa: B023
            check(front, batch_id, names, refused)


def test_a_rebuilt_engine_answers_the_rest(repo: Path, tmp_path: Path) -> None:
    names, lines, refused = lines_of(200)
    folder = tmp_path / "store"
    with FakeEngine(step_s=0.02) as engine, FakeSupervisor(engine) as supervisor:
        control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        with Front(repo, tmp_path / "log", "--batch-dir", str(folder), **control) as front:
            batch_id = create(front, lines).id
            wait_until(lambda: done(folder, batch_id) >= 4, 120, "four results")
            engine.stop()
            supervisor.set_phase("down", REASON)
            time.sleep(1.0)
            shape = {"limits": engine.limits, "next_token": engine.next_token}
            with FakeEngine(epoch=engine.epoch + 1, **shape) as following:
                supervisor.set_ready(following)
                check(front, batch_id, names, refused)


def test_a_stopped_service_is_continued_by_the_next_one(repo: Path, tmp_path: Path) -> None:
    names, lines, refused = lines_of(300)
    folder = tmp_path / "store"
    with FakeEngine(step_s=0.02) as engine, FakeSupervisor(engine) as supervisor:
        control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        with Front(repo, tmp_path / "log", "--batch-dir", str(folder), **control) as front:
            batch_id = create(front, lines).id
            wait_until(lambda: done(folder, batch_id) >= 4, 120, "four results")
            front.process.send_signal(signal.SIGTERM)
            assert front.process.wait(30) == 0
        assert "front/batches/" not in front.text()  # no traceback of the process of the batches
        held = done(folder, batch_id)
        assert 4 <= held < len(names)
        # two services of one folder: one of them answers
        with (
            Front(repo, tmp_path / "log", "--batch-dir", str(folder), **control) as first,
            Front(repo, tmp_path / "log2", "--batch-dir", str(folder), **control) as second,
        ):
            check(second, batch_id, names, refused)
            other = create(second, [line("a")]).id
            assert wait(first, other).status == "completed"
            said = [one.text().count("another service answers the batches") for one in (first, second)]
            assert sorted(said) == [0, 1]


def test_a_store_without_room_ends_a_batch_and_keeps_its_answers(repo: Path, tmp_path: Path) -> None:
    names, lines, _ = lines_of(1000)
    folder = tmp_path / "store"
    with FakeEngine(step_s=0.02) as engine, FakeSupervisor(engine) as supervisor:
        control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        options = ("--batch-dir", str(folder), "--batch-dir-bytes", "300000")
        with Front(repo, tmp_path / "log", *options, **control) as front:
            ended = wait(front, create(front, lines).id)
            assert ended.status == "failed" and ended.errors is not None and ended.errors.data is not None
            assert ended.errors.data[0].code == "storage_full"
            answers = results(front, ended.output_file_id)
            assert 0 < len(answers) < len(names) and len(set(ids_of(answers))) == len(answers)
            front.openai.files.delete(ended.output_file_id or "")
            front.openai.files.delete(ended.input_file_id)
            assert wait(front, create(front, [line("a")]).id).status == "completed"


def test_a_short_batch_does_not_wait_for_a_long_one(front: Front) -> None:
    long = create(front, [line(f"line-{n}", max_tokens=60) for n in range(3000)])
    try:
        short = wait(front, create(front, [line("a")]).id)
        assert short.status == "completed"
        assert front.openai.batches.retrieve(long.id).status == "in_progress"
    finally:
        front.openai.batches.cancel(long.id)
        assert wait(front, long.id).status == "cancelled"


def test_what_killed_processes_leave_is_removed(repo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with FakeEngine() as engine, FakeSupervisor(engine) as supervisor:
        control = {"TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
        with Front(repo, tmp_path / "log", "--batch-dir", str(folder), **control) as front:
            kept = upload(front, [line("a")])
        for name in ("file-1.part", "file-2.data", ".file-3.json.77", "file-4.json"):
            (folder / "files" / name).write_bytes(b"{}")
        (folder / "batches" / ".batch_1").mkdir()
        with Front(repo, tmp_path / "log", "--batch-dir", str(folder), **control):
            wanted = {f"{kept}.data", f"{kept}.json"}
            wait_until(lambda: {path.name for path in (folder / "files").iterdir()} == wanted, 60, "order")
            assert not list((folder / "batches").iterdir())


def test_a_child_ends_whose_parent_was_killed_during_its_imports(tmp_path: Path) -> None:
    """The lock of the batches, or the port, would stay with it, and the next front could not work."""
    Store(tmp_path).create()
    settings = FrontSettings(engine_dir="", tokenizer_dir="", batch_dir=str(tmp_path))
    given = encode({"front": settings, "url": "http://127.0.0.1:1", "key": ""})
    program = f"""
import os, signal
from tridecode.backend.front.process.child import Child
child = Child("child", {MODULES["batches"]!r}, [], (), lambda: {given!r})
child.look(0.0)
child.signal(signal.SIGSTOP)  # its imports end after the death of this process
print(child.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = processes.identify(int(parent.stdout.readline()))
    assert child is not None
    processes.kill(child, signal.SIGCONT)
    try:
        wait_until(lambda: not processes.alive(child), 60, "the end of the child")
    finally:
        processes.kill(child)


@pytest.mark.parametrize("kind", ["batches", "worker"])
def test_a_child_of_another_process_ends_before_it_reads_its_settings(kind: str) -> None:
    module = MODULES["batches"] if kind == "batches" else "tridecode.backend.front.process.worker"
    numbers = [] if kind == "batches" else ["0", "0", "0"]
    command = [sys.executable, "-m", module, *numbers, "1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
