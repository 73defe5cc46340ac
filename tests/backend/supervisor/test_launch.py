"""Doors find the one supervisor of their engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tridecode.backend.base.errors import ConfigError, EngineDownError
from tridecode.backend.supervisor import launch, processes, runtime_dir


def test_doors_that_call_at_once_start_one_supervisor(world):
    code = "import sys; from tridecode.backend.supervisor.launch import ensure\n"
    code += "print(ensure(sys.argv[1], int(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(world.engine_dir), str(world.server.pid)]
    doors = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        here = set(pool.map(lambda _: world.ensure(), range(4)))
    there = {door.stdout.readline().strip() for door in doors}
    for door in doors:
        door.stdout.close()
        door.wait()
    assert here == there == {f"ipc://{world.folder}/control.sock"}
    assert len(world.supervisors()) == 1


def test_each_engine_of_instance_group_has_a_supervisor_and_devices_of_its_own(world):
    world.configure("instance_group [{ count: 2 }]", devices="7,5,4,6", tensor_para_size=2)
    states = [world.door(number=number).wait("ready") for number in range(2)]
    assert len({state.endpoint for state in states}) == len(world.supervisors()) == 2
    found = {}
    for pid in world.ranks():
        line = processes.command_line(pid)
        found.setdefault(line[line.index("--endpoint") + 1], []).append(line[line.index("--devices") + 1])
    assert [found[state.endpoint] for state in states] == [["7,5"] * 2, ["4,6"] * 2]
    first, second = world.doors
    os.kill(_ranks_at(world, states[1].endpoint)[0], signal.SIGKILL)
    second.wait("ready", states[1].epoch + 1)
    assert first.states[-1].phase == "ready" and first.states[-1].epoch == states[0].epoch


def _ranks_at(world, endpoint: str) -> list[int]:
    return [pid for pid in world.ranks() if endpoint in processes.command_line(pid)]


def test_engines_that_cannot_have_gpus_of_their_own_do_not_start(world):
    world.configure("instance_group [{ count: 2 }]", devices="0,1,2", tensor_para_size=2)
    for number in range(2):
        detail = world.door(number=number).wait("failed").detail
        assert "2 engines (instance_group) of tensor_para_size 2 x pipeline_para_size 1 need 4 GPUs" in detail
        assert "parameter devices names 3: 1 instance(s) or tensor_para_size 1 would fit" in detail
    assert not world.ranks()


def test_several_engines_of_a_model_are_refused_over_nodes(world, monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
    monkeypatch.setenv("TRIDECODE_NODES_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("TRIDECODE_NODES", "127.0.0.1:7117,other")
    monkeypatch.setenv("TRIDECODE_NODE", "1")
    world.configure("instance_group [{ count: 2 }]")
    detail = world.door(number=1).wait("failed").detail
    assert "makes 2 engines" in detail and "a job of 2 nodes; wanted 1 instance" in detail


def test_a_killed_supervisor_takes_its_ranks_along_and_is_replaced_in_a_later_epoch(world):
    door = world.door()
    first = door.wait("ready")
    (supervisor,) = world.supervisors()
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not world.ranks(first.epoch), 60, "the end of the orphaned ranks")
    second = world.door().wait("ready")
    assert second.epoch > first.epoch
    assert second.endpoint != first.endpoint
    assert len(world.supervisors()) == 1


def test_a_frozen_supervisor_is_replaced(world):
    first = world.door().wait("ready")
    (supervisor,) = world.supervisors()
    os.kill(supervisor, signal.SIGSTOP)
    second = world.door().wait("ready")
    assert second.epoch > first.epoch
    assert supervisor not in world.supervisors()


def test_a_given_endpoint_is_taken_as_it_is(monkeypatch):
    monkeypatch.setenv("TRIDECODE_CONTROL_ENDPOINT", "ipc:///somewhere")
    assert launch.ensure("/no/such/folder", 1) == "ipc:///somewhere"


def test_a_supervisor_that_cannot_start_is_reported_with_its_exit_code(world, monkeypatch):
    monkeypatch.setenv("TRIDECODE_ENGINE_PYTHON", "/bin/false")
    with pytest.raises(EngineDownError, match="exit code 1"):
        world.ensure()
    monkeypatch.setenv("TRIDECODE_ENGINE_PYTHON", "/no/python")
    with pytest.raises(ConfigError, match="/no/python.*TRIDECODE_ENGINE_PYTHON"):
        world.ensure()
    monkeypatch.setenv("TRIDECODE_ENGINE_PYTHON", sys.executable)
    world.door().wait("ready")


def test_nothing_is_started_while_the_server_stops(world):
    (world.root / "run").mkdir(mode=0o700)
    (world.root / "run" / runtime_dir.STOPPING).touch()
    with pytest.raises(EngineDownError, match="stopping"):
        world.ensure()
    (world.root / "run" / runtime_dir.STOPPING).unlink()


def test_a_path_too_long_for_a_socket_is_refused_with_its_length():
    path = Path("/tmp") / ("x" * 200) / "control.sock"
    with pytest.raises(ConfigError, match=r"218 bytes.*107"):
        runtime_dir.endpoint(path)


def test_a_runtime_folder_open_to_others_is_refused(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(tmp_path / "open"))
    with pytest.raises(ConfigError, match="mode 755.*mode 700"):
        runtime_dir.base_dir()


def test_a_runtime_folder_behind_a_symbolic_link_is_refused(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(ConfigError, match=r"link is a symbolic link to .*real"):
        runtime_dir.base_dir()


@pytest.mark.parametrize("owner", ["4711", "a:b", "4711:", f"{2**22 + 5}:1"])
def test_an_owner_that_is_no_living_process_is_refused(world, monkeypatch, owner):
    monkeypatch.setenv("TRIDECODE_OWNER", owner)
    with pytest.raises(ConfigError, match="TRIDECODE_OWNER is"):
        world.ensure()


def test_the_record_of_a_folder_is_rewritten_in_place(tmp_path):
    fd = runtime_dir.lock(tmp_path / "new")
    owner = runtime_dir.owner_of(processes.identify(os.getpid()))
    owner.shm_prefix = "x" * 60
    runtime_dir.write_owner(fd, owner)
    size = (tmp_path / "new" / "owner").stat().st_size
    owner.shm_prefix = ""
    runtime_dir.write_owner(fd, owner)
    assert runtime_dir.read_owner(tmp_path / "new") == owner
    assert (tmp_path / "new" / "owner").stat().st_size == size
    os.close(fd)


def test_the_engine_gets_its_own_environment_back(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/door/lib")
    monkeypatch.setenv("TRIDECODE_ENGINE_LD_LIBRARY_PATH", "")
    monkeypatch.setenv("TRIDECODE_ENGINE_PATH", "/engine/bin")
    environment = launch.engine_environment()
    assert "LD_LIBRARY_PATH" not in environment
    assert environment["PATH"] == "/engine/bin"


def test_a_new_folder_that_a_sweep_looks_into_is_locked_a_moment_later(tmp_path):
    looking = runtime_dir.lock(tmp_path / "new")
    timer = threading.Timer(0.2, os.close, (looking,))
    timer.start()
    os.close(runtime_dir.lock_new(tmp_path / "new"))
    timer.join()


def test_folders_of_dead_servers_are_swept_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(tmp_path / "run"))
    base = runtime_dir.base_dir()
    region = Path("/dev/shm") / f"tridecode_test_{os.getpid()}_1"
    region.touch()
    with subprocess.Popen(["sleep", "600"]) as server:
        dead = runtime_dir.owner_of(processes.identify(server.pid))
        server.kill()
    dead.shm_prefix = f"tridecode_test_{os.getpid()}_"
    alive = runtime_dir.owner_of(processes.identify(os.getpid()))
    for name, owner in (("dead", dead), ("alive", alive), ("locked", dead)):
        fd = runtime_dir.lock(base / name)
        runtime_dir.write_owner(fd, owner)
        if name != "locked":
            os.close(fd)
    assert runtime_dir.sweep(base) == [base / "dead"]
    assert sorted(path.name for path in base.iterdir()) == ["alive", "locked"]
    assert not region.exists()


@pytest.mark.parametrize("living", ["nobody", "the server", "another engine"])
def test_the_last_engine_of_a_dead_server_removes_the_server_s_folder(tmp_path, living):
    folder, engine, other = tmp_path / "serve-1", tmp_path / "serve-1" / "a", tmp_path / "serve-1" / "b"
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = runtime_dir.owner_of(processes.identify(process.pid))
        fd = runtime_dir.lock_new(folder)
        runtime_dir.write_owner(fd, owner)
        os.close(fd)
        fds = [runtime_dir.lock_new(path) for path in (engine, other)]
        if living != "the server":
            process.kill()
            process.wait()
        if living != "another engine":
            os.close(fds[1])  # its supervisor was killed, too
        runtime_dir.leave(engine, fds[0])
        assert not engine.exists()
        assert folder.exists() == (living != "nobody")
        if living == "another engine":
            runtime_dir.leave(other, fds[1])
            assert not folder.exists()
        process.kill()
