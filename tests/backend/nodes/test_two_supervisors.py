"""Two real supervisors, as two nodes would have them, over ranks without torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backend.supervisor.conftest import FAKE_RANK, Door, World, pids_with
from tests.waiting import wait_until
from tridecode.backend.supervisor import launch, processes
from tridecode.tools.serve.ports import free_ports


class Pair:
    """worlds: node 0 and node 1, each with a stand-in of a server. They share the machine, nothing else."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for index in (0, 1):
            (root / str(index)).mkdir()
        self.worlds = [World(root / str(index)) for index in (0, 1)]
        self.configure(tensor_para_size=2)

    def configure(self, **parameters: object) -> None:
        for world in self.worlds:
            world.configure(**parameters)

    def _as(self, node: int) -> None:
        self._monkeypatch.setenv("TRIDECODE_NODE", str(node))
        self._monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(self.worlds[node].root / "run"))

    def door(self, node: int) -> Door:
        self._as(node)
        return self.worlds[node].door()

    def ensure(self, node: int) -> None:
        """Ensure that the node has a supervisor, like a door that does not hear from one."""
        self._as(node)
        launch.ensure(str(self.worlds[node].engine_dir), self.worlds[node].server.pid)

    def supervisor(self, node: int) -> int:
        (pid,) = self.worlds[node].supervisors()
        return pid


@pytest.fixture
def pair(monkeypatch) -> Iterator[Pair]:
    root = Path(tempfile.mkdtemp(prefix="tdpair"))
    (root / "secret").write_text("a secret of the job")
    monkeypatch.setenv("TRIDECODE_ENGINE_PYTHON", sys.executable)
    monkeypatch.setenv("TRIDECODE_RANK_COMMAND", shlex.join([sys.executable, str(FAKE_RANK)]))
    monkeypatch.setenv("TRIDECODE_NODES", f"127.0.0.1:{free_ports(1)[0]},second")
    monkeypatch.setenv("TRIDECODE_NODES_SECRET_FILE", str(root / "secret"))
    made = Pair(root, monkeypatch)
    yield made
    for world in made.worlds:
        world.close()
    left = [path for world in made.worlds for path in (world.root / "run").glob("*")]
    shutil.rmtree(root)
    assert not left, f"runtime folders are left: {left}"


def test_node_0_waits_for_the_other_and_leads_it(pair: Pair):
    first = pair.door(0)
    wait_until(lambda: first.states and "waiting for node 1 (second)" in first.states[-1].detail, 60)
    second = pair.door(1)
    ready = first.wait("ready")
    assert [len(world.ranks(ready.epoch)) for world in pair.worlds] == [1, 1]
    (rank,) = pair.worlds[1].ranks()
    line = processes.command_line(rank)
    assert [line[line.index(name) + 1] for name in ("--rank", "--world", "--local-world")] == ["1", "2", "1"]
    assert line[line.index("--meeting") + 1].startswith("tcp://127.0.0.1:")
    lending = (
        "this is node 1 of 2, which lends its GPUs: send requests to node 0 (127.0.0.1); its engine is ready"
    )
    wait_until(lambda: second.states[-1].detail.startswith(lending), 60, "the state of the lender")
    assert {state.phase for state in second.states} <= {"starting", "lending"}


@pytest.mark.parametrize(
    "how, wanted",
    [
        (signal.SIGKILL, r"rank 1 on node 1 \(.*\) was killed by signal 9"),
        (signal.SIGSTOP, r"rank 1 on node 1 \(.*\) has been silent for [34]\.\d s \(stopped by a signal\)"),
    ],
)
def test_a_rank_of_the_other_node_is_named(pair: Pair, how, wanted):
    first, _ = pair.door(0), pair.door(1)
    ready = first.wait("ready")
    began = time.monotonic()
    os.kill(pair.worlds[1].ranks()[0], how)
    down = first.wait("down")
    assert time.monotonic() - began < 5.0 and re.match(wanted, down.detail), down.detail
    again = first.wait("ready", ready.epoch + 1)
    assert [len(world.ranks(again.epoch)) for world in pair.worlds] == [1, 1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_supervisor_of_the_other_node_is_named_and_waited_for(pair: Pair, how):
    first, _ = pair.door(0), pair.door(1)
    ready = first.wait("ready")
    began = time.monotonic()
    os.kill(pair.supervisor(1), how)
    down = first.wait("down")
    assert time.monotonic() - began < 5.0
    assert re.match(r"node 1 \(.*\) with rank 1 has been silent for 3\.\d s", down.detail), down.detail
    wait_until(lambda: "; waiting for node 1" in first.states[-1].detail, 60, f"{first.states[-1]}")
    pair.ensure(1)
    again = first.wait("ready", ready.epoch + 1)
    assert [len(world.ranks(again.epoch)) for world in pair.worlds] == [1, 1]


def test_ranks_of_the_other_node_end_with_node_0_and_serve_its_next_supervisor(pair: Pair):
    first, second = pair.door(0), pair.door(1)
    ready = first.wait("ready")
    (rank,) = pair.worlds[1].ranks()
    os.kill(pair.supervisor(0), signal.SIGKILL)
    wait_until(lambda: rank not in pair.worlds[1].ranks(), 60, "the end of the rank")
    wait_until(lambda: "node 0 is silent, waiting for it" in second.states[-1].detail, 60)
    again = pair.door(0).wait("ready", ready.epoch + 1)
    wait_until(lambda: len(pair.worlds[1].ranks(again.epoch)) == 1, 60)


def test_a_node_with_another_repository_is_refused_by_name_on_both(pair: Pair):
    pair.worlds[1].configure(tensor_para_size=2, max_sequences=8)
    first, second = pair.door(0), pair.door(1)
    wanted = r"node 1 \(.*\) has another repository than node 0: config.pbtxt is \w+ there and \w+ on node 0"
    for door in (first, second):
        assert re.match(wanted, door.wait("failed").detail)
    pair.configure(tensor_para_size=2, max_sequences=8)
    first.wait("ready")
    wait_until(lambda: second.states[-1].phase == "lending", 60)


def test_ranks_that_the_nodes_cannot_share_evenly_are_refused(pair: Pair):
    pair.configure(tensor_para_size=3)
    first, _ = pair.door(0), pair.door(1)
    assert "is 3, and the job has 2 nodes; wanted a multiple of 2" in first.wait("failed").detail


def test_a_missing_secret_is_named_on_both_nodes_until_it_is_there(pair: Pair):
    secret = pair.worlds[0].root.parent / "secret"
    text = secret.read_text()
    secret.unlink()
    first, second = pair.door(0), pair.door(1)
    for door in (first, second):
        assert f"names {secret}, which cannot be read" in door.wait("failed").detail
    secret.write_text(text)
    pair.door(1)  # a new door makes a failed node try again
    pair.door(0).wait("ready")


def test_a_pair_ends_with_its_servers(pair: Pair):
    first, _ = pair.door(0), pair.door(1)
    first.wait("ready")
    pair.worlds[0].server.kill()
    wait_until(lambda: not pair.worlds[1].ranks(), 60, "the end of the rank of node 1")
    wait_until(lambda: not pids_with(str(pair.worlds[0].root / "run")), 60)
    assert pair.supervisor(1), "which waits for the next node 0"
