"""A real supervisor process over ranks without torch: its messages to doors, and what remains after it
ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import zmq

from tests.backend.supervisor.conftest import pids_with
from tests.waiting import wait_until
from tridecode.backend.supervisor import processes, runtime_dir, state_file
from tridecode.backend.supervisor.rank_link import SUPERVISOR_SILENCE_S
from tridecode.backend.wire import messages as m


def test_an_engine_is_ready_when_all_its_ranks_are(world):
    world.configure(tensor_para_size=2)
    door = world.door()
    ready = door.wait("ready")
    assert len(world.ranks(ready.epoch)) == 2
    assert ready.endpoint == f"ipc://{world.folder}/engine-{ready.epoch}.sock"
    details = [state.detail for state in door.states if state.phase == "starting"]
    assert any("rank 1: loading weights" in detail for detail in details), details
    wait_until(lambda: state_file.read(world.folder).running == 3, 60, "the load in the state file")
    content = state_file.read(world.folder)
    assert (content.state.phase, content.waiting) == ("ready", 2)


def test_a_killed_rank_is_reported_and_the_engine_rebuilt(world):
    world.configure(tensor_para_size=2)
    door = world.door()
    ready = door.wait("ready")
    start = time.monotonic()
    os.kill(world.ranks(ready.epoch)[1], signal.SIGKILL)
    down = door.wait("down")
    assert time.monotonic() - start < m.SILENCE_S, "an exit is seen at once, not by its silence"
    assert down.detail == "rank 1 was killed by signal 9"
    wait_until(lambda: not world.ranks(ready.epoch), 60, "the end of rank 0, which shared the epoch")
    assert door.wait("ready", ready.epoch + 1).epoch == ready.epoch + 1


def test_a_stopped_rank_is_reported_and_the_engine_rebuilt(world):
    door = world.door()
    ready = door.wait("ready")
    start = time.monotonic()
    os.kill(world.ranks()[0], signal.SIGSTOP)
    down = door.wait("down")
    assert m.SILENCE_S - m.BEAT_S - 0.1 < time.monotonic() - start < 5.0
    wanted = r"rank 0 has been silent for [34]\.\d s \(stopped by a signal\)"
    assert re.fullmatch(wanted, down.detail), down.detail
    door.wait("ready", ready.epoch + 1)
    assert not world.ranks(ready.epoch)


def test_a_step_that_takes_too_long_is_reported(world):
    world.configure(step_timeout_s=1)
    world.behave("stuck")
    door = world.door()
    door.wait("ready")
    world.behave("ready")
    detail = door.wait("down").detail
    wanted = r"rank 0 has been in one step for [1-4](\.\d+)? s; step_timeout_s is 1"
    assert re.fullmatch(wanted, detail), detail
    door.wait("ready", 2)


def test_a_start_that_hangs_is_ended_with_what_it_was_doing(world):
    world.configure(start_timeout_s=1.5)
    world.behave("loading")
    detail = world.door().wait("down").detail
    assert detail == "not ready after 1.5 s (start_timeout_s): rank 0 was still loading weights"


def test_a_rank_that_ends_while_starting_is_reported_with_its_exit_code(world):
    world.behave("exit")
    assert world.door().wait("down").detail == "rank 0 ended with exit code 3 while loading weights"


def test_a_fatal_error_is_not_tried_again_until_the_settings_change(world):
    world.behave("refuse")
    door = world.door()
    failed = door.wait("failed")
    assert failed.detail == "rank 0: config.ini has no head_num"
    world.behave("ready")
    time.sleep(1.5)
    assert door.states[-1].phase == "failed"
    world.configure(max_sequences=8)
    assert door.wait("ready", failed.epoch + 1, timeout_s=5).epoch == failed.epoch + 1


def test_a_new_door_makes_a_failed_engine_try_again(world):
    world.behave("refuse")
    world.door().wait("failed")
    world.behave("ready")
    world.door().wait("ready", 2)


def test_a_wrong_setting_is_reported_to_the_doors(world):
    world.configure(tensor_para_size="two")
    failed = world.door().wait("failed")
    assert "config.pbtxt: parameter tensor_para_size is 'two'; wanted a whole number" in failed.detail


def test_numbers_of_ranks_that_the_model_cannot_have_are_refused_before_any_rank_starts(world):
    (world.engine_dir / "1" / "1-gpu").mkdir()
    (world.engine_dir / "1" / "1-gpu" / "config.ini").write_text("[gpt]\nhead_num = 6\nnum_layer = 5\n")
    world.configure(tensor_para_size=4)
    door = world.door()
    assert "tensor_para_size = 4 does not divide head_num = 6" in door.wait("failed").detail
    assert "wanted one of 1, 2, 3, 6" in door.states[-1].detail
    assert not any("python" in state.detail for state in door.states), "a rank was started"
    world.configure(pipeline_para_size=4)
    detail = door.wait("failed", door.states[-1].epoch + 1).detail
    assert "pipeline_para_size = 4 leaves stages without layers" in detail
    assert detail.endswith("in stages of 2 fills 3; wanted one of 1, 2, 3, 5")
    world.configure(pipeline_para_size=3)
    door.wait("ready", door.states[-1].epoch + 1)


def test_a_door_that_comes_alone_after_a_change_of_settings_gets_a_new_engine(world):
    first = world.door()
    epoch = first.wait("ready").epoch
    world.configure(tensor_para_size=2)
    first.close()
    second = world.door()
    second.wait("ready", epoch + 1)
    assert len(world.ranks()) == 2


def test_the_engine_ends_when_the_last_door_has_said_goodbye(world):
    door, other = world.door(), world.door()
    epoch = door.wait("ready").epoch
    other.close()
    time.sleep(0.5)
    assert world.ranks(epoch)
    folder = world.folder
    door.close()
    wait_until(lambda: not pids_with(str(world.root / "run")), 20, "the end of supervisor and rank")
    assert (world.engine_dir / f"stopped-{epoch}-0").exists(), (
        "the rank was asked to stop before it was killed"
    )
    assert not folder.exists()


def test_the_engine_outlives_a_door_that_died(world):
    door = world.door()
    epoch = door.wait("ready").epoch
    door.close(goodbye=False)
    world.processes[-1].kill()
    world.processes[-1].wait()
    time.sleep(4.5)
    assert world.ranks(epoch), "a dead door is brought back; the engine waits for it"


def test_a_pause_of_everybody_leaves_the_engine_as_it_is(world):
    door = world.door()
    ready = door.wait("ready")
    everybody = [*world.supervisors(), *world.ranks()]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(m.SILENCE_S + SUPERVISOR_SILENCE_S)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)
    assert door.states[-1].phase == "ready" and door.states[-1].epoch == ready.epoch
    assert everybody == [*world.supervisors(), *world.ranks()]


def test_a_pause_is_no_time_spent_in_a_step(world):
    world.configure(step_timeout_s=6)
    world.behave("stuck")
    door = world.door()
    ready = door.wait("ready")
    everybody = [*world.supervisors(), *world.ranks()]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    time.sleep(2.0)
    assert door.states[-1].phase == "ready", door.states[-1]
    assert door.wait("down", timeout_s=8).epoch == ready.epoch, "the step itself goes on being counted"


def test_whoever_is_not_known_is_told_to_say_hello(world):
    world.door().wait("ready")
    context = zmq.Context.instance()
    with context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(world.ensure())
        stranger.send(m.encode(m.Ping()))
        assert stranger.poll(2000)
        assert isinstance(m.decode(stranger.recv(), m.FromSupervisor), m.Unknown)


def test_a_deleted_control_socket_is_there_again(world):
    door = world.door()
    ready = door.wait("ready")
    (world.folder / "control.sock").unlink()
    wait_until(lambda: (world.folder / "control.sock").exists(), 60, "the socket")
    other = world.door()
    assert other.wait("ready").epoch == ready.epoch
    assert len(world.supervisors()) == 1


def test_a_deleted_runtime_folder_is_there_again_with_its_lock(world):
    door = world.door()
    ready = door.wait("ready")
    folder = world.folder
    shutil.rmtree(folder)
    wait_until(lambda: (folder / "control.sock").exists(), 60, "the socket")
    assert runtime_dir.lock(folder) is None, "the supervisor holds the new lock"
    assert runtime_dir.read_owner(folder).epoch == ready.epoch
    assert world.door().wait("ready").epoch == ready.epoch
    assert len(world.supervisors()) == 1


def test_an_engine_whose_files_cannot_be_written_is_served_on(world):
    door = world.door()
    ready = door.wait("ready")
    (
        world.folder / "state.json.new"
    ).mkdir()  # root cannot write it either; a full disk fails in the same place
    os.kill(world.ranks()[0], signal.SIGKILL)
    door.wait("down")
    assert door.wait("ready", ready.epoch + 1).epoch == ready.epoch + 1
    world.door().wait("ready", ready.epoch + 1)


def test_the_engine_outlives_a_server_that_another_process_starts_again(world, monkeypatch):
    guard = subprocess.Popen(["sleep", "600"])
    world.processes.append(guard)
    identity = processes.identify(guard.pid)
    monkeypatch.setenv("TRIDECODE_OWNER", f"{identity.pid}:{identity.start}")
    door = world.door()
    ready = door.wait("ready")
    door.close(goodbye=False)
    world.processes[-1].kill()  # the door's process
    world.server.kill()
    world.server.wait()
    time.sleep(3.0)
    world.server = subprocess.Popen(["sleep", "600"])
    world.processes.append(world.server)
    assert world.door().wait("ready").epoch == ready.epoch
    guard.kill()
    guard.wait()
    wait_until(lambda: not pids_with(str(world.root / "run")), 20, "the end of supervisor and rank")


def test_nothing_is_left_of_a_killed_server(world, tmp_path):
    world.behave("deaf")  # a rank that hears no Stop
    region = Path("/dev/shm") / f"triton_python_backend_shm_region_test_{os.getpid()}"
    known = Path("/dev/shm") / f"triton_python_backend_shm_region_door_{os.getpid()}"
    region.touch()
    known.touch()
    script = tmp_path / "model.py"
    script.write_text("import time; time.sleep(600)")
    arguments = [str(tmp_path / "triton_python_backend_stub"), str(script), region.name, "1", "1"]
    arguments += [str(world.server.pid), str(tmp_path), "1", "toy_0_0", "DEFAULT"]
    stub = subprocess.Popen(arguments, executable=sys.executable)  # has a stub's command line
    world.processes.append(stub)
    world.door(shm_region=known.name).wait("ready")
    folder = world.folder
    world.server.kill()
    world.server.wait()
    wait_until(lambda: not pids_with(str(world.root / "run")), 20, "the end of supervisor and rank")
    assert stub.wait(60) == -signal.SIGKILL
    assert not region.exists() and not known.exists()
    assert not folder.exists()


def test_a_supervisor_that_is_asked_to_end_tells_the_doors(world):
    door = world.door()
    door.wait("ready")
    (supervisor,) = world.supervisors()
    os.kill(supervisor, signal.SIGTERM)
    assert "SIGTERM" in door.wait("stopping").detail
    wait_until(lambda: not world.ranks(), 60, "the end of the rank")
