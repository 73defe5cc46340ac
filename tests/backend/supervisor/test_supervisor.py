"""A real supervisor process over ranks without torch: what doors are told, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.backend.supervisor.conftest import pids_with
from tests.waiting import wait_until
from tridecode.backend import messages as m
from tridecode.backend.supervisor import state_file


def test_an_engine_is_ready_when_all_its_ranks_are(world):
    world.configure(tensor_para_size=2)
    door = world.door()
    ready = door.wait("ready")
    assert len(world.ranks(ready.epoch)) == 2
    assert ready.endpoint == f"ipc://{world.folder}/engine-{ready.epoch}.sock"
    details = [state.detail for state in door.states if state.phase == "starting"]
    assert any("rank 1: loading weights" in detail for detail in details), details
    wait_until(lambda: state_file.read(world.folder).running == 3, 5, "the load in the state file")
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
    wait_until(lambda: not world.ranks(ready.epoch), 5, "the end of rank 0, which shared the epoch")
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
    wait_until(lambda: not pids_with(str(world.root / "run")), 6, "the end of supervisor and rank")
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
    stub = subprocess.Popen(arguments, executable=sys.executable)  # what a stub's command line looks like
    world.processes.append(stub)
    world.door(shm_region=known.name).wait("ready")
    folder = world.folder
    world.server.kill()
    world.server.wait()
    wait_until(lambda: not pids_with(str(world.root / "run")), 5, "the end of supervisor and rank")
    assert stub.wait(5) == -signal.SIGKILL
    assert not region.exists() and not known.exists()
    assert not folder.exists()


def test_a_supervisor_that_is_asked_to_end_tells_the_doors(world):
    door = world.door()
    door.wait("ready")
    (supervisor,) = world.supervisors()
    os.kill(supervisor, signal.SIGTERM)
    assert "SIGTERM" in door.wait("stopping").detail
    wait_until(lambda: not world.ranks(), 5, "the end of the rank")
