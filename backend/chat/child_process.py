"""The process that renders chat templates, for its parent; base/child_frames.py has their messages.

jinja's sandbox stops a template from reaching Python, but not from running forever (nested empty loops) or
filling the memory (`'a'.ljust(3000000000)`), which no check between statements can prevent. The child is
template_child.py, which limits itself; its parent kills it at a deadline. No torch, no transformers, no
jinja2 here.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tridecode.backend.base import child_frames
from tridecode.backend.base.errors import TridecodeError

_CHILD = Path(__file__).with_name("template_child.py")
_START_S = 60.0  # time for a child to import jinja2: 0.2 s on an idle machine
_END_S = 1.0  # from the end of a child's connection to its exit
MAX_REQUEST = 64 << 20  # bytes of source and values as JSON


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one render.

    seconds: wall-clock and CPU time. memory_bytes: in addition to the child's memory after its imports.
    characters: limit of the rendered text.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    characters: int = 8 << 20

    @property
    def max_answer(self) -> int:
        """Bytes of the longest answer: JSON writes a character in up to 12 bytes."""
        return 16 * self.characters + 4096

    @property
    def late(self) -> str:
        """Clause about a template that runs too long."""
        return f"it runs for more than {self.seconds:g} s"


class TemplateFault(TridecodeError):
    """The template does not run, or exceeds a limit. The text is a clause about it: "it runs for ..."."""

    code = "INVALID_ARG"


class RendererDown(TemplateFault):
    """No child can be started: the template is not to blame."""

    code = "UNAVAILABLE"


class ChildKilled(Exception):
    """The child was killed from outside (by an operator or the OOM killer), not by its own limits."""


class Child:
    """A started child. socket: connected to it, blocking. process: killed and waited for by `close`."""

    def __init__(self, limits: RenderLimits):
        """Start the process and wait until it is ready. Raises RendererDown."""
        self.limits = limits
        self.socket, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(limits.seconds), str(limits.memory_bytes)]
        arguments += [str(limits.characters), *_places()]
        with theirs:
            try:
                fds = (theirs.fileno(),)
                self.process = child_frames.start_child(_CHILD, arguments, fds, own_session=True)
            except OSError as error:
                self.socket.close()
                raise RendererDown(f"the process that renders templates does not start: {error}") from None
        try:
            started = self._receive(time.monotonic() + _START_S)
        except TimeoutError:
            started = {"fault": f"it has not started within {_START_S:g} s"}
        except (EOFError, OSError):
            started = {"fault": f"it ended at its start: {self._end()}"}
        if "fault" in started:
            self.close()
            raise RendererDown(f"the process that renders templates cannot be used: {started['fault']}")

    def answer(self, frame: bytes) -> dict[str, Any]:
        """Return {"text": ...} or {"fault": ...}. Blocks. Raises TemplateFault if the child must be replaced,
        ChildKilled if another child may render the same request.
        """
        deadline = time.monotonic() + self.limits.seconds
        try:
            self.socket.settimeout(self.limits.seconds)
            self.socket.sendall(frame)
            return self._receive(deadline)
        except TimeoutError:
            raise TemplateFault(self.limits.late) from None
        except (EOFError, OSError):
            raise self.lost() from None

    def lost(self) -> Exception:
        """Return why the child's connection has ended: TemplateFault or ChildKilled. Waits up to a second."""
        end = self._end()
        if end == f"signal {signal.SIGKILL.value}":
            return ChildKilled()
        too_long = end == f"signal {signal.SIGXCPU.value}"
        return TemplateFault(self.limits.late if too_long else f"it ends the process that renders it ({end})")

    def close(self) -> None:
        """Close the socket and end the process."""
        self.socket.close()
        self.kill()

    def kill(self) -> None:
        """End the process and wait for it. More calls have no effect."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def _end(self) -> str:
        """Describe how the process ended."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it does not answer"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Return one message. Raises TimeoutError at the deadline, EOFError or OSError without a child."""
        return child_frames.receive(self.socket, deadline, self.limits.max_answer)


def request_frame(source: str, values: Mapping[str, Any]) -> bytes:
    """Return the frame that requests a text. Raises TemplateFault for values that are not of JSON's types,
    and for too many bytes.
    """
    try:
        frame = child_frames.frame_of({"source": source, "values": values})
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateFault(f"its variables are not JSON: {error}") from None
    size = len(frame) - child_frames.LENGTH
    if size > MAX_REQUEST:
        raise TemplateFault(f"it and its variables have {size:,} bytes; wanted {MAX_REQUEST:,}")
    return frame


def text_of(answer: Mapping[str, Any]) -> str:
    """Return the text of a child's answer. Raises the TemplateFault that the answer describes."""
    if "text" not in answer:
        raise TemplateFault(str(answer.get("fault", "its process gave neither a text nor a reason")))
    return str(answer["text"])


def _places() -> list[str]:
    """Return the folders of jinja2 and markupsafe, which -I may hide from the child (a user's
    site-packages)."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    origins = [spec.origin for spec in found if spec is not None and spec.origin]
    return list(dict.fromkeys(os.path.dirname(os.path.dirname(origin)) for origin in origins))
