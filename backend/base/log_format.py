"""The format of this project's log lines: text, or one JSON object per line.

$TRIDECODE_LOG_FORMAT chooses it for every process of a server: `tridecode serve --log-format` sets it, or set
it before starting a plain tritonserver. Imports the standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

FORMAT_VARIABLE = "TRIDECODE_LOG_FORMAT"
REQUESTS_VARIABLE = "TRIDECODE_REQUEST_LOG"  # off: no line per request
FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s {}: %(message)s"


def chosen() -> str:
    """The format of $TRIDECODE_LOG_FORMAT; "text" if it is not set or has another value."""
    value = os.environ.get(FORMAT_VARIABLE, "").strip().lower()
    return value if value in FORMATS else "text"


def timestamp(seconds: float) -> str:
    """UTC time with milliseconds, as in 2026-11-26T10:00:00.123Z. seconds: since the Unix epoch."""
    whole, thousandths = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{thousandths:03d}Z"


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, and the traceback of an exception."""

    def __init__(self, process: str = ""):
        """process: value of the field `process`; "": none."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["process"] = self._process
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_door(instance: str) -> None:
    """configure() for a model instance of this name, a process of tritonserver."""
    configure(instance, "%(name)s " + instance.replace("%", "%%"))


def configure(process: str = "", where: str = "%(name)s", level: str | int = logging.INFO) -> None:
    """Write this process's log to stderr, from `level` on; no effect if a handler exists already.

    process: field of JSON lines. where: prefix of text lines, with logging's format fields.
    """
    handler = logging.StreamHandler()
    if chosen() == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(_TEXT.format(where)))
    logging.basicConfig(level=level, handlers=[handler])
