"""The first process of the front; the supervisor runs it as `python -m tridecode.backend.front`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tridecode.backend.base import log_format
from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.chat.tool_formats import find_format
from tridecode.backend.front.access import Keys, digest_of
from tridecode.backend.front.batches.store import Store
from tridecode.backend.front.process.counts import shared_counts
from tridecode.backend.front.process.master import Master, open_port
from tridecode.backend.front.process.repository import (
    ENGINE_MODEL,
    find_engine_dir,
    find_server,
    read_repository,
    read_vocab_size,
)
from tridecode.backend.front.settings import (
    LOOPBACK,
    MAX_CONNECTIONS,
    MAX_STORE_BYTES,
    MAX_STORE_FILES,
    FrontSettings,
)
from tridecode.backend.front.triton.hosts import read_hosts
from tridecode.backend.front.triton.tls import check_tls
from tridecode.backend.supervisor import processes

MAX_WORKERS = 64
_TIMES = ("stalled_s", "headers_s", "body_s", "idle_s")
_log = logging.getLogger("tridecode.front")


@dataclass(frozen=True)
class FrontArguments:
    """The options of the front, with the names that `tridecode front` gives them.

    owner: "PID:START" of the server whose life the engine shares; "": that of a running server of this
    repository, else this process. limit_seconds: instead of the limits of time of FrontSettings, for tests.
    """

    repository: Path
    host: str = LOOPBACK
    port: int = 9000
    workers: int = 1
    served_model_name: tuple[str, ...] = ()
    chat_template: str = ""
    tool_call_parser: str = ""
    cors: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_key_file: str = ""
    engine_model: str = ENGINE_MODEL
    manage_adapters: bool = False
    max_connections: int = MAX_CONNECTIONS
    batch_dir: str = ""
    batch_dir_bytes: int = MAX_STORE_BYTES
    batch_max_files: int = MAX_STORE_FILES
    triton: str = ""
    triton_tls: bool = False
    triton_ca: str = ""
    triton_cert: str = ""
    triton_key: str = ""
    owner: str = ""
    limit_seconds: float = 0.0


def read_settings(arguments: FrontArguments) -> FrontSettings:
    """Raises ConfigError and other TridecodeErrors for what the workers would stumble over."""
    if not 1 <= arguments.workers <= MAX_WORKERS:
        raise ConfigError(f"--workers is {arguments.workers}; wanted 1 to {MAX_WORKERS}")
    if arguments.max_connections < 1:
        raise ConfigError(f"--max-connections is {arguments.max_connections}; wanted 1 or more")
    if arguments.chat_template and not Path(arguments.chat_template).is_file():
        raise ConfigError(f"--chat-template is {arguments.chat_template}; wanted a file that exists")
    hosts = read_hosts(arguments.triton) if arguments.triton else ()
    files = arguments.triton_ca, arguments.triton_cert, arguments.triton_key
    check_tls(hosts, arguments.triton_tls, *files)
    if hosts and arguments.manage_adapters:
        raise ConfigError("--manage-adapters changes a folder of this machine; wanted without --triton")
    for name in ("batch_dir_bytes", "batch_max_files"):
        if (found := getattr(arguments, name)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {found}; wanted 1 or more")
    find_format("", arguments.tool_call_parser or None)
    engine_dir = find_engine_dir(arguments.repository, arguments.engine_model)
    values = read_repository(engine_dir)
    if arguments.limit_seconds:
        values.update(dict.fromkeys(_TIMES, arguments.limit_seconds))
    owner, guest = arguments.owner, bool(arguments.owner)
    if not owner:
        server = None if hosts else find_server(engine_dir)
        server = server or processes.identify(os.getpid())
        assert server is not None
        owner, guest = f"{server.pid}:{server.start}", server.pid != os.getpid()
    digests = tuple(map(digest_of, arguments.api_key))
    Keys(digests, arguments.api_key_file)
    return FrontSettings(
        host=arguments.host,
        port=arguments.port,
        workers=arguments.workers,
        names=arguments.served_model_name,
        chat_template=_absolute(arguments.chat_template),
        tool_call_parser=arguments.tool_call_parser,
        cors=arguments.cors,
        key_digests=digests,
        key_file=arguments.api_key_file,
        owner=owner,
        guest=guest,
        manage_adapters=arguments.manage_adapters,
        max_connections=arguments.max_connections,
        batch_dir=_absolute(arguments.batch_dir),
        batch_dir_bytes=arguments.batch_dir_bytes,
        batch_max_files=arguments.batch_max_files,
        triton=hosts,
        triton_tls=arguments.triton_tls,
        triton_ca=_absolute(arguments.triton_ca),
        triton_cert=_absolute(arguments.triton_cert),
        triton_key=_absolute(arguments.triton_key),
        vocab_size=read_vocab_size(engine_dir) if hosts else 0,
        **values,
    )


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""


def _check_parser() -> None:
    """Raise ConfigError where uploads could not be read."""
    try:
        import python_multipart  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--batch-dir: {error}; wanted: pip install 'tridecode[front]'") from None


def run(arguments: FrontArguments) -> int:
    """Serve until a signal, or until the server is gone. Returns the exit code."""
    log_format.configure("openai")
    settings = read_settings(arguments)
    os.environ["TRIDECODE_OWNER"] = settings.owner
    if (store := Store.of(settings)) is not None:
        _check_parser()
        store.create()
    listening = open_port(settings.host, settings.port)
    host, port = listening.getsockname()[:2]
    _log.info("the OpenAI service listens on %s port %d, with %d worker(s)", host, port, settings.workers)
    return Master(settings, listening, shared_counts(settings.workers)).run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tridecode.backend.front", description=__doc__)
    parser.add_argument("repository", type=Path)
    for name in (
        "host",
        "chat-template",
        "tool-call-parser",
        "api-key-file",
        "engine-model",
        "owner",
        "triton",
        "batch-dir",
        "triton-ca",
        "triton-cert",
        "triton-key",
    ):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    parser.add_argument("--manage-adapters", action="store_true")
    parser.add_argument("--triton-tls", action="store_true")
    parser.add_argument("--parent", type=int, help="process that started this one; end with it")
    parser.add_argument("--limit-seconds", type=float, default=argparse.SUPPRESS)
    for name in ("port", "workers", "max-connections", "batch-dir-bytes", "batch-max-files"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    for name in ("served-model-name", "cors", "api-key"):
        parser.add_argument(f"--{name}", action="append", default=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    if (parent := given.pop("parent")) is not None:
        processes.end_with(parent)
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return run(FrontArguments(**arguments))  # type: ignore[arg-type]
    except TridecodeError as error:
        _log.error("%s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
