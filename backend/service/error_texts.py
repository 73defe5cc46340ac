"""Error texts for clients."""

from __future__ import annotations

import re

from tridecode.backend.base.errors import TridecodeError

_SHOWN_LABEL = 100  # characters of a request id shown in an error

#: an absolute path of two parts or more that is not part of a URL or a fraction
_PATH = re.compile(r"(?<![\w/:.~*])/(?:[\w.+@~-]+/)+([\w.+@~-]*)")


def public_text(text: str) -> str:
    """Return an error's text for a client: without directories of this server, and always valid UTF-8."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return _PATH.sub(lambda found: found.group(1) or "a directory", text)


def with_label(text: str, label: str) -> str:
    """Return an error's text with the client's request id, if it sent one: streams share a connection."""
    shown = label if len(label) <= _SHOWN_LABEL else label[: _SHOWN_LABEL - 3] + "..."
    return text if not label or repr(label) in text else f"{text} (request {shown!r})"


def internal_error(error: Exception, label: str) -> TridecodeError:
    """Return the client's error for a defect of this program; the log has the traceback."""
    which = f"request {label!r}" if label else "a request without an id"
    return TridecodeError(f"the door failed: {type(error).__name__} ({which}); the server's log says more")
