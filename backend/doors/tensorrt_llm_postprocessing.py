"""Model `postprocessing` of TensorRT-LLM's ensemble: token ids and lengths in, texts out."""

from __future__ import annotations

from tridecode.backend.doors import postprocessing
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import TENSORRT_LLM_POSTPROCESSING


class TritonPythonModel(postprocessing.TritonPythonModel):
    """FasterTransformer's postprocessing, with a required length of each row."""

    contract = TENSORRT_LLM_POSTPROCESSING
    length_name = "SEQUENCE_LENGTH"
