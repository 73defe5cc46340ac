"""Model `postprocessing` of the interactive contract: that of FasterTransformer's ensemble, one axis deeper.

As in FasterTransformer's, OUTPUT is flat: it gets no extra axis.
"""

from __future__ import annotations

from typing import Any

from tridecode.backend.doors import postprocessing
from tridecode.backend.doors.contracts.inputs import Inputs
from tridecode.backend.doors.contracts.interactive import INTERACTIVE_POSTPROCESSING
from tridecode.backend.doors.requests.interactive_axis import without_axis


class TritonPythonModel(postprocessing.TritonPythonModel):
    contract = INTERACTIVE_POSTPROCESSING

    def answer(self, inputs: Inputs) -> dict[str, Any]:
        return super().answer(without_axis(inputs))
