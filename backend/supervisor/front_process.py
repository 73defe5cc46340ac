"""The OpenAI service that a repository wants: started, found again, started again when it dies, ended.

It is a process of its own, which outlives a supervisor that is killed: the next one finds it by the Hello of
its workers. It ends by itself with the server whose life the engine shares. Nothing here imports the service.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

from tridecode.backend.supervisor import processes
from tridecode.backend.wire.messages import Hello

MODULE = "tridecode.backend.front"
#: workers say Hello under this name
DOOR = "openai"
PORT_VARIABLE = "TRIDECODE_OPENAI_PORT"
ADDRESS_VARIABLE = "TRIDECODE_OPENAI_ADDRESS"
#: how long a supervisor that follows another one waits for the Hello of a service that lives
FIND_S = 3.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 15.0  # before a dead service is started again; doubles with each death
HEALTHY_S = 30.0
STOP_S = 1.5  # a service that has not ended by then is killed

_log = logging.getLogger("tridecode.supervisor")


@dataclass(frozen=True)
class FrontOptions:
    """The parameters of config.pbtxt whose names begin with openai_. port 0: no service."""

    port: int = 0
    address: str = "127.0.0.1"
    workers: int = 1
    model_name: str = "none"
    api_key_file: str = "none"
    chat_template: str = "none"
    tool_call_parser: str = "none"
    cors: str = "none"
    batch_dir: str = "none"

    def words(self) -> list[str]:
        """Return the options of the service. Paths are absolute."""
        words = ["--host", self.address, "--port", str(self.port), "--workers", str(self.workers)]
        for name, text in (
            ("served-model-name", self.model_name),
            ("api-key-file", self.api_key_file),
            ("chat-template", self.chat_template),
            ("tool-call-parser", self.tool_call_parser),
            ("batch-dir", self.batch_dir),
        ):
            if text != "none":
                words += [f"--{name}", text]
        if self.cors != "none":
            for origin in self.cors.split(","):
                words += ["--cors", origin.strip()]
        return words


class FrontProcess:
    """Times are monotonic seconds that the caller gives, except in `end`."""

    def __init__(self, engine_dir: str, server: processes.ProcessId, follows: bool, now: float) -> None:
        """follows: whether a supervisor of this engine ran before, whose service may live."""
        self._engine_dir, self._server = engine_dir, server
        self._options: FrontOptions | None = None  # until the settings of the engine have been read
        self._child: subprocess.Popen[bytes] | None = None
        self._process: processes.ProcessId | None = None
        self._words: list[str] = []  # the options that the process was started with
        self._start_at = now + FIND_S if follows else now
        self._started_at = now
        self._pause = 0.0
        self._waker = processes.Waker()

    def want(self, options: FrontOptions) -> None:
        """Take the newest settings; a service that runs with others is ended, and started again."""
        changed, self._options = options != self._options, options
        if changed:  # a second signal would cut the streams of a service that is ending
            self._end_with_other_options()

    def hear(self, hello: Hello) -> None:
        """A front end has said Hello: its parent may be a service that an earlier supervisor started."""
        if self._process is None and hello.guest and hello.door.startswith(f"{DOOR}:"):
            master = processes.parent(hello.pid)
            words = processes.command_line(master)
            if MODULE in words and "--owner" in words:
                self._process = processes.identify(master)
                self._words = words[words.index(MODULE) + 2 : words.index("--owner")]
                _log.info("the OpenAI service (pid %d) is found again", master)
                self._end_with_other_options()

    def look(self, now: float) -> None:
        """Start the service if it is enabled and not running."""
        if self._process is not None and not processes.alive(self._process):
            self._bury(now)
        if self._process is not None and self._waker.look(self._process.pid, now):
            _log.warning(
                "the OpenAI service (pid %d) was stopped by a signal; it is continued", self._process.pid
            )
        if self._process is None and self._options and self._options.port and now >= self._start_at:
            self._start(self._options, now)

    def _end_with_other_options(self) -> None:
        """End a service that was started with other options than those wanted.

        The Hello of a service that an earlier supervisor started may come before the settings are read: then
        it is compared when they are.
        """
        if self._process is not None and self._options is not None and self._words != self._options.words():
            processes.kill(self._process, signal.SIGTERM)

    def _bury(self, now: float) -> None:
        assert self._process is not None
        code = self._child.poll() if self._child is not None else None
        how = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
        if now - self._started_at > HEALTHY_S:
            self._pause = 0.0
        _log.error("the OpenAI service (pid %d) has ended%s; it is started again", self._process.pid, how)
        self._process = self._child = None
        self._start_at = now + self._pause
        self._pause = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause))

    def _start(self, options: FrontOptions, now: float) -> None:
        self._words = options.words()
        command = [sys.executable, "-m", MODULE, self._engine_dir, *self._words]
        command += ["--owner", f"{self._server.pid}:{self._server.start}"]
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            _log.error("the OpenAI service cannot be started: %s", error)
            self._start_at = now + MAX_PAUSE_S
            return
        self._process = processes.identify(self._child.pid)
        self._started_at = now

    def end(self) -> None:
        """End the service, by force if need be, and wait until it has gone."""
        if self._process is None:
            return
        processes.kill(self._process, signal.SIGTERM)
        processes.kill(self._process, signal.SIGCONT)  # a stopped one would not notice
        deadline = time.monotonic() + STOP_S
        while self._lives() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._lives():
            for worker in map(processes.identify, processes.children(self._process.pid)):
                if worker is not None:
                    processes.kill(worker)
            processes.kill(self._process)
        while self._lives():
            time.sleep(0.02)

    def _lives(self) -> bool:
        if self._child is not None:
            self._child.poll()
        return self._process is not None and processes.alive(self._process)


def options_with_environment(options: FrontOptions) -> FrontOptions:
    """Return the options with the port and address of `tridecode serve`, which take precedence."""
    port = os.environ.get(PORT_VARIABLE, "")
    if not port.isdigit():
        return options
    return replace(options, port=int(port), address=os.environ.get(ADDRESS_VARIABLE) or options.address)
