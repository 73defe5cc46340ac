"""A real server over a tiny random checkpoint: its processes by role, and what remains after its end."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from rich.console import Console

from tests.checkpoints import save, tiny_llama
from tridecode.model_repo_templates.served import DEFAULT
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.serve.server_process import ServerProcess

SHM = Path("/dev/shm")
MARK = "TRIDECODE_TEST_MARK"
CHECKER_WORKER = "checker worker:"  # and its pid: a role
RUNTIME = "TRIDECODE_RUNTIME_DIR"
DOORS = (
    "fastertransformer",
    "fastertransformer_streaming",
    "preprocessing",
    "postprocessing",
    "tensorrt_llm_bls",
    "tensorrt_llm_bls_plain",
    "tridecode_health",
)
SLOTS = 96  # more than the streams of a schedule: what waits there waits for the fault
QUEUE = 256
POSITIONS = 1024


def end_on_sigterm() -> None:
    """Make SIGTERM an exception in the main thread, so that a program cleans up what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def build_repository(
    folder: Path, ranks: int = 1, contracts: Sequence[str] = DEFAULT, **engine_settings: object
) -> Path:
    """A repository of a LLaMA with 2 layers of 48, 1,024 positions, 331 tokens; cut for `ranks` ranks.

    contracts: served together; the first one that has a name keeps it.
    """
    settings = {
        "cache_bytes": 64 << 20,
        "num_threads": 1,
        "max_sequences": SLOTS,
        "max_queued_requests": QUEUE,
        "device": "cpu",
        **engine_settings,
    }
    with contextlib.redirect_stderr(io.StringIO()):
        checkpoint = save(tiny_llama(max_position_embeddings=POSITIONS), folder / "hf")
    return build_repo(
        str(checkpoint),
        folder / "repo",
        tensor_para_size=ranks,
        contracts=contracts,
        owners=contracts,
        engine_settings={name: str(value) for name, value in settings.items()},
        console=Console(file=io.StringIO()),
    )


class Service:
    """One `tridecode serve`; all that it starts carries a mark in its environment."""

    def __init__(self, repository: Path, run_dir: Path | None = None, ready_s: float = 60.0) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="tdrel"))
        self.repository = repository
        self.run_dir = run_dir or self.root / "run"
        self._mark = uuid.uuid4().hex
        self.shm_prefixes: set[str] = set()
        with _environment({MARK: self._mark, RUNTIME: str(self.run_dir)}):
            self.server = ServerProcess(repository, self.root / "serve.log", drain_s=5.0)
        try:
            self.server.wait_ready(ready_s)
            self.note_regions()
        except BaseException:
            self.close()
            raise
        self.pids_at_start = self.lasting_pids()

    @property
    def http(self) -> tuple[str, int]:
        return "127.0.0.1", self.server.http_port

    @property
    def grpc(self) -> str:
        return self.server.grpc_url

    def log(self) -> str:
        return self.server.log()

    def ended(self) -> bool:
        return self.server.process.poll() is not None

    # ------------------------------------------------------------ processes

    def processes(self) -> list[psutil.Process]:
        """All that are ours and alive; a zombie is not."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.pid != os.getpid() and process.environ().get(MARK) == self._mark
                if ours and process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def roles(self) -> dict[str, psutil.Process]:
        """serve, guard, tritonserver, door:<model>, supervisor, rank0, checker, …; others by name and pid."""
        found = {}
        for process in self.processes():
            try:
                role = _role(process.cmdline(), process.pid)
                if role == "checker" and process.parent().cmdline() == process.cmdline():
                    role = f"{CHECKER_WORKER}{process.pid}"
                found[role] = process
            except psutil.Error:
                continue
        return found

    def pids(self) -> dict[str, int]:
        return {role: process.pid for role, process in self.roles().items()}

    def lasting_pids(self) -> dict[str, int]:
        """Without the processes that one request may end."""
        return {role: pid for role, pid in self.pids().items() if not role.startswith(CHECKER_WORKER)}

    def note_regions(self) -> None:
        """Remember the names under which this server's stubs keep shared memory."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                for part in process.cmdline():
                    if "shm-region-prefix-name=" in part:
                        self.shm_prefixes.add(part.split("=")[-1])

    def regions(self) -> list[str]:
        return [name for name in os.listdir(SHM) if name.startswith(tuple(self.shm_prefixes or {"\0"}))]

    def engine_folders(self) -> list[Path]:
        return [path.parent for path in self.run_dir.glob("*/*/control.sock")]

    # ------------------------------------------------------------ the end

    def stop(self) -> str:
        """Stop as an operator does; what went wrong or was left behind, "" if nothing."""
        self.note_regions()
        for process in self.processes():  # frozen processes are resumed; serve gets the signal first
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        complaint = ""
        try:
            self.server.stop(40)
        except Exception as error:
            complaint = f"stop: {str(error).splitlines()[0]}"
        return complaint or self.wait_nothing_left()

    def wait_nothing_left(self, timeout_s: float = 20.0) -> str:
        deadline = time.monotonic() + timeout_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return "; ".join(left)

    def left(self) -> list[str]:
        """Processes, shared memory, sockets and folders of ours that still exist."""
        processes = [f"process {role} {pid}" for role, pid in self.pids().items()]
        regions = [f"/dev/shm/{name}" for name in self.regions()]
        files = [str(path) for path in self.run_dir.iterdir()] if self.run_dir.exists() else []
        return processes + regions + files

    def close(self) -> None:
        """Kill everything, in any state."""
        self.note_regions()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.server.process.kill()
        self.server.process.wait()
        for name in self.regions():
            with contextlib.suppress(OSError):
                (SHM / name).unlink()
        shutil.rmtree(self.root, ignore_errors=True)


def _role(line: list[str], pid: int) -> str:
    name = os.path.basename(line[0])
    if name == "tritonserver":
        return "tritonserver"
    if name == "triton_python_backend_stub":
        return "door:" + Path(line[1]).parent.parent.name
    if "tridecode.tools.cli" in line and "serve" in line:
        return "serve"
    if "tridecode.tools.serve.guard" in line:
        return "guard"
    if "tridecode.backend.front" in line:
        return "front"
    if "tridecode.backend.front.batches.process" in line:
        return "batches"
    if "tridecode.backend.front.process.worker" in line:
        return "front:" + line[line.index("tridecode.backend.front.process.worker") + 1]
    if "tridecode.backend.supervisor" in line:
        return "supervisor"
    if "tridecode.backend.engine" in line and "--rank" in line:
        return "rank" + line[line.index("--rank") + 1]
    if any(part.endswith("/checker_child.py") for part in line):
        return "checker"
    return f"{name}:{pid}"


@contextlib.contextmanager
def _environment(entries: dict[str, str]) -> Iterator[None]:
    """os.environ with these entries, for processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in entries}
    os.environ.update(entries)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
