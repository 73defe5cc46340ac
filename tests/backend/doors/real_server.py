"""The real tritonserver with doors in its stubs and a fake engine in this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine, FakeSupervisor, scripted
from tridecode.backend.supervisor.shared_memory import unlink_prefix
from tridecode.model_repo_templates.repository import (
    RepositoryModel,
    engine_texts,
    tokenizer_dir,
    write_models,
)
from tridecode.tools.serve.guarded_server import SHM_PREFIX
from tridecode.tools.serve.ports import free_ports
from tridecode.tools.serve.triton_install import prepare

ANSWER = " world, hello streaming 東京 text! 😀 A stop word"
EOS = byte_level().token_to_id("<|endoftext|>")
ANSWER_IDS = byte_level().encode(ANSWER, add_special_tokens=False).ids


@dataclass
class RealServer:
    http: str
    grpc: str
    metrics: str
    log: Path
    process: subprocess.Popen
    engine: FakeEngine
    supervisor: FakeSupervisor
    doors: int  # that have said hello to the engine


def write_repository(root: Path, models: list[RepositoryModel]) -> Path:
    repository = root / "repository"
    repository.mkdir()
    write_models(
        repository,
        models,
        engine=engine_texts({}, "test"),
        model_type="GPT",
        checkpoint_path="/nowhere",
        stop_ids="",
    )
    tokenizer = repository / tokenizer_dir(models)
    tokenizer.mkdir(parents=True)
    byte_level().save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return repository


@contextlib.contextmanager
def real_server(
    root: Path, models: list[RepositoryModel], step_s: float = 0.0, failure: str = ""
) -> Iterator[RealServer]:
    """A ready server; it and its processes are gone afterwards.

    failure: why the engine cannot start, if it cannot. AssertionError with the log if the server gives up.
    """
    limits = msgspec.structs.replace(LIMITS, vocab_size=600, start_id=EOS, end_id=EOS)
    engine = FakeEngine(limits=limits, next_token=scripted([*ANSWER_IDS, EOS]), step_s=step_s)
    with engine, FakeSupervisor(engine) as supervisor:
        if failure:
            supervisor.set_phase("failed", failure)
        with server_before(root, models, engine, supervisor) as server:
            yield server
            code = server.process.poll()
            text = server.log.read_text(errors="replace")
            assert code is None, f"the server ended with code {code}:\n{text}"
        log = server.log
        assert "Signal (11)" not in log.read_text(errors="replace"), (
            f"the server crashed at its end; see {log}"
        )


@contextlib.contextmanager
def server_before(
    root: Path,
    models: list[RepositoryModel],
    engine: FakeEngine,
    supervisor: FakeSupervisor,
    ports: Sequence[int] = (),
    options: Sequence[str] = (),
) -> Iterator[RealServer]:
    """A ready server before this engine; it and its processes are gone afterwards. ports: HTTP, gRPC,
    metrics; (): free ones. options: further ones of tritonserver."""
    http, grpc, metrics = ports or free_ports(3)
    install = prepare(root)
    log = root / "server.log"
    command = [str(install.binary), *install.arguments]
    command += ["--model-repository", str(write_repository(root, models))]
    command += ["--disable-auto-complete-config", "--exit-timeout-secs=5", "--model-load-thread-count=8"]
    shm_prefix = f"{SHM_PREFIX}_{uuid.uuid4().hex[:8]}_"
    command += [f"--backend-config=python,shm-region-prefix-name={shm_prefix}"]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", *options]
    environment = {**install.environment, "TRIDECODE_CONTROL_ENDPOINT": supervisor.endpoint}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_ready(f"http://127.0.0.1:{http}/v2/health/ready", process, log)
        urls = [f"127.0.0.1:{port}" for port in (http, grpc, metrics)]
        yield RealServer(*urls, log, process, engine, supervisor, len(engine.hellos))
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        unlink_prefix(shm_prefix)


def _wait_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if urllib.request.urlopen(url, timeout=2).status == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the server is not ready:\n{log.read_text(errors='replace')}")
