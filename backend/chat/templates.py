"""Renders the untrusted chat templates of checkpoints in a child process with hard limits.

One child renders many templates. A child that exceeds a limit is killed and replaced (child_process.py).
TemplateRenderer blocks its caller; event loops use async_templates.py.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from typing import Any

from tridecode.backend.chat.child_process import (
    Child,
    ChildKilled,
    RenderLimits,
    TemplateFault,
    request_frame,
    text_of,
)

__all__ = ["RenderLimits", "TemplateFault", "TemplateRenderer", "render_template"]


class TemplateRenderer:
    """Renders templates in a child process, started by the first template. Threads take turns."""

    def __init__(self, limits: RenderLimits = RenderLimits()):
        self.limits = limits
        self._child: Child | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Return the child's process id; None before the first render and after the child has ended."""
        return None if self._child is None else self._child.process.pid

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Render the template `source` as transformers does.

        values: the variables, of JSON's types. If something else kills the child, a second one renders.
        Raises TemplateFault.
        """
        frame = request_frame(source, values)
        with self._lock:
            try:
                answer = self._answer(frame)
            except ChildKilled:
                try:
                    answer = self._answer(frame)
                except ChildKilled:
                    raise TemplateFault("the process that renders it was killed twice (signal 9)") from None
        return text_of(answer)

    def close(self) -> None:
        """End the child; the next render starts another."""
        with self._lock:
            self._close()

    def _answer(self, frame: bytes) -> dict[str, Any]:
        if self._child is None:
            self._child = Child(self.limits)
        try:
            answer = self._child.answer(frame)
        except BaseException:  # a child that has not answered cannot be used again
            self._close()
            raise
        if answer.get("ended"):
            self._close()
        return answer

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


_shared = TemplateRenderer()
atexit.register(_shared.close)


def render_template(source: str, values: Mapping[str, Any]) -> str:
    """Call TemplateRenderer.render with the default limits and the one child of this process."""
    return _shared.render(source, values)
