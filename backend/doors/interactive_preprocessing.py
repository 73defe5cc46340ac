"""Model `preprocessing` of the interactive contract: that of FasterTransformer's ensemble, one axis deeper.

The tokenizer's special tokens, such as a BOS, belong to the start of a conversation; later rounds have none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tridecode.backend.doors import preprocessing
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.interactive import INTERACTIVE_PREPROCESSING
from tridecode.backend.doors.requests.interactive_axis import with_axis, without_axis

_SEQUENCE_START = 1  # bit of a Triton request's flags


class TritonPythonModel(preprocessing.TritonPythonModel):
    contract = INTERACTIVE_PREPROCESSING

    def _respond(self, request: Any) -> Any:
        """Respond to one request; Triton sends the requests of a sequence one at a time, on one thread."""
        goes_on = bool(request.correlation_id()) and not request.flags() & _SEQUENCE_START
        settings = self.settings
        if goes_on:
            self.settings = replace(settings, add_special_tokens=False)
        try:
            return super()._respond(request)
        finally:
            self.settings = settings

    def answer(self, inputs: Inputs) -> dict[str, Any]:
        return with_axis(super().answer(without_axis(inputs)))
