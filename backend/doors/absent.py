"""Placeholder for a model that the repository does not have: requests fail with the option that builds it.

Triton's own error for an unknown model has no such hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from tridecode.backend.base.errors import RequestError, TridecodeError, UnsupportedError
from tridecode.backend.doors import huge_shapes
from tridecode.backend.doors.answers.stream import FINAL
from tridecode.backend.doors.door import refusal
from tridecode.backend.doors.door_settings import read_settings
from tridecode.backend.doors.monitoring.request_lines import line_of
from tridecode.backend.doors.monitoring.request_times import GapCounts, RequestTimes
from tridecode.backend.doors.requests.envelope import read_label
from tridecode.backend.service.monitoring.request_log import RequestLog
from tridecode.backend.wire.taken_requests import TakenRequests


class TritonPythonModel:
    """Declares the inputs of the missing model, so that Triton accepts its clients' requests."""

    def initialize(self, args: Mapping[str, str]) -> None:
        huge_shapes.install()
        self.taken = TakenRequests()  # stays 0, because execute() answers before it returns
        try:
            settings = read_settings(args)
        except TridecodeError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self.error = UnsupportedError(
            f"model {settings.name} is not part of this repository; tridecode build-repo {settings.made_by} "
            "makes it"
        )
        self.log = RequestLog(settings.name).start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            times = RequestTimes(GapCounts())
            label = _label(request)
            request.get_response_sender().send(refusal(self.error, label), flags=FINAL)
            self.log.put(line_of(times, label, self.error.code.lower(), None, 0, str(self.error)))

    def finalize(self) -> None:
        """Called by Triton when the model is unloaded."""
        self.log.close()


def _label(request: Any) -> str:
    try:
        return read_label(request)
    except RequestError:
        return ""
