"""Chat templates of checkpoints, which are not trusted: rendered in a child process with hard limits.

jinja's sandbox stops a template from reaching Python, but not from running forever (nested empty loops) or
filling the memory (`'a'.ljust(3000000000)`), which no check between statements can prevent. The child is
template_child.py; it imports jinja2 and nothing of ours. One child renders many templates, and a child that
breaks a limit is killed and replaced. No torch, no transformers, no jinja2 here.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tridecode.backend.base.errors import TridecodeError

_CHILD = Path(__file__).with_name("template_child.py")
_START_S = 60.0  # time for a child to import jinja2: 0.2 s on an idle machine
_LENGTH = 8  # bytes of a frame's length, little end first
_MAX_REQUEST = 64 << 20  # bytes of source and values as JSON
_READ = 1 << 20


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one render.

    seconds: wall-clock and CPU time. memory_bytes: in addition to the child's memory after its imports.
    characters: limit of the rendered text.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    characters: int = 8 << 20


class TemplateFault(TridecodeError):
    """The template does not run, or exceeds a limit. The text is a clause about it: "it runs for ..."."""

    code = "INVALID_ARG"


class TemplateRenderer:
    """Renders templates in a child process, which starts with the first template. Threads take turns."""

    def __init__(self, limits: RenderLimits = RenderLimits()):
        self.limits = limits
        self._child: _Child | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The child's process id; None where there is none."""
        return None if self._child is None else self._child.process.pid

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Render the template `source` as transformers does.

        values: the variables, of JSON's types. Raises TemplateFault.
        """
        try:
            request = json.dumps({"source": source, "values": values}).encode("ascii")
        except (TypeError, ValueError) as error:
            raise TemplateFault(f"its variables are not JSON: {error}") from None
        if len(request) > _MAX_REQUEST:
            raise TemplateFault(f"it and its variables have {len(request):,} bytes; wanted {_MAX_REQUEST:,}")
        with self._lock:
            if self._child is None:
                self._child = _Child(self.limits)
            try:
                answer = self._child.answer(request)
            except BaseException:  # a child that has not answered is useless
                self._close()
                raise
            if answer.get("ended"):
                self._close()
        if "fault" in answer:
            raise TemplateFault(str(answer["fault"]))
        return str(answer["text"])

    def close(self) -> None:
        """End the child; the next render starts another."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class _Child:
    def __init__(self, limits: RenderLimits):
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        # -I: neither the working directory nor PYTHONPATH can shadow the installed jinja2
        command = [sys.executable, "-I", str(_CHILD), str(theirs.fileno())]
        command += [str(limits.seconds), str(limits.memory_bytes), str(limits.characters), *_places()]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # the parent handles Ctrl-C
            )
        try:
            started = self._receive(time.monotonic() + _START_S)
        except TimeoutError:
            started = {"fault": f"it has not started within {_START_S:g} s"}
        except EOFError:
            started = {"fault": f"it ended at its start: {self._end()}"}
        if "fault" in started:
            self.kill()
            raise TemplateFault(f"the process that renders templates cannot be used: {started['fault']}")

    def answer(self, request: bytes) -> dict[str, Any]:
        """Return {"text": …} or {"fault": …}. Raises TemplateFault if the child has to be replaced."""
        deadline = time.monotonic() + self._limits.seconds
        late = f"it runs for more than {self._limits.seconds:g} s"
        try:
            self._socket.settimeout(self._limits.seconds)
            self._socket.sendall(len(request).to_bytes(_LENGTH, "little") + request)
            return self._receive(deadline)
        except TimeoutError:
            raise TemplateFault(late) from None
        except (EOFError, OSError):
            end = self._end()
            too_long = end == f"signal {signal.SIGXCPU.value}"
            raise TemplateFault(
                late if too_long else f"it ends the process that renders it ({end})"
            ) from None

    def kill(self) -> None:
        self._socket.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def _end(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it does not answer"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _receive(self, deadline: float) -> dict[str, Any]:
        """One frame. Raises TimeoutError at the deadline, EOFError or OSError if the child has gone."""
        length = int.from_bytes(self._read(_LENGTH, deadline), "little")
        most = 16 * self._limits.characters + 4096  # JSON writes a character in up to 12 bytes
        if length > most:
            raise EOFError
        return json.loads(self._read(length, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            try:
                piece = self._socket.recv(min(_READ, size - len(data)))
            except socket.timeout:  # TimeoutError since Python 3.10
                raise TimeoutError from None
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


def _places() -> list[str]:
    """The folders of jinja2 and markupsafe, which -I may hide from the child (a user's site-packages)."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    origins = [spec.origin for spec in found if spec is not None and spec.origin]
    return list(dict.fromkeys(os.path.dirname(os.path.dirname(origin)) for origin in origins))


_shared = TemplateRenderer()
atexit.register(_shared.close)


def render_template(source: str, values: Mapping[str, Any]) -> str:
    """Call TemplateRenderer.render with the process's only child and the default limits."""
    return _shared.render(source, values)
