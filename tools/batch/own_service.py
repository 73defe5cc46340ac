"""The OpenAI service of a batch without a server: a child process that ends with the command."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tridecode.backend.base import log_format
from tridecode.backend.base.errors import ConfigError, EngineDownError
from tridecode.backend.batches.target import Target
from tridecode.backend.front.access import digest_of
from tridecode.backend.front.settings import LOOPBACK

_PORT = re.compile(r"listens on \S+ port (\d+),")
_ERROR = re.compile(r" ERROR \S+: (.+)")
_PORT_S = 60.0  # until the port is open; the engine starts after that
_STOP_S = 30.0
_LOG_LINES = 8


@contextmanager
def own_service(repository: Path, names: Sequence[str] = ()) -> Iterator[Target]:
    """Run `tridecode front` on a free port of the loopback interface while the block runs.

    names: of the served model; (): its own. Only this process knows the key. The child ends with the block,
    and with the thread that started it, however that ends. Raises ConfigError and EngineDownError with the
    child's text.
    """
    with tempfile.TemporaryDirectory(prefix="tridecode-batch-") as made:
        folder, key = Path(made), secrets.token_urlsafe(32)
        (folder / "keys").write_text(digest_of(key) + "\n")
        log = folder / "front.log"
        command = [sys.executable, "-m", "tridecode.backend.front", str(repository), "--port", "0"]
        command += ["--host", LOOPBACK, "--api-key-file", str(folder / "keys"), "--parent", str(os.getpid())]
        for name in names:
            command += ["--served-model-name", name]
        with log.open("wb") as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # a terminal's Ctrl-C is for this process, which then stops the child
                env=_environment(),
            )
        try:
            port = _port(child, log)
            yield Target(f"http://{LOOPBACK}:{port}", key, lambda: _ended(child, log))
        finally:
            _stop(child)


def _environment() -> dict[str, str]:
    """The child's log may not grow by a line for each request, and its engine has this Python."""
    return {
        "TRIDECODE_ENGINE_PYTHON": sys.executable,
        **os.environ,
        log_format.FORMAT_VARIABLE: "text",
        log_format.REQUESTS_VARIABLE: "off",
    }


def _port(child: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + _PORT_S
    while child.poll() is None and time.monotonic() < deadline:
        if found := _PORT.search(_text(log)):
            return int(found[1])
        time.sleep(0.02)
    if child.poll() == 2 and (errors := _ERROR.findall(_text(log))):  # a wrong repository or setting
        raise ConfigError(errors[-1])
    raise EngineDownError(_ended(child, log) or f"the OpenAI service did not start within {_PORT_S:.0f} s")


def _ended(child: subprocess.Popen[bytes], log: Path) -> str:
    """Return how the child ended, and the end of its log; "": it has not."""
    code = child.poll()
    if code is None:
        return ""
    lines = _text(log).strip().splitlines()[-_LOG_LINES:]
    return "\n".join([f"the OpenAI service has ended with exit code {code}", *lines])


def _text(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (64 << 10)))
        return file.read().decode("utf-8", "replace")


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()  # its workers and the engine notice that, and end
        child.wait()
