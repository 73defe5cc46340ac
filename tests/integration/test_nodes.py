"""Engines over two hosts, network namespaces that a cable joins: real servers, ranks and TCP."""

from __future__ import annotations

import http.client
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.backend.engine.offline_models import hf_greedy
from tests.backend.nodes import slurm
from tests.checkpoints import save, tiny_gpt2
from tests.integration.clients import infer, standard_inputs
from tests.integration.engines import add_engine
from tests.integration.hosts import Host, refusal, two_hosts
from tests.integration.supervised import command_line, marked_processes
from tests.mpi_launchers import launcher
from tests.waiting import wait_until
from tridecode.backend.supervisor import state_file
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.ports import free_ports

pytestmark = [pytest.mark.server, pytest.mark.slow]

ERROR_S = 5.0  # within which an open request ends
BACK_S = 60.0
PORT = 7117
LONG = 900
MODEL, STAGES = "fastertransformer", "stages"  # of two tensor ranks, and of two pipeline stages
ENGINES = (MODEL, STAGES)


class Node:
    """One server on one host."""

    def __init__(self, index: int, host: Host, root: Path, repository: Path, environment: dict) -> None:
        self.index, self.host = index, host
        self.run, self.log_file = root / f"run{index}", root / f"node{index}.log"
        self._mark = uuid4().hex
        command = [sys.executable, "-m", "tridecode.tools.cli"]
        if index == 0:
            command += ["tritonserver", f"--model-repository={repository}"]
        else:  # its start never ends: serve must not give up
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

    def contents(self, engine: str) -> list[state_file.StateFile]:
        """Return the state files of the engine; [] before the first."""
        found = [content for folder in self.run.glob("serve-*") for content in state_file.read_all(folder)]
        return [content for content in found if Path(content.engine_dir).name == engine]

    def state(self, engine: str = MODEL):
        """The supervisor's last words; None before."""
        found = self.contents(engine)
        return found[0].state if found else None

    def ready(self) -> bool:
        return self.host.call(_is_ready).result(60)

    def ask(self, row: list[int], count: int, engine: str = MODEL) -> list[int]:
        """A request on this node, and its answer."""
        return self.later(row, count, engine).result(60)

    def later(self, row: list[int], count: int, engine: str = MODEL, resume: bool = True):
        return self.host.call(_ask, row, count, 8000, engine, resume)

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


def _ask(row: list[int], count: int, port: int = 8000, engine: str = MODEL, resume: bool = True) -> list[int]:
    inputs = {**standard_inputs([row], [count]), "resume": np.array([[resume]])}
    answer = infer("http", f"127.0.0.1:{port}", engine, inputs)
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
def two_engines(repository, tmp_path_factory) -> Path:
    copy = shutil.copytree(repository, tmp_path_factory.mktemp("two") / "repo")
    add_engine(copy, STAGES, 1, 2)
    return copy


@pytest.fixture(scope="module")
def nodes(two_engines) -> Iterator[tuple[Node, Node]]:
    """Two engines over two hosts, a rank of each on each."""
    if reason := refusal():
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="tdnodes"))  # pytest's own folders are too long for a socket
    (root / "secret").write_text(secrets.token_hex(16))
    with two_hosts() as hosts:
        environment = {
            "TRIDECODE_NODES": f"{hosts[0].address}:{PORT},{hosts[1].address}",
            "TRIDECODE_NODES_SECRET_FILE": str(root / "secret"),
        }
        made = [Node(index, host, root, two_engines, environment) for index, host in enumerate(hosts)]
        try:
            wait_until(made[0].ready, 240, "readiness of node 0")
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
    for engine in ENGINES:
        for row in ([5, 9, 11], [7, 8, 4, 20]):
            assert first.ask(row, 16, engine) == wanted(model, row, 16)
    assert [len(node.processes("tridecode.backend.engine")) for node in nodes] == [2, 2]
    assert not second.ready()
    for engine in ENGINES:
        state = second.state(engine)
        assert state.phase == "lending"
        lead = f"this is node 1 of 2, which lends its GPUs: send requests to node 0 ({first.host.address}"
        assert lead in state.detail


def failures_of(first: Node, strike) -> list[tuple[str, float]]:
    """The error of a long request of each engine that is open when `strike` happens, and the seconds until
    it came."""
    requests = [first.later([5, 9, 11], LONG, engine, resume=False) for engine in ENGINES]
    wait_until(lambda: all(_running(first, engine) for engine in ENGINES), 60, "requests in the engines")
    time.sleep(0.3)
    assert not any(request.done() for request in requests), "a request ended too early"
    strike()
    began = time.monotonic()
    found = []
    for request in requests:
        with pytest.raises(InferenceServerException) as caught:
            request.result(30)
        found.append((str(caught.value), time.monotonic() - began))
    return found


def _running(node: Node, engine: str) -> bool:
    return any(content.running for content in node.contents(engine))


def answers(node: Node, model: torch.nn.Module) -> bool:
    try:
        return all(node.ask([7, 8, 4], 8, engine) == wanted(model, [7, 8, 4], 8) for engine in ENGINES)
    except InferenceServerException:
        return False


def test_a_cut_cable_ends_requests_with_the_node_s_name_and_a_healed_one_brings_engines_back(nodes, model):
    first, second = nodes
    for text, seconds in failures_of(first, lambda: second.host.plug("down")):
        assert seconds < ERROR_S
        assert "node 1 (" in text and "with rank 1 has been silent for" in text and "network" in text
    wait_until(lambda: not second.processes("tridecode.backend.engine"), 60, "the end of the ranks there")
    for engine in ENGINES:
        wait_until(lambda: "waiting for node 1" in first.state(engine).detail, 60, "node 0 to wait")  # noqa: B023
        wait_until(lambda: "node 0 is silent" in second.state(engine).detail, 60, "node 1 to wait")  # noqa: B023
    second.host.plug("up")
    back = wait_until(lambda: answers(first, model), BACK_S, "answers after the cable is back")
    print(f"cut: errors after {seconds:.1f} s; healed: answers after {back:.1f} s")
    assert not second.ready()


def test_killed_supervisors_of_the_other_node_are_named_and_the_engines_come_back(nodes, model):
    first, second = nodes

    def kill_supervisors() -> None:
        for supervisor in second.processes("tridecode.backend.supervisor"):
            supervisor.kill()

    for text, seconds in failures_of(first, kill_supervisors):
        assert seconds < ERROR_S
        # silent for 3 s, or back before that, since its server starts a new one
        assert "node 1 (" in text
        assert "its supervisor is dead or stopped" in text or "was restarted" in text
    back = wait_until(lambda: answers(first, model), BACK_S, "answers")
    print(f"killed: errors after {seconds:.1f} s, answers after {back:.1f} s")
    for node in nodes:
        assert node.process.poll() is None


@pytest.mark.parametrize("name", ["openmpi", pytest.param("mpich", marks=pytest.mark.nightly), "srun"])
def test_a_launcher_starts_one_engine_over_its_servers(name, repository, model):
    """Two servers on this machine, as `mpirun -n 2 tritonserver` on two; address and secret go by MPI."""
    if name == "srun" and (reason := slurm.missing()):
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="tdmpi"))
    mark = uuid4().hex
    ours = {"TRIDECODE_TEST_MARK": mark, "TRIDECODE_RUNTIME_DIR": str(root / "run")}
    ports = free_ports(6)
    servers = []
    for node in (0, 1):
        http, grpc, metrics = ports[3 * node : 3 * node + 3]
        servers.append([sys.executable, "-m", "tridecode.tools.cli", "tritonserver"])
        servers[node] += [f"--model-repository={repository}", f"--http-port={http}", f"--grpc-port={grpc}"]
        servers[node] += [f"--metrics-port={metrics}"]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root)
        environment, end = dict(os.environ), subprocess.Popen.terminate
        if name == "srun":
            environment = stack.enter_context(slurm.cluster(root / "slurm"))
            (root / "programs").write_text(
                "".join(f"{i} {shlex.join(one)}\n" for i, one in enumerate(servers))
            )
            end = partial(slurm.cancel, environment=environment)
            command = [*slurm.srun("pmix"), "--multi-prog", str(root / "programs")]
        else:
            command = [*launcher(name), "-n", "1", *servers[0], ":", "-n", "1", *servers[1]]
        _serve_job(command, {**environment, **ours}, end, root, mark, ports, model)


def _serve_job(command, environment, end, root: Path, mark: str, ports: list[int], model) -> None:
    """The job answers, and leaves nothing behind when its launcher is asked to end: end(process)."""
    with (root / "log").open("wb") as log:
        job = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: job.poll() is not None or _is_ready(ports[0]), 90, "readiness of node 0")
        assert _ask([5, 9, 11], 16, ports[0]) == wanted(model, [5, 9, 11], 16)
        assert not _is_ready(ports[3])
        end(job)
        job.wait(40)
        wait_until(lambda: not marked_processes(mark), 20, "an end of everything")
        assert not list((root / "run").iterdir())
    finally:
        for process in marked_processes(mark):
            process.kill()
        job.wait(40)
        print((root / "log").read_text(errors="replace")[-8000:])
