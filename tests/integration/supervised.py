"""A server on two doors that share one engine, tests/fake_engine.py behind the real supervisor."""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient

from tests.waiting import wait_until
from tridecode.backend.supervisor import state_file
from tridecode.tools.serve.server_process import ServerProcess

SHM = Path("/dev/shm")
ERROR_S = 5.0  # for an open request to end with an error
END_S = 20.0  # for a killed server's guard and supervisor to clean up, on a slow machine

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 1024
model_transaction_policy {{ decoupled: true }}
instance_group {{ count: 1 kind: KIND_CPU }}
input {{ name: "input_ids" data_type: TYPE_UINT32 dims: [ -1 ] }}
input {{ name: "input_lengths" data_type: TYPE_UINT32 dims: [ 1 ] reshape: {{ shape: [ ] }} }}
input {{ name: "request_output_len" data_type: TYPE_UINT32 dims: [ -1 ] }}
input {{ name: "resume" data_type: TYPE_BOOL dims: [ 1 ] reshape: {{ shape: [ ] }} optional: true }}
output {{ name: "output_ids" data_type: TYPE_UINT32 dims: [ -1, -1 ] }}
output {{ name: "sequence_length" data_type: TYPE_UINT32 dims: [ -1 ] }}
parameters {{ key: "engine_model" value: {{ string_value: "fastertransformer" }} }}
"""

# a model that HTTP clients reach, as postprocessing
ECHO_CONFIG = """
name: "echo"
backend: "python"
instance_group { count: 1 kind: KIND_CPU }
input { name: "TEXT" data_type: TYPE_UINT32 dims: [ -1 ] }
output { name: "ECHO" data_type: TYPE_UINT32 dims: [ -1 ] }
"""
ECHO = """
import time

import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb.get_input_tensor_by_name(one, "TEXT").as_numpy() for one in requests]
        time.sleep(max(int(array.max()) for array in arrays))
        return [pb.InferenceResponse([pb.Tensor("ECHO", array)]) for array in arrays]
"""


class Request:
    """One streamed request over a gRPC stream of its own."""

    def __init__(
        self,
        server: ServerProcess,
        model: str,
        tokens: int,
        shape: Sequence[int] = (),
        resume: bool = True,
    ) -> None:
        """shape: of input_ids without any bytes."""
        self.responses = 0
        self.longest_gap_s, self._heard_at = 0.0, 0.0  # between two responses
        self.last: np.ndarray | None = None  # the newest output_ids
        self.error = ""
        self.ended_at = 0.0
        self.done = threading.Event()
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._client.start_stream(self._on_response)
        rows = shape[0] if shape else 1
        arrays = {"input_ids": [[5, 6, 7]], "input_lengths": [[3]] * rows}
        arrays["request_output_len"] = [[tokens]] * rows
        inputs = []
        for name, rows in arrays.items():
            array = np.array(rows, np.uint32)
            inputs.append(grpcclient.InferInput(name, list(array.shape), "UINT32"))
            inputs[-1].set_data_from_numpy(array)
        if shape:
            inputs[0].set_shape(shape)
            inputs[0]._raw_content = b""
        if not resume:
            inputs.append(grpcclient.InferInput("resume", [1, 1], "BOOL"))
            inputs[-1].set_data_from_numpy(np.array([[False]]))
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True)

    def _on_response(self, result, error) -> None:
        if self.done.is_set():
            return  # the end of the connection, after the end of the request
        if error is not None:
            self.error = str(error)
        elif not result.get_response().parameters["triton_final_response"].bool_param:
            self.responses += 1
            self._note(result)
            return
        else:
            self._note(result)
        self.ended_at = time.monotonic()
        self.done.set()

    def _note(self, result) -> None:
        now = time.monotonic()
        if self._heard_at:
            self.longest_gap_s = max(self.longest_gap_s, now - self._heard_at)
        self._heard_at = now
        if result.get_response().outputs:
            self.last = result.as_numpy("output_ids")

    def wait_error(self) -> str:
        assert self.done.wait(60)
        return self.error

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Living processes with the mark in their environment, except the test itself."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TRIDECODE_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if command_line(process)]


def command_line(process: psutil.Process) -> list[str]:
    """The arguments of a process; empty if it has ended. A zombie has ended: the first process of a container
    may never reap it."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class Service:
    """A running server, and what belongs to it by a mark in the environment of all that it starts."""

    def __init__(
        self, root: Path, mark: str, drain_s: float = 20.0, repo: str = "repo", options: Sequence[str] = ()
    ) -> None:
        self.root = root
        self._mark = mark
        self._requests: list[Request] = []
        self.server = ServerProcess(root / repo, root / "serve.log", drain_s=drain_s, options=options)
        try:
            self.server.wait_ready()
            # a client sees readiness before `serve` does; a death before that ends `serve`
            wait_until(lambda: "ready after" in self.server.log(), END_S, "the readiness that serve logs")
        except BaseException:
            self.server.stop()
            raise
        (setting,) = [part for part in self.triton.cmdline() if "shm-region-prefix-name=" in part]
        self._shm_prefix = setting.split("=")[-1]
        assert [name for name in os.listdir(SHM) if name.startswith(self._shm_prefix)]

    @property
    def triton(self) -> psutil.Process:
        """The current tritonserver."""
        return psutil.Process(self.server.server_pid)

    def wait_back(self) -> float:
        """Seconds until the next tritonserver answers after one that died."""
        return wait_until(lambda: "tritonserver is back after" in self.server.log(), END_S, "the next server")

    def request(
        self,
        model: str = "fastertransformer",
        tokens: int = 5,
        shape: Sequence[int] = (),
        resume: bool = True,
    ) -> Request:
        self._requests.append(Request(self.server, model, tokens, shape, resume))
        return self._requests[-1]

    def streaming(self, model: str = "fastertransformer", tokens: int = 450, resume: bool = True) -> Request:
        """A long request whose first tokens have come."""
        request = self.request(model, tokens, resume=resume)
        wait_until(lambda: request.responses > 2, 60, f"a stream of {model}; error: {request.error}")
        return request

    def answers(self, model: str = "fastertransformer") -> bool:
        """Return whether a new request succeeds."""
        request = self.request(model)
        return request.done.wait(60) and not request.error and request.responses > 0

    def wait_reloaded(self, times: int = 1) -> float:
        """Seconds until that many doors have been reloaded."""
        return wait_until(lambda: self.server.log().count("is back after") == times, 60, "the reload")

    def door(self, model: str) -> psutil.Process:
        for stub in self.triton.children():
            if any(part.endswith(f"/{model}/1/model.py") for part in command_line(stub)):
                return stub
        raise AssertionError(f"no door {model}")

    def process(self, argument: str) -> psutil.Process:
        """The one process of ours with that argument."""
        (found,) = [one for one in self.processes() if argument in command_line(one)]
        return found

    @property
    def engine(self) -> psutil.Process:
        return self.process(str(Path(__file__).with_name("fake_rank.py")))

    def engine_epochs(self) -> list[tuple[int, int]]:
        (folder,) = (self.root / "run").iterdir()
        return [(one.supervisor_pid, one.state.epoch) for one in state_file.read_all(folder)]

    def processes(self) -> list[psutil.Process]:
        return marked_processes(self._mark)

    def left(self) -> list[str]:
        """Processes, shared memory and runtime files that are ours and still exist."""
        regions = [name for name in os.listdir(SHM) if name.startswith(self._shm_prefix)]
        files = [str(path) for path in (self.root / "run").iterdir()]
        lines = [command_line(process) for process in self.processes()]
        return [str(line) for line in lines if line] + regions + files

    def close(self) -> None:
        for request in self._requests:
            request.close()
        if self.server.stop() == -signal.SIGKILL:  # its guard still runs
            wait_until(lambda: not self.left(), END_S, "an end of everything")


@contextmanager
def services() -> Iterator[Callable[..., Service]]:
    """Yield a function that starts services on a repository of `echo` and two doors with one engine."""
    root = Path(tempfile.mkdtemp(prefix="tdserve"))
    mark = uuid.uuid4().hex
    for name in ("fastertransformer", "second"):
        (root / "repo" / name / "1").mkdir(parents=True)
        (root / "repo" / name / "config.pbtxt").write_text(CONFIG.format(name=name))
        (root / "repo" / name / "1" / "model.py").write_text(
            "from tridecode.backend.doors.fastertransformer import TritonPythonModel  # noqa: F401\n"
        )
    (root / "repo" / "echo" / "1").mkdir(parents=True)
    (root / "repo" / "echo" / "config.pbtxt").write_text(ECHO_CONFIG)
    (root / "repo" / "echo" / "1" / "model.py").write_text(ECHO)
    rank = [sys.executable, str(Path(__file__).with_name("fake_rank.py"))]
    held: list[Service] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDECODE_RUNTIME_DIR", str(root / "run"))
        patch.setenv("TRIDECODE_TEST_MARK", mark)
        patch.setenv("TRIDECODE_RANK_COMMAND", shlex.join(rank))

        def start(**options) -> Service:
            held.append(Service(root, mark, **options))
            return held[-1]

        try:
            yield start
        finally:
            for service in held:
                service.close()
            left = [trace for service in held for trace in service.left()]
            print((root / "serve.log").read_text()[-6000:])  # pytest shows it where a test failed
            shutil.rmtree(root)
    assert not left


def post(service: Service, model: str, body: bytes, timeout_s: float = 10.0) -> str:
    """The response's body, or the error's text."""
    connection = http.client.HTTPConnection(service.server.http_url, timeout=timeout_s)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", body)
        return connection.getresponse().read().decode()
    except (http.client.HTTPException, OSError) as error:
        return f"Error: {error!r}"
    finally:
        connection.close()
