"""The text model with the tensors of TensorRT-LLM's backend v0.5."""

from __future__ import annotations

from tridecode.backend.doors import text
from tridecode.backend.doors.contracts.tensorrt_llm_v05 import TENSORRT_LLM_V05


class TritonPythonModel(text.TritonPythonModel):
    contract = TENSORRT_LLM_V05
